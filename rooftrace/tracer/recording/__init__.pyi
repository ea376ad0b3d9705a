from rooftrace.tracer.recording.autocast import (
    followed as followed,
)
from rooftrace.tracer.recording.functions import (
    Functions as Functions,
    wait as wait,
)
from rooftrace.tracer.recording.gaps import (
    look_for_gaps as look_for_gaps,
)
from rooftrace.tracer.recording.recorder import (
    Recorder as Recorder,
)
from rooftrace.tracer.recording.running import (
    Runner as Runner,
)
