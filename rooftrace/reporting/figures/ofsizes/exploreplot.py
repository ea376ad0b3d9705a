"""Where a decode step is limited by computing: a field of devices by cache length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.exploring import formsteps
from rooftrace.hardware.units import format_bandwidth, format_flop_rate
from rooftrace.reporting.figures import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ROW = 0.5
"""Inches of a row."""


def exploration_plot(result: formsteps.Exploration) -> Figure:
    """A field for each number of devices and length: the least batch of all devices together.

    The colour says what limits there: blue where computing can, orange where HBM, the cache or the
    network stands in the way of every batch.
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
