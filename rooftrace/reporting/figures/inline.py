"""The figure of a result in HTML, as below the table of a notebook."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import singledispatch
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import to_html
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.estimates.rows import Breakdown
from rooftrace.diffs.costs import Diff
from rooftrace.graph import OpGraph
from rooftrace.hardware.units import format_flops, format_time
from rooftrace.measured.fit import Calibration, Validation
from rooftrace.reporting.figures.breakdown import OWN_SCALE, Bar, family_bars
from rooftrace.reporting.figures.parity import parity_points
from rooftrace.reporting.figures.style import FAINT, GREY, GRID, INK, colours, ink_on
from rooftrace.reporting.renderers import words
from rooftrace.reporting.sections import Results

if TYPE_CHECKING:
    from rooftrace.reporting.figures.parity import ParityPoint

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


# -- Small figures in a page of HTML, as SVG images that cannot act: stacked bars, parity points ---

WIDTH = 720  # pixels
MOST_BARS = 24
MOST_POINTS = 600  # those of the largest weight
_BAR, _GAP = 20, 6  # pixels: the height of a bar, and the space below it
_LEFT, _RIGHT = 150, 130  # pixels for the name before a bar, and its total behind it
_LETTER = 6.3  # pixels, of the font below
_FONT = "ui-monospace,Menlo,Consolas,monospace"


def image(svg: str, about: str) -> str:
    """An <img> with an SVG inside.  about: its text for readers who do not see it."""
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<img alt="{to_html(about)}" style="max-width:100%;margin-top:6px" '
        f'src="data:image/svg+xml;base64,{data}"/>'
    )


def bar_svg(title: str, bars: Sequence[Bar]) -> str:
    """Stacked bars; those of a group share a scale, and the longest of a group fills the width."""
    shown = bars[:MOST_BARS]
    tones = colours(dict.fromkeys(name for bar in shown for name in bar.parts))
    longest: dict[str, float] = {}
    for bar in shown:
        longest[bar.group] = max(longest.get(bar.group, 0.0), bar.length)
    body = [_text(8, 18, f"{title}{OWN_SCALE * (len(longest) > 1)}", weight="bold")]
    top, span = 30, WIDTH - _LEFT - _RIGHT
    for bar in shown:
        name = " ".join(filter(None, (bar.group, bar.name)))
        body.append(_text(8, top + 14, words.short_text(name, int((_LEFT - 16) / _LETTER))))
        left, scale = float(_LEFT), span / (longest[bar.group] or 1)
        for part, amount in bar.parts.items():
            width = amount * scale
            body.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" '
                f'fill="{tones[part]}"/>'
            )
            if len(part) * _LETTER + 6 < width:
                body.append(_text(left + 4, top + 14, part, ink_on(tones[part])))
            left += width
        body.append(_text(left + 6, top + 14, bar.total))
        top += _BAR + _GAP
    legend = list(_legend(tones, top + 4))
    height = top + 20 * len({y for y, _ in legend}) + 6
    return _svg(height, [*body, *(line for _, line in legend)])


def _legend(tones: dict[str, str], top: int) -> Iterator[tuple[int, str]]:
    """(height, a key) for each part, in as many lines as they need."""
    left = 8.0
    for name, colour in tones.items():
        label = words.short_text(name, int(200 / _LETTER))
        width = 22 + len(label) * _LETTER
        if left + width > WIDTH and left > 8:
            left, top = 8.0, top + 20
        mark = f'<rect x="{left:.1f}" y="{top + 3}" width="10" height="10" fill="{colour}"/>'
        yield top, mark + _text(left + 14, top + 12, label, FAINT)
        left += width


def point_svg(title: str, points: Sequence[ParityPoint]) -> str:
    """Predicted over measured seconds, both logarithmic; on the line they are equal."""
    shown = [p for p in points if p.measured > 0 and p.predicted > 0]
    shown = sorted(shown, key=lambda point: point.weight)[-MOST_POINTS:]
    if not shown:
        return _svg(30, [_text(8, 18, f"{title}: nothing to draw")])
    values = [value for point in shown for value in (point.predicted, point.measured)]
    low, high = math.log10(min(values)) - 0.1, math.log10(max(values)) + 0.1
    side, left, top = 300, 96, 30
    tones = colours(dict.fromkeys(point.group for point in shown))

    def at(seconds: float) -> float:
        return side * (math.log10(seconds) - low) / (high - low)

    body = [_text(8, 18, title, weight="bold")]
    body.append(
        f'<rect x="{left}" y="{top}" width="{side}" height="{side}" fill="none" stroke="{GRID}"/>'
        f'<line x1="{left}" y1="{top + side}" x2="{left + side}" y2="{top}" stroke="{GREY}"/>'
    )
    ticks = [10.0**n for n in range(math.ceil(low), math.floor(high) + 1)]
    for tick in ticks[:: max(1, len(ticks) // 6)]:
        body.append(_text(left + at(tick) - 14, top + side + 14, format_time(tick), FAINT))
        body.append(_text(8, top + side - at(tick) + 4, format_time(tick), FAINT))
    for point in shown:
        body.append(
            f'<circle cx="{left + at(point.measured):.1f}" '
            f'cy="{top + side - at(point.predicted):.1f}" r="3.5" '
            f'fill="{tones[point.group]}" fill-opacity="0.75"/>'
        )
    body.append(_text(left, top + side + 30, "measured to the right, predicted upwards", FAINT))
    legend = list(_legend(tones, top + side + 38))
    height = top + side + 38 + 20 * len({y for y, _ in legend}) + 6
    return _svg(height, [*body, *(line for _, line in legend)])


def _svg(height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
        f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="{_FONT}" font-size="11">'
        f'<rect width="100%" height="100%" rx="6" fill="#ffffff"/>{"".join(body)}</svg>'
    )


def _text(left: float, top: float, text: str, colour: str = INK, weight: str = "normal") -> str:
    return (
        f'<text x="{left:.1f}" y="{top:.1f}" fill="{colour}" font-weight="{weight}">'
        f"{to_html(text)}</text>"
    )
