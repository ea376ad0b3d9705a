"""Reports on one or several targets, chips and executions, and the largest batch that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rooftrace._formats import FIGURES, TEXTS, USUAL
from rooftrace._progress import tell, telling
from rooftrace.costmodels.fusion import ExecutionModel, plan
from rooftrace.costmodels.memory import LargestBatch, Memory, largest
from rooftrace.costmodels.rewrites import reprice
from rooftrace.errors import RequestError, is_ours
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip, load_chip
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.pricing import PricingOptions
from rooftrace.reporting.commands.reportfolder import (
    Report,
    build_report,
    check_folder,
    check_formats,
    conditions,
    new_folder,
)
from rooftrace.reporting.commands.requests import StepRequest
from rooftrace.reporting.commands.rooflinesteps import FIGURE, PAGE, Reports, check_names, names_of
from rooftrace.studies.advice import WhatIf, fitting
from rooftrace.tracer import Job
from rooftrace.tracer.phases import SizedSource, at_batches


def report(
    model: Source,
    *args: Any,
    out: str | os.PathLike[str] | None = None,
    formats: Sequence[str] | None = None,
    max_batch: bool = False,
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
    `calibrate` returns them; None for the datasheet's peaks.  rewrites, tf32, library, exchange,
    what_if, settings: other changes to every execution.  progress: a function that is called
    with a few words on each thing that is being done.

    Returns the Report; print it for one screen.  Raises RequestError for an argument that neither
    the model nor rooftrace takes.
    """
    request = StepRequest.of(report, model, args, kwargs)
    chips, models = conditions(request.chips, request.models)
    how: dict[str, Any] = {} if formats is None else {"formats": tuple(formats)}
    if out is not None:
        check_folder(Path(out), **how)
    with telling(progress):
        result = build_report(request.graphs(), chips, models, tell)
        result = replace(result, fitting=_fitting(result, request.job))
        if max_batch:
            again = replace(request.job.without("batch"), phases=tuple(result.phases))
            result = replace(result, largest=_largest(again, chips, models[-1]))
    if out is not None:
        result.write(Path(out), **how)
    return result


def largest_batch(
    model: Source,
    *args: Any,
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
    request = StepRequest.of(largest_batch, model, args, kwargs)
    request.job.refuse(("batch",), "the batch is what is looked for; leave it out")
    with telling(progress):
        return _largest(request.job, request.chips, request.model)


def _fitting(result: Report, job: Job) -> dict[str, tuple[WhatIf, ...]]:
    """Changes after which a phase fits the first chip, of each phase that does not."""
    steps = {phase: result.estimate(phase) for phase in result.phases}
    fixed = job.is_graph or job.is_script or job.is_step or job.request.mesh

    @cache
    def traces() -> Any:
        return at_batches(replace(job.without("batch"), phases=tuple(result.phases)))[1]

    def at(phase: str, batch: int) -> OpGraph:
        try:
            return reprice(traces()(phase, batch), *job.precisions)
        except RuntimeError as error:  # a TraceError, or torch's
            raise RequestError(f"{phase} at batch {batch}: {error}") from error

    def over(phase: str, chips: int, again: bool) -> OpGraph:
        tell(f"{phase} over {chips} chips")
        how = "full" if again else job.request.checkpoint
        request = replace(job.request, mesh={"dp": chips}, checkpoint=how)
        shared = replace(job, request=request, phases=(phase,), explicit=())
        return reprice(SizedSource(shared, ()).graphs(())[phase], *job.precisions)

    alone = fixed or not job.is_named  # a module in memory is not built again
    return {
        phase: fitting(
            step, None if fixed else partial(at, phase), None if alone else partial(over, phase)
        )
        for phase, step in steps.items()
        if not step.memory.fits(step.chip)
    }


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


# -- many reports ----------------------------------------------------------------------------------

MANIFEST = "_comparison.json"
MOST = 200
"""Targets of one call at most."""


def write_comparison(
    result: Reports, out: Path, formats: Sequence[str], style: str = "screen"
) -> list[Path]:
    """Write the page, the table and the figure of all reports into a folder; their paths."""
    from rooftrace.reporting.views import file_of

    with new_folder(out, MANIFEST) as made:
        names: list[str] = []
        drawn = [name for name in FIGURES if name in formats]
        if result.roofline is not None and drawn:
            from rooftrace.reporting.figures import roofline

            for ending in drawn:
                names.append(f"{FIGURE}.{ending}")
                roofline.draw_roofline(result.roofline, made / names[-1], style)
        pictures = {name: (made / name).read_bytes() for name in names if name.endswith(".png")}
        how = {"files": tuple(names), "pictures": pictures, "style": style}
        for name in (name for name in TEXTS if name in formats):
            names.append(f"{PAGE}.{name}")
            (made / names[-1]).write_bytes(file_of(result, name, **how))
    return [out / name for name in names]


def reports(
    targets: Sequence[str],
    *,
    out: str | Path | None = None,
    formats: Sequence[str] | None = None,
    style: str = "screen",
    names: Sequence[str] | None = None,
    **asked: Any,
) -> Reports:
    """A report on each of several targets; with `out`, a folder for each inside of that one.

    asked: arguments of `report` for all targets.  `out` also gets comparison.html, .md, .json and
    .csv (by `formats`) and a figure with all steps on one roofline.  A folder is written as soon as
    its report is there; a target that fails stops no other.  names: one for each target, in the
    table and figure of all.

    Returns the Reports, with the failures by target.  Raises RequestError for no target, one that
    is there twice, too many, and names that are not one for each.
    """
    _check(targets)
    check_names(names, targets)
    conditions_of(report, PricingOptions.parted(asked)[0])
    used = USUAL if formats is None else tuple(formats)
    check_formats(used)
    folders = names_of(targets)
    for name in folders.values() if out is not None else ():
        check_folder(Path(out or "") / name, used)
    made: dict[str, Report] = {}
    failures: dict[str, str] = {}
    for number, target in enumerate(targets, 1):
        tell(f"{target}, {number} of {len(targets)}")
        try:
            result = report(target, **asked)
            if out is not None:
                result.write(Path(out) / folders[target], used, style=style)
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            if not (isinstance(error, OSError) or is_ours(error)):
                raise
            failures[target] = _line(error)
            continue
        made[target] = result
    together = Reports(made, failures, dict(zip(targets, names or (), strict=names is not None)))
    if out is not None:
        write_comparison(together, Path(out), used, style)
    return together


def _line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
    return " ".join(text.split())


def _check(targets: Sequence[str]) -> None:
    if not targets:
        raise RequestError("targets: expected at least one, got none")
    if len(targets) > MOST:
        raise RequestError(f"{len(targets):,} targets: expected {MOST} at most in one call")
    for target in targets:
        if list(targets).count(target) > 1:
            raise RequestError(f"{target}: it is there {list(targets).count(target)} times")
