"""How a step scales: items per second of all chips over their number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace.hardware.units import format_time
from rooftrace.reporting.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rooftrace.costmodels.meshing import MeshRow, ScalingAnswer


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
    axes.grid(color=style.GRID)
    axes.set_axisbelow(True)
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
