"""A step over the values of one size, as points along the roofline of each chip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftrace.costmodels.explaining import sizesweeps
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_flop_rate, format_intensity
from rooftrace.reporting.figures import style
from rooftrace.reporting.view import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROOM = 2.0
"""How far the axes go beyond what they show, as a factor."""


def sweep_roofline(sweep: sizesweeps.SizeSweep, chips: Sequence[Chip]) -> Figure:
    """FLOP/s of the step over its FLOP/byte, log-log; a point for each value, joined in order.

    Roofs are the bandwidth and the engine that computes most; points are coloured by what limits.
    """
    others = ", ".join(f"{name} {size:,}" for name, size in sweep.others.items())
    figure = style.sheet(
        7.0,
        f"{sweep.title}: {sweep.phase} over {sweep.name}",
        f"{others + '; ' if others else ''}{sweep.execution}; FLOP per second of the expected time",
    )
    axes = figure.add_axes((0.100, 0.105, 0.880, 0.775))
    axes.set_xscale("log")
    axes.set_yscale("log")
    style.plain_axes(axes)
    axes.grid(True, which="major", color=style.GRID, linewidth=0.8)
    left, right, low, high = _limits(sweep, chips)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.set_xlabel("arithmetic intensity  [FLOP / HBM byte]", fontsize=11, color=style.INK)
    style.log_ticks(axes.xaxis)
    style.log_ticks(axes.yaxis, style.bare_words(format_flop_rate))
    for place, chip in enumerate(chips):
        _draw(axes, sweep, chip, place, (left, right))
    _legend(axes, sweep, chips)
    return figure


def _limits(
    sweep: sizesweeps.SizeSweep, chips: Sequence[Chip]
) -> tuple[float, float, float, float]:
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
    axes: Axes, sweep: sizesweeps.SizeSweep, chip: Chip, place: int, span: tuple[float, float]
) -> None:
    """A chip's roof, and its points with the values of the size beside them."""
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=2.5, foreground="white", alpha=0.85)]
    colour = style.CHIPS[place % len(style.CHIPS)]
    peak, bandwidth = sweep.peaks[chip.name], chip.memory_bandwidth.value
    ridge = peak / bandwidth
    axes.plot(
        [span[0], ridge, span[1]], [bandwidth * span[0], peak, peak], color=colour, linewidth=1.8
    )
    axes.annotate(
        f"{chip.name}  {format_flop_rate(peak)}, ridge {format_intensity(ridge)}",
        (span[1], peak), xytext=(-4, 4), textcoords="offset points", ha="right",
        fontsize=9.5, color=colour, path_effects=halo, zorder=5,
    )  # fmt: skip
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
        # Values are the same on all chips: they stand beside the points of the first.
        if place == 0 and (marked or not any(_near(row, other, span) for other in crowd)):
            axes.annotate(
                f"{row.value:,}" + (" = B_crit" if marked else ""),
                (row.intensity, row.rate), xytext=(8, -14), textcoords="offset points",
                fontsize=9.5, color=style.INK, fontweight="bold" if marked else "normal",
                path_effects=halo, zorder=5,
            )  # fmt: skip


def _near(row: sizesweeps.SweepRow, other: sizesweeps.SweepRow, span: tuple[float, float]) -> bool:
    """Whether a point is too close to another one for a text at each."""
    apart = abs(math.log(row.intensity / other.intensity))
    return row is not other and apart < 0.02 * math.log(span[1] / span[0])


def _legend(axes: Axes, sweep: sizesweeps.SizeSweep, chips: Sequence[Chip]) -> None:
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
