from rooftrace.tracer.phases.before import (
    as_before as as_before,
)
from rooftrace.tracer.phases.optimizer import (
    made_optimizer as made_optimizer,
    optimizer_class as optimizer_class,
)
from rooftrace.tracer.phases.peers import (
    PeerCount as PeerCount,
    check_peers as check_peers,
    count_phases as count_phases,
)
from rooftrace.tracer.phases.steps import (
    Capture as Capture,
    trace_step as trace_step,
)
from rooftrace.tracer.phases.workload import (
    PlainCall as PlainCall,
    Run as Run,
    cache_arguments as cache_arguments,
    check_request as check_request,
    learn as learn,
    named_inputs as named_inputs,
    trace_phases as trace_phases,
)
