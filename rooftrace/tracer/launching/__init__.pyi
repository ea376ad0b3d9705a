from rooftrace.tracer.launching.ownprocess import (
    run_apart as run_apart,
)
from rooftrace.tracer.launching.records import (
    CommandLine as CommandLine,
    Ended as Ended,
    Ranks as Ranks,
)
from rooftrace.tracer.launching.running import (
    launched as launched,
)
from rooftrace.tracer.launching.words import (
    understood as understood,
)
