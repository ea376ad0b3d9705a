from rooftrace.costmodels.timing import queue as queue, timings as timings
from rooftrace.costmodels.timing.plan_times import time_plan as time_plan
from rooftrace.costmodels.timing.timings import (
    StepTimes as StepTimes,
    Timing as Timing,
)
