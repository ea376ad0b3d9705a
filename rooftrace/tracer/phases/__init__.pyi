from rooftrace.tracer.phases import (
    apart as apart,
    ownprocess as ownprocess,
    stepping as stepping,
    steps as steps,
)
from rooftrace.tracer.phases.calls import ModuleCalls as ModuleCalls, PlainCall as PlainCall
from rooftrace.tracer.phases.counters import PeerCount as PeerCount, count_phases as count_phases
from rooftrace.tracer.phases.ownprocess import call_apart as call_apart
from rooftrace.tracer.phases.running import trace_phases as trace_phases
from rooftrace.tracer.phases.sizing import (
    SizedSource as SizedSource,
    TraceCache as TraceCache,
    at_batches as at_batches,
    kept_or_traced as kept_or_traced,
)
from rooftrace.tracer.phases.tracing import (
    collector_paused as collector_paused,
    loaded as loaded,
    traced as traced,
)
