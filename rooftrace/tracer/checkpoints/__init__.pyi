from rooftrace.tracer.checkpoints.comparing import (
    compare_checkpoints as compare_checkpoints,
)
from rooftrace.tracer.checkpoints.records import (
    CheckpointDiff as CheckpointDiff,
    ConfigDiff as ConfigDiff,
    TensorDiff as TensorDiff,
    TensorLook as TensorLook,
)
