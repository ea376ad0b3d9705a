from rooftrace.costmodels.batchtiming.batches import (
    BatchTimes as BatchTimes,
    time_columns as time_columns,
)
from rooftrace.costmodels.batchtiming.plancolumns import PlanColumns as PlanColumns
from rooftrace.costmodels.batchtiming.stacking import stack as stack
from rooftrace.costmodels.kernels.columns import (
    KernelColumns as KernelColumns,
    WorkColumns as WorkColumns,
)
