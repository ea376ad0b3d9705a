from rooftrace.tracer.sources import apart as apart
from rooftrace.tracer.sources.tracing import (
    ModuleSource as ModuleSource,
    collector_paused as collector_paused,
    loaded as loaded,
    traced as traced,
)
