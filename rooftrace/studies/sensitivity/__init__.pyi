from rooftrace.studies.sensitivity import designs as designs
from rooftrace.studies.sensitivity.designs import (
    Factorial as Factorial,
    Interaction as Interaction,
    MainEffect as MainEffect,
    factorial as factorial,
    grid_of as grid_of,
)
from rooftrace.studies.sensitivity.elasticity import elasticities as elasticities
from rooftrace.studies.sensitivity.slopes import (
    Elasticities as Elasticities,
    Elasticity as Elasticity,
)
