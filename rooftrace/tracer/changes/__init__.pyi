from rooftrace.tracer.changes import (
    aligning as aligning,
    limits as limits,
    metrics as metrics,
)
from rooftrace.tracer.changes.change import (
    Change as Change,
    relative as relative,
)
from rooftrace.tracer.changes.limits import Limit as Limit
