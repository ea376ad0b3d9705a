from rooftrace.tracer.requests import (
    assumptions as assumptions,
    callables as callables,
    names as names,
    source as source,
)
from rooftrace.tracer.requests.conditions import spec_after as spec_after
from rooftrace.tracer.requests.job import Job as Job
from rooftrace.tracer.requests.request import (
    Options as Options,
    Request as Request,
    RequestLengths as RequestLengths,
)
from rooftrace.tracer.requests.source import (
    TraceError as TraceError,
    deciding_line as deciding_line,
    source_line as source_line,
    users_traceback as users_traceback,
)
