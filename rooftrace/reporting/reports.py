"""Reports on several chips and executions, and the largest batch that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.execution import TYPICAL, ExecutionModel, execution_model
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.memory import LargestBatch, Memory, largest
from rooftrace.costmodels.planning import plan, usual_execution
from rooftrace.costmodels.rewriting import reprice
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip, load_chip
from rooftrace.hardware.systems import System
from rooftrace.reporting.alternatives import chips_for, each_execution
from rooftrace.reporting.estimates import Source, priced
from rooftrace.reporting.pages import Report, build_report, conditions
from rooftrace.reporting.pages.files import check_folder
from rooftrace.tracer.asking import Job, Options, Request
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sizing import at_batches

if TYPE_CHECKING:
    from rooftrace.measured.fit import Calibration


def report(
    model: Source,
    *args: Any,
    chip: str | Chip | Sequence[str | Chip] | None = None,
    system: str | System | Sequence[str | System] | None = None,
    execution: str | ExecutionModel | Sequence[str | ExecutionModel] | None = None,
    phases: Sequence[str] | None = None,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    out: str | os.PathLike[str] | None = None,
    formats: Sequence[str] | None = None,
    max_batch: bool = False,
    knobs: str | os.PathLike[str] | Knobs | Calibration | None = TYPICAL,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Report:
    """Trace `model` called with these arguments and price it.

    model: a module with its arguments, a graph, graphs by phase, a saved graph or a target.  batch,
    seq, kv and inputs: the sizes of a target, or of a Hugging Face model without arguments.  loss,
    optimizer, branches, assume, repeats, torch: as for `trace`.  phases: by default forward and
    training; for a target those that fit it.  chip: one or several names, chips or TOML paths;
    default the one that `knobs` were fitted on, else h200-sxm.
    system: how chips are joined, for a step of several processes; its chip then is `chip`.  dtype,
    weights_dtype, kv_dtype: storage precisions to price in.  out: a folder for report.html,
    report.md, report.json, ops.csv and figures.  formats: which of html, md, json, csv, png (these
    by default) and trace.  max_batch: also look for the largest batch that fits each chip
    (`largest_batch`).  execution: one or several, default naive and efficient, and for a script
    naive and mixed.  knobs: calibrated constants of every execution, by name or path or as
    `calibrate` returns them; None for the datasheet's peaks.  progress: a function that is called
    with a few words on each thing that is being done.

    Returns the Report; print it for one screen.  Raises RequestError for an argument that neither
    the model nor rooftrace takes.
    """
    executions = each_execution(execution or ("naive", usual_execution(model)))
    if knobs != TYPICAL:
        executions = [execution_model(model, knobs=knobs) for model in executions]
    chips, models = conditions(chips_for(chip, executions, system), executions)
    how: dict[str, Any] = {} if formats is None else {"formats": tuple(formats)}
    if out is not None:
        check_folder(Path(out), **how)
    prices = {"dtype": dtype, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype}
    job = Job.of(report, model, args, kwargs, phases=phases, **prices)
    with telling(progress):
        graphs = priced(job).graphs
        _check_disturbed(graphs, models)
        result = build_report(graphs, chips, models, tell)
        if max_batch:
            again = replace(job.without("batch"), phases=tuple(result.phases))
            result = replace(result, largest=_largest(again, chips, models[-1]))
    if out is not None:
        result.write(Path(out), **how)
    return result


def _check_disturbed(graphs: Mapping[str, OpGraph], models: Sequence[ExecutionModel]) -> None:
    """Raise RequestError for disturbances of many processes where there is one."""
    asked = {name: value for model in models for name, value in model.disturbances.asked.items()}
    if asked and not any(graph.groups for graph in graphs.values()):
        told = ", ".join(f"{name}={value:g}" for name, value in asked.items())
        raise RequestError(
            f"{told}: it slows steps of several processes, and this is of one; name a mesh, as "
            "--mesh dp=4"
        )


def largest_batch(
    model: Source,
    *args: Any,
    chip: str | Chip | Sequence[str | Chip] | None = None,
    execution: str | ExecutionModel | None = None,
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    dtype: str | None = None,
    weights_dtype: str | None = None,
    kv_dtype: str | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> dict[str, dict[str, LargestBatch]]:
    """The largest batch that fits each chip, by phase and name of the chip.

    model: a module with its arguments, or a target (with seq, kv and inputs, or a Request, for its
    other sizes).  The batch is the first dimension of the inputs; every answer is traced, and so is
    the batch after it.  execution: how the step is run, since a fused kernel keeps what it makes in
    between to itself.  loss, optimizer, assume and the like, or options: as for `trace`.  dtype,
    weights_dtype, kv_dtype: storage precisions to price in.  Raises RequestError for a graph, for
    an argument `batch`, and for a module that runs at no other batch.
    """
    whole = {"phases": phases, "request": request, "options": options}
    prices = {"dtype": dtype, "weights_dtype": weights_dtype, "kv_dtype": kv_dtype}
    job = Job.of(largest_batch, model, args, kwargs, **whole, **prices)
    job.refuse(("batch",), "the batch is what is looked for; leave it out")
    execution = execution_model(usual_execution(job) if execution is None else execution)
    with telling(progress):
        return _largest(job, chips_for(chip, execution), execution)


def _largest(
    job: Job, chips: Sequence[str | Chip], execution: ExecutionModel
) -> dict[str, dict[str, LargestBatch]]:
    """The largest batch of each phase of a job that fits each chip, run as `execution` says."""
    if not job.is_named and not job.is_graph:
        job.refuse(
            ("seq", "kv", "inputs"),
            "the inputs of the call have their sizes; only their batch is changed",
        )
    names, trace_at = at_batches(job)
    peaks: dict[tuple[str, int], Memory] = {}

    def memory_at(phase: str, batch: int) -> Memory:
        if (phase, batch) not in peaks:
            graph = reprice(trace_at(phase, batch), *job.precisions)
            peaks[phase, batch] = plan(graph, execution).memory
        return peaks[phase, batch]

    def peak_of(phase: str, batch: int) -> int:
        return memory_at(phase, batch).peak

    def fit(phase: str, weights: int, chip: Chip) -> LargestBatch:
        capacity = chip.room()
        batch, open_ended = largest(partial(peak_of, phase), capacity)
        return LargestBatch(batch, peak_of(phase, max(1, batch)), weights, capacity, open_ended)

    result: dict[str, dict[str, LargestBatch]] = {}
    for phase in names:
        weights = memory_at(phase, 1).weights
        result[phase] = {chip.name: fit(phase, weights, chip) for chip in map(load_chip, chips)}
    return result
