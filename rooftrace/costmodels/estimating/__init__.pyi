from rooftrace.costmodels.estimating import (
    breakdowns as breakdowns,
    communication as communication,
    rows as rows,
)
from rooftrace.costmodels.estimating.estimates import (
    Estimate as Estimate,
    estimate as estimate,
)
from rooftrace.costmodels.estimating.rows import (
    Row as Row,
)
