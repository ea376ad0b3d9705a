from rooftrace.tracer.tape import records as records
from rooftrace.tracer.tape.loopwatch import (
    LoopWatch as LoopWatch,
)
from rooftrace.tracer.tape.records import (
    META_KEY as META_KEY,
    Entry as Entry,
    Recorded as Recorded,
)
from rooftrace.tracer.tape.tape import (
    Tape as Tape,
)
