"""Conditions on what may grow between two revisions: "time>5%", "memory>1 GiB"."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rooftrace.hardware.units import (
    UnitError,
    format_capacity,
    format_count,
    format_flops,
    format_time,
    format_traffic,
    parse,
)

METRICS = ("time", "flops", "bytes", "memory", "params", "kernels")
NETWORK = ("communication", "exposed")
"""Totals of steps of several processes: seconds of exchanges, and for which computing waits."""
_UNITS = {
    "time": "second",
    "flops": "count",
    "bytes": "byte",
    "memory": "byte",
    "params": "count",
    "kernels": "count",
}
FORMATS: Mapping[str, Callable[[float], str]] = {
    "time": format_time,
    "flops": format_flops,
    "bytes": format_traffic,
    "memory": format_capacity,
    "params": format_count,
    "kernels": format_count,
}


class FailOnError(ValueError):
    """A --fail-on condition that cannot be read."""


_CONDITION = re.compile(r"\s*([a-z]+)\s*>\s*([0-9.eE+-]+)\s*(.*?)\s*")


def parse_condition(text: str) -> tuple[str, float, bool, str]:
    """("time", 0.05, True, text) for "time>5%"; an absolute limit takes a unit ("memory>1 GiB")."""
    match = _CONDITION.fullmatch(text)
    if match is None or match[1] not in METRICS:
        raise FailOnError(
            f"--fail-on {text!r}: expected METRIC>LIMIT with METRIC one of {', '.join(METRICS)}, "
            'for example "time>5%" or "memory>1 GiB"'
        )
    metric, number, unit = match.groups()
    try:
        if unit == "%":
            return metric, float(number) / 100, True, text
        if not unit and _UNITS[metric] == "count":
            return metric, float(number), False, text
        return metric, parse(f"{number} {unit}", _UNITS[metric]), False, text
    except (UnitError, ValueError) as error:
        raise FailOnError(f"--fail-on {text!r}: {error}") from None
