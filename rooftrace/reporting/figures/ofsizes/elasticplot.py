"""Elasticities as a tornado: the time of a step after each number is halved, and doubled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftrace.costmodels.elasticity import Elasticities, Elasticity
from rooftrace.hardware.units import format_time
from rooftrace.reporting.figures.ofsizes.tornadoes import TornadoBar, bars_around

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 16
"""Bars; numbers with less effect are left out."""
_LONGEST = 28
"""Letters of a name; the end tells names apart."""


def elasticity_plot(result: Elasticities) -> Figure:
    """A bar for each number that moves the expected time: from half of it to twice of it.

    Raises ValueError where none does.
    """
    bars = [bar for row in result.rows if (bar := _bar(row, result.t_est)) is not None]
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


def _bar(row: Elasticity, seconds: float) -> TornadoBar | None:
    """The bar of a number; None where neither step changes anything."""
    steps = [row.step(change) for change in ("x0.5", "x2")]
    ends = [(s.change, s.t_est * seconds) for s in steps if s is not None and s.t_est is not None]
    if all(value == seconds for _, value in ends):
        return None
    ends.append(("now", seconds))
    low, *_, high = sorted(ends, key=lambda end: end[1])
    name = row.name if len(row.name) <= _LONGEST else f"\u2026{row.name[-_LONGEST + 1 :]}"
    return TornadoBar(name, low, high, f"{row.t_est or 0:+.2f}")
