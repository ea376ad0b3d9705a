"""From measured steps to a knob file: traces what ran, fits, and says how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.calibrate import Case, Errors, Fit, errors, fit, predict, step_case
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.knobs import Knobs, load_knobs
from rooftrace.costmodels.profiles.steps import StepTime
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.units import format_time
from rooftrace.reporting.measured import (
    MeasuredRequestError,
    MeasuredStep,
    steps_of_run,
    steps_of_table,
)
from rooftrace.tracer.runfile import Run

if TYPE_CHECKING:
    from rich.console import RenderableType

_NUMBERS = ("mean", "median", "p90", "bias")


@dataclass(frozen=True)
class Calibration:
    """A fit, and the measurements that it could not use.

    failures: why a step was left out, by where it stands.  before: errors without any knobs.
    """

    fit: Fit
    chip: str
    execution: str
    steps: int
    failures: Mapping[str, str]
    before: Errors


def calibrate_steps(
    steps: Sequence[StepTime],
    chip: Chip,
    execution: str | ExecutionModel = "eager",
    target: str = "{target}",
    start: Knobs | str | None = None,
    free: Sequence[str] = ("compute", "memory"),
    title: str = "",
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Fit knobs to a table of measured steps.

    target: how the name in the table becomes a target, for example "models.py:{target}"; {batch},
    {seq}, {kv} and {image_size} stand for those columns.  start: where the fit begins (default: the
    typical shares of this kind of execution on a GPU, none on a CPU).  A step whose target does not
    trace is left out and reported.  Raises MeasuredRequestError where none is left, and
    CalibrationError where there are fewer than knobs to fit.
    """
    measured = steps_of_table(steps, target)
    return _calibrated(measured, chip, execution, start, free, title, progress)


def calibrate_run(
    run: Run,
    chip: Chip,
    execution: str | ExecutionModel = "eager",
    start: Knobs | str | None = None,
    free: Sequence[str] = ("compute", "memory"),
    title: str = "",
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """The same from the models of a run file: those that ran as `execution` dispatches.

    Raises MeasuredRequestError where there are none.
    """
    measured = steps_of_run(run, execution)
    return _calibrated(measured, chip, execution, start, free, title, progress)


def _calibrated(
    measured: Sequence[MeasuredStep],
    chip: Chip,
    execution: str | ExecutionModel,
    start: Knobs | str | None,
    free: Sequence[str],
    title: str,
    progress: Callable[[str], None] | None,
) -> Calibration:
    tell = progress or (lambda _: None)
    model = execution_model(execution)
    cases: list[Case] = []
    failures: dict[str, str] = {}
    for number, one in enumerate(measured):
        tell(f"tracing {one.label} ({number + 1} of {len(measured)})")
        try:
            cases.append(step_case(one.label, one.graph(), chip, model, one.seconds, one.group))
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            why = str(error).splitlines()[0]
            failures[one.place] = why if one.group in one.place else f"{one.group}: {why}"
    if not cases:
        first = next(iter(failures.values()), "the table is empty")
        raise MeasuredRequestError(
            f"none of {len(measured)} measured steps could be traced; the first: {first}"
        )
    tell("fitting")
    found = fit(cases, _start(start, chip, model), free, title or f"{chip.name}, {model.name}")
    source = {
        "chip": chip.name,
        "execution": model.name,
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
    return Calibration(found, chip.name, model.name, len(measured), failures, before)


def _start(start: Knobs | str | None, chip: Chip, model: ExecutionModel) -> Knobs:
    if isinstance(start, Knobs):
        return start
    if start is not None:
        return load_knobs(start)
    if chip.kind != "gpu":
        return Knobs("datasheet", overlap=3.0)
    return load_knobs("typical-eager" if model.fusion == "none" else "typical-compiled")


# -- in words --------------------------------------------------------------------------------------


def render_calibration(found: Calibration) -> RenderableType:
    """The terminal view."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    fitted = found.fit
    used = found.steps - len(found.failures)
    parts: list[Any] = [
        Text.assemble(
            ("calibration  ", "bold"),
            f"{found.chip}, {found.execution}: {used} of {found.steps} measured steps",
        )
    ]
    for place, why in list(found.failures.items())[:5]:
        parts.append(Text(f"  left out, {place}: {why}", style="yellow"))
    knobs = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("knob", "start", "fitted", "std. error", ""):
        knobs.add_column(name, justify="left" if name in ("knob", "") else "right")
    for p in fitted.parameters:
        note = "" if p.identified else "not identified by these measurements; left at its start"
        knobs.add_row(p.name, _number(p.name, p.start), _number(p.name, p.value),
                      f"{p.error:.0%}", note)  # fmt: skip
    parts.append(knobs)
    for pair, value in fitted.correlations.items():
        parts.append(
            Text(f"  {pair[0]} and {pair[1]} stand for each other ({value:+.2f})", style="yellow")
        )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("error on", *_NUMBERS, "worst"):
        table.add_column(name, justify="left" if name in ("error on", "worst") else "right")
    table.add_row("all, without knobs", *_errors(found.before))
    table.add_row("models that were fitted", *_errors(fitted.errors))
    if fitted.left_out is not None:
        table.add_row("models that were left out", *_errors(fitted.left_out))
    for kind, one in fitted.by_class.items():
        table.add_row(f"  mostly {kind} ({one.count})", *_errors(one))
    parts.append(table)
    if fitted.left_out is None:
        parts.append(
            Text("  too few different models to leave some out: the error is of the fit itself")
        )
    return Group(*parts)


def _number(name: str, value: float) -> str:
    return format_time(value) if name in ("launch", "dispatch") else f"{value:.3g}"


def _errors(one: Errors) -> list[str]:
    numbers = [f"{getattr(one, name):{'+' if name == 'bias' else ''}.1%}" for name in _NUMBERS]
    return [*numbers, f"{one.worst:+.0%} {one.worst_case}"]
