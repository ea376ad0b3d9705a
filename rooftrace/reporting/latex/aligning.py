"""Cells of a column as numbers of one unit, which then stands in the head; points stand in line.

It works on the texts that every other page prints, so the digits are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from rooftrace.hardware.units import (
    CAPACITY_STEPS,
    COUNT_STEPS,
    DECIMAL_STEPS,
    MISSING,
    TIME_STEPS,
)
from rooftrace.reporting.latex.escaping import plain

_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?"
_UNIT = r"[A-Za-z%][A-Za-z/%]*"
_CELL = re.compile(
    rf"(?P<sign>(?:[≥≤<>±~+\-−] ?)*)(?P<number>{_NUMBER})(?: ?(?P<unit>{_UNIT}))?"
    rf"(?:–(?P<most>{_NUMBER}) ?(?P<most_unit>{_UNIT})?)?"
)


def _steps(steps: Sequence[tuple[float, str]], unit: str) -> dict[str, Decimal]:
    return {f"{prefix}{unit}": Decimal(scale) for scale, prefix in steps}


_TIMES = {name: Decimal(str(scale)) for scale, name in TIME_STEPS}
_COUNTS = _steps(COUNT_STEPS, "")
_BYTES = _steps(DECIMAL_STEPS, "B")
_FAMILIES: tuple[Mapping[str, Decimal], ...] = (
    _TIMES,
    _BYTES,
    _steps(CAPACITY_STEPS, ""),
    _steps(DECIMAL_STEPS, "FLOP"),
    _steps(DECIMAL_STEPS, "FLOP/s"),
    _steps(DECIMAL_STEPS, "B/s"),
    _COUNTS,
)
"""Units that go into each other, and what one of each is worth."""
_POWERS = {"K": "$10^3$", "M": "$10^6$", "B": "$10^9$", "T": "$10^{12}$"}
_LARGEST = 10**6
"""Numbers of a column are below this, else each keeps its own unit."""
_LEAST = Decimal("0.1")


class InOneUnit(NamedTuple):
    """The unit of a column as LaTeX, and its cells: (text, decimals that it lacks)."""

    unit: str
    cells: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Quantity:
    sign: str
    numbers: tuple[tuple[Decimal, str], ...]  # one, or the ends of an interval, each with its unit


def aligned(texts: Sequence[str], symbol: str = "") -> InOneUnit | None:
    """Cells of a column in one unit; None where they are no numbers, or of too different sizes.

    symbol: what the numbers are as they are stored ("byte", "s"), since "B" is billions too.
    """
    quantities = [_quantity(text) for text in texts]
    numbers = [item for item in quantities if item is not None]
    if not numbers or any(
        item is None and text not in ("", MISSING, "∞")
        for item, text in zip(quantities, texts, strict=True)
    ):
        return None
    used = {unit for item in numbers for number, unit in item.numbers if number or unit}
    family = _family(used, symbol)
    if family is None:
        return None
    sizes = [number * family[unit] for item in numbers for number, unit in item.numbers if number]
    unit = _common(used, family, sizes)
    if unit is None:
        return None
    written = [
        text
        if item is None
        else item.sign + "–".join(_in(part, unit, family) for part in item.numbers)
        for item, text in zip(quantities, texts, strict=True)
    ]
    places = [len(text.rpartition(".")[2]) if "." in text else 0 for text in written]
    most = max(places)
    lacks = [
        most - place if item is not None else 0
        for place, item in zip(places, quantities, strict=True)
    ]
    shown = _POWERS.get(unit, unit) if family is _COUNTS else _shown(unit)
    return InOneUnit(shown, tuple(zip(written, lacks, strict=True)))


def _quantity(text: str) -> _Quantity | None:
    match = _CELL.fullmatch(text)
    if match is None:
        return None
    last = match["most_unit"] or ""
    numbers = [(_decimal(match["number"]), match["unit"] or last)]
    if match["most"]:
        numbers.append((_decimal(match["most"]), last))
    return _Quantity(match["sign"], tuple(numbers))


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _family(used: set[str], symbol: str) -> Mapping[str, Decimal] | None:
    """The units that hold all of these; of one unit, that one."""
    if not used - {""}:
        return {"": Decimal(1)}
    if used == {"B"} and symbol != "byte":
        return _COUNTS
    if len(used) == 1 and not any(used <= set(family) for family in _FAMILIES):
        return {unit: Decimal(1) for unit in used}
    fitting = (family for family in _FAMILIES if used <= set(family))
    return next(fitting, None)


def _common(used: set[str], family: Mapping[str, Decimal], sizes: Sequence[Decimal]) -> str | None:
    """The largest of the units in which no number is tiny; None where one is then too long."""
    if not sizes:
        return next(iter(used), next(iter(family)))
    fitting = [unit for unit in used if min(sizes) / family[unit] >= _LEAST]
    unit = max(fitting, key=lambda name: family[name], default=min(used, key=lambda n: family[n]))
    return unit if max(sizes) / family[unit] < _LARGEST else None


def _in(part: tuple[Decimal, str], unit: str, family: Mapping[str, Decimal]) -> str:
    """A number in another unit, with as many digits as it has."""
    number, own = part
    if not number:
        return "0"
    if own == unit:
        return f"{number:,}"
    factor = family[own] / family[unit]
    digits = len(number.as_tuple().digits)
    changed = number * factor
    places = max(0, digits - 1 - changed.adjusted())
    return f"{changed:,.{places}f}"


_SHOWN = {"us": r"$\mu$s", "%": r"\%", "x": r"$\times$"}


def _shown(unit: str) -> str:
    return _SHOWN.get(unit, plain(unit))
