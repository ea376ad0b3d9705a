from rooftrace.tracer.weights import filenames as filenames, torchfile as torchfile
from rooftrace.tracer.weights.opening import open_checkpoint as open_checkpoint
from rooftrace.tracer.weights.torchfile import (
    Checkpoint as Checkpoint,
    CheckpointError as CheckpointError,
    Stored as Stored,
)
