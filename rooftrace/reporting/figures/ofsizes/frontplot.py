"""Tokens per second of a chip over those of a user: every configuration, and what none beats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.answers import serving
from rooftrace.reporting.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = 11
_MARKED = 6
"""Points of the front that show their size."""


def front_plot(result: serving.ServingAnswer) -> Figure:
    """A line for each configuration over the size that is left open; the front is drawn thick.

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
    axes.grid(color=style.GRID)
    axes.set_axisbelow(True)
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
    front = result.front
    axes.plot(
        [point.per_user for point in front], [point.per_chip for point in front],
        color=style.GREY, linewidth=7, alpha=0.35, solid_capstyle="round",
    )  # fmt: skip
    several = _several(result)
    for number, curve in enumerate(curves):
        colour = style.MANY[number % len(style.MANY)]
        label, fits = _label(curve, several), curve.fits
        speeds = curve.per_user[fits], curve.per_chip[fits]
        axes.plot(*speeds, color=colour, linewidth=1.6, label=label)
    _mark(axes, result)
    axes.legend(
        loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9, labelspacing=0.9
    )
    return figure


def _several(result: serving.ServingAnswer) -> list[str]:
    labels = [curve.labels for curve in result.curves]
    return [n for n in labels[0] if len({str(x.get(n)) for x in labels}) > 1] if labels else []


def _label(row: Any, several: list[str]) -> str:
    chips = f"{row.chips} x {row.chip}" if row.chips > 1 else row.chip
    return ", ".join([chips, *(str(row.labels[name]) for name in several)])


def _mark(axes: Axes, result: serving.ServingAnswer) -> None:
    if result.limits.tpot is not None:
        axes.axvline(1 / result.limits.tpot, color=style.INK, linestyle="--", linewidth=1)
    places = np.unique(np.linspace(0, len(result.front) - 1, _MARKED).astype(int))
    for place in places if len(result.front) else []:
        point = result.front[place]
        axes.annotate(
            f"{result.name} {point.sizes[result.name]:,}", (point.per_user, point.per_chip),
            xytext=(5, 6), textcoords="offset points", fontsize=8, color=style.INK,
        )  # fmt: skip
    if result.best is not None:
        axes.plot(
            [result.best.per_user], [result.best.per_chip], "o", markersize=11,
            markerfacecolor="none", markeredgecolor=style.INK, markeredgewidth=1.6,
        )  # fmt: skip
