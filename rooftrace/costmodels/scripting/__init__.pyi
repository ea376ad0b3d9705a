from rooftrace.costmodels.scripting.pricing import (
    price_script as price_script,
)
from rooftrace.costmodels.scripting.records import (
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
)
