from rooftrace.costmodels.breaking.pricing import (
    BreakCost as BreakCost,
    GraphBreaks as GraphBreaks,
    price_breaks as price_breaks,
)
