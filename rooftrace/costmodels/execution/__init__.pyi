from rooftrace.costmodels.execution.executions import (
    REWRITES as REWRITES,
    SUMMARIES as SUMMARIES,
    TYPICAL as TYPICAL,
    ExecutionError as ExecutionError,
    ExecutionModel as ExecutionModel,
    execution_model as execution_model,
)
