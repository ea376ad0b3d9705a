"""Main effects as a tornado: a bar for each factor, from its lowest to its highest mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.factorial import MainEffect
from rooftrace.hardware.units import format_time
from rooftrace.reporting.figures import style
from rooftrace.reporting.view import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """A bar from `low` to `high`, each a label and a value; `right` stands beside it."""

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

    texts: title, subtitle, what stands below the middle, and what is at the right.
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
        _note(axes, "no effect", (middle, y), style.FAINT, "left", 5)
        return
    for (level, value), colour, across, away in ends:
        axes.barh(y, value - middle, left=middle, height=0.66, color=colour)
        text = f"{short_text(str(level))}: {wording(value)}"
        _note(axes, text, (value, y), style.ink_of(colour), across, away)


def short_text(text: str, most: int = 16) -> str:
    """A level in so many letters."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _note(
    axes: Axes, text: str, at: tuple[float, float], colour: str, across: str, away: int
) -> None:
    """Words beside a place, some points away from it."""
    how: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9.5, "va": "center"}
    axes.annotate(text, at, xytext=(away, 0), color=colour, ha=across, **how)
