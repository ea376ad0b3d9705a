from rooftrace.tracer.scripts.failing import (
    ScriptError as ScriptError,
)
from rooftrace.tracer.scripts.records import (
    Script as Script,
    TurnPiece as TurnPiece,
    Turns as Turns,
)
from rooftrace.tracer.scripts.running import (
    run_script as run_script,
)
