from rooftrace.costmodels.findings.counters.counting import (
    Comparison as Comparison,
    Difference as Difference,
    compare as compare,
    flop_counts as flop_counts,
)
