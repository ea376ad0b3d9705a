from rooftrace.costmodels.kernels import (
    columns as columns,
    engines as engines,
    reuse as reuse,
    tables as tables,
)
from rooftrace.costmodels.kernels.attention_libraries import attention_knobs as attention_knobs
from rooftrace.costmodels.kernels.opclass import group_class as group_class
