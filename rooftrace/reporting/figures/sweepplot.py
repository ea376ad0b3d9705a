"""Figures of sweeps, scaling and sensitivities: lines, tornado charts, Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.units import (
    format_bandwidth,
    format_flop_rate,
    format_intensity,
    format_time,
)
from rooftrace.reporting.figures import printing, style
from rooftrace.reporting.renderers import words
from rooftrace.studies.explaining import decode_forms, steps
from rooftrace.studies.sensitivity import Elasticities, Elasticity, MainEffect
from rooftrace.studies.solving import serving
from rooftrace.studies.sweeps import Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from rooftrace.studies.solving import MeshRow, ScalingAnswer

# -- files -----------------------------------------------------------------------------------------


def draw_sweep(result: Sweep, path: Path, size: str | None = None) -> None:
    """Draw the seconds of a sweep over a size; default: its first."""
    printing.save(lambda: sweep_plot(result, size), path)


def draw_answer(answer: object, path: Path) -> None:
    """Draw an answer about deployments or about scaling.  Raises RequestError for other answers."""
    from rooftrace.studies.solving import ScalingAnswer

    if isinstance(answer, ScalingAnswer):
        printing.save(partial(scaling_plot, answer), path)
    elif isinstance(answer, serving.ServingAnswer) and answer.curves:
        printing.save(partial(front_plot, answer), path)
    else:
        raise RequestError(
            f"{path}: only batches of decode steps have a figure, as find='cheapest' asks for them"
        )


# -- tornado ---------------------------------------------------------------------------------------

LEFT, SPAN = 0.235, 0.545  # of the page: before the bars, and the bars
ROOM = 0.30  # of the longest bar, kept free at both ends for words


def tornado(
    effects: Sequence[MainEffect],
    title: str = "Main effects",
    subtitle: str = "",
    wording: Callable[[float], str] = format_time,
) -> Figure:
    """A bar for each factor around the grand mean, the widest on top; both ends name their level.

    effects: main effects of one grid, for example `factorial(...).main`.  wording: a mean of the
    response in words; seconds by default.  The share at the right is of the sum of squares.
    Raises ValueError without an effect.
    """
    if not effects:
        raise ValueError("tornado(effects=...): no effects: a grid has at least one factor")
    middle = sum(effects[0].means) / len(effects[0].means)  # of equally many cells each
    bars = [
        TornadoBar(effect.factor, effect.low, effect.high, words.percent(effect.share))
        for effect in effects
    ]
    about = f"mean {wording(middle)}"
    return bars_around(bars, middle, (title, subtitle, about, "share of variance"), wording)


@dataclass(frozen=True, slots=True)
class TornadoBar:
    """A bar from `low` to `high`, each a label and a value, and the text at its right."""

    name: str
    low: tuple[Any, float]
    high: tuple[Any, float]
    right: str


def bars_around(
    bars: Sequence[TornadoBar],
    middle: float,
    texts: tuple[str, str, str, str],
    wording: Callable[[float], str],
) -> Figure:
    """Bars around a middle, the widest on top.

    texts: title, subtitle, the text below the middle, and the head of those at the right.
    """
    ranked = sorted(bars, key=lambda bar: bar.low[1] - bar.high[1])
    title, subtitle, about, right = texts
    height = 1.55 + 0.46 * len(ranked)  # inches
    figure = style.sheet(height, title, subtitle)
    axes = figure.add_axes((LEFT, 0.52 / height, SPAN, 0.46 * len(ranked) / height))
    least = min(middle, *(bar.low[1] for bar in ranked))
    most = max(middle, *(bar.high[1] for bar in ranked))
    room = ROOM * (most - least) or abs(middle) or 1.0
    axes.set_xlim(least - room, most + room)
    axes.set_ylim(len(ranked) - 0.4, -0.6)
    for y, bar in enumerate(ranked):
        _bar(axes, bar, y, middle, wording)
    axes.plot([middle, middle], [-0.6, len(ranked) - 0.4], color=style.INK, linewidth=1.4)
    strong: dict[str, Any] = {"fontsize": 10, "color": style.INK, "ha": "center"}
    axes.text(middle, len(ranked) - 0.3, about, va="top", **strong)
    axes.axis("off")
    top = 1 - 0.86 / height
    for x, text in ((0.988, right), (LEFT - 0.012, "factor")):
        figure.text(x, top, text, fontsize=9.5, color=style.FAINT, ha="right", va="center")
    return figure


def _bar(
    axes: Axes, bar: TornadoBar, y: int, middle: float, wording: Callable[[float], str]
) -> None:
    """One factor: its bar below and above the middle, the levels at both ends."""
    at: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    axes.text(
        -0.022,
        y,
        words.short_text(bar.name, 28),
        fontsize=11,
        fontweight="bold",
        color=style.INK,
        ha="right",
        **at,
    )
    axes.text((0.988 - LEFT) / SPAN, y, bar.right, fontsize=10, color=style.INK, ha="right", **at)
    ends = ((bar.low, style.CHIPS[1], "right", -5), (bar.high, style.CHIPS[2], "left", 5))
    if bar.low[1] == bar.high[1]:
        style.note(axes, "no effect", (middle, y), (5, 0), size=9.5, va="center")
        return
    for (level, value), colour, across, away in ends:
        axes.barh(y, value - middle, left=middle, height=0.66, color=colour)
        text = f"{words.short_text(str(level), 16)}: {wording(value)}"
        ink = style.ink_of(colour)
        style.note(axes, text, (value, y), (away, 0), across, 9.5, ink, va="center")


# -- elasticities ----------------------------------------------------------------------------------

MOST = 16
"""Bars; numbers with less effect are left out."""
_LONGEST = 28
"""Letters of a name; the end tells names apart."""


def elasticity_plot(result: Elasticities) -> Figure:
    """A bar for each number that moves the expected time: from half of it to twice of it.

    Raises ValueError where none does.
    """
    bars = [bar for row in result.rows if (bar := _elasticity_bar(row, result.t_est)) is not None]
    if not bars:
        raise ValueError(f"{result.title}: no number moves its time, so there is nothing to draw")
    widest = sorted(bars, key=lambda bar: bar.low[1] - bar.high[1])[:MOST]
    sizes = ", ".join(f"{name} {size:,}" for name, size in result.sizes.items())
    subtitle = (
        f"{result.phase}, {sizes}, {result.chip}, {result.execution}: each halved and doubled"
    )
    about = f"now {format_time(result.t_est)}"
    texts = (f"What moves {result.title}", subtitle, about, "elasticity")
    return bars_around(widest, result.t_est, texts, format_time)


def _elasticity_bar(row: Elasticity, seconds: float) -> TornadoBar | None:
    """The bar of a number; None where neither step changes anything."""
    steps = [row.step(change) for change in ("x0.5", "x2")]
    ends = [(s.change, s.t_est * seconds) for s in steps if s is not None and s.t_est is not None]
    if all(value == seconds for _, value in ends):
        return None
    ends.append(("now", seconds))
    low, *_, high = sorted(ends, key=lambda end: end[1])
    name = row.name if len(row.name) <= _LONGEST else f"\u2026{row.name[-_LONGEST + 1 :]}"
    return TornadoBar(name, low, high, f"{row.t_est or 0:+.2f}")


# -- explorations ----------------------------------------------------------------------------------

_ROW = 0.5
"""Inches of a row."""


def exploration_plot(result: decode_forms.Exploration) -> Figure:
    """A field for each number of devices and cache length: the least batch of all devices.

    Blue where computing can limit the decode step, orange where HBM, the cache or the network
    limits it at every batch.
    """
    from matplotlib.patches import Rectangle

    devices = list(dict.fromkeys(cell.devices for cell in result.cells))
    lengths = list(dict.fromkeys(cell.kv for cell in result.cells))
    height = 1.75 + _ROW * len(devices)
    rates = result.rates
    subtitle = (
        f"{result.chip}, {result.execution}: {format_flop_rate(rates.peak)}, "
        f"{format_bandwidth(rates.memory)}, link {format_bandwidth(rates.link)}; least batch of "
        f"all devices at which computing takes {result.alpha:g} of the slower of HBM and link"
    )
    figure = style.sheet(height, f"{result.title}: when computing limits decode", subtitle)
    axes = figure.add_axes((0.14, 0.62 / height, 0.82, _ROW * len(devices) / height))
    axes.set_xlim(0, len(lengths))
    axes.set_ylim(len(devices), 0)
    middle: dict[str, Any] = {"ha": "center", "va": "center"}
    for cell in result.cells:
        x, y = lengths.index(cell.kv), devices.index(cell.devices)
        colour = style.MEANINGS.get(cell.limiter if cell.batch is None else "compute", style.GREY)
        axes.add_patch(Rectangle((x + 0.01, y + 0.03), 0.98, 0.94, color=colour, alpha=0.22))
        batch = cell.global_batch
        text = f"none: {cell.limiter}" if batch is None else f"{batch:,}"
        axes.text(x + 0.5, y + 0.5, text, fontsize=11, color=style.INK, **middle)
    for x, length in enumerate(lengths):
        axes.text(x + 0.5, len(devices) + 0.3, f"kv {length:,}", color=style.INK, **middle)
    for y, count in enumerate(devices):
        text = f"{count} device" + ("s" if count > 1 else "")
        axes.text(-0.03, y + 0.5, text, color=style.INK, ha="right", va="center")
    axes.axis("off")
    return figure


# -- Pareto fronts ---------------------------------------------------------------------------------

_LINES = 11
_MARKED = 6
"""Points of the front that show their size."""


def front_plot(result: serving.ServingAnswer) -> Figure:
    """Tokens/s of a chip over tokens/s of a user: a line for each configuration, the front thick.

    A ring marks the best within the limits; a dashed line is the limit of the time per token.
    """
    from matplotlib import ticker

    curves = result.curves[:_LINES]
    left = len(result.curves) - len(curves)
    more = f"; {left} more configurations are not drawn" if left else ""
    figure = style.sheet(
        7.2, f"{result.title}: speed of a user against speed of a chip",
        f"each line: {result.name} {result.sizes[0]:,} (right) to {result.sizes[1]:,} (left), "
        f"where it fits; grey: what no other beats{more}",
    )  # fmt: skip
    axes = figure.add_axes((0.085, 0.11, 0.62, 0.74))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tokens/s of a user", color=style.INK)
    axes.set_ylabel("tokens/s of a chip", color=style.INK)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axis.set_minor_formatter(ticker.NullFormatter())
    style.grid_axes(axes)
    front = result.front
    axes.plot(
        [point.per_user for point in front], [point.per_chip for point in front],
        color=style.GREY, linewidth=7, alpha=0.35, solid_capstyle="round",
    )  # fmt: skip
    several = words.differing([curve.labels for curve in result.curves])
    for number, curve in enumerate(curves):
        colour = style.MANY[number % len(style.MANY)]
        label, fits = _label(curve, several), curve.fits
        speeds = curve.per_user[fits], curve.per_chip[fits]
        axes.plot(*speeds, color=colour, linewidth=1.6, label=label)
    _mark(axes, result)
    style.side_legend(axes)
    return figure


def _label(row: Any, several: list[str]) -> str:
    chips = f"{row.chips} x {row.chip}" if row.chips > 1 else row.chip
    return ", ".join([chips, *(str(row.labels[name]) for name in several)])


def _mark(axes: Axes, result: serving.ServingAnswer) -> None:
    if result.limits.tpot is not None:
        axes.axvline(1 / result.limits.tpot, color=style.INK, linestyle="--", linewidth=1)
    marked = np.unique(np.linspace(0, len(result.front) - 1, _MARKED).astype(int))
    for number in marked if len(result.front) else []:
        point = result.front[number]
        text, at = f"{result.name} {point.sizes[result.name]:,}", (point.per_user, point.per_chip)
        style.note(axes, text, at, (5, 6), size=8, colour=style.INK, va="baseline")
    if result.best is not None:
        axes.plot(
            [result.best.per_user], [result.best.per_chip], "o", markersize=11,
            markerfacecolor="none", markeredgecolor=style.INK, markeredgewidth=1.6,
        )  # fmt: skip


# -- Figures of a step as its sizes change, on rooflines and as lines, and of its scaling on chips -

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
    style.log_ticks(axes.yaxis, printing.bare_words(format_flop_rate))
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
    as_fast = [f"{each.engine} {each.precision}" for each in chip.peaks if each.rate.value == peak]
    engine = " or ".join(as_fast)
    text = f"{chip.name}  {engine} {format_flop_rate(peak)}, ridge {format_intensity(ridge)}"
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

_LINE_STYLES = 8
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
    style.log_ticks(axes.yaxis, printing.bare_words(format_time))
    _mark_point(axes, result, name, {label: i for i, (label, _) in enumerate(drawn)})
    style.side_legend(axes)
    return figure


def _mark_point(axes: Axes, result: Sweep, name: str, places: dict[str, int]) -> None:
    named: list[tuple[float, float]] = []
    for crossing in result.crossings(name):
        label = _label_line(result, crossing.labels, crossing.chip, crossing.at)
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
    step = max(1, -(-len(every) // _LINE_STYLES))
    yield from every[::step]


def _all_lines(result: Sweep, name: str) -> Iterator[tuple[str, Any]]:
    for number, case in enumerate(result.cases):
        for chip, lines in result.lines(number, name):
            at = {n: int(result.columns[n][lines[0]]) for n in result.names if n != name}
            yield _label_line(result, case.labels, result.chips[chip].name, at), lines


def _label_line(result: Sweep, labels: Any, chip: str, at: Any) -> str:
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
    style.log_ticks(right.yaxis, printing.bare_words(format_time))
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
