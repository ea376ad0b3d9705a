from rooftrace.tracer.phases import stepping as stepping, steps as steps
from rooftrace.tracer.phases.calls import ModuleCalls as ModuleCalls, PlainCall as PlainCall
from rooftrace.tracer.phases.counters import PeerCount as PeerCount, count_phases as count_phases
from rooftrace.tracer.phases.running import trace_phases as trace_phases
