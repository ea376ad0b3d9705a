from rooftrace.costmodels.timing.plan_times import time_plan as time_plan
from rooftrace.costmodels.timing.queue import (
    Queue as Queue,
    host_seconds as host_seconds,
)
from rooftrace.costmodels.timing.timings import (
    StepTimes as StepTimes,
    Timing as Timing,
    ranked as ranked,
)
