"""A calibration in words: the knobs, and how far off they still are."""

from __future__ import annotations

import math
from typing import Any

from rooftrace.costmodels.knobs import Knobs
from rooftrace.measured.fit import Calibration, Errors
from rooftrace.reporting.factors import factor_columns, factor_rows, factor_sentence
from rooftrace.reporting.view import model as view, units, words

_LEFT_OUT = 5
_KNOB = units.Unit("", "number", lambda value: f"{value:.3g}")
_KNOBS = (
    view.Column("name", units.TEXT, "knob"),
    view.Column("start", _KNOB, "start"),
    view.Column("value", _KNOB, "fitted"),
    view.Column("error", units.Unit("", "number", lambda e: f"{e:.0%}"), "std. error"),
    view.Column("note", units.TEXT, "", folded=True),
)
_ERRORS = (
    view.Column("on", units.TEXT, "error on"),
    view.Column("mean", units.SPREAD, "mean"),
    view.Column("median", units.SPREAD, "median"),
    view.Column("p90", units.SPREAD, "p90"),
    view.Column("bias", units.ERROR, "bias"),
    view.Column("worst", units.TEXT, "worst", folded=True),
)


def calibration_view(result: Calibration, output: view.Output) -> view.View:
    """What was fitted to what, each knob, and the errors with and without them."""
    fit, used = result.fit, result.measured - len(result.failures)
    single = f", and {words.plural(result.kernels, 'single kernel')}" if result.kernels else ""
    head = (
        f"{result.chip}, {result.execution}: {used} of {result.measured} measured "
        f"{result.what}{single}"
    )
    parts: list[view.Part] = [
        view.Note(head, on="screen", label="calibration  "),
        view.Note(f"{head}.", on="page"),
    ]
    for place, why in list(result.failures.items())[:_LEFT_OUT]:
        parts.append(view.Note(f"  left out, {place}: {why}", "warn"))
    parts.append(view.Table(columns=_KNOBS, rows=[_knob(p) for p in fit.parameters]))
    parts += _traffic(result)
    for (first, second), value in fit.correlations.items():
        text = f"  {first} and {second} stand for each other ({value:+.2f})"
        parts.append(view.Note(text, "warn"))
    parts.append(view.Table(columns=_ERRORS, rows=_error_rows(result)))
    parts.append(view.Note(f"  {_interval(fit.knobs)}"))
    if fit.left_out is None:
        text = (
            f"  too few different {result.what} to leave some out: the error is of the fit itself"
        )
        parts.append(view.Note(text))
    if len(result.tried) > 1:
        text = "  as few numbers as explain more than chance; mean error on what was left out:"
        parts.append(view.Note(text))
        for free, errors in result.tried.items():
            chosen = "*" if errors == fit.left_out else " "
            parts.append(view.Note(f"    {chosen} {errors.mean:6.1%}  {free}"))
    return view.View((view.Section(parts=parts),), "Calibration")


def _interval(knobs: Knobs) -> str:
    """Where steps by these knobs lie, and how that is known."""
    low, high = (math.exp(end * knobs.spread) for end in knobs.ends())
    known = knobs.residuals.get(knobs.use)
    by = "the spread of single kernels" if known is None else known.told
    wide = f"between {low:.2f} and {high:.2f} times"
    return f"90 % of steps are {wide} what is expected ({knobs.use}), by {by}"


def _traffic(result: Calibration) -> list[view.Part]:
    """The factors on bytes, what they rest on, and those of layers where they were asked for."""
    made = result.traffic
    if made is None:
        return []
    apart = f", {made.apart} left out as far from the others" if made.apart else ""
    off = f"; a kernel is {made.noise:.0%} off what its factors say" if made.kernels else ""
    head = f"bytes of {made.kernels} of {words.plural(made.of, 'kernel')}{apart}{off}"
    parts: list[view.Part] = [
        view.Note(head),
        view.Table(columns=factor_columns, rows=factor_rows(made.factors.factors)),
        view.Note(factor_sentence(made.factors)),
    ]
    if made.by_layer:
        parts.append(view.Table(columns=factor_columns, rows=factor_rows(made.by_layer)))
    return parts


def _knob(parameter: Any) -> dict[str, Any]:
    note = "not identified by these measurements; left at its start"
    timed = units.SECOND if parameter.name in ("launch", "dispatch") else None
    return {
        "name": parameter.name,
        "start": view.Cell(parameter.start, unit=timed),
        "value": view.Cell(parameter.value, unit=timed),
        "error": parameter.error,
        "note": "" if parameter.identified else note,
    }


def _error_rows(result: Calibration) -> list[dict[str, Any]]:
    fit, what = result.fit, "models" if result.what == "steps" else result.what
    rows = [
        _errors("all, without knobs", result.before),
        _errors(f"{what} that were fitted", fit.errors),
    ]
    if fit.left_out is not None:
        rows.append(_errors(f"{what} that were left out", fit.left_out))
    for kind, errors in fit.by_class.items():
        rows.append(_errors(f"  mostly {kind} ({errors.count})", errors))
    return rows


def _errors(name: str, errors: Errors) -> dict[str, Any]:
    numbers = {key: getattr(errors, key) for key in ("mean", "median", "p90", "bias")}
    return {"on": name, **numbers, "worst": f"{errors.worst:+.0%} {errors.worst_case}"}
