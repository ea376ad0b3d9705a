from rooftrace.tracer.recording import functions as functions
from rooftrace.tracer.recording.autocast import (
    followed as followed,
)
from rooftrace.tracer.recording.recorder import (
    Recorder as Recorder,
    check_not_inside as check_not_inside,
)
from rooftrace.tracer.recording.running import (
    Runner as Runner,
)
