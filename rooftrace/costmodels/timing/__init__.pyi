from rooftrace.costmodels.timing import queue as queue, streams as streams, timings as timings
from rooftrace.costmodels.timing.exchanges import Communication as Communication
from rooftrace.costmodels.timing.plan_times import time_plan as time_plan
from rooftrace.costmodels.timing.timings import StepTimes as StepTimes
