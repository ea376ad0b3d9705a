from rooftrace.costmodels.kernels import engines as engines
from rooftrace.costmodels.kernels.attention_time import attention_knobs as attention_knobs
from rooftrace.costmodels.kernels.opclass import group_class as group_class
from rooftrace.costmodels.kernels.reuse import warm_accesses as warm_accesses
from rooftrace.costmodels.kernels.tables import (
    KernelTable as KernelTable,
    kernel_table as kernel_table,
)
