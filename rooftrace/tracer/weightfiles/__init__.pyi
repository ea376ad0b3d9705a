from rooftrace.tracer.weightfiles.filenames import (
    is_checkpoint as is_checkpoint,
)
from rooftrace.tracer.weightfiles.opening import (
    open_checkpoint as open_checkpoint,
)
from rooftrace.tracer.weightfiles.slices import (
    flat_slice as flat_slice,
)
from rooftrace.tracer.weightfiles.stored import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    Stored as Stored,
)
