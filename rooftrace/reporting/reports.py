"""Reports on several chips and executions, and the largest batch that fits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.memory import LargestBatch, Memory, largest
from rooftrace.costmodels.planning import plan
from rooftrace.costmodels.rewriting import reprice
from rooftrace.hardware import Chip, load_chip
from rooftrace.reporting.estimates import Source
from rooftrace.reporting.pages import Report, build_report, conditions
from rooftrace.reporting.pages.files import check_folder
from rooftrace.reporting.requests import StepRequest
from rooftrace.tracer.asking import Job
from rooftrace.tracer.sizing import at_batches


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
    `calibrate` returns them; None for the datasheet's peaks.  rewrites, tf32, exchange, what_if,
    settings: what else is changed of every execution.  progress: a function that is called
    with a few words on each thing that is being done.

    Returns the Report; print it for one screen.  Raises RequestError for an argument that neither
    the model nor rooftrace takes.
    """
    asked = StepRequest.of(report, model, args, kwargs)
    chips, models = conditions(asked.chips, asked.models)
    how: dict[str, Any] = {} if formats is None else {"formats": tuple(formats)}
    if out is not None:
        check_folder(Path(out), **how)
    with telling(progress):
        result = build_report(asked.graphs(), chips, models, tell)
        if max_batch:
            again = replace(asked.job.without("batch"), phases=tuple(result.phases))
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
    asked = StepRequest.of(largest_batch, model, args, kwargs)
    asked.job.refuse(("batch",), "the batch is what is looked for; leave it out")
    with telling(progress):
        return _largest(asked.job, asked.chips, asked.model)


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
