from rooftrace.tracer.phases import optimizer as optimizer
from rooftrace.tracer.phases.calls import (
    ModuleCalls as ModuleCalls,
    PlainCall as PlainCall,
)
from rooftrace.tracer.phases.running import (
    trace_phases as trace_phases,
)
from rooftrace.tracer.phases.steps import (
    Capture as Capture,
    trace_step as trace_step,
)
