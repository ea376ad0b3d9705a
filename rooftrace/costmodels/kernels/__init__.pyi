from rooftrace.costmodels.kernels import (
    engines as engines,
    reuse as reuse,
    seconds as seconds,
    works as works,
)
from rooftrace.costmodels.kernels.attention_rows import attention_knobs as attention_knobs
from rooftrace.costmodels.kernels.opclass import group_class as group_class
