from rooftrace.measured.realsteps.measurement import (
    measure as measure,
    measured_row as measured_row,
    measuring as measuring,
    profiled_step as profiled_step,
)
from rooftrace.measured.realsteps.realize import (
    realized as realized,
)
from rooftrace.measured.realsteps.targetruns import (
    measured_target as measured_target,
)
