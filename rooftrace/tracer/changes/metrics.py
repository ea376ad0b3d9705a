"""Quantities that are compared: their units, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rooftrace.hardware.units import (
    format_capacity,
    format_count,
    format_flops,
    format_share,
    format_time,
    format_traffic,
)


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that may grow.

    unit: of `hardware.units`.  write: a value in words.  relative: whether a limit may be a share
    of what was before.  symbol: what may stand behind the prefix of a count: "FLOP".
    """

    unit: str
    write: Callable[[float], str]
    relative: bool = True
    symbol: str = ""


SECONDS = Metric("second", format_time)
FLOPS = Metric("count", format_flops, symbol="FLOP")
TRAFFIC = Metric("byte", format_traffic)
CAPACITY = Metric("byte", format_capacity)
COUNT = Metric("count", format_count)
EXACT = Metric("count", lambda number: f"{number:,.0f}")
NUMBER = Metric("count", EXACT.write, relative=False)
"""A count of which no share is meant: what grows is counted from 0."""
SHARE = Metric("share", format_share, relative=False)

Metrics = Mapping[str, Metric]
TOTALS: Metrics = {
    "time": SECONDS,
    "flops": FLOPS,
    "bytes": TRAFFIC,
    "memory": CAPACITY,
    "params": COUNT,
    "kernels": COUNT,
}
"""The totals of a step, by the names that diffs, budgets and locks have for them."""
