from rooftrace.weights import inventory as inventory
from rooftrace.weights.comparison import compare_checkpoints as compare_checkpoints
from rooftrace.weights.inventory import (
    CheckpointDiff as CheckpointDiff,
    ConfigDiff as ConfigDiff,
    ParameterDiff as ParameterDiff,
    TensorDiff as TensorDiff,
    TensorLook as TensorLook,
    compare_parameters as compare_parameters,
)
from rooftrace.weights.taking import inventory_of as inventory_of
