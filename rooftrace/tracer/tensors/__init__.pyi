from rooftrace.tracer.tensors import trees as trees
from rooftrace.tracer.tensors.closures import (
    copy_hooks as copy_hooks,
    held_by as held_by,
    hooks_of as hooks_of,
    rebound as rebound,
)
from rooftrace.tracer.tensors.onmeta import (
    LAZY as LAZY,
    Twins as Twins,
    beside_in as beside_in,
    fresh_handles as fresh_handles,
    inputs_on_meta as inputs_on_meta,
    is_lazy as is_lazy,
    on_meta as on_meta,
    own_tensors as own_tensors,
    parameters_of as parameters_of,
    replaced as replaced,
    twin as twin,
)
from rooftrace.tracer.tensors.trees import (
    ORDINARY as ORDINARY,
    PLAIN as PLAIN,
    arguments_in as arguments_in,
    attributes_of as attributes_of,
    bytes_of as bytes_of,
    is_sparse as is_sparse,
    is_wrapper as is_wrapper,
    listed as listed,
    look_of as look_of,
    parts_of as parts_of,
    pieces_of as pieces_of,
    stored_bytes as stored_bytes,
    tensors_in as tensors_in,
)
