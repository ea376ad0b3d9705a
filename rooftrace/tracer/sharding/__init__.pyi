from rooftrace.tracer.sharding import (
    ddp as ddp,
    fsdp as fsdp,
    huggingface as huggingface,
    plans as plans,
    splitting as splitting,
    zero as zero,
)
from rooftrace.tracer.sharding.fsdp import fake_mesh as fake_mesh
from rooftrace.tracer.sharding.schedules import (
    SCHEDULES as SCHEDULES,
    Action as Action,
    schedule_of as schedule_of,
    stages_of as stages_of,
    table_of as table_of,
)
