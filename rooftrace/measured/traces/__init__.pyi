from rooftrace.measured.traces import records as records
from rooftrace.measured.traces.kineto import (
    read_trace as read_trace,
)
from rooftrace.measured.traces.records import (
    Trace as Trace,
    TraceStep as TraceStep,
)
