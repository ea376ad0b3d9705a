from rooftrace.tracer.replay.calls import (
    Block as Block,
    Calls as Calls,
    RepeatedCall as RepeatedCall,
    repeated as repeated,
)
from rooftrace.tracer.replay.loops import (
    Loop as Loop,
    Rolling as Rolling,
)
