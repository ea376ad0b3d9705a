from rooftrace.tracer.recording import (
    functions as functions,
    groups as groups,
    library as library,
    ops as ops,
    overrides as overrides,
    taperecords as taperecords,
)
from rooftrace.tracer.recording.autocast import followed as followed
from rooftrace.tracer.recording.by_value import copied_to_host as copied_to_host
from rooftrace.tracer.recording.ops import (
    Call as Call,
    entering as entering,
    info_of as info_of,
    written_nodes as written_nodes,
)
from rooftrace.tracer.recording.overrides import (
    Scope as Scope,
    original_of as original_of,
    put as put,
    replaced as replaced,
    when_imported as when_imported,
)
from rooftrace.tracer.recording.recorder import (
    Recorder as Recorder,
    check_not_inside as check_not_inside,
)
from rooftrace.tracer.recording.recurrent import kept_whole as kept_whole
from rooftrace.tracer.recording.releases import (
    Release as Release,
    installed_release as installed_release,
    read_release as read_release,
    registered_ops as registered_ops,
)
from rooftrace.tracer.recording.running import Runner as Runner
from rooftrace.tracer.recording.serving import attend as attend, own_ops as own_ops
from rooftrace.tracer.recording.tape import Tape as Tape
from rooftrace.tracer.recording.taperecords import (
    META_KEY as META_KEY,
    Entry as Entry,
    LoopWatch as LoopWatch,
    Recorded as Recorded,
)
