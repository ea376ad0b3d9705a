"""A parity plot: predicted against measured seconds, log-log, one point per kernel or per case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftrace.graph import pattern_of
from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.fit import Node, StepCheck, Validation, misses
from rooftrace.reporting.figures import printing, style
from rooftrace.reporting.renderers import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELLED = 8
_LEAST_SHOWN = 1e-3
"""Kernels with less than this share of the time are no points."""
GROUPS = 9  # colours in the legend; the rest is "other"
SHORT_NAME = 18  # letters of a group's name that leave room for its numbers in one line


@dataclass(frozen=True, slots=True)
class ParityPoint:
    """Seconds predicted and measured for one kernel or case.

    group: points of a group share a colour.  weight: how much the point matters, in seconds.  Its
    area in the plot follows it, and the points with the largest weighted errors are named.
    """

    label: str
    predicted: float
    measured: float
    group: str
    weight: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1


def kernel_points(nodes: Sequence[Node]) -> list[ParityPoint]:
    """A point for each kernel that the run has: seconds of one launch, coloured by family."""
    return [
        ParityPoint(
            _label(node),
            node.predicted / node.row.count,
            node.measured / node.row.count,
            node.row.family,
            max(node.predicted, node.measured),
        )
        for node in nodes
        if node.measured and node.predicted > 0
    ]


def parity_points(result: Validation) -> tuple[list[ParityPoint], str]:
    """By kernel for a trace, else by step, coloured by phase; and a note on those left out."""
    if result.kind == "trace":
        points = kernel_points([check.node for check in result.alike])
        least = _LEAST_SHOWN * sum(point.weight for point in points)
        shown = [point for point in points if point.weight >= least]
        few = len(points) - len(shown)
        left = (
            f"{words.plural(few, 'kernel')} below {format_share(_LEAST_SHOWN)} of the time left out"
        )
        return shown, left if few else ""
    points = [
        ParityPoint(
            f"{short_label(step)} {step.phase}", step.predicted, step.measured,
            step.line, max(step.predicted, step.measured),
        )
        for step in result.steps
        if step.predicted > 0
    ]  # fmt: skip
    return points, ""


def short_label(step: StepCheck) -> str:
    """The label without the words of the heading above it."""
    heading = {step.phase, "eager", "compiled"}
    rest = [word for word in step.label.split() if word not in heading]
    return " ".join(rest) or step.label


def _label(node: Node) -> str:
    module = words.short_module(pattern_of(node.row.module), 26)
    return f"{words.kernel_name(node.row.name)} {module}".strip()


def parity_figure(
    points: Sequence[ParityPoint], title: str = "Predicted and measured", subtitle: str = ""
) -> Figure:
    """Points with the diagonal and the lines of +-20 %; the worst are named.

    Raises ValueError without a point.
    """
    if not points:
        raise ValueError("parity_figure(points=...): no points: nothing was both predicted and run")
    figure = style.sheet(8.6, title, subtitle)
    axes = figure.add_axes((0.085, 0.105, 0.665, 0.795))
    low, high = _limits(points)
    style.log_axes(axes, (low, high), (low, high))
    for axis in (axes.xaxis, axes.yaxis):
        style.log_ticks(axis, printing.bare_words(format_time))
    axes.set_xlabel("predicted", fontsize=11, color=style.INK)
    axes.set_ylabel("measured", fontsize=11, color=style.INK)
    _lines(axes, low, high)
    tones = _tones(points)
    largest = max(point.weight for point in points) or 1.0
    for point in sorted(points, key=lambda point: -point.weight):
        axes.plot(
            point.predicted,
            point.measured,
            marker="o",
            linestyle="",
            markersize=_size(point, largest),
            markerfacecolor=tones.get(point.group, style.GREY),
            markeredgecolor="white",
            markeredgewidth=0.8,
            alpha=0.85,
            zorder=3,
        )
    _legend(figure, points, tones)
    figure.text(0.085, 0.012, _footer(points), fontsize=9, color=style.FAINT)
    _names(figure, axes, points, tones, largest)
    return figure


def _size(point: ParityPoint, largest: float) -> float:
    """Diameter in points: the area follows the weight, small ones stay visible."""
    return 4.5 + 11.5 * math.sqrt(point.weight / largest)


def _limits(points: Sequence[ParityPoint]) -> tuple[float, float]:
    values = [value for point in points for value in (point.predicted, point.measured)]
    return min(values) / 2.2, max(values) * 2.2


def _lines(axes: Axes, low: float, high: float) -> None:
    """The diagonal, and where the prediction is 20 % more and less than the measurement."""
    axes.plot([low, high], [low, high], color=style.INK, linewidth=1.4, zorder=2)
    for factor in (1 / (1 - misses.CLOSE), 1 / (1 + misses.CLOSE)):
        axes.plot(
            [low, high],
            [low * factor, high * factor],
            color=style.FAINT,
            linewidth=1.0,
            linestyle=(0, (5, 3)),
            zorder=2,
        )
    for text, x, y, across in (
        ("slower than predicted", 0.02, 0.975, "left"),
        ("faster than predicted", 0.985, 0.02, "right"),
    ):
        axes.text(
            x, y, text, transform=axes.transAxes, fontsize=9.5, color=style.FAINT, ha=across,
            va="top" if y > 0.5 else "bottom",
        )  # fmt: skip


def _tones(points: Sequence[ParityPoint]) -> dict[str, str]:
    """A colour for each group, those with most weight first."""
    weights: dict[str, float] = {}
    for point in points:
        weights[point.group] = weights.get(point.group, 0.0) + point.weight
    groups = sorted(weights, key=lambda name: (-weights[name], name))[:GROUPS]
    return style.colours(groups)


def _legend(figure: Figure, points: Sequence[ParityPoint], tones: dict[str, str]) -> None:
    """Groups at the right, each with its median error and the number of its points."""
    groups: dict[str, list[float]] = {}
    for point in points:
        name = point.group if point.group in tones else "other groups"
        groups.setdefault(name, []).append(abs(point.error))
    figure.text(
        0.772, 0.885, "median |error|, points", fontsize=9.5, color=style.FAINT, va="center"
    )
    order = [*(name for name in tones if name in groups), *(groups.keys() - tones.keys())]
    below = max(map(len, order)) > SHORT_NAME
    for number, name in enumerate(order):
        y = 0.85 - (0.055 if below else 0.043) * number
        errors = groups[name]
        tone = tones.get(name, style.GREY)
        figure.text(0.772, y, "\u25cf", fontsize=13, color=tone, va="center")
        figure.text(0.792, y, name, fontsize=10.5, color=style.INK, va="center")
        x, lower, side = (0.792, 0.022, "left") if below else (0.988, 0.0, "right")
        figure.text(
            x, y - lower, f"{format_share(statistics.median(errors))}   {len(errors)}",
            fontsize=10, color=style.FAINT, va="center", ha=side,
        )  # fmt: skip


def _footer(points: Sequence[ParityPoint]) -> str:
    errors = [abs(point.error) for point in points]
    inside = sum(error <= misses.CLOSE for error in errors) / len(points)
    return (
        f"{words.plural(len(points), 'point')}, {format_share(inside)} inside the dashed lines "
        f"(\u00b1{format_share(misses.CLOSE)}); median |error| "
        f"{format_share(statistics.median(errors))} of the measured.  Area: seconds of the step."
    )


def _names(
    figure: Figure,
    axes: Axes,
    points: Sequence[ParityPoint],
    tones: dict[str, str],
    largest: float,
) -> None:
    """The names of the points that are furthest off, by their weight."""
    off = [p for p in points if abs(p.error) > misses.CLOSE]
    off.sort(key=lambda p: (-p.weight * abs(math.log(p.predicted / p.measured)), p.label))
    texts = [
        style.PlotText(
            point.predicted,
            point.measured,
            f"{point.label}  {point.measured / point.predicted:.2g}x",
            style.ink_of(tones.get(point.group, style.GREY)),
            spacing=None,
        )
        for point in off[:LABELLED]
    ]
    marks = [style.mark_box(axes, p.predicted, p.measured, _size(p, largest)) for p in points]
    # Of many marks the large ones are kept clear; the placing is quadratic.
    marks.sort(key=lambda box: box.x0 - box.x1)
    frame = axes.get_window_extent()
    diagonal = [
        (frame.x0 + frame.width * i / 150, frame.y0 + frame.height * i / 150) for i in range(151)
    ]
    for text, label, box in style.place_texts(figure, axes, texts, marks[:150], diagonal):
        x, y = box.nearest(label.x, label.y)
        if math.hypot(x - label.x, y - label.y) > 16:
            style.join(figure, (label.x, label.y), (x, y), text.colour)
