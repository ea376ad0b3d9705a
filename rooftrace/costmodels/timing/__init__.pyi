from rooftrace.costmodels.timing.plan_times import time_plan as time_plan
from rooftrace.costmodels.timing.queue import (
    Queue as Queue,
    dispatch_seconds as dispatch_seconds,
)
from rooftrace.costmodels.timing.timings import (
    StepTimes as StepTimes,
    Timing as Timing,
    ranked as ranked,
)
