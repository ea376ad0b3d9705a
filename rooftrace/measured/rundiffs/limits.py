"""What is compared of two measured steps, and limits on how much it may grow: "time>5%"."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from rooftrace.errors import hint
from rooftrace.hardware.units import (
    UnitError,
    format_capacity,
    format_count,
    format_time,
    parse,
)

METRICS: Mapping[str, str] = {
    "time": "s",
    "device": "s",
    "computing": "s",
    "exposed": "s",
    "copying": "s",
    "idle": "s",
    "waiting": "s",
    "queued": "s",
    "outside": "s",
    "communication": "s",
    "hidden": "s",
    "work": "s",
    "kernels": "launches",
    "copies": "launches",
    "memory": "byte",
}
"""Figures of a step and their units.

time: wall.  device: when any kernel or copy runs, = computing + exposed + copying.  exposed:
communication that no kernel hides; copying: copies under neither.  idle: time - device, = waiting
(the host has not launched the next kernel) + queued (it has) + outside (before, after and beside
its kernels).  communication = hidden + exposed.  work: of all kernels and copies, added up.
On a host device is when any op runs.  memory: at the peak, of a run.
"""
PARTS = ("computing", "exposed", "copying", "waiting", "queued", "outside")
"""Figures that exclude each other and add up to the time of a step of a GPU's trace."""

_KINDS = {"s": "second", "byte": "byte", "launches": "count"}
_CONDITION = re.compile(r"\s*([a-z]+)\s*>\s*([0-9.eE+-]+)\s*(.*?)\s*")


class MeasuredLimitError(ValueError):
    """A limit on a measured metric that cannot be read, or on one that was not measured."""


def parse_limit(text: str) -> tuple[str, float, bool, str]:
    """("time", 0.05, True, text) for "time>5%"; an absolute limit takes a unit ("idle>1 ms")."""
    match = _CONDITION.fullmatch(text)
    if match is None or match[1] not in METRICS:
        near = hint(text.partition(">")[0].strip(), tuple(METRICS))
        raise MeasuredLimitError(
            f"--fail-on {text!r}: expected METRIC>LIMIT with METRIC one of {', '.join(METRICS)} "
            f'for measured runs, for example "time>5%" or "idle>1 ms"{near}'
        )
    metric, number, unit = match.groups()
    try:
        if unit == "%":
            return metric, float(number) / 100, True, text
        kind = _KINDS[METRICS[metric]]
        if kind == "count" and not unit:
            return metric, float(number), False, text
        return metric, parse(f"{number} {unit}", kind), False, text
    except (UnitError, ValueError) as error:
        raise MeasuredLimitError(f"--fail-on {text!r}: {error}") from None


def not_measured(text: str, metric: str, there: Collection[str]) -> MeasuredLimitError:
    """The error for a limit on a metric that neither run has."""
    known = ", ".join(name for name in METRICS if name in there)
    return MeasuredLimitError(
        f"--fail-on {text!r}: {metric} was not measured in both; there are {known}"
    )


def written(metric: str, value: float) -> str:
    """A value of a metric with its unit."""
    form = {"s": format_time, "byte": format_capacity, "launches": format_count}
    return form[METRICS[metric]](value)
