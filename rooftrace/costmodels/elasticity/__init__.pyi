from rooftrace.costmodels.elasticity import grids as grids
from rooftrace.costmodels.elasticity.responses import (
    Elasticities as Elasticities,
    Elasticity as Elasticity,
)
from rooftrace.costmodels.elasticity.stepelasticities import (
    elasticities as elasticities,
)
