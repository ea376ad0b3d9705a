from rooftrace.scripts.steps import real_steps as real_steps, watching as watching
from rooftrace.scripts.steps.real_steps import RealTurn as RealTurn, real_turns as real_turns
from rooftrace.scripts.steps.records import Script as Script, Turns as Turns
from rooftrace.scripts.steps.running import (
    ScriptError as ScriptError,
    ScriptRequest as ScriptRequest,
)
