from rooftrace._progress import (
    telling as telling,
)
from rooftrace.costmodels.estimating import (
    Estimate as Estimate,
    ExecutionModel as ExecutionModel,
    Plan as Plan,
    execution_model as execution_model,
    plan as plan,
)
from rooftrace.costmodels.findings import (
    Headroom as Headroom,
    Saving as Saving,
    headroom as headroom,
)
from rooftrace.costmodels.memory import (
    memory as memory,
)
from rooftrace.costmodels.pricing import (
    Access as Access,
    Cost as Cost,
    OpView as OpView,
    Work as Work,
    rule as rule,
)
from rooftrace.costmodels.rewriting import (
    reprice as reprice,
)
from rooftrace.errors import (
    RequestError as RequestError,
    TargetError as TargetError,
)
from rooftrace.hardware import (
    Chip as Chip,
    available_chips as available_chips,
    load_chip as load_chip,
)
from rooftrace.measured.bench import (
    Run as Run,
    RunFileError as RunFileError,
    load_run as load_run,
    measure as measure,
    measuring as measuring,
)
from rooftrace.measured.validate import (
    Validation as Validation,
)
from rooftrace.reporting.differences import (
    compare as compare,
    diff as diff,
)
from rooftrace.reporting.estimates import (
    estimate as estimate,
    priced_graphs as priced_graphs,
    profile as profile,
    summary as summary,
)
from rooftrace.reporting.measurements import (
    calibrate as calibrate,
    validate as validate,
)
from rooftrace.reporting.reports import (
    largest_batch as largest_batch,
    report as report,
)
from rooftrace.tracer import (
    capture as capture,
    load as load,
    save as save,
    trace as trace,
    trace_target as trace_target,
)
from rooftrace.tracer.asking import (
    Request as Request,
)
from rooftrace.tracer.graph import (
    OpGraph as OpGraph,
)
from rooftrace.tracer.recording import (
    TraceError as TraceError,
)

__version__: str

def _render(estimates: list[Estimate]) -> str: ...
