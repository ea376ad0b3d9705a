from rooftrace.tracer.inputs import arguments as arguments
from rooftrace.tracer.inputs.before import (
    as_before as as_before,
)
from rooftrace.tracer.inputs.calls import (
    Inputs as Inputs,
    Loaded as Loaded,
    call_inputs as call_inputs,
)
from rooftrace.tracer.inputs.modules import (
    module_inputs as module_inputs,
)
