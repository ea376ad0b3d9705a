from rooftrace.tracer.weightfiles import filenames as filenames, slices as slices
from rooftrace.tracer.weightfiles.opening import (
    open_checkpoint as open_checkpoint,
)
from rooftrace.tracer.weightfiles.stored import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    Stored as Stored,
)
