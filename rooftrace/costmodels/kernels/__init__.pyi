from rooftrace.costmodels.kernels.attention_time import attention_knobs as attention_knobs
from rooftrace.costmodels.kernels.engines import (
    compute_seconds as compute_seconds,
    engine_of as engine_of,
)
from rooftrace.costmodels.kernels.opclass import group_class as group_class
from rooftrace.costmodels.kernels.tables import (
    KernelTable as KernelTable,
    kernel_table as kernel_table,
)
