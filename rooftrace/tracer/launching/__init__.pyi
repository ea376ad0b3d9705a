from rooftrace.tracer.launching import ownprocess as ownprocess
from rooftrace.tracer.launching.ownprocess import (
    call_apart as call_apart,
)
from rooftrace.tracer.launching.records import (
    Ended as Ended,
    Ranks as Ranks,
)
from rooftrace.tracer.launching.running import (
    launched as launched,
)
from rooftrace.tracer.launching.words import (
    understood as understood,
)
