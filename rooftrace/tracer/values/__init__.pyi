from rooftrace.tracer.values import (
    choices as choices,
    copies as copies,
    masks as masks,
    trees as trees,
)
from rooftrace.tracer.values.copies import (
    Twins as Twins,
    inputs_on_meta as inputs_on_meta,
    on_meta as on_meta,
    twin as twin,
    with_tensors as with_tensors,
)
from rooftrace.tracer.values.masks import META as META, REAL_VALUE as REAL_VALUE
from rooftrace.tracer.values.trees import (
    dtype_name as dtype_name,
    own_tensors as own_tensors,
    parameters_of as parameters_of,
    tensors_in as tensors_in,
    torch_dtype as torch_dtype,
)
from rooftrace.tracer.values.values import (
    DECIDED as DECIDED,
    ChoiceNeededError as ChoiceNeededError,
    UnknownValueError as UnknownValueError,
    Values as Values,
)
