"""Figures that a notebook shows below the table of a result, by the type of the result."""

from __future__ import annotations

from collections.abc import Mapping
from functools import singledispatch
from typing import Any

from rooftrace.costmodels.diffs import Diff
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.estimates.rows import Breakdown
from rooftrace.hardware.units import format_flops, format_time
from rooftrace.measured.fit import Calibration, Validation
from rooftrace.reporting.figures.breakdown import Bar, family_bars
from rooftrace.reporting.figures.inline import bar_svg, image, point_svg
from rooftrace.reporting.figures.parity import parity_points
from rooftrace.reporting.renderers import words
from rooftrace.reporting.sections import Results
from rooftrace.tracer.graph import OpGraph


def figure_of_measured(result: Any) -> str:
    """The HTML of the figure of a Validation or a Calibration; "" for another type."""
    if isinstance(result, Validation):
        return of_validation(result)
    return of_calibration(result) if isinstance(result, Calibration) else ""


def of_validation(result: Validation) -> str:
    """A point for each step or kernel: predicted over measured seconds."""
    points, _ = parity_points(result)
    title = "predicted and measured seconds"
    return image(point_svg(title, points), title) if points else ""


def of_calibration(result: Calibration) -> str:
    """The mean error of predictions without knobs, with them, and on what a fit had not seen."""
    errors = {"without knobs": result.before, "fitted": result.fit.errors}
    if result.fit.left_out is not None:
        errors["left out"] = result.fit.left_out
    bars = [
        Bar("", name, {"mean error": each.mean}, f"{each.mean:.1%} of {each.count}")
        for name, each in errors.items()
    ]
    title = "mean error of predicted times"
    return image(bar_svg(title, bars), title)


# -- notebooks -------------------------------------------------------------------------------------
# The one figure that a notebook shows below the table of a result, by its type.

_PARTS = 8
"""Parts of a bar with a colour of their own; the rest is one part."""


def figure_of(result: Any) -> str:
    """The HTML of the figure; "" for a type without one."""
    if type(result).__module__.startswith("rooftrace.measured"):
        # A report of predictions does not load the code about measured time.

        return figure_of_measured(result)
    return _figure(result)


@singledispatch
def _figure(result: Any) -> str:
    return ""


@_figure.register
def _(result: Results) -> str:
    kind = words.time_word(each for _, _, each in result.of_first_chip())
    return _bars(f"{kind} time by family", family_bars(result))


@_figure.register
def _(result: Estimate) -> str:
    estimates = {result.phase: {result.execution.name: {result.chip.name: result}}}
    return _figure(Results(estimates, {}, {result.phase: result.plan.source}))


@_figure.register
def _(result: Breakdown) -> str:
    parts = {row.key or "(root)": row.t_device for row in result.rows}
    total = format_time(sum(parts.values()))
    bar = Bar("", result.by, _largest(parts), total)
    return _bars(f"seconds of kernels by {result.by}", [bar] if parts else [])


@_figure.register
def _(result: Diff) -> str:
    kind = "expected" if result.expected else "bound"
    bars = []
    for phase in result.phases:
        time = phase.totals["time"]
        for name, seconds in zip(("before", "after"), (time.before, time.after), strict=True):
            bars.append(Bar(phase.phase, name, {name: seconds}, format_time(seconds)))
    return _bars(f"{kind} time before and after", bars)


@_figure.register
def _(result: OpGraph) -> str:
    from rooftrace.costmodels.estimates import estimate

    families = estimate(result, execution="eager").by_family()
    parts = {row.key: float(row.flops) for row in families.rows if row.flops}
    bars = [Bar("", result.phase, _largest(parts), format_flops(sum(parts.values())))]
    return _bars("FLOP by family", bars if parts else [])


def _bars(title: str, bars: list[Bar]) -> str:
    return image(bar_svg(title, bars), title) if bars else ""


def _largest(parts: Mapping[str, float]) -> dict[str, float]:
    """The largest parts, and the sum of the others."""
    ranked = sorted(parts.items(), key=lambda part: -part[1])
    rest = sum(amount for _, amount in ranked[_PARTS:])
    return {**dict(ranked[:_PARTS]), **({"others": rest} if rest else {})}
