from rooftrace.tracer.inventory import records as records, values as values
from rooftrace.tracer.inventory.comparing import (
    SIZES as SIZES,
    ParameterDiff as ParameterDiff,
    compare_parameters as compare_parameters,
)
from rooftrace.tracer.inventory.taking import (
    inventory_of as inventory_of,
)
