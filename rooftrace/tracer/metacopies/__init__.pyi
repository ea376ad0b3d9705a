from rooftrace.tracer.metacopies import (
    copies as copies,
    overrides as overrides,
    scopes as scopes,
    trees as trees,
)
from rooftrace.tracer.metacopies.copies import (
    Twins as Twins,
    inputs_on_meta as inputs_on_meta,
    on_meta as on_meta,
    twin as twin,
    with_tensors as with_tensors,
)
from rooftrace.tracer.metacopies.overrides import (
    original_of as original_of,
    put as put,
    replaced as replaced,
)
from rooftrace.tracer.metacopies.scopes import Scope as Scope
from rooftrace.tracer.metacopies.trees import (
    dtype_name as dtype_name,
    own_tensors as own_tensors,
    parameters_of as parameters_of,
    tensors_in as tensors_in,
    torch_dtype as torch_dtype,
)
