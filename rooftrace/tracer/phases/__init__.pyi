from rooftrace.tracer.phases import (
    optimizer as optimizer,
    stepping as stepping,
    steps as steps,
)
from rooftrace.tracer.phases.calls import (
    ModuleCalls as ModuleCalls,
    PlainCall as PlainCall,
)
from rooftrace.tracer.phases.refusals import (
    check_not_inside as check_not_inside,
)
from rooftrace.tracer.phases.running import (
    trace_phases as trace_phases,
)
