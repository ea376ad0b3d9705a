from rooftrace.tracer.pipelines import splitting as splitting
from rooftrace.tracer.pipelines.schedules import (
    SCHEDULES as SCHEDULES,
    Action as Action,
    stages_of as stages_of,
    table_of as table_of,
)
