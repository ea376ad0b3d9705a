from rooftrace.tracer.scripts.realturns import RealTurn as RealTurn, real_turns as real_turns
from rooftrace.tracer.scripts.records import Script as Script, Turns as Turns
from rooftrace.tracer.scripts.running import (
    ScriptError as ScriptError,
    ScriptRequest as ScriptRequest,
)
