from rooftrace.tracer.targets import (
    checkpoints as checkpoints,
    isolation as isolation,
    quantized_weights as quantized_weights,
)
from rooftrace.tracer.targets.checkpoints import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    Stored as Stored,
    open_checkpoint as open_checkpoint,
)
from rooftrace.tracer.targets.target import load_module as load_module, load_target as load_target
