from rooftrace.tracer.asking import (
    assumptions as assumptions,
    names as names,
)
from rooftrace.tracer.asking.job import (
    Job as Job,
)
from rooftrace.tracer.asking.request import (
    Options as Options,
    Request as Request,
    RequestLengths as RequestLengths,
)
