from rooftrace.costmodels.estimating.estimates import (
    Estimate as Estimate,
    Row as Row,
    dispatch_seconds as dispatch_seconds,
    estimate as estimate,
)
from rooftrace.costmodels.estimating.executions import (
    SUMMARIES as SUMMARIES,
    ExecutionModel as ExecutionModel,
    execution_model as execution_model,
)
from rooftrace.costmodels.estimating.plans import (
    Coverage as Coverage,
    Plan as Plan,
    Unsupported as Unsupported,
    plan as plan,
    regrouped as regrouped,
)
