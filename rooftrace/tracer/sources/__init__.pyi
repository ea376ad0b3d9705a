from rooftrace.tracer.sources import (
    apart as apart,
    places as places,
)
from rooftrace.tracer.sources.modules import (
    ModuleSource as ModuleSource,
    collector_paused as collector_paused,
)
from rooftrace.tracer.sources.tracing import (
    loaded as loaded,
    traced as traced,
)
