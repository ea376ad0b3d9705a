from rooftrace.tracer.source import lines as lines
from rooftrace.tracer.source.imports import (
    spec_after as spec_after,
)
from rooftrace.tracer.source.lines import (
    TraceError as TraceError,
    deciding_line as deciding_line,
    source_line as source_line,
    users_traceback as users_traceback,
)
