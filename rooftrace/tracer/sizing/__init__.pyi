from rooftrace.tracer.sizing.sizedsource import SizedSource as SizedSource
from rooftrace.tracer.sizing.tracecache import TraceCache as TraceCache
