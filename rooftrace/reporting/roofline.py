"""Log-log rooflines: where each phase, or each family of a phase, stands under the roofs of the chips."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftrace.costmodels.estimate import MATRIX, Estimate
from rooftrace.costmodels.timing import engine_of
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.units import format_flop_rate, format_intensity, format_share, format_time
from rooftrace.reporting import style, words
from rooftrace.reporting.labels import Box, Label, place
from rooftrace.reporting.tally import tally

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    from rooftrace.reporting.report import Report

FAMILIES_SHOWN = 8
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
        """FLOP/s that no work of this intensity exceeds."""
        return min(self.top, self.bandwidth * intensity)


@dataclass(frozen=True, slots=True)
class Point:
    """FLOP/byte, FLOP/s, what it is, and how it is drawn; size is the marker's in points."""

    x: float
    y: float
    label: str
    colour: str
    marker: str = "o"
    filled: bool = True
    size: float = 9.0


def roofs(report: Report) -> list[Roof]:
    """The roof of every chip, with the ceilings of the rates that any phase uses."""
    result = []
    for position, chip in enumerate(report.chips):
        used: dict[str, float] = {}
        for phase in report.phases:
            for execution in report.executions:
                used.update(_rates(report.estimate(phase, execution, chip.name)))
        ceilings = tuple(sorted(used.items(), key=lambda entry: (-entry[1], entry[0])))
        result.append(Roof(chip, ceilings, style.CHIPS[position % len(style.CHIPS)]))
    return result


def _rates(one: Estimate) -> dict[str, float]:
    """The matrix rates that the work of an estimate runs at, and the vector rate beside them."""
    rates = (
        {"vector fp32": one.chip.peak("vector", "fp32")}
        if one.chip.has_peak("vector", "fp32")
        else {}
    )
    for work, flop in one.plan.total.work.items():
        if flop and (work.operation in MATRIX or not rates):
            engine, precision = engine_of(work, one.chip, one.execution)
            peak = one.chip.find_peak(engine, precision)
            if peak is not None:
                rates[f"{engine} {peak.precision}"] = peak.rate.value
    return rates


def phase_points(report: Report) -> list[Point]:
    """One point per phase, execution and chip; what computes or moves nothing has no point."""
    tones = style.colours(report.phases, style.PHASES)
    points = []
    for roof, marker in zip(roofs(report), _markers(report), strict=True):
        for phase in report.phases:
            # Only the first chip shows every execution: more points than a page has room for.
            for execution in report.executions if roof.chip is report.chips[0] else [report.main]:
                one = report.estimate(phase, execution, roof.chip.name)
                if not one.ai_hbm or not one.t_est:
                    continue
                rate = one.flops_causal / one.t_est
                name = f"{phase}, {execution}"
                if len(report.chips) > 1:
                    name += f", {roof.chip.name}"
                label = (
                    f"{name}\n{format_time(one.t_est)}, "
                    f"{words.percent(rate / roof.at(one.ai_hbm))} of its roof"
                )
                points.append(
                    Point(one.ai_hbm, rate, label, tones[phase], marker, execution == report.main)
                )
    return points


def family_points(report: Report, phase: str) -> tuple[list[Point], str]:
    """One point per family of a phase on the first chip, for every execution; and a line that names
    the families that have no point since they compute nothing."""
    names = [entry.key for entry in tally(report.estimate(phase).rows, lambda row: row.family)]
    tones = style.colours(names)
    points, idle = [], []
    for execution in report.executions:
        one = report.estimate(phase, execution)
        main = execution == report.main
        entries = tally(one.rows, lambda row: row.family)
        for rank, entry in enumerate(entries):
            share = entry.seconds / one.t_est if one.t_est else 0.0
            if not entry.flops_causal or not entry.bytes:
                if main and share >= 0.0005:
                    idle.append(f"{entry.key} {words.percent(share)}")
                continue
            if rank >= FAMILIES_SHOWN or share < 0.0005:
                continue
            label = entry.key if main else f"{entry.key}, {execution}"
            points.append(
                Point(
                    entry.flops_causal / entry.bytes,
                    entry.flops_causal / entry.seconds,
                    f"{label}\n{format_share(share)} of the time",
                    tones.get(entry.key, style.GREY),
                    filled=main,
                    size=7.0 + 16.0 * share**0.5,
                )
            )
    return points, f"Without a point, since they compute nothing: {', '.join(idle)}" if idle else ""


def _markers(report: Report) -> list[str]:
    return [style.MARKERS[i % len(style.MARKERS)] for i in range(len(report.chips))]


def roofline(report: Report) -> Figure:
    """The roofline of every phase and execution on every chip."""
    first = report.estimate(report.phases[0])
    return draw(
        roofs(report),
        phase_points(report),
        title=f"Roofline: {words.model_words(report.model, first.graph.workload)}",
        subtitle=_legend_words(report)
        + (
            f"; {', '.join(f'{m} {c.title}' for m, c in zip(_shapes(report), report.chips, strict=True))}"
            if len(report.chips) > 1
            else ""
        ),
    )


def family_roofline(report: Report, phase: str) -> Figure:
    """The roofline of the families of one phase on the first chip."""
    points, idle = family_points(report, phase)
    one = report.estimate(phase)
    return draw(
        roofs(report)[:1],
        points,
        title=f"{phase.capitalize()} by family on {one.chip.title}",
        subtitle=f"{_legend_words(report)}; area is the share of {format_time(one.t_est)}",
        footer=idle,
    )


def _legend_words(report: Report) -> str:
    others = [name for name in report.executions if name != report.main]
    return f"filled {report.main}" + (f", hollow {words.listed(others)}" if others else "")


def _shapes(report: Report) -> list[str]:
    names = {
        "o": "circle",
        "s": "square",
        "D": "diamond",
        "^": "triangle",
        "v": "wedge",
        "P": "plus",
    }
    return [names[marker] for marker in _markers(report)]


# -- drawing -------------------------------------------------------------------------------------


def draw(
    chips: Sequence[Roof],
    points: Sequence[Point],
    *,
    title: str,
    subtitle: str = "",
    footer: str = "",
) -> Figure:
    """Roofs and points on log-log axes, every label clear of the others."""
    figure = style.sheet(7.4, title, subtitle)
    axes = figure.add_axes((0.088, 0.100, 0.898, 0.765))
    axes.set_xscale("log")
    axes.set_yscale("log")
    left, right, low, high = _limits(chips, points)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    style.plain_axes(axes)
    axes.grid(True, which="major", color=style.GRID, linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("arithmetic intensity  [FLOP / HBM byte]", fontsize=11, color=style.INK)
    axes.set_title(
        "FLOP per second of the estimated time", fontsize=11, color=style.INK, loc="left", pad=8
    )
    axes.xaxis.set_major_formatter(
        lambda value, _: words.bare(format_intensity(value), " FLOP/byte")
    )
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    _shade(axes, chips[0], left, right, low)
    for roof in reversed(chips):
        _draw_roof(axes, roof, left, right, main=roof is chips[0])
    for point in points:
        axes.plot(
            [point.x] * 2,
            [point.y, max(point.y, _roof_over(chips, point))],
            color=point.colour,
            linewidth=0.8,
            linestyle=(0, (1, 3)),
            zorder=2,
        )
        # A ring is wider than the disc that may lie on it, so that both are seen.
        axes.plot(
            point.x,
            point.y,
            marker=point.marker,
            linestyle="",
            zorder=6 if point.filled else 5,
            markersize=point.size + (0 if point.filled else 4),
            markerfacecolor=point.colour if point.filled else "white",
            markeredgewidth=1.6,
            markeredgecolor="white" if point.filled else point.colour,
        )
    if footer:
        figure.text(0.088, 0.012, footer, fontsize=9, color=style.FAINT)
    _write_labels(figure, axes, chips, points, right)
    return figure


def _roof_over(chips: Sequence[Roof], point: Point) -> float:
    """The lowest roof that is still above the point: its own chip's, or a close one."""
    heights = [roof.at(point.x) for roof in chips]
    return min((height for height in heights if height >= point.y * 0.999), default=point.y)


def _tick(rate: float) -> str:
    text = format_flop_rate(rate)
    number, _, unit = text.partition(" ")
    return f"{float(number):g} {unit}"


def _limits(chips: Sequence[Roof], points: Sequence[Point]) -> tuple[float, float, float, float]:
    """The window: every point and every ridge, with a margin that labels fit into."""
    ridges = [rate / roof.bandwidth for roof in chips for _, rate in roof.ceilings]
    xs = [*ridges, *(point.x for point in points)]
    left = min(xs) / 4
    right = max(xs) * max(10.0, (max(xs) / left) ** 0.36)
    bottoms = [
        *(point.y for point in points),
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


def _write_labels(
    figure: Figure, axes: Axes, chips: Sequence[Roof], points: Sequence[Point], right: float
) -> list[Box]:
    """Place every text of the plot; returns the boxes, in pixels."""
    frame = _box(axes.get_window_extent())
    to_pixels = axes.transData.transform
    texts: list[Text] = []
    anchors: list[tuple[float, float]] = []

    def add(
        x: float, y: float, text: str, colour: str, size: float, weight: str = "normal"
    ) -> None:
        texts.append(
            figure.text(
                0,
                0,
                text,
                fontsize=size,
                color=colour,
                transform=None,
                zorder=7,
                fontweight=weight,
                linespacing=1.15,
                va="bottom",
                ha="left",
            )
        )
        anchors.append(tuple(to_pixels((x, y))))

    for point in sorted(points, key=lambda p: (p.x, -p.y, p.label)):
        add(
            point.x,
            point.y,
            point.label,
            _darker(point.colour),
            9.5,
            "bold" if point.filled else "normal",
        )
    count = len(texts)
    for roof in chips:
        for name, rate in roof.ceilings:
            if name.startswith("matrix") or rate == roof.top:
                add(
                    rate / roof.bandwidth,
                    rate,
                    f"ridge {format_intensity(rate / roof.bandwidth)}",
                    roof.colour,
                    8.5,
                )
    ridges = len(texts)
    for roof in chips:
        for name, rate in roof.ceilings:
            add(right, rate, f"{roof.chip.name} {name}  {format_flop_rate(rate)}", roof.colour, 9)
    low = axes.get_ylim()[0]
    ridge = chips[0].top / chips[0].bandwidth
    add(ridge, low, "memory-bound  ", style.FAINT, 9.5)
    add(right, low, "compute-bound  ", style.FAINT, 9.5)
    marks = []
    for p in points:
        x, y = to_pixels((p.x, p.y))
        marks.append(_around(x, y, (0.5 * p.size + 3) * style.DPI / 72))
    canvas = figure.canvas
    renderer = canvas.get_renderer()  # type: ignore[attr-defined]
    labels = []
    for position, (text, (x, y)) in enumerate(zip(texts, anchors, strict=True)):
        extent = text.get_window_extent(renderer)
        slide = 0.0 if position < ridges else SLIDE
        labels.append(
            Label(
                float(x) - (5 if slide else 0),
                float(y),
                float(extent.width) + 4,
                float(extent.height) + 2,
                slide,
            )
        )
    line = [spot for roof in chips for spot in _trace(axes, roof)]
    inside = Box(frame.x0 + 4, frame.y0 + 4, frame.x1 - 4, frame.y1 - 4)
    boxes = place(labels, inside, points=marks, line=line)
    for position, (text, label, box) in enumerate(zip(texts, labels, boxes, strict=True)):
        text.set_position((box.x0 + 2, box.y0 + 1))
        if position < count:
            _leader(figure, marks, label, box, str(text.get_color()))
    return boxes


def _leader(figure: Figure, marks: Sequence[Box], label: Label, box: Box, colour: str) -> None:
    """A line from the edge of the mark to its label, where they are not side by side."""
    from matplotlib.lines import Line2D

    x, y = box.nearest(label.x, label.y)
    radius = max((mark.x1 - mark.x0) / 2 for mark in marks if mark.contains(label.x, label.y))
    length = math.hypot(x - label.x, y - label.y)
    if length < radius + 10:
        return
    start = radius / length * 0.8
    figure.add_artist(
        Line2D(
            [label.x + (x - label.x) * start, x],
            [label.y + (y - label.y) * start, y],
            transform=None,
            color=colour,
            linewidth=0.9,
            alpha=0.8,
            zorder=4,
        )
    )


def _trace(axes: Axes, roof: Roof) -> list[tuple[float, float]]:
    """The roof as pixels a few apart, for labels to keep off."""
    left, right = axes.get_xlim()
    ridge = roof.top / roof.bandwidth
    corners = [[(left, roof.bandwidth * left), (ridge, roof.top), (right, roof.top)]]
    corners += [[(rate / roof.bandwidth, rate), (right, rate)] for _, rate in roof.ceilings[1:]]
    spots: list[tuple[float, float]] = []
    for chain in corners:
        pixels = [tuple(axes.transData.transform(corner)) for corner in chain]
        for (x0, y0), (x1, y1) in itertools.pairwise(pixels):
            steps = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 8))
            spots += [
                (x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)
            ]
    return spots


def _around(x: float, y: float, half: float) -> Box:
    return Box(float(x) - half, float(y) - half, float(x) + half, float(y) + half)


def _box(extent: object) -> Box:
    return Box(*(float(getattr(extent, side)) for side in ("x0", "y0", "x1", "y1")))


def _darker(colour: str) -> str:
    """The colour of a mark, dark enough to read as text on white."""
    parts = (int(int(colour[i : i + 2], 16) * 0.72) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)
