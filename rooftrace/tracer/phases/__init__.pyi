from rooftrace.tracer.phases import (
    optimizer as optimizer,
    stepping as stepping,
    steps as steps,
)
from rooftrace.tracer.phases.calls import (
    ModuleCalls as ModuleCalls,
    PlainCall as PlainCall,
)
from rooftrace.tracer.phases.running import (
    trace_phases as trace_phases,
)
