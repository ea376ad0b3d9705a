from rooftrace.tracer.repeats.blocks import (
    RecordedCall as RecordedCall,
    RepeatedCall as RepeatedCall,
    Twin as Twin,
    UnlikeLayersError as UnlikeLayersError,
    repeated as repeated,
)
from rooftrace.tracer.repeats.calls import CallReplay as CallReplay
from rooftrace.tracer.repeats.fewer import Shortened as Shortened, shorten as shorten
from rooftrace.tracer.repeats.loops import Loop as Loop, Rolling as Rolling
from rooftrace.tracer.repeats.outside import Unwatched as Unwatched
