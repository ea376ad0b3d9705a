"""What may be held to a limit of two checkpoints: "drift>1%", "nonfinite>0"."""

from __future__ import annotations

from rooftrace.tracer.inventory.limits import Limit, parse_limit

METRICS = ("drift", "params", "bytes", "nonfinite", "changed", "added", "removed")


def checkpoint_limit(text: str) -> Limit:
    """The limit that "drift>1%" says.  Raises RequestError for what checkpoints do not have."""
    return parse_limit(text, METRICS, "two checkpoints")
