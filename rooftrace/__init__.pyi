from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooftrace._progress import telling as telling
from rooftrace.costmodels.advice import (
    GraphBreaks as GraphBreaks,
    Guidance as Guidance,
    Headroom as Headroom,
    Saving as Saving,
    WhatIf as WhatIf,
    guidance as guidance,
    headroom as headroom,
)
from rooftrace.costmodels.estimates import (
    Estimate as Estimate,
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
)
from rooftrace.costmodels.estimates.rows import Breakdown as Breakdown
from rooftrace.costmodels.explaining import (
    Explanation as Explanation,
)
from rooftrace.costmodels.fusion import (
    KernelView as KernelView,
    fusion as fusion,
)
from rooftrace.costmodels.memory import (
    memory as memory,
)
from rooftrace.costmodels.ops import (
    Access as Access,
    Cost as Cost,
    OpView as OpView,
    Work as Work,
    rule as rule,
)
from rooftrace.costmodels.planning import (
    ExecutionModel as ExecutionModel,
    Plan as Plan,
    execution_model as execution_model,
    plan as plan,
)
from rooftrace.costmodels.rewriting import (
    reprice as reprice,
)
from rooftrace.costmodels.solving import disaggregated as disaggregated
from rooftrace.costmodels.sweeps import Elasticities as Elasticities, Form as Form, Sweep as Sweep
from rooftrace.errors import (
    RequestError as RequestError,
    TargetError as TargetError,
)
from rooftrace.hardware import (
    Chip as Chip,
    available_chips as available_chips,
    load_chip as load_chip,
)
from rooftrace.measured.alignment import FusedStep as FusedStep, fused as fused
from rooftrace.measured.bench import (
    Run as Run,
    RunFileError as RunFileError,
    load_run as load_run,
    measure as measure,
    measuring as measuring,
)
from rooftrace.measured.fit import Validation as Validation
from rooftrace.measured.live import (
    lightning_callback as lightning_callback,
    live as live,
    trainer_callback as trainer_callback,
)
from rooftrace.measured.profiles import source as source
from rooftrace.reporting.figures import save_chakra as save_chakra
from rooftrace.reporting.fleets.sweeps import SweepFleet as SweepFleet
from rooftrace.reporting.habits import (
    capture as capture,
    dump_model_info as dump_model_info,
    flop_count_table as flop_count_table,
)
from rooftrace.reporting.inventories import (
    inventory as inventory,
)
from rooftrace.reporting.renderers import units as units
from rooftrace.reporting.renderers.view import (
    Column as Column,
    Note as Note,
    Section as Section,
    Table as Table,
)
from rooftrace.reporting.rooflines import (
    plot_roofline as plot_roofline,
)
from rooftrace.reporting.rooflinesteps import (
    Rooflines as Rooflines,
)
from rooftrace.reporting.sections import (
    section as section,
)
from rooftrace.reporting.signed import (
    best_mesh as best_mesh,
    calibrate as calibrate,
    compare as compare,
    diff as diff,
    estimate as estimate,
    explain as explain,
    explore as explore,
    form as form,
    graph_breaks as graph_breaks,
    largest_batch as largest_batch,
    priced_graphs as priced_graphs,
    profile as profile,
    report as report,
    reports as reports,
    roofline as roofline,
    run as run,
    scaling as scaling,
    sensitivity as sensitivity,
    solve as solve,
    summary as summary,
    sweep as sweep,
    sweep_fleet as sweep_fleet,
    trace as trace,
    validate as validate,
)
from rooftrace.reporting.solving import (
    plot_answer as plot_answer,
)
from rooftrace.reporting.stepforms import load_form as load_form, save_form as save_form
from rooftrace.reporting.sweeps import (
    plot_sweep as plot_sweep,
)
from rooftrace.reporting.timelines import (
    save_timeline as save_timeline,
)
from rooftrace.tracer import (
    load as load,
    save as save,
    trace_target as trace_target,
)
from rooftrace.tracer.graph import (
    OpGraph as OpGraph,
)
from rooftrace.tracer.inventory.records import (
    ModelInfo as ModelInfo,
)
from rooftrace.tracer.requests import Request as Request, TraceError as TraceError
from rooftrace.tracer.requests.names import phase as phase
from rooftrace.tracer.sharding import fake_mesh as fake_mesh

__version__: str

def _headroom(estimate: Estimate) -> Headroom: ...
def _render(result: Any, form: str) -> Any: ...
def _write(result: Any, out: Path, figures: Sequence[str]) -> list[Path]: ...
