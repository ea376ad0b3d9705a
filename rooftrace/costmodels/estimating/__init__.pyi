from rooftrace.costmodels.estimating.estimates import (
    MATRIX as MATRIX,
    Coverage as Coverage,
    Estimate as Estimate,
    Row as Row,
    Unsupported as Unsupported,
    dispatch_seconds as dispatch_seconds,
    estimate as estimate,
)
from rooftrace.costmodels.estimating.executions import (
    SUMMARIES as SUMMARIES,
    ExecutionModel as ExecutionModel,
    execution_model as execution_model,
)
from rooftrace.costmodels.estimating.plans import (
    Plan as Plan,
    plan as plan,
    regrouped as regrouped,
)
