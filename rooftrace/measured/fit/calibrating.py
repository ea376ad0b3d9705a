"""From measurements to a knob file: traces the measured steps, fits, and reports the errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rooftrace._shown import Shown, short
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.knobs import Knobs, dump_knobs, load_knobs
from rooftrace.costmodels.planning import plan
from rooftrace.hardware import Chip
from rooftrace.measured.fit.cases import (
    Case,
    Errors,
    alone_case,
    errors,
    kernel_cases,
    predict,
    profiled_cases,
    step_case,
)
from rooftrace.measured.fit.fitting import FEW, Fit, choose, fit
from rooftrace.measured.pairing import (
    Graphs,
    MeasuredRequestError,
    MeasuredStep,
    best_match,
    read_measured,
    steps_of,
)
from rooftrace.measured.runs import Run
from rooftrace.measured.tables import StepTime
from rooftrace.measured.traces import Trace
from rooftrace.tracer.paths import pattern_of

Tell = Callable[[str], None]
_FEWEST_STEPS = 3
"""A run with fewer measured steps than this is fitted to its single kernels."""


@dataclass(frozen=True, kw_only=True)
class Calibration(Shown):
    """A fit, and the measurements that it could not use."""

    fit: Fit
    chip: str  # its name
    execution: str  # how the steps ran
    what: str  # "steps", or "kernels" of a trace
    measured: int  # how many there were
    failures: Mapping[str, str]  # why some were left out, by where they stand
    before: Errors  # of predictions without any knobs
    kernels: int = 0  # single kernels that shares of classes were fitted to
    # Errors on what was left out, by the names that were free, where the measurements chose.
    tried: Mapping[str, Errors] = field(default_factory=dict)

    @property
    def knobs(self) -> Knobs:
        """The fitted knobs, for `knobs=` of an execution model."""
        return self.fit.knobs

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the knobs as TOML, whole or not at all."""
        from rooftrace._writing import write_bytes

        path = Path(path)
        write_bytes(path, dump_knobs(self.knobs).encode())
        return path

    def __repr__(self) -> str:
        fit = self.fit
        unseen = "" if fit.left_out is None else f", {fit.left_out.mean:.1%} on those left out"
        return short(
            self,
            f"{self.chip}, {self.execution}: {fit.errors.count} of {self.measured} {self.what}; "
            f"mean error {self.before.mean:.1%} before, {fit.errors.mean:.1%} fitted{unseen}",
        )


def calibrated(
    measured: str | os.PathLike[str] | Run | Trace | Sequence[StepTime],
    chip: Chip,
    model: ExecutionModel,
    graphs_of: Callable[[], Graphs] | None = None,
    template: str | None = None,
    trust_targets: bool = False,
    start: Knobs | str | None = None,
    free: Sequence[str] | None = None,
    title: str = "",
    progress: Tell | None = None,
) -> Calibration:
    """Knobs from whatever was measured.

    measured: a file of any kind that `source_of` knows except counters, or its reader's result.
    graphs_of, template, trust_targets: as in `validated`.  start: where the fit begins (default:
    the typical shares of this kind of execution on a GPU, none on a CPU).  free: knobs to fit; None
    takes as many as a run supports, and compute and memory of a table.  Steps that do not trace are
    left out and reported.

    Raises MeasuredRequestError where nothing is left, and CalibrationError where there is less than
    there are knobs to fit.
    """
    if isinstance(measured, (str, os.PathLike)):
        measured = read_measured(os.fspath(measured), "a fit")
    wanted = _Wanted(
        chip=chip,
        model=model,
        start=start_of(start, chip, model),
        free=free,
        title=title or f"{chip.name}, {model.name}",
        tell=progress or (lambda _: None),
    )
    if isinstance(measured, Trace):
        return _of_trace(measured, graphs_of, wanted)
    target = template if graphs_of is None else graphs_of()
    steps = steps_of(measured, model, target, trust_targets)
    if isinstance(measured, Run):
        return _of_run(measured, steps, wanted)
    cases, _, failures = _traced(steps, wanted)
    few = FEW if free is None else free
    return _calibration(cases, [], replace(wanted, free=few), len(steps), failures)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """The request of a fit."""

    chip: Chip
    model: ExecutionModel  # how the steps ran
    start: Knobs  # where the fit begins
    free: Sequence[str] | None  # knobs to fit; None: as many as the measurements support
    title: str  # of the knobs
    tell: Tell


def _traced(
    measured: Sequence[MeasuredStep], wanted: _Wanted
) -> tuple[list[Case], list[Case], dict[str, str]]:
    """Cases of the steps, cases of their measured kernels, and failures to trace by step."""
    chip, model = wanted.chip, wanted.model
    cases: list[Case] = []
    alone: list[Case] = []
    failures: dict[str, str] = {}
    for number, step in enumerate(measured):
        wanted.tell(f"tracing {step.label} ({number + 1} of {len(measured)})")
        try:
            planned = plan(step.graph(), model)
            cases.append(step_case(step.label, planned, chip, model, step.seconds, step.group))
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            failures[step.place] = step.why_not(error)
            continue
        row = step.row
        if row is not None and row.source == "replay":
            seconds = {op.id: op.seconds for op in row.ops if op.id is not None}
            alone += kernel_cases(planned, chip, seconds, step.label, step.group)
        elif row is not None:
            alone += profiled_cases(planned, chip, row.ops, step.label, step.group)
    if not cases:
        first = next(iter(failures.values()), "the table is empty")
        raise MeasuredRequestError(
            f"none of {len(measured)} measured steps could be traced; the first: {first}"
        )
    return cases, alone, failures


def _of_run(run: Run, steps: Sequence[MeasuredStep], wanted: _Wanted) -> Calibration:
    """Knobs from the steps of a run, and from single kernels: those of few steps alone."""
    cases, alone, failures = _traced(steps, wanted)
    if len(cases) < _FEWEST_STEPS and alone:
        return _of_kernels(alone, wanted, len(alone), failures)
    if wanted.model.dispatch == "eager" and wanted.free is None:
        alone += _of_operations(run, wanted, failures)
    else:
        alone = []  # kernels of other executions are fused: operations alone are none of theirs
    return _calibration(cases, alone, wanted, len(steps), failures)


def _of_operations(run: Run, wanted: _Wanted, failures: dict[str, str]) -> list[Case]:
    """Cases of the operations that the run measured alone."""
    from rooftrace.measured.suite import traced_micro

    wanted.tell(f"tracing {len(run.micro)} operations")
    cases: list[Case] = []
    for row in run.micro:
        if row.bytes is None and row.flops is None:
            continue  # a launch
        try:
            planned = plan(traced_micro(row, run.device.get("type") == "cuda"), wanted.model)
            case = alone_case(row.key, planned, wanted.chip, row.median)
        except (ValueError, LookupError, RuntimeError) as error:
            failures[row.key] = str(error).splitlines()[0]
            continue
        if case is not None:
            cases.append(case)
    return cases


def _of_trace(trace: Trace, graphs_of: Callable[[], Graphs] | None, wanted: _Wanted) -> Calibration:
    """Knobs from the kernels of one trace; equal kernels are left out together."""
    match = best_match(trace, graphs_of, wanted.chip, wanted.model, wanted.tell)
    priced = match.estimate
    cases = kernel_cases(priced.plan, wanted.chip, match.alignment.seconds, priced.phase)
    if not cases:
        raise MeasuredRequestError(
            f"{trace.source or 'the trace'}: no kernel of it is long enough to fit to"
        )
    return _of_kernels(cases, wanted, len(priced.plan.groups), {})


def _of_kernels(
    cases: Sequence[Case], wanted: _Wanted, measured: int, failures: Mapping[str, str]
) -> Calibration:
    """Knobs from single kernels; those of one op and one module pattern are left out together."""
    apart = [replace(case, group=pattern_of(case.name)) for case in cases]
    return _calibration(apart, apart, wanted, measured, failures, "kernels")


def _calibration(
    cases: Sequence[Case],
    alone: Sequence[Case],
    wanted: _Wanted,
    measured: int,
    failures: Mapping[str, str],
    what: str = "steps",
) -> Calibration:
    wanted.tell("fitting")
    start, free, title = wanted.start, wanted.free, wanted.title
    tried: Mapping[str, Errors] = {}
    if free is None:
        result, tried = choose(cases, start, alone, title)
    else:
        result = fit(cases, start, free, title)
    source = {
        "chip": wanted.chip.name,
        "execution": wanted.model.name,
        "cases": len(cases),
        "error_fitted": result.errors.mean,
        **({"error_left_out": result.left_out.mean} if result.left_out else {}),
        "not_identified": list(result.unidentified),
    }
    result = replace(result, knobs=replace(result.knobs, source=source))
    before = errors(
        [case.name for case in cases],
        predict(cases, Knobs("datasheet")),
        [case.seconds for case in cases],
    )
    return Calibration(
        fit=result,
        chip=wanted.chip.name,
        execution=wanted.model.name,
        what=what,
        measured=measured,
        failures=failures,
        before=before,
        kernels=len(alone),
        tried=tried,
    )


def start_of(start: Knobs | str | None, chip: Chip, model: ExecutionModel) -> Knobs:
    """The start of a fit: knobs, the name or path of a knob file, or None for the usual knobs."""
    if start is None:
        return usual_start(chip, model)
    return start if isinstance(start, Knobs) else load_knobs(start)


def usual_start(chip: Chip, model: ExecutionModel) -> Knobs:
    """Typical shares of GPU kernels in this kind of execution; plain knobs for a CPU."""
    if chip.kind != "gpu":
        return Knobs("datasheet", overlap=3.0)
    return load_knobs("typical-eager" if model.fusion == "none" else "typical-compiled")
