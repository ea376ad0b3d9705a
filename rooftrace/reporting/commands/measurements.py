"""Compares measurements with predictions, and fits knobs to measurements."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rooftrace._progress import tell, telling
from rooftrace.costmodels.fusion import TYPICAL, ExecutionModel
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.rewrites import check_precisions
from rooftrace.errors import RequestError, UnusedError
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.measured.bench import Run
from rooftrace.measured.fit import Calibration, Validation, calibrated, validated
from rooftrace.measured.profiles import Trace, source_of
from rooftrace.reporting.commands.calls import conditions_of
from rooftrace.reporting.commands.estimates import Source
from rooftrace.reporting.commands.pricing import PricingOptions, check_groups
from rooftrace.reporting.commands.requests import StepRequest, priced
from rooftrace.tracer import Job
from rooftrace.tracer.targets import isolation


def validate(
    measured: Any,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
    target: Source | None = None,
    knobs: str | os.PathLike[str] | Knobs | None = TYPICAL,
    *,
    trust_targets: bool = False,
    counters: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Validation:
    """Compare measurements with their predictions; print the result to see it on one screen.

    measured: a path to a run of `rooftrace measure`, a trace of torch.profiler or a table of step
    times, told apart by its contents; or a Run, a Trace or steps.  execution: how the step was
    run.  target: what was run: a graph (`trace(model, x)`), graphs by phase, or a target.  With a
    trace also give the target's sizes as for `report` (batch, seq, kv, dtype ...).  With a table
    give a template such as "models.py:{target}", in which {target} stands for the name in a line,
    and {batch}, {seq}, {kv} and {image_size} for its sizes.  With a run of the suite leave it out:
    its rows name models of the suite.  trust_targets: names in the file are targets themselves,
    which are imported and called: only for a file that you trust as you trust code.  knobs:
    calibrated constants, by name or path, by default the typical ones of the chip's kind; None for
    the datasheet's peaks.  phases: compare only these.  counters: a CSV of Nsight
    Compute or rocprof of the same step as the trace.

    Raises RequestError for arguments that do not go together; ProfileError for a file that cannot
    be read, or a trace of something else.
    """
    named = {"chip": chip, "execution": execution, "knobs": knobs, **kwargs}
    if chip is None and named.get("system") is None:
        raise RequestError(
            "chip (--chip): say which chip the steps were measured on; `rooftrace diff FILE` says "
            "without one where the time of a trace goes"
        )
    request = StepRequest.of(validate, "" if target is None else target, (), named)
    job = request.job
    # Rows of one target share its imports.
    with telling(progress), isolation.keeping(isolation.Kept()):
        graphs, template = _graphs(measured, job)
        check_groups(lambda: [] if graphs is None else graphs().values(), request.models)
        _check_trusted(measured, target, trust_targets)
        return validated(
            measured,
            request.chip,
            request.model,
            graphs,
            template,
            trust_targets,
            job.phases,
            counters,
            tell,
        )


def calibrate(
    measured: Any,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
    target: Source | None = None,
    *,
    start: str | Knobs | None = None,
    free: Sequence[str] | None = None,
    title: str = "",
    trust_targets: bool = False,
    counters: str | os.PathLike[str] | None = None,
    counted_steps: int | None = None,
    factors: bool = True,
    by_layer: bool = False,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> Calibration:
    """Fit knobs to measurements on `chip`; print the result to see them and how sure they are.

    measured, target, trust_targets, phases, sizes: as for `validate`; a run of `rooftrace.measure`
    needs no target.  chip: by default the device at hand, which is measured then.  execution: how
    the steps ran; by default as a run says, and eager for other measurements.  start: knobs to
    begin with, by name or path; by default typical ones for a GPU, and the datasheet for other
    chips.  free: names of the knobs to fit; by default compute and memory, and with a run or a
    trace as many as it supports.  counters: a file of a hardware profiler with the DRAM bytes of
    the step that was measured; a total is of `counted_steps` steps.  factors: whether bytes get
    factors by kind, where single kernels were measured; by_layer: and the weights of each layer.
    Pass the result as `knobs=` to `report` or `execution_model`;
    `.save(path)` writes it to a file for --knobs.

    Raises the errors of `validate`, and RequestError for fewer measurements than knobs to fit.
    """
    job = Job.of(calibrate, "" if target is None else target, (), kwargs)
    begin = os.fspath(start) if isinstance(start, os.PathLike) else start
    with telling(progress), isolation.keeping(isolation.Kept()):
        graphs, template = _graphs(measured, job, all_phases=True)
        _check_trusted(measured, target, trust_targets)
        pricing = PricingOptions(
            chip=_chip_at_hand(measured) if chip is None else chip,
            execution=_as_run(measured) if execution is None else execution,
        )
        (model,), (used,) = conditions_of(calibrate, pricing)
        return calibrated(
            measured,
            used,
            model,
            graphs,
            template,
            trust_targets,
            begin,
            free,
            title,
            tell,
            counters,
            counted_steps,
            factors,
            by_layer,
        )


def _as_run(measured: Any) -> str:
    """The execution that all steps of a run had; eager for other measurements."""
    modes = {row.mode for row in measured.models} if isinstance(measured, Run) else set()
    return "compiled" if modes == {"compiled"} else "eager"


_CHIP_SECONDS = 8.0


def _chip_at_hand(measured: Any) -> Chip:
    """The device at hand, measured; RequestError where the measurements are not of it."""
    from rooftrace.measured.bench import machine, measure_chip

    if not isinstance(measured, Run) or not measured.graphs:
        raise RequestError(
            "chip: expected the chip that the steps were measured on, for example "
            'chip="h100-sxm", or a file of `rooftrace measure --chip-only`'
        )
    tell("measuring the rates of this device")
    return measure_chip(str(measured.device.get("type", machine.default_device())), _CHIP_SECONDS)


def _graphs(
    measured: Any, job: Job, all_phases: bool = False
) -> tuple[Callable[[], Mapping[str, OpGraph]] | None, str | None]:
    """A function that makes the graphs of the measured steps, or a template for their names.

    job: the request; its source is "" without a target.  all_phases: use rows of all phases, even
    if the job names some.  Raises RequestError for sizes without a target, and for sizes
    beside a file that names what was run.
    """
    shown, kind = "this", "a run" if isinstance(measured, Run) else "a table of step times"
    is_trace = isinstance(measured, Trace)
    if isinstance(measured, (str, os.PathLike)):
        source = source_of(measured)
        shown, kind, is_trace = os.fspath(measured), source.about, source.gives == "trace"
    if not is_trace and job.is_named:
        job.refuse(
            [name for name in job.explicit if name != "phases" or all_phases],
            f"this is for a trace; {shown} is {kind}, and says itself what ran",
        )
    if job.is_named and not job.name:
        job.refuse(job.explicit if is_trace else (), "there is no target to run so")
        return None, None
    check_precisions(*job.precisions)
    template = job.name if job.is_named else None
    if not is_trace and template is not None:
        return None, template
    return functools.cache(lambda: priced(job).graphs), template


def _check_trusted(measured: Any, target: Source | None, trust_targets: bool) -> None:
    """Raise UnusedError for `trust_targets` where no name in the measurements is used."""
    if not isinstance(trust_targets, bool):
        raise RequestError(f"trust_targets={trust_targets!r:.60}: expected True or False")
    if not trust_targets:
        return
    path = isinstance(measured, (str, os.PathLike))
    trace = source_of(measured).gives == "trace" if path else isinstance(measured, Trace)
    if trace or target is not None:
        reason = "a trace names nothing" if trace else "the target says already what ran"
        raise UnusedError("trust_targets", "True", reason)
