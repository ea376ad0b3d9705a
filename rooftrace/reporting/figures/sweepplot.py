"""Figures of a step as its sizes change, on rooflines and as lines, and of its scaling on chips."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_flop_rate, format_intensity, format_time
from rooftrace.reporting.figures import style
from rooftrace.reporting.renderers import words
from rooftrace.studies.explaining import steps
from rooftrace.studies.sweeps import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rooftrace.studies.solving import MeshRow, ScalingAnswer


# -- rooflines -------------------------------------------------------------------------------------

_ROOM = 2.0
"""Room of the axes beyond their points, as a factor."""


def sweep_roofline(sweep: steps.SizeSweep, chips: Sequence[Chip]) -> Figure:
    """FLOP/s of the step over its FLOP/byte, log-log; a point for each value, joined in order.

    Roofs are the bandwidth and the engine that computes most; points are coloured by their limit.
    """
    others = ", ".join(f"{name} {size:,}" for name, size in sweep.others.items())
    figure = style.sheet(
        7.0,
        f"{sweep.title}: {sweep.phase} over {sweep.name}",
        f"{others + '; ' if others else ''}{sweep.execution}; FLOP per second of the expected time",
    )
    axes = figure.add_axes((0.100, 0.105, 0.880, 0.775))
    left, right, low, high = _limits(sweep, chips)
    style.log_axes(axes, (left, right), (low, high))
    axes.set_xlabel("arithmetic intensity  [FLOP / HBM byte]", fontsize=11, color=style.INK)
    style.log_ticks(axes.xaxis)
    style.log_ticks(axes.yaxis, style.bare_words(format_flop_rate))
    for place, chip in enumerate(chips):
        _draw(axes, sweep, chip, place, (left, right))
    _legend(axes, sweep, chips)
    return figure


def _limits(sweep: steps.SizeSweep, chips: Sequence[Chip]) -> tuple[float, float, float, float]:
    rows = [row for row in sweep.rows if row.bytes and row.flops]
    ridges = [sweep.peaks[chip.name] / chip.memory_bandwidth.value for chip in chips]
    intensities = [*(row.intensity for row in rows), *ridges]
    rates = [*(row.rate for row in rows), *(sweep.peaks[chip.name] for chip in chips)]
    return (
        min(intensities) / _ROOM,
        max(intensities) * 2 * _ROOM,
        min(rates) / _ROOM,
        max(rates) * _ROOM,
    )


def _draw(
    axes: Axes, sweep: steps.SizeSweep, chip: Chip, place: int, span: tuple[float, float]
) -> None:
    """A chip's roof, and its points with the values of the size."""
    over: dict[str, Any] = {"va": "baseline", "path_effects": style.halo(), "zorder": 5}
    colour = style.CHIPS[place % len(style.CHIPS)]
    peak, bandwidth = sweep.peaks[chip.name], chip.memory_bandwidth.value
    ridge = peak / bandwidth
    axes.plot(
        [span[0], ridge, span[1]], [bandwidth * span[0], peak, peak], color=colour, linewidth=1.8
    )
    text = f"{chip.name}  {format_flop_rate(peak)}, ridge {format_intensity(ridge)}"
    style.note(axes, text, (span[1], peak), (-4, 4), "right", 9.5, colour, **over)
    rows = [row for row in sweep.rows if row.chip == chip.name and row.bytes and row.flops]
    xs, ys = [row.intensity for row in rows], [row.rate for row in rows]
    axes.plot(xs, ys, color=colour, linewidth=0.9, linestyle=(0, (2, 2)), zorder=3)
    marker = style.MARKERS[place % len(style.MARKERS)]
    crowd = [row for row in rows if sweep.is_marked(row)]
    for row in rows:
        marked = sweep.is_marked(row)
        axes.plot(
            row.intensity, row.rate, marker=marker, linestyle="", zorder=4,
            markersize=11 if marked else 7, markerfacecolor=style.REGIMES[row.regime],
            markeredgecolor=style.INK if marked else "white", markeredgewidth=1.2,
        )  # fmt: skip
        # Values are the same on all chips: only the points of the first have them.
        if place == 0 and (marked or not any(_near(row, other, span) for other in crowd)):
            text = f"{row.value:,}" + (" = B_crit" if marked else "")
            at, weight = (row.intensity, row.rate), "bold" if marked else "normal"
            over["fontweight"] = weight
            style.note(axes, text, at, (8, -14), "left", 9.5, style.INK, **over)


def _near(row: steps.SweepRow, other: steps.SweepRow, span: tuple[float, float]) -> bool:
    """Whether two points are too close for a text at each."""
    apart = abs(math.log(row.intensity / other.intensity))
    return row is not other and apart < 0.02 * math.log(span[1] / span[0])


def _legend(axes: Axes, sweep: steps.SizeSweep, chips: Sequence[Chip]) -> None:
    from matplotlib.lines import Line2D

    used = dict.fromkeys(row.regime for row in sweep.rows)
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=7,
               color=style.REGIMES[name], label=f"limited by {words.LIMITS[name]}")
        for name in used
    ]  # fmt: skip
    if len(chips) > 1:
        handles += [
            Line2D([], [], marker=style.MARKERS[place % len(style.MARKERS)], linestyle="",
                   color=style.CHIPS[place % len(style.CHIPS)], markersize=7, label=chip.name)
            for place, chip in enumerate(chips)
        ]  # fmt: skip
    axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=10)


# -- sweeps ----------------------------------------------------------------------------------------

_LINES = 8
"""Lines of a figure at most."""
_LABELS = 12
"""Crossings that are named."""


def sweep_plot(result: Sweep, size: str | None = None) -> Figure:
    """Expected seconds of a step over a size (default: the first), a line for each case and chip.

    A band is where 90 % of such steps are measured; a dot is where another limiter takes over.
    """
    name = size or result.names[0]
    form = result.cases[0].form
    drawn = list(_lines(result, name))
    left = sum(1 for _ in _all_lines(result, name)) - len(drawn)
    more = f"; {left} more lines are not drawn" if left > 0 else ""
    figure = style.sheet(
        7.2, f"{form.title}, {form.phase}: time over {name}",
        f"band: 90 % of measured steps; dot: another limiter takes over{more}",
    )  # fmt: skip
    axes = figure.add_axes((0.085, 0.11, 0.65, 0.74))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(name, color=style.INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    style.grid_axes(axes)
    for number, (label, lines) in enumerate(drawn):
        colour = style.MANY[number % len(style.MANY)]
        x, c = result.columns[name][lines], result.columns
        axes.plot(x, c["t_est"][lines], color=colour, linewidth=1.8, label=label)
        axes.fill_between(x, c["t_low"][lines], c["t_high"][lines], color=colour, alpha=0.10,
                          linewidth=0)  # fmt: skip
    style.log_ticks(axes.yaxis, style.bare_words(format_time))
    _mark(axes, result, name, {label: i for i, (label, _) in enumerate(drawn)})
    style.side_legend(axes)
    return figure


def _mark(axes: Axes, result: Sweep, name: str, places: dict[str, int]) -> None:
    named: list[tuple[float, float]] = []
    for crossing in result.crossings(name):
        label = _label(result, crossing.labels, crossing.chip, crossing.at)
        if label not in places:
            continue
        colour = style.MANY[places[label] % len(style.MANY)]
        axes.plot([crossing.size], [crossing.t_est], "o", color=colour, markersize=5)
        place = math.log2(crossing.size), math.log2(crossing.t_est)
        if len(named) < _LABELS and all(_apart(place, other) for other in named):
            text, at = f"{crossing.size:,}: {crossing.after}", (crossing.size, crossing.t_est)
            style.note(axes, text, at, (4, -11), size=8, colour=style.INK, va="baseline")
            named.append(place)


def _apart(place: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two labels at these places (powers of two) can both be read."""
    return abs(place[0] - other[0]) > 1.1 or abs(place[1] - other[1]) > 0.3


def _lines(result: Sweep, name: str) -> Iterator[tuple[str, Any]]:
    """The lines that are drawn, spread over all that there are."""
    every = list(_all_lines(result, name))
    step = max(1, -(-len(every) // _LINES))
    yield from every[::step]


def _all_lines(result: Sweep, name: str) -> Iterator[tuple[str, Any]]:
    for number, case in enumerate(result.cases):
        for chip, lines in result.lines(number, name):
            at = {n: int(result.columns[n][lines[0]]) for n in result.names if n != name}
            yield _label(result, case.labels, result.chips[chip].name, at), lines


def _label(result: Sweep, labels: Any, chip: str, at: Any) -> str:
    several = words.differing([case.labels for case in result.cases])
    parts = [str(labels[n]) for n in several] + [f"{n} {v:,}" for n, v in at.items()]
    return ", ".join([*parts, chip])


# -- scaling ---------------------------------------------------------------------------------------


def scaling_plot(result: ScalingAnswer) -> Figure:
    """Two panels over the number of chips: efficiency, weak and strong; seconds of a step.

    A hollow mark is a count on which the step does not fit.
    """
    figure = style.sheet(
        5.4, f"{result.title}: on more and more chips of {result.system}",
        "weak: each replica keeps its batch; strong: all do together what the most chips do in one "
        "step; hollow: does not fit",
    )  # fmt: skip
    chips = [row.chips for row in result.rows]
    left, right = (figure.add_axes((x, 0.13, 0.40, 0.66)) for x in (0.07, 0.57))
    shares = (
        [result.weak(row) for row in result.rows],
        [result.strong(row) for row in result.rows],
    )
    seconds = (
        [row.seconds for row in result.rows],
        [result.strong_seconds(row) for row in result.rows],
    )
    for axes, lines in ((left, shares), (right, seconds)):
        for values, name, colour in zip(lines, ("weak", "strong"), style.MANY[:2], strict=False):
            _line(axes, chips, values, result.rows, name, colour)
        _axis(axes, chips)
    left.set_ylabel("efficiency: work of a chip per second", color=style.INK)
    left.set_ylim(0, 1.08)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_ylabel("seconds of a step", color=style.INK)
    right.set_yscale("log")
    style.log_ticks(right.yaxis, style.bare_words(format_time))
    left.legend(loc="lower left", frameon=False)
    return figure


def _line(
    axes: Any,
    chips: list[int],
    values: list[float],
    rows: tuple[MeshRow, ...],
    name: str,
    colour: str,
) -> None:
    axes.plot(chips, values, color=colour, linewidth=1.8, label=name, zorder=2)
    for row, count, value in zip(rows, chips, values, strict=True):
        face = colour if row.fits else "white"
        axes.plot(count, value, "o", color=colour, markerfacecolor=face, markersize=6, zorder=3)


def _axis(axes: Any, chips: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(chips)
    axes.set_xticklabels([f"{count:,}" for count in chips])
    axes.set_xlabel("chips", color=style.INK)
    style.grid_axes(axes)
