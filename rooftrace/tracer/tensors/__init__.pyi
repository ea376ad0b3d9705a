from rooftrace.tracer.tensors import owners as owners, subclasses as subclasses, trees as trees
from rooftrace.tracer.tensors.owners import (
    own_tensors as own_tensors,
    parameters_of as parameters_of,
)
from rooftrace.tracer.tensors.trees import (
    tensors_in as tensors_in,
)
