from rooftrace.costmodels.execution.executions import (
    SUMMARIES as SUMMARIES,
    TYPICAL as TYPICAL,
    ExecutionError as ExecutionError,
    ExecutionModel as ExecutionModel,
    execution_model as execution_model,
)
from rooftrace.costmodels.execution.rewritenames import REWRITES as REWRITES
