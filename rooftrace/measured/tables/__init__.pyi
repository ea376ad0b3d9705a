from rooftrace.measured.tables import tabular as tabular
from rooftrace.measured.tables.ncu import (
    KernelCounters as KernelCounters,
    read_counters as read_counters,
)
from rooftrace.measured.tables.steptimes import (
    StepTime as StepTime,
    read_steps as read_steps,
)
