from rooftrace.tracer.sources import (
    apart as apart,
    places as places,
)
from rooftrace.tracer.sources.batches import (
    at_batches as at_batches,
)
from rooftrace.tracer.sources.tracing import (
    collector_paused as collector_paused,
    loaded as loaded,
    traced as traced,
)
