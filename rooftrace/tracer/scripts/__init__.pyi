from rooftrace.tracer.scripts.failing import (
    ScriptError as ScriptError,
)
from rooftrace.tracer.scripts.records import (
    Piece as Piece,
    Script as Script,
    Stretch as Stretch,
)
from rooftrace.tracer.scripts.running import (
    run_script as run_script,
)
