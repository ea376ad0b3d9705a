from rooftrace.tracer.recording.autocast import (
    followed as followed,
)
from rooftrace.tracer.recording.origin import (
    TraceError as TraceError,
    source_line as source_line,
    users_traceback as users_traceback,
)
from rooftrace.tracer.recording.recorder import (
    META_KEY as META_KEY,
    Entry as Entry,
    OpInfo as OpInfo,
    Origin as Origin,
    Recorded as Recorded,
    Recorder as Recorder,
    Spec as Spec,
    shown_path as shown_path,
)
from rooftrace.tracer.recording.values import (
    META as META,
    REAL as REAL,
    REAL_VALUE as REAL_VALUE,
    UNINITIALISED as UNINITIALISED,
    Real as Real,
    UnknownValueError as UnknownValueError,
    Values as Values,
    draws as draws,
    small as small,
)
