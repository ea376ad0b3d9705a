from rooftrace.tracer import (
    callables as callables,
    names as names,
    source as source,
    torch_private as torch_private,
)
from rooftrace.tracer.api import (
    capture as capture,
    load as load,
    only as only,
    save as save,
    trace as trace,
    trace_target as trace_target,
)
from rooftrace.tracer.conditions import spec_after as spec_after
from rooftrace.tracer.job import Job as Job
from rooftrace.tracer.request import (
    Options as Options,
    Request as Request,
    RequestLengths as RequestLengths,
)
from rooftrace.tracer.source import (
    deciding_line as deciding_line,
    source_line as source_line,
    users_traceback as users_traceback,
)
