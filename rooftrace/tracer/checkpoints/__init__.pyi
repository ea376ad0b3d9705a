from rooftrace.tracer.checkpoints.comparing import (
    compare_checkpoints as compare_checkpoints,
)
from rooftrace.tracer.checkpoints.conditions import (
    METRICS as METRICS,
    parse_limit as parse_limit,
)
from rooftrace.tracer.checkpoints.records import (
    CheckpointDiff as CheckpointDiff,
    ConfigDiff as ConfigDiff,
    TensorDiff as TensorDiff,
)
