from rooftrace.costmodels.breaking.pricing import price_breaks as price_breaks
from rooftrace.costmodels.breaking.records import (
    BreakCost as BreakCost,
    GraphBreaks as GraphBreaks,
)
