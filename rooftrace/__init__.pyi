from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rooftrace._progress import telling as telling
from rooftrace.costmodels.breaking import (
    GraphBreaks as GraphBreaks,
)
from rooftrace.costmodels.costs import Access as Access, Cost as Cost, Work as Work
from rooftrace.costmodels.disaggregating import disaggregated as disaggregated
from rooftrace.costmodels.elasticity import (
    Elasticities as Elasticities,
)
from rooftrace.costmodels.estimating import (
    Estimate as Estimate,
)
from rooftrace.costmodels.estimating.breakdowns import Breakdown as Breakdown
from rooftrace.costmodels.execution import (
    ExecutionModel as ExecutionModel,
    execution_model as execution_model,
)
from rooftrace.costmodels.explaining import (
    Explanation as Explanation,
)
from rooftrace.costmodels.findings import (
    Headroom as Headroom,
    Saving as Saving,
    headroom as headroom,
)
from rooftrace.costmodels.fusion import (
    KernelView as KernelView,
    fusion as fusion,
)
from rooftrace.costmodels.guiding import (
    Guidance as Guidance,
    WhatIf as WhatIf,
    guidance as guidance,
)
from rooftrace.costmodels.memory import (
    memory as memory,
)
from rooftrace.costmodels.opviews import OpView as OpView
from rooftrace.costmodels.planning import Plan as Plan, plan as plan
from rooftrace.costmodels.registry import rule as rule
from rooftrace.costmodels.rewriting import (
    reprice as reprice,
)
from rooftrace.costmodels.scripting import (
    ScriptCost as ScriptCost,
    TurnCost as TurnCost,
)
from rooftrace.costmodels.sweeping import Form as Form, Sweep as Sweep
from rooftrace.errors import (
    RequestError as RequestError,
    TargetError as TargetError,
)
from rooftrace.hardware import (
    Chip as Chip,
    available_chips as available_chips,
    load_chip as load_chip,
)
from rooftrace.measured.callbacks import (
    lightning_callback as lightning_callback,
    trainer_callback as trainer_callback,
)
from rooftrace.measured.fused import (
    FusedStep as FusedStep,
    fused as fused,
)
from rooftrace.measured.live import live as live
from rooftrace.measured.realsteps import (
    measure as measure,
    measuring as measuring,
)
from rooftrace.measured.runs import (
    Run as Run,
    RunFileError as RunFileError,
    load_run as load_run,
)
from rooftrace.measured.sources import (
    source as source,
)
from rooftrace.measured.validate import (
    Validation as Validation,
)
from rooftrace.reporting.chakra import save_chakra as save_chakra
from rooftrace.reporting.differences import (
    compare as compare,
    diff as diff,
)
from rooftrace.reporting.estimates import (
    estimate as estimate,
    priced_graphs as priced_graphs,
)
from rooftrace.reporting.explaining import (
    explain as explain,
)
from rooftrace.reporting.exploring import (
    explore as explore,
)
from rooftrace.reporting.fleetsweeps import (
    SweepFleet as SweepFleet,
    sweep_fleet as sweep_fleet,
)
from rooftrace.reporting.formfiles import (
    load_form as load_form,
    save_form as save_form,
)
from rooftrace.reporting.graphbreaks import (
    graph_breaks as graph_breaks,
)
from rooftrace.reporting.habits import (
    capture as capture,
    flop_count_table as flop_count_table,
    profile as profile,
    summary as summary,
)
from rooftrace.reporting.inventories import (
    inventory as inventory,
)
from rooftrace.reporting.manyreports import (
    reports as reports,
)
from rooftrace.reporting.measurements import (
    calibrate as calibrate,
    validate as validate,
)
from rooftrace.reporting.meshes import (
    best_mesh as best_mesh,
    scaling as scaling,
)
from rooftrace.reporting.modeldump import (
    dump_model_info as dump_model_info,
)
from rooftrace.reporting.reports import (
    largest_batch as largest_batch,
    report as report,
)
from rooftrace.reporting.rooflines import (
    plot_roofline as plot_roofline,
    roofline as roofline,
)
from rooftrace.reporting.rooflinesteps import (
    Rooflines as Rooflines,
)
from rooftrace.reporting.scripts import (
    run as run,
)
from rooftrace.reporting.sections import (
    section as section,
)
from rooftrace.reporting.sensitivity import (
    sensitivity as sensitivity,
)
from rooftrace.reporting.solving import (
    plot_answer as plot_answer,
    solve as solve,
)
from rooftrace.reporting.stepforms import (
    form as form,
)
from rooftrace.reporting.sweeps import (
    plot_sweep as plot_sweep,
    sweep as sweep,
)
from rooftrace.reporting.timelines import (
    save_timeline as save_timeline,
)
from rooftrace.reporting.view import (
    units as units,
)
from rooftrace.reporting.view.model import (
    Column as Column,
    Note as Note,
    Section as Section,
    Table as Table,
)
from rooftrace.tracer import (
    load as load,
    save as save,
    trace as trace,
    trace_target as trace_target,
)
from rooftrace.tracer.asking import (
    Request as Request,
)
from rooftrace.tracer.asking.names import (
    phase as phase,
)
from rooftrace.tracer.graph import (
    OpGraph as OpGraph,
)
from rooftrace.tracer.inventory.records import (
    ModelInfo as ModelInfo,
)
from rooftrace.tracer.sharded import fake_mesh as fake_mesh
from rooftrace.tracer.source import (
    TraceError as TraceError,
)

__version__: str

def _headroom(estimate: Estimate) -> Headroom: ...
def _render(result: Any, form: str) -> Any: ...
def _write(result: Any, out: Path, figures: Sequence[str]) -> list[Path]: ...
