"""A sweep as lines: time over its first size, with the intervals and the crossings of limiters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.sweeping import Sweep
from rooftrace.hardware.units import format_time
from rooftrace.reporting.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = 8
"""Lines that one figure holds; more are not told apart."""
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
    axes.grid(color=style.GRID)
    axes.set_axisbelow(True)
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
    for number, (label, lines) in enumerate(drawn):
        colour = style.MANY[number % len(style.MANY)]
        x, c = result.columns[name][lines], result.columns
        axes.plot(x, c["t_est"][lines], color=colour, linewidth=1.8, label=label)
        axes.fill_between(x, c["t_low"][lines], c["t_high"][lines], color=colour, alpha=0.10,
                          linewidth=0)  # fmt: skip
    style.log_ticks(axes.yaxis, style.bare_words(format_time))
    _mark(axes, result, name, {label: i for i, (label, _) in enumerate(drawn)})
    axes.legend(
        loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9, labelspacing=0.9
    )
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
            axes.annotate(
                f"{crossing.size:,}: {crossing.after}", (crossing.size, crossing.t_est),
                xytext=(4, -11), textcoords="offset points", fontsize=8, color=style.INK,
            )  # fmt: skip
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
    several = [n for n in labels if len({str(c.labels.get(n)) for c in result.cases}) > 1]
    words = [str(labels[n]) for n in several] + [f"{n} {v:,}" for n, v in at.items()]
    return ", ".join([*words, chip])
