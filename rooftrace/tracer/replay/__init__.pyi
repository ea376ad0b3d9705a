from rooftrace.tracer.replay.blocks import (
    RecordedCall as RecordedCall,
    RepeatedCall as RepeatedCall,
    Twin as Twin,
    UnlikeLayersError as UnlikeLayersError,
    repeated as repeated,
)
from rooftrace.tracer.replay.calls import (
    CallReplay as CallReplay,
)
