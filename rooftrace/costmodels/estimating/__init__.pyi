from rooftrace.costmodels.estimating import rows as rows
from rooftrace.costmodels.estimating.breakdowns import (
    Breakdown as Breakdown,
    BreakdownRow as BreakdownRow,
)
from rooftrace.costmodels.estimating.estimates import (
    Estimate as Estimate,
    estimate as estimate,
)
from rooftrace.costmodels.estimating.rows import (
    Row as Row,
)
