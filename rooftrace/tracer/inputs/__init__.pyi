from rooftrace.tracer.inputs import calls as calls
from rooftrace.tracer.inputs.calls import (
    Inputs as Inputs,
    Loaded as Loaded,
    as_before as as_before,
    call_inputs as call_inputs,
)
from rooftrace.tracer.inputs.huggingface import module_inputs as module_inputs
