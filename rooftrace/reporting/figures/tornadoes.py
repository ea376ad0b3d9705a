"""Tornado charts of effects and elasticities, and charts of device counts and of Pareto fronts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.hardware.units import format_bandwidth, format_flop_rate, format_time
from rooftrace.reporting.figures import style
from rooftrace.reporting.renderers import words
from rooftrace.studies.explaining import decode_forms
from rooftrace.studies.sensitivity import Elasticities, Elasticity, MainEffect
from rooftrace.studies.solving import serving

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        short_text(bar.name, 28),
        fontsize=11,
        fontweight="bold",
        color=style.INK,
        ha="right",
        **at,
    )
    axes.text((0.988 - LEFT) / SPAN, y, bar.right, fontsize=10, color=style.INK, ha="right", **at)
    ends = ((bar.low, style.BLUE, "right", -5), (bar.high, style.ORANGE, "left", 5))
    if bar.low[1] == bar.high[1]:
        style.note(axes, "no effect", (middle, y), (5, 0), size=9.5, va="center")
        return
    for (level, value), colour, across, away in ends:
        axes.barh(y, value - middle, left=middle, height=0.66, color=colour)
        text = f"{short_text(str(level))}: {wording(value)}"
        ink = style.ink_of(colour)
        style.note(axes, text, (value, y), (away, 0), across, 9.5, ink, va="center")


def short_text(text: str, most: int = 16) -> str:
    """A level in so many letters."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"


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
        colour = style.ORANGE if cell.batch is None else style.BLUE
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
