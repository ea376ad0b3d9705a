"""What may be held to a limit of two checkpoints: "drift>1%", "nonfinite>0"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rooftrace.tracer.inventory.limits import Limit, parse_limit

if TYPE_CHECKING:
    from rooftrace.tracer.checkpoints.records import CheckpointDiff


def _drift(result: CheckpointDiff) -> tuple[float, float]:
    return 0.0, max((tensor.moved for tensor in result.tensors), default=0.0)


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


def checkpoint_limit(text: str) -> Limit:
    """The limit that "drift>1%" says.  Raises RequestError for what checkpoints do not have."""
    return parse_limit(text, METRICS, "two checkpoints")


def broken(limit: Limit, result: CheckpointDiff) -> str:
    """A sentence where a limit is passed; else nothing."""
    sentence = limit.grown(*METRICS[limit.metric](result))
    if sentence and limit.metric == "drift":
        return f"{max(result.tensors, key=lambda tensor: tensor.moved).name}: {sentence}"
    return sentence
