from rooftrace.costmodels.planning.advice import usual_execution as usual_execution
from rooftrace.costmodels.planning.executions import (
    REWRITES as REWRITES,
    SUMMARIES as SUMMARIES,
    TYPICAL as TYPICAL,
    ExecutionError as ExecutionError,
    ExecutionModel as ExecutionModel,
    execution_model as execution_model,
)
from rooftrace.costmodels.planning.plans import (
    Coverage as Coverage,
    Launch as Launch,
    Plan as Plan,
    Unsupported as Unsupported,
    plan as plan,
)
