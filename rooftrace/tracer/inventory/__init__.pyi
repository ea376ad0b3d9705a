from rooftrace.tracer.inventory import changes as changes, records as records
from rooftrace.tracer.inventory.changes import Change as Change, Limit as Limit
from rooftrace.tracer.inventory.checkpoints import compare_checkpoints as compare_checkpoints
from rooftrace.tracer.inventory.records import (
    SIZES as SIZES,
    CheckpointDiff as CheckpointDiff,
    ConfigDiff as ConfigDiff,
    ParameterDiff as ParameterDiff,
    TensorDiff as TensorDiff,
    TensorLook as TensorLook,
    compare_parameters as compare_parameters,
)
from rooftrace.tracer.inventory.taking import inventory_of as inventory_of
