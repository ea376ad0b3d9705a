"""Draws a roofline: roofs, points, and texts that keep clear of each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_flop_rate, format_intensity
from rooftrace.reporting.figures import printing, style
from rooftrace.reporting.figures.printing import SCREEN, Medium
from rooftrace.reporting.figures.style import Box, Label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECADE = 10.0
SLIDE = 500.0  # pixels that the name of a ceiling may move along it


@dataclass(frozen=True, slots=True)
class Roof:
    """A chip: byte/s, and the FLOP/s of the rates that the work uses, highest first."""

    chip: Chip
    ceilings: tuple[tuple[str, float], ...]
    colour: str

    @property
    def bandwidth(self) -> float:
        """byte/s."""
        return self.chip.memory_bandwidth.value

    @property
    def top(self) -> float:
        """The highest ceiling."""
        return self.ceilings[0][1]

    def at(self, intensity: float) -> float:
        """The most FLOP/s at this intensity."""
        return min(self.top, self.bandwidth * intensity)


@dataclass(frozen=True, slots=True)
class Point:
    """FLOP/byte and FLOP/s of a mark, its label and its look; size is the marker's in points.

    line: points of one line are joined in their order; "" is none.  caps: further limits of this
    point, as a colour and FLOP/s.
    """

    x: float
    y: float
    label: str
    colour: str
    marker: str = "o"
    filled: bool = True
    size: float = 9.0
    line: str = ""
    caps: tuple[tuple[str, float], ...] = ()

    @property
    def across(self) -> float:
        """Points from edge to edge: a ring is wider than the disc that may lie on it."""
        return self.size if self.filled else self.size + 4


@dataclass(frozen=True, slots=True)
class Words:
    """The texts above and below a roofline."""

    title: str
    subtitles: tuple[str, ...] = ()
    footer: str = ""


LEFT, RIGHT, BOTTOM, TOP = 1.05, 0.29, 0.74, 0.28  # margins of the axes, inches


def draw(
    chips: Sequence[Roof], points: Sequence[Point], words: Words, medium: Medium = SCREEN
) -> Figure:
    """Roofs and points on log-log axes, every label clear of the others, no mark hidden."""
    brief = medium.is_narrow
    below = printing.wrapped(words.footer, 9, medium.width - 2 * style.MARGIN)
    body = (4.3 if brief else 0.38 * medium.width + 2.1) + 0.17 * len(below)
    figure, height = style.headed(medium, body, words.title, words.subtitles)
    bottom = BOTTOM + 0.17 * len(below)
    axes = figure.add_axes(
        (
            LEFT / medium.width,
            bottom / height,
            1 - (LEFT + RIGHT) / medium.width,
            (body - bottom - TOP) / height,
        )
    )
    left, right, low, high = _limits(chips, points)
    style.log_axes(axes, (left, right), (low, high))
    axes.set_xlabel("arithmetic intensity  [FLOP / HBM byte]", fontsize=11, color=style.INK)
    axes.set_title(
        "FLOP per second of the time of the step", fontsize=11, color=style.INK, loc="left", pad=8
    )
    style.log_ticks(axes.xaxis)
    style.log_ticks(axes.yaxis, printing.bare_words(format_flop_rate))
    _shade(axes, chips[0], left, right, low)
    for roof in reversed(chips):
        _draw_roof(axes, roof, left, right, main=roof is chips[0])
    _draw_lines(axes, points)
    points = ringed(points, axes)
    for rank, point in enumerate(points):
        _draw_point(axes, chips, point, 6 - rank / (len(points) + 1))
    for place_, line in enumerate(reversed(below)):
        y = (0.10 + 0.17 * place_) / height
        figure.text(style.MARGIN / medium.width, y, line, fontsize=9, color=style.FAINT)
    _write(figure, axes, chips, points, right, brief=brief)
    return figure


RIM = 2.5  # points of a mark that stay visible under another mark


def ringed(points: Sequence[Point], axes: Axes) -> list[Point]:
    """The points from the top down; a point that another would hide becomes a ring around it.

    The smaller of two lies above.
    """
    seen: list[tuple[float, float, Point]] = []
    for point in sorted(points, key=lambda p: (p.across, p.x, p.y, p.label)):
        x, y = (
            float(value) * 72 / style.DPI for value in axes.transData.transform((point.x, point.y))
        )
        size = point.size
        for over_x, over_y, over in seen:
            distance = math.hypot(x - over_x, y - over_y)
            rim = (size + point.across - point.size - over.across) / 2 + distance
            if rim < RIM:
                size += 2 * (RIM - rim)
        seen.append((x, y, replace(point, size=size)))
    return [point for _, _, point in seen]


def _draw_lines(axes: Axes, points: Sequence[Point]) -> None:
    """Points of one line joined in their order; the further limits of each as short marks."""
    for line in dict.fromkeys(point.line for point in points if point.line):
        some = [point for point in points if point.line == line]
        axes.plot(
            [point.x for point in some], [point.y for point in some], color=some[0].colour,
            linewidth=1.2, zorder=3,
        )  # fmt: skip
    for point in points:
        for colour, rate in point.caps:
            axes.plot(
                point.x, rate, marker="_", markersize=CAP, markeredgewidth=2.2, color=colour,
                linestyle="", zorder=4,
            )  # fmt: skip


CAP = 13
"""Points across a short mark."""


def _draw_point(axes: Axes, chips: Sequence[Roof], point: Point, order: float) -> None:
    """A mark, and a dotted line up to its roof."""
    axes.plot(
        [point.x] * 2,
        [point.y, max(point.y, _roof_over(chips, point))],
        color=point.colour,
        linewidth=0.8,
        linestyle=(0, (1, 3)),
        zorder=2,
    )
    axes.plot(
        point.x,
        point.y,
        marker=point.marker,
        linestyle="",
        zorder=order,
        markersize=point.across,
        markerfacecolor=point.colour if point.filled else "white",
        markeredgewidth=1.6 if not point.filled else 1.0,
        markeredgecolor="white" if point.filled else point.colour,
    )


def _roof_over(chips: Sequence[Roof], point: Point) -> float:
    """The lowest roof above the point: that of its chip, or a close one."""
    heights = [roof.at(point.x) for roof in chips]
    return min((height for height in heights if height >= point.y * 0.999), default=point.y)


def _limits(chips: Sequence[Roof], points: Sequence[Point]) -> tuple[float, float, float, float]:
    """The window: every point and every ridge, with a margin that labels fit into."""
    ridges = [rate / roof.bandwidth for roof in chips for _, rate in roof.ceilings]
    xs = [*ridges, *(point.x for point in points)]
    left = min(xs) / 4
    right = max(xs) * max(10.0, (max(xs) / left) ** 0.36)
    bottoms = [
        *(point.y for point in points),
        *(rate for point in points for _, rate in point.caps),
        *(rate for roof in chips for _, rate in roof.ceilings),
    ]
    low = min(min(bottoms) / 6, max(roof.top for roof in chips) / DECADE**3)
    return left, right, low, max(roof.top for roof in chips) * 4


def _shade(axes: Axes, roof: Roof, left: float, right: float, low: float) -> None:
    """Under the first chip's roof: bandwidth limits left of the ridge, compute right of it."""
    ridge = roof.top / roof.bandwidth
    axes.fill_between(
        [left, ridge],
        [roof.at(left), roof.top],
        low,
        color=style.BLUE,
        alpha=0.06,
        linewidth=0,
        zorder=0,
    )
    axes.fill_between(
        [ridge, right], [roof.top] * 2, low, color=style.GREEN, alpha=0.07, linewidth=0, zorder=0
    )


def _draw_roof(axes: Axes, roof: Roof, left: float, right: float, *, main: bool) -> None:
    top_ridge = roof.top / roof.bandwidth
    width = 2.4 if main else 1.8
    axes.plot(
        [left, top_ridge, right],
        [roof.bandwidth * left, roof.top, roof.top],
        color=roof.colour,
        linewidth=width,
        zorder=3,
        solid_joinstyle="miter",
    )
    for _, rate in roof.ceilings[1:]:
        axes.plot(
            [rate / roof.bandwidth, right],
            [rate, rate],
            color=roof.colour,
            zorder=2,
            linewidth=1.2,
            linestyle=(0, (5, 3)),
        )
    for _, rate in roof.ceilings:
        axes.plot(
            rate / roof.bandwidth, rate, marker="o", markersize=5, color=roof.colour, zorder=4
        )


def _texts(
    chips: Sequence[Roof], points: Sequence[Point], right: float, low: float, *, brief: bool
) -> list[style.PlotText]:
    """The texts of points, of ceilings at their right end, of ridges and of the two regions.

    brief: of points the first word, since fill and shape tell the rest; no regions.
    """
    notes = [
        style.PlotText(
            point.x,
            point.y,
            point.label.partition("\n")[0].partition(",")[0] if brief else point.label,
            style.ink_of(point.colour),
            9.5,
            "bold" if point.filled else "normal",
        )
        for point in sorted(points, key=lambda p: (p.x, -p.y, p.label))
        if point.label
    ]
    alone = len(chips) == 1
    on_line: dict[str, Any] = {"slide": SLIDE, "first": True, "leader": False}
    for roof in chips:
        for name, rate in roof.ceilings:
            # In a column the rates and ridges of several chips stand on the axes alone.
            text = f"{name}  {format_flop_rate(rate)}" if not brief or alone else name
            text = text if brief and alone else f"{roof.chip.name} {text}"
            notes.append(style.PlotText(right, rate, text, roof.colour, **on_line))
            if (name.startswith("matrix") or rate == roof.top) and (alone or not brief):
                ridge = rate / roof.bandwidth
                text = format_intensity(ridge) if brief else f"ridge {format_intensity(ridge)}"
                notes.append(style.PlotText(ridge, rate, text, roof.colour, first=True))
    ridge = chips[0].top / chips[0].bandwidth
    where = f" on {chips[0].chip.name}" if len(chips) > 1 else ""
    regions = () if brief else ((ridge, "memory-bound"), (right, "compute-bound"))
    for x, text in regions:
        notes.append(style.PlotText(x, low, f"{text}{where}  ", style.FAINT, 9.5, **on_line))
    return notes


def _write(
    figure: Figure,
    axes: Axes,
    chips: Sequence[Roof],
    points: Sequence[Point],
    right: float,
    *,
    brief: bool,
) -> None:
    """Write every text of the plot clear of the others, of the points and of the roofs."""
    texts = _texts(chips, points, right, axes.get_ylim()[0], brief=brief)
    marks = [style.mark_box(axes, point.x, point.y, point.across) for point in points]
    line = [spot for chain in _chains(axes, chips, points) for spot in _trace(axes, chain)]
    caps = [axes.transData.transform((p.x, rate)) for p in points for _, rate in p.caps]
    marks += [Box.around(x, y, CAP * figure.dpi / 72, 6) for x, y in caps]
    for text, label, box in style.place_texts(figure, axes, texts, marks, line):
        if text.leader:
            _leader(figure, marks, label, box, text.colour)


def _leader(figure: Figure, marks: Sequence[Box], label: Label, box: Box, colour: str) -> None:
    """A line from the edge of the mark to its label, where they are not side by side."""
    x, y = box.nearest(label.x, label.y)
    around = [(mark.x1 - mark.x0) / 2 for mark in marks if mark.contains(label.x, label.y)]
    radius = max(around, default=8.0)
    length = math.hypot(x - label.x, y - label.y)
    if length < radius + 10:
        return
    start = radius / length * 0.8
    begin = (label.x + (x - label.x) * start, label.y + (y - label.y) * start)
    style.join(figure, begin, (x, y), colour)


Chain = Sequence[tuple[float, float]]
"""Corners of a line that is drawn, in data."""


def _chains(axes: Axes, chips: Sequence[Roof], points: Sequence[Point]) -> Iterator[Chain]:
    """The lines that labels keep off: roofs, ceilings, and points that are joined."""
    left, right = axes.get_xlim()
    for roof in chips:
        ridge = roof.top / roof.bandwidth
        yield [(left, roof.bandwidth * left), (ridge, roof.top), (right, roof.top)]
        for _, rate in roof.ceilings[1:]:
            yield [(rate / roof.bandwidth, rate), (right, rate)]
    for line in dict.fromkeys(point.line for point in points if point.line):
        yield sorted((point.x, point.y) for point in points if point.line == line)


def _trace(axes: Axes, chain: Chain) -> Iterator[tuple[float, float]]:
    """Pixels of a line, a few apart."""
    pixels = [tuple(axes.transData.transform(corner)) for corner in chain]
    for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
        steps = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 8))
        for i in range(steps + 1):
            yield x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps
