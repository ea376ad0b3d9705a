from rooftrace.costmodels.fusion import runs as runs, traffic as traffic
from rooftrace.costmodels.fusion.execution_advice import (
    Coverage as Coverage,
    Unsupported as Unsupported,
    usual_execution as usual_execution,
)
from rooftrace.costmodels.fusion.executions import (
    LIBRARIES as LIBRARIES,
    REWRITES as REWRITES,
    SUMMARIES as SUMMARIES,
    TYPICAL as TYPICAL,
    ExecutionError as ExecutionError,
    ExecutionModel as ExecutionModel,
    execution_model as execution_model,
)
from rooftrace.costmodels.fusion.grouping import fuse as fuse
from rooftrace.costmodels.fusion.index_space import (
    BATCH_NORMS as BATCH_NORMS,
    is_batch_norm_native as is_batch_norm_native,
    release_of as release_of,
)
from rooftrace.costmodels.fusion.joins import fusion as fusion, own_joins as own_joins
from rooftrace.costmodels.fusion.kernels import KernelView as KernelView
from rooftrace.costmodels.fusion.partition import FusionGroup as FusionGroup, beyond as beyond
from rooftrace.costmodels.fusion.plans import (
    Bytes as Bytes,
    Launch as Launch,
    Plan as Plan,
    plan as plan,
    waits as waits,
    waits_at as waits_at,
)
from rooftrace.costmodels.fusion.traffic import (
    bytes_by_role as bytes_by_role,
    storage_sizes as storage_sizes,
)
