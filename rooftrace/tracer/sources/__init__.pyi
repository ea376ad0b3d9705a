from rooftrace.tracer.sources.apart import (
    Traced as Traced,
    trace_each_apart as trace_each_apart,
)
from rooftrace.tracer.sources.batches import (
    at_batches as at_batches,
)
from rooftrace.tracer.sources.tracing import (
    collector_paused as collector_paused,
    loaded as loaded,
    traced as traced,
)
