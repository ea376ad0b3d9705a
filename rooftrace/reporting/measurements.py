"""Predictions beside measurements, and knobs fitted to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.knobs import Knobs, load_knobs
from rooftrace.costmodels.rewriting import check_precisions
from rooftrace.hardware import Chip, load_chip
from rooftrace.measured.fit import Calibration, calibrated
from rooftrace.measured.runs import Run
from rooftrace.measured.sources import KINDS, Kind, kind_of
from rooftrace.measured.validate import Validation, validated
from rooftrace.reporting.estimates import Profile, Source, priced
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.targets import isolation


def validate(
    measured: Any,
    chip: str | Chip,
    execution: str | ExecutionModel = "eager",
    target: Source | None = None,
    knobs: str | os.PathLike[str] | Knobs | None = None,
    *,
    phases: Sequence[str] | None = None,
    counters: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Validation:
    """What was measured beside what is predicted for it; print it for one screen.

    measured: a path (told by its contents: a run of `rooftrace measure`, a trace of torch.profiler,
    a table of step times), or a Run, a Profile, steps.  execution: how it was run.  target: what
    ran: a graph (`trace(model, x)`), graphs by phase, or a target; of a trace at the batch, seq,
    kv, dtype ... that `report` takes; for a table a template such as "models.py:{target}"; rows of
    a run name it themselves.  knobs: what a calibration found, by name or path.  phases: only
    these.  counters: a CSV of Nsight Compute of the same step as a trace.

    Raises MeasuredRequestError where these do not go together, ProfileError and RunFileError for a
    file that cannot be read or a trace of something else.
    """
    loaded = load_knobs(knobs) if isinstance(knobs, (str, os.PathLike)) else knobs
    changes: dict[str, Any] = {} if loaded is None else {"knobs": loaded}
    model = execution_model(execution, **changes)
    job = Job.of(validate, "" if target is None else target, (), kwargs, phases=phases)
    # Rows of one target share what it imported.
    with telling(progress), isolation.keeping(isolation.Kept()):
        graphs, template = _what_ran(measured, job)
        return validated(
            measured, load_chip(chip), model, graphs, template, job.phases, counters, tell
        )


def calibrate(
    measured: Any,
    chip: str | Chip,
    execution: str | ExecutionModel = "eager",
    target: Source | None = None,
    *,
    start: str | Knobs | None = None,
    free: Sequence[str] | None = None,
    title: str = "",
    phases: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Calibration:
    """Knobs that make predictions for `chip` right, and how sure they are; print it to see both.

    measured, execution, target, phases, sizes: as `validate` takes them.  start: knobs to begin
    with, by name or path; default: typical ones of GPUs, the datasheet of others.  free: names of
    the knobs to fit; default: compute and memory, and of a run or a trace as many as it supports.
    `.knobs` is for `execution_model(name, knobs=...)`, `.save(path)` writes them for --knobs.

    Raises what `validate` does, and CalibrationError for less than there are knobs to fit.
    """
    job = Job.of(calibrate, "" if target is None else target, (), kwargs, phases=phases)
    begin = os.fspath(start) if isinstance(start, os.PathLike) else start
    model = execution_model(execution)
    with telling(progress), isolation.keeping(isolation.Kept()):
        graphs, template = _what_ran(measured, job, all_phases=True)
        return calibrated(
            measured, load_chip(chip), model, graphs, template, begin, free, title, tell
        )


def _what_ran(
    measured: Any, job: Job, all_phases: bool = False
) -> tuple[Callable[[], Mapping[str, OpGraph]] | None, str | None]:
    """How the graphs of what was measured are made, or a template for the names in it.

    job: what is asked of the target; its source is "" where there is none.  all_phases: whether
    rows of all phases are taken, whatever is asked.
    Raises MeasuredRequestError for sizes of what says itself what ran, or without a target.
    """
    if isinstance(measured, Profile):
        kind: Kind = "trace"
    elif isinstance(measured, (str, os.PathLike)):
        kind = kind_of(measured)
    else:
        kind = "run" if isinstance(measured, Run) else "steps"
    if kind != "trace" and job.is_named:
        shown = measured if isinstance(measured, (str, os.PathLike)) else "this"
        job.refuse(
            [name for name in job.explicit if name != "phases" or all_phases],
            f"this is for a trace; {shown} is {KINDS[kind]}, and says itself what ran",
        )
    if job.is_named and not job.name:
        job.refuse(job.explicit if kind == "trace" else (), "there is no target to run so")
        return None, None
    check_precisions(*job.precisions)
    template = job.name if job.is_named else None
    if kind != "trace" and template is not None:
        return None, template
    return (lambda: priced(job).graphs), template
