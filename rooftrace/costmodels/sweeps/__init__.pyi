from rooftrace.costmodels.sweeps import grids as grids
from rooftrace.costmodels.sweeps.designs import (
    Factorial as Factorial,
    FactorialError as FactorialError,
    Interaction as Interaction,
    MainEffect as MainEffect,
    factorial as factorial,
    grid_of as grid_of,
)
from rooftrace.costmodels.sweeps.elasticity import elasticities as elasticities
from rooftrace.costmodels.sweeps.evaluating import (
    Form as Form,
    evaluated as evaluated,
    points_of as points_of,
)
from rooftrace.costmodels.sweeps.slopes import (
    Elasticities as Elasticities,
    Elasticity as Elasticity,
)
from rooftrace.costmodels.sweeps.sweeps import (
    Sweep as Sweep,
    SweepCase as SweepCase,
    lines_of as lines_of,
)
