from rooftrace.tracer.sizing.sizedsource import (
    SizedSource as SizedSource,
    at_batches as at_batches,
)
from rooftrace.tracer.sizing.tracecache import TraceCache as TraceCache
