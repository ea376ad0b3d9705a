"""How values are written: a unit for each kind of cell, on a page and on a screen.

SECOND = Unit("s", "number", format_time)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rooftrace.hardware.units import (
    MISSING,
    format_capacity,
    format_count,
    format_flop_rate,
    format_flops,
    format_intensity,
    format_share,
    format_time,
    format_traffic,
)
from rooftrace.reporting.renderers import words
from rooftrace.reporting.renderers.escaping import code_span


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a column's numbers, and their text.  Words are a unit too."""

    symbol: str  # of the numbers as they are stored: "s", "byte"
    type: str  # "integer", "number" or "string"
    page: Callable[[Any], str]
    screen: Callable[[Any], str] | None = None  # where that is shorter than on a page
    left: Literal["both", "page", "screen", ""] = ""  # where it is flush left

    def written(self, value: Any, *, page: bool) -> str:
        """The text of a value; "" stays blank, and None is a dash."""
        if isinstance(value, str) and self.type != "string":
            return value
        if value is None:
            return MISSING
        return (self.page if page or self.screen is None else self.screen)(value)


def _count(number: float) -> str:
    return f"{number:,.0f}"


def _kernel(name: str) -> str:
    name = words.kernel_name(name)
    return name if len(name) <= KERNEL_WIDTH else f"{name[: KERNEL_WIDTH - 1]}…"


def full(unit: Unit) -> Unit:
    """A unit whose numbers are written in full on screens too."""
    return replace(unit, screen=None)


def signed(unit: Unit) -> Unit:
    """A unit whose numbers have a sign: "+2.10 GB", "0"."""

    def written(value: float) -> str:
        return f"{'+' if value > 0 else '-'}{unit.page(abs(value))}" if value else "0"

    return replace(unit, page=written, screen=None)


KERNEL_WIDTH = 26  # of a kernel's name on a screen

TEXT = Unit("", "string", str, left="both")
WORDS = Unit("", "string", str)
"""A few words in a column of numbers: flush right."""
LIMITS = Unit("", "string", str, left="screen")
CODE = Unit("", "string", code_span, str, left="both")
MODULE = Unit("", "string", lambda p: code_span(p or "(root)"), lambda p: p or "(root)", "both")
KERNEL = Unit("", "string", lambda name: code_span(words.kernel_name(name)), _kernel, "both")
COUNT = Unit("", "integer", _count)
EXACT = Unit("", "integer", lambda number: f"{number:,}")
"""An integer of any size: COUNT rounds beyond 53 bits, and also takes means."""
INDEX = Unit("", "integer", str)
FLOP = Unit("FLOP", "integer", format_flops, lambda n: words.bare(format_flops(n), "FLOP"))
BYTE = Unit("byte", "integer", format_traffic)
CAPACITY = Unit("byte", "integer", format_capacity)
SECOND = Unit("s", "number", format_time)
RATE = Unit("1/s", "number", format_count)
FLOP_RATE = Unit("FLOP/s", "number", format_flop_rate)
NUMBER = Unit("", "number", format_count)
SHARE = Unit("", "number", format_share, words.percent)
ERROR = Unit("", "number", lambda error: f"{error:+.1%}")
SPREAD = Unit("", "number", lambda error: f"{error:.1%}")
INTENSITY = Unit(
    "FLOP/byte", "number", lambda ratio: words.bare(format_intensity(ratio), "FLOP/byte")
)
TOTALS: Mapping[str, Unit] = {
    "time": SECOND,
    "flops": full(FLOP),
    "bytes": BYTE,
    "memory": CAPACITY,
    "params": NUMBER,
    "kernels": COUNT,
}
"""The units of the totals of a step, by the names that diffs and budgets have for them."""
