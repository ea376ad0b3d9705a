from rooftrace.costmodels.kernels import (
    engines as engines,
    reuse as reuse,
    tables as tables,
    works as works,
)
from rooftrace.costmodels.kernels.attention_libraries import attention_knobs as attention_knobs
from rooftrace.costmodels.kernels.opclass import group_class as group_class
