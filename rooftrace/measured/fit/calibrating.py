"""From measurements to a knob file: traces what ran, fits, and says how sure that is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.knobs import Knobs, dump_knobs, load_knobs
from rooftrace.costmodels.planning import plan
from rooftrace.hardware import Chip
from rooftrace.measured.bench import Run
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
from rooftrace.measured.profiles import Profile, StepTime
from rooftrace.measured.validate import (
    Graphs,
    MeasuredRequestError,
    MeasuredStep,
    best_match,
    read_measured,
    steps_of_run,
    steps_of_table,
    what_ran,
    why_not,
)
from rooftrace.tracer.graph import pattern_of

Tell = Callable[[str], None]
_FEWEST_STEPS = 3
"""Below this a run is fitted to by its single kernels."""


@dataclass(frozen=True)
class Calibration:
    """A fit, and the measurements that it could not use.

    what: steps, or kernels of a trace; measured: how many there were.  failures: why one was left
    out, by where it stands.  before: errors without any knobs.  kernels: single kernels that shares
    of classes were fitted to.  tried: errors on what was left out, by what was free, where the
    measurements chose.
    """

    fit: Fit
    chip: str
    execution: str
    what: str
    measured: int
    failures: Mapping[str, str]
    before: Errors
    kernels: int = 0
    tried: Mapping[str, Errors] = field(default_factory=dict)

    @property
    def knobs(self) -> Knobs:
        """What was found: for `knobs=` of an execution model."""
        return self.fit.knobs

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the knobs as TOML, whole or not at all."""
        from rooftrace.tracer.graph import write_bytes

        path = Path(path)
        write_bytes(path, dump_knobs(self.knobs).encode())
        return path

    def __rich__(self) -> Any:
        from rooftrace.reporting.text import render_calibration

        return render_calibration(self)

    def __str__(self) -> str:
        from rooftrace.reporting.pages import as_text

        return as_text(self.__rich__())


def calibrated(
    measured: str | os.PathLike[str] | Run | Profile | Sequence[StepTime],
    chip: Chip,
    model: ExecutionModel,
    graphs_of: Callable[[], Graphs] | None = None,
    template: str | None = None,
    start: Knobs | str | None = None,
    free: Sequence[str] | None = None,
    title: str = "",
    progress: Tell | None = None,
) -> Calibration:
    """Knobs from whatever was measured.

    measured: a file of any kind that `kind_of` knows but counters, or what its reader made of it.
    graphs_of, template: as in `validated`.  start: where the fit begins (default: the typical
    shares of this kind of execution on a GPU, none on a CPU).  free: knobs to fit; None takes as
    many as a run supports, and compute and memory of a table.  What does not trace is left out and
    reported.

    Raises MeasuredRequestError where nothing is left, and CalibrationError where there is less than
    there are knobs to fit.
    """
    if isinstance(measured, (str, os.PathLike)):
        measured = read_measured(os.fspath(measured), "a fit")
    wanted = _Wanted(
        chip,
        model,
        start_of(start, chip, model),
        free,
        title or f"{chip.name}, {model.name}",
        progress or (lambda _: None),
    )
    if isinstance(measured, Profile):
        return _of_trace(measured, what_ran(measured, graphs_of), wanted)
    target = template if graphs_of is None else graphs_of()
    if isinstance(measured, Run):
        return _of_run(measured, target, wanted)
    steps = steps_of_table(measured, "{target}" if target is None else target)
    cases, _, failures = _traced(steps, wanted)
    few = FEW if free is None else free
    return _found(cases, [], replace(wanted, free=few), len(steps), failures)


@dataclass(frozen=True)
class _Wanted:
    """What is fitted, from where, and what it is called."""

    chip: Chip
    model: ExecutionModel
    start: Knobs
    free: Sequence[str] | None
    title: str
    tell: Tell


def _traced(
    measured: Sequence[MeasuredStep], wanted: _Wanted
) -> tuple[list[Case], list[Case], dict[str, str]]:
    """Cases of the steps, of those of their kernels that were measured, and what does not trace."""
    chip, model = wanted.chip, wanted.model
    cases: list[Case] = []
    alone: list[Case] = []
    failures: dict[str, str] = {}
    for number, one in enumerate(measured):
        wanted.tell(f"tracing {one.label} ({number + 1} of {len(measured)})")
        try:
            planned = plan(one.graph(), model)
            cases.append(step_case(one.label, planned, chip, model, one.seconds, one.group))
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            failures[one.place] = why_not(error, one)
            continue
        row = one.row
        if row is not None and row.source == "replay":
            seconds = {op.id: op.seconds for op in row.ops if op.id is not None}
            alone += kernel_cases(planned, chip, seconds, one.label, one.group)
        elif row is not None:
            alone += profiled_cases(planned, chip, row.ops, one.label, one.group)
    if not cases:
        first = next(iter(failures.values()), "the table is empty")
        raise MeasuredRequestError(
            f"none of {len(measured)} measured steps could be traced; the first: {first}"
        )
    return cases, alone, failures


def _of_run(run: Run, target: str | Graphs | None, wanted: _Wanted) -> Calibration:
    """Knobs from the steps of a run, and from single kernels: those of few steps alone."""
    steps = steps_of_run(run, wanted.model, target)
    cases, alone, failures = _traced(steps, wanted)
    if len(cases) < _FEWEST_STEPS and alone:
        return _of_kernels(alone, wanted, len(alone), failures)
    if wanted.model.dispatch == "eager" and wanted.free is None:
        alone += _of_operations(run, wanted, failures)
    else:
        alone = []  # kernels of other executions are fused: operations alone are none of theirs
    return _found(cases, alone, wanted, len(steps), failures)


def _of_operations(run: Run, wanted: _Wanted, failures: dict[str, str]) -> list[Case]:
    """Cases of the operations that the run measured alone."""
    from rooftrace.measured.suite import traced_micro

    wanted.tell(f"tracing {len(run.micro)} operations")
    found: list[Case] = []
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
            found.append(case)
    return found


def _of_trace(profile: Profile, graphs: Graphs, wanted: _Wanted) -> Calibration:
    """Knobs from the kernels of one trace: alike ones are left out together."""
    priced, found = best_match(profile, graphs, wanted.chip, wanted.model, wanted.tell)
    cases = kernel_cases(priced.plan, wanted.chip, found.seconds, priced.phase)
    if not cases:
        raise MeasuredRequestError(
            f"{profile.source or 'the trace'}: no kernel of it is long enough to fit to"
        )
    return _of_kernels(cases, wanted, len(priced.plan.groups), {})


def _of_kernels(
    cases: Sequence[Case], wanted: _Wanted, measured: int, failures: Mapping[str, str]
) -> Calibration:
    """Knobs from single kernels; those of one op and one module pattern are left out together."""
    apart = [replace(case, group=pattern_of(case.name)) for case in cases]
    return _found(apart, apart, wanted, measured, failures, "kernels")


def _found(
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
        found, tried = choose(cases, start, alone, title)
    else:
        found = fit(cases, start, free, title)
    source = {
        "chip": wanted.chip.name,
        "execution": wanted.model.name,
        "cases": len(cases),
        "error_fitted": found.errors.mean,
        **({"error_left_out": found.left_out.mean} if found.left_out else {}),
        "not_identified": list(found.unidentified),
    }
    found = replace(found, knobs=replace(found.knobs, source=source))
    before = errors(
        [case.name for case in cases],
        predict(cases, Knobs("datasheet")),
        [case.seconds for case in cases],
    )
    return Calibration(
        found,
        wanted.chip.name,
        wanted.model.name,
        what,
        measured,
        failures,
        before,
        len(alone),
        tried,
    )


def start_of(start: Knobs | str | None, chip: Chip, model: ExecutionModel) -> Knobs:
    """Where a fit begins: knobs as they are, of a name or a path, or None for the usual ones."""
    if start is None:
        return usual_start(chip, model)
    return start if isinstance(start, Knobs) else load_knobs(start)


def usual_start(chip: Chip, model: ExecutionModel) -> Knobs:
    """Typical shares of GPU kernels in this kind of execution; nothing is known of others."""
    if chip.kind != "gpu":
        return Knobs("datasheet", overlap=3.0)
    return load_knobs("typical-eager" if model.fusion == "none" else "typical-compiled")
