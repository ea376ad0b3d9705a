"""Conditions on what may change between two checkpoints: "drift>1%", "params>0"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rooftrace.errors import RequestError
from rooftrace.hardware.units import UnitError, format_share, parse

if TYPE_CHECKING:
    from rooftrace.tracer.checkpoints.records import CheckpointDiff, TensorDiff


class Limit(NamedTuple):
    """A condition: what may not grow beyond which number."""

    metric: str
    most: float
    relative: bool
    text: str


def _share(tensor: TensorDiff) -> float:
    """The drift of a tensor, relative to its norm before: infinite where that is 0."""
    if tensor.drift is None:
        return 0.0
    return math.inf if tensor.drift.relative is None else tensor.drift.relative


def _drift(result: CheckpointDiff) -> tuple[float, float]:
    return 0.0, max(map(_share, result.tensors), default=0.0)


def _count(*statuses: str) -> Callable[[CheckpointDiff], tuple[float, float]]:
    return lambda result: (0.0, float(sum(len(result.of(status)) for status in statuses)))


def _not_finite(result: CheckpointDiff) -> tuple[float, float]:
    counts = [tensor.not_finite for tensor in result.not_finite]
    return float(sum(before for before, _ in counts)), float(sum(after for _, after in counts))


METRICS: Mapping[str, Callable[[CheckpointDiff], tuple[float, float]]] = {
    "drift": _drift,
    "params": lambda result: result.params,
    "bytes": lambda result: result.bytes,
    "nonfinite": _not_finite,
    "changed": _count("drifted", "renamed", "dtype", "shape", "added", "removed"),
    "added": _count("added"),
    "removed": _count("removed"),
}
"""Each as a number before and after; what grows from one to the other is held to the limit."""
_CONDITION = re.compile(r"\s*([a-z]+)\s*>\s*([0-9.eE+-]+)\s*(.*?)\s*")


def parse_limit(text: str) -> Limit:
    """The limit that "drift>1%" says.  Raises RequestError for what checkpoints do not have."""
    match = _CONDITION.fullmatch(text)
    if match is None or match[1] not in METRICS:
        raise RequestError(
            f"--fail-on {text!r}: of two checkpoints expected METRIC>LIMIT with METRIC one of "
            f'{", ".join(METRICS)}, for example "drift>1%"'
        )
    metric, number, unit = match.groups()
    try:
        if unit == "%":
            if metric not in ("drift", "params", "bytes"):
                raise ValueError(f"{metric} is a number of its own; expected no %")
            return Limit(metric, float(number) / 100, metric != "drift", text)
        if metric == "bytes":
            return Limit(metric, parse(f"{number} {unit}", "byte"), False, text)
        if unit:
            raise ValueError(f"{metric} has no unit; expected a number")
        return Limit(metric, float(number), False, text)
    except (UnitError, ValueError) as error:
        raise RequestError(f"--fail-on {text!r}: {error}") from None


def grown(limit: Limit, result: CheckpointDiff) -> str:
    """A sentence where a limit is passed; else nothing."""
    before, after = METRICS[limit.metric](result)
    growth = after - before
    if limit.relative:
        growth = growth / before if before else (math.inf if after else 0.0)
    if not growth > limit.most:
        return ""
    share = limit.relative or limit.metric == "drift"
    amount = format_share(growth) if share else f"{growth:,.0f}"
    if limit.metric == "drift":
        worst = max(result.tensors, key=_share)
        return f"{worst.name} drifted by {amount}, more than {limit.text!r} allows"
    return f"{limit.metric} grew by {amount}, more than {limit.text!r} allows"
