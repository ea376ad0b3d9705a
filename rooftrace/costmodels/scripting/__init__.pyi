from rooftrace.costmodels.scripting.records import (
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
    price_script as price_script,
)
