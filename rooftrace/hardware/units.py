"""Knows how quantities are written (units, prefixes, digits); knows nothing about chips or models.

`parse` reads what a person wrote ("3.35 TB/s") into an SI number, exactly; `write` is its inverse;
the `format_*` functions are the one place where numbers become words in a report.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction


class UnitError(ValueError):
    """A text that is not a quantity in the expected unit."""


DECIMAL: Mapping[str, Fraction] = {
    "": Fraction(1),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
}
BINARY: Mapping[str, Fraction] = {
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
SMALL: Mapping[str, Fraction] = {
    "m": Fraction(1, 10**3),
    "u": Fraction(1, 10**6),
    "\u00b5": Fraction(1, 10**6),  # the micro sign
    "\u03bc": Fraction(1, 10**6),  # the Greek letter, which looks the same
    "n": Fraction(1, 10**9),
    "p": Fraction(1, 10**12),
}
ONE: Mapping[str, Fraction] = {"": Fraction(1)}

# unit -> {spelling of its symbol: worth of one such symbol in that unit}
SYMBOLS: Mapping[str, Mapping[str, Fraction]] = {
    # Integer rates are quoted in OP/s; they stand in the same table as FLOP/s.
    "FLOP/s": {"FLOP/s": Fraction(1), "OP/s": Fraction(1)},
    # Links are quoted in bits; "Gb/s" is refused on purpose, since it is read both ways.
    "byte/s": {"B/s": Fraction(1), "byte/s": Fraction(1), "bit/s": Fraction(1, 8)},
    "byte": {"B": Fraction(1), "byte": Fraction(1), "bytes": Fraction(1)},
    "second": {"s": Fraction(1), "second": Fraction(1), "seconds": Fraction(1)},
    "watt": {"W": Fraction(1), "watt": Fraction(1), "watts": Fraction(1)},
    "dollar/hour": {"dollar/hour": Fraction(1), "dollars/hour": Fraction(1), "$/h": Fraction(1)},
    "hertz": {"Hz": Fraction(1), "hertz": Fraction(1)},
    "count": {"": Fraction(1)},
    "share": {"%": Fraction(1, 100)},
}
PREFIXES: Mapping[str, Mapping[str, Fraction]] = {
    "FLOP/s": DECIMAL,
    "byte/s": {**DECIMAL, **BINARY},
    "byte": {**DECIMAL, **BINARY},
    "second": {**ONE, **SMALL},
    "watt": {**ONE, "k": DECIMAL["k"], "M": DECIMAL["M"], "m": SMALL["m"]},
    "dollar/hour": ONE,
    "hertz": DECIMAL,
    "count": ONE,
    "share": ONE,
}
LONG: Mapping[str, Mapping[str, Fraction]] = {
    "second": {"min": Fraction(60), "h": Fraction(3600), "hours": Fraction(3600),
               "days": Fraction(86400)},
    "count": {name: DECIMAL[name] for name in ("k", "M", "T")} | {"B": DECIMAL["G"]},
}  # fmt: skip
"""Spellings that stand without a prefix.  A billion is written B, as counts of tokens are."""
EXAMPLES: Mapping[str, str] = {
    "FLOP/s": "989 TFLOP/s",
    "byte/s": "3.35 TB/s",
    "byte": "80 GiB",
    "second": "4.5 us",
    "watt": "700 W",
    "dollar/hour": "2.50 dollar/hour",
    "hertz": "1.98 GHz",
    "count": "132",
    "share": "92 %",
}
UNITS: tuple[str, ...] = tuple(SYMBOLS)

# "1979", "1,979", "3.35", "1e12": thousands commas must be in the right places.
QUANTITY = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(?P<symbol>.*)", re.DOTALL
)


def _spellings(unit: str) -> dict[str, Fraction]:
    """The worth of every way to write `unit` with a prefix."""
    return {
        prefix + symbol: scale * worth
        for symbol, worth in SYMBOLS[unit].items()
        for prefix, scale in PREFIXES[unit].items()
    } | dict(LONG.get(unit, {}))


SPELLINGS: Mapping[str, Mapping[str, Fraction]] = {unit: _spellings(unit) for unit in UNITS}


def parse(text: str, unit: str) -> float:
    """The SI value of `text`, correctly rounded; `unit` is one of `UNITS`.

    >>> parse("3.35 TB/s", "byte/s")
    3350000000000.0
    """
    if unit not in SYMBOLS:
        raise UnitError(f'unit "{unit}": expected one of {", ".join(UNITS)}')
    quantity = QUANTITY.fullmatch(text.strip())
    if quantity is not None:
        scale = SPELLINGS[unit].get(quantity["symbol"].strip())
        if scale is not None:
            try:
                value = float(_exact(quantity["number"]) * scale)
                if unit != "count" or value <= _LARGEST_COUNT:
                    return value
                raise OverflowError(value)
            except OverflowError:
                problem = f"too large, or too long a number, for a quantity in {unit}"
                raise UnitError(f'"{_short(text)}": {problem}') from None
    example = _nearest_example(text, unit)
    raise UnitError(f'"{_short(text)}": expected a quantity in {unit}, for example "{example}"')


_MOST_DIGITS = 100
"""Digits that a number may be written with."""
_LARGEST_EXPONENT = 400
"""Powers of ten beyond which a number is too large, or 0, as a double."""
_LARGEST_COUNT = 2.0**53
"""Doubles count without gaps up to here."""


def _exact(number: str) -> Fraction:
    """A number as it is written.  Raises OverflowError where it is not of a size to write so.

    The size is judged by the text alone: the number 1e9999999999 would fill the memory.
    """
    digits, _, exponent = number.replace(",", "").lower().partition("e")
    sign, power = exponent[:1] == "-", exponent.lstrip("+-").lstrip("0")
    if len(digits) > _MOST_DIGITS or len(power) > 4 or int(power or 0) > _LARGEST_EXPONENT:
        if sign and len(digits) <= _MOST_DIGITS:
            return Fraction(0)
        raise OverflowError(number[:_MOST_DIGITS])
    return Fraction(f"{digits}e{exponent or 0}")


def _short(text: str) -> str:
    return text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."


def parse_any(text: str) -> tuple[float, str]:
    """The SI value of `text` and the unit it is in, whichever of `UNITS` that is."""
    quantity = QUANTITY.fullmatch(text.strip())
    if quantity is not None:
        for unit, spellings in SPELLINGS.items():
            if quantity["symbol"].strip() in spellings:
                return parse(text, unit), unit
    raise UnitError(
        f'"{_short(text)}": expected a number with a unit, one of {", ".join(UNITS)}, '
        f'for example "{EXAMPLES["byte/s"]}"'
    )


def _nearest_example(text: str, unit: str) -> str:
    """A likely correction: the same number and prefix with the right symbol."""
    quantity = QUANTITY.fullmatch(text.strip())
    if quantity is None or unit == "count":
        return EXAMPLES[unit]
    symbol = next(iter(SYMBOLS[unit]))
    written = quantity["symbol"].strip()
    prefixes = PREFIXES[unit]
    for prefix in (written[:2], written[:1]):
        if len(prefix) < len(written) and prefix in prefixes and prefix:
            return f"{quantity['number']} {prefix}{symbol}"
    return EXAMPLES[unit]


def write(value: float, unit: str, digits: int = 4) -> str:
    """A text that `parse` reads back as `value` rounded to `digits` significant digits."""
    if unit not in SYMBOLS:
        raise UnitError(f'unit "{unit}": expected one of {", ".join(UNITS)}')
    if not math.isfinite(value) or value < 0:
        raise UnitError(f"value = {value!r}: expected a finite number in {unit}, 0 or more")
    symbol = next(iter(SYMBOLS[unit]))
    if value == 0:
        return f"0 {symbol}".strip()
    rounded = Fraction(f"{value:.{digits - 1}e}")
    # Decimal prefixes only, and one spelling of micro.
    scales = {
        prefix: scale * SYMBOLS[unit][symbol]
        for prefix, scale in PREFIXES[unit].items()
        if prefix not in BINARY and prefix.isascii()
    }
    fitting = {prefix: scale for prefix, scale in scales.items() if rounded >= scale}
    prefix = max(fitting or scales, key=lambda name: scales[name] if fitting else -scales[name])
    number = rounded / scales[prefix]
    places = max(0, digits - 1 - math.floor(math.log10(float(number))))
    body = f"{number.numerator / number.denominator:.{places}f}"
    if "." in body:
        body = body.rstrip("0").rstrip(".")
    return f"{body} {prefix}{symbol}".strip()


# Reports have three or four significant digits: 1.53, 15.3, 153.4.

MISSING = "\u2013"  # an en dash
DECIMAL_STEPS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
COUNT_STEPS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"), (1, ""))
TIME_STEPS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
CAPACITY_STEPS = (
    (2.0**50, "PiB"),
    (2.0**40, "TiB"),
    (2.0**30, "GiB"),
    (2.0**20, "MiB"),
    (2.0**10, "KiB"),
    (1.0, "B"),
)


def _digits(value: float, *, count: bool = False) -> str:
    """`value` >= 0 with three or four significant digits; a whole count without decimals."""
    if count and value == int(value):
        return f"{int(value)}"
    if value >= 999.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    if value >= 0.995:
        return f"{value:.2f}"
    return f"{value:.3g}" if value >= 1e-3 else f"{value:.2e}"


def _scaled(value: float | None, steps: tuple[tuple[float, str], ...], unit: str = "") -> str:
    """`value` in the largest step that leaves at least 1 in front of the point."""
    if value is None or math.isnan(value):
        return MISSING
    value = int(value) if isinstance(value, int) else value  # how it is written decides no plan
    if value < 0:
        return f"-{_scaled(-value, steps, unit)}"
    base = min(steps, key=lambda step: abs(math.log(step[0])))[1]
    if value == 0:
        return f"0 {base}{unit}".strip()
    if math.isinf(value):
        return f"\u221e {base}{unit}".strip()
    ratio = steps[0][0] / steps[1][0]
    for position, (scale, prefix) in enumerate(steps):
        # 999.96 would print as 1000.0: the step above takes it, as 1.00.
        limit = scale * (1 - 0.00005) if position == 0 or ratio == 1000 else scale
        if value >= limit or position == len(steps) - 1:
            body = _digits(value / scale, count=scale == 1 and prefix in ("", "B"))
            return f"{body} {prefix}{unit}".strip()
    raise UnitError(f"value = {value!r}: expected a number")


def _unscaled(value: float | None, unit: str) -> str:
    """`value` in one unit, however large it is."""
    if value is None or math.isnan(value):
        return MISSING
    if value == 0:
        return f"0 {unit}"
    body = "\u221e" if math.isinf(value) else _digits(abs(value))
    return f"{'-' if value < 0 else ''}{body} {unit}"


def format_flops(flops: float | None) -> str:
    """Floating-point operations, one multiply-add being two: "152.0 TFLOP"."""
    return _scaled(flops, DECIMAL_STEPS, "FLOP")


def format_flop_rate(rate: float | None) -> str:
    """FLOP/s: "989.0 TFLOP/s"."""
    return _scaled(rate, DECIMAL_STEPS, "FLOP/s")


def format_traffic(traffic: float | None) -> str:
    """Bytes moved, in decimal units: "671.0 GB"."""
    return _scaled(traffic, DECIMAL_STEPS, "B")


def format_bandwidth(bandwidth: float | None) -> str:
    """byte/s, always in GB/s so that columns compare: "4800 GB/s"."""
    return _unscaled(bandwidth and bandwidth / 1e9, "GB/s")


def format_capacity(capacity: float | None) -> str:
    """Bytes held, in binary units: "131.3 GiB"."""
    return _scaled(capacity, CAPACITY_STEPS)


def format_time(seconds: float | None) -> str:
    """Seconds: "143.5 ms"."""
    return _scaled(seconds, TIME_STEPS)


def format_count(count: float | None) -> str:
    """Parameters, tokens, ops: "671.0 B", "512"."""
    return _scaled(count, COUNT_STEPS)


def format_intensity(intensity: float | None) -> str:
    """FLOP per byte, never prefixed: "412.3 FLOP/byte"."""
    return _unscaled(intensity, "FLOP/byte")


def format_share(share: float | None) -> str:
    """A fraction of one, in percent: 0.123 is "12.3 %"."""
    if share is None or math.isnan(share):
        return MISSING
    if share == 0:
        return "0 %"
    sign = "-" if share < 0 else ""
    size = abs(share) * 100
    if math.isinf(size):
        return f"{sign}\u221e %"
    if size < 0.005:
        return f"{sign}<0.01 %"
    return f"{sign}{size:.2f} %" if size < 0.995 else f"{sign}{size:.1f} %"


# -- counts and lists in sentences ---------------------------------------------------------------


def plural(count: int, noun: str) -> str:
    """ "1 op", "2 ops"; nouns that end in y take -ies."""
    if count == 1:
        return f"{count:,} {noun}"
    return f"{count:,} {noun[:-1]}ies" if noun.endswith("y") else f"{count:,} {noun}s"


def listed(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def few(words: Sequence[str], most: int = 3) -> str:
    """ "a, b and 3 more": the first of several words."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return f"{', '.join(words[:most])}{more}"


def arrow(*sides: object) -> str:
    """ "2 -> 4": a value before and after; once where both are equal or one is missing."""
    return " -> ".join(dict.fromkeys(filter(None, map(str, sides))))
