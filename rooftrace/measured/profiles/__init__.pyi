from rooftrace.measured.profiles import records as records, tables as tables
from rooftrace.measured.profiles.counters import (
    MemoryCount as MemoryCount,
    read_likwid as read_likwid,
    read_rocprof as read_rocprof,
)
from rooftrace.measured.profiles.kinds import (
    Measured as Measured,
    Records as Records,
    counts_of as counts_of,
    read_perf_stat as read_perf_stat,
    records_of as records_of,
    source as source,
    source_of as source_of,
)
from rooftrace.measured.profiles.kineto import read_trace as read_trace
from rooftrace.measured.profiles.records import Trace as Trace, TraceStep as TraceStep
from rooftrace.measured.profiles.tables import (
    KernelCounters as KernelCounters,
    StepTime as StepTime,
    read_counters as read_counters,
    read_steps as read_steps,
)
