"""The figure that a notebook shows below the table of a result, by the type of the result."""

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

_PARTS = 8
"""Parts of a bar with a colour each; the rest is one part."""


@singledispatch
def figure_of(result: Any) -> str:
    """The HTML of the figure; "" for a type without one."""
    return ""


@figure_of.register
def _(result: Validation) -> str:
    points, _ = parity_points(result)
    title = "predicted and measured seconds"
    return image(point_svg(title, points), title) if points else ""


@figure_of.register
def _(result: Calibration) -> str:
    errors = {"without knobs": result.before, "fitted": result.fit.errors}
    if result.fit.left_out is not None:
        errors["left out"] = result.fit.left_out
    bars = [
        Bar("", name, {"mean error": each.mean}, f"{each.mean:.1%} of {each.count}")
        for name, each in errors.items()
    ]
    return _bars("mean error of predicted times", bars)


@figure_of.register
def _(result: Results) -> str:
    kind = words.time_word(each for _, _, each in result.of_first_chip())
    return _bars(f"{kind} time by family", family_bars(result))


@figure_of.register
def _(result: Estimate) -> str:
    estimates = {result.phase: {result.execution.name: {result.chip.name: result}}}
    return figure_of(Results(estimates, {}, {result.phase: result.plan.source}))


@figure_of.register
def _(result: Breakdown) -> str:
    parts = {row.key or "(root)": row.t_device for row in result.rows}
    total = format_time(sum(parts.values()))
    bar = Bar("", result.by, _largest(parts), total)
    return _bars(f"seconds of kernels by {result.by}", [bar] if parts else [])


@figure_of.register
def _(result: Diff) -> str:
    kind = "expected" if result.expected else "bound"
    bars = []
    for phase in result.phases:
        time = phase.totals["time"]
        for name, seconds in zip(("before", "after"), (time.before, time.after), strict=True):
            bars.append(Bar(phase.phase, name, {name: seconds}, format_time(seconds)))
    return _bars(f"{kind} time before and after", bars)


@figure_of.register
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
