from rooftrace.costmodels.findings.matching.flow import (
    Flow as Flow,
    Read as Read,
    in_any_order as in_any_order,
)
from rooftrace.costmodels.findings.matching.matching import (
    Matching as Matching,
    Pair as Pair,
    match as match,
)
