from rooftrace.tracer.inventory.comparing import (
    ParameterDiff as ParameterDiff,
    compare_parameters as compare_parameters,
)
from rooftrace.tracer.inventory.records import (
    LayerInfo as LayerInfo,
    ModelInfo as ModelInfo,
)
from rooftrace.tracer.inventory.taking import (
    inventory_of as inventory_of,
)
