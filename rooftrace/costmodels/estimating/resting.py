"""What shares of a step rest on: packages that are missing, masks and lengths that nobody knows."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rooftrace.hardware.units import format_share
from rooftrace.tracer.asking import assumptions as asked

if TYPE_CHECKING:
    from rooftrace.costmodels.estimating.estimates import Estimate

_SAID = {asked.FALLBACK: "runs in place of a kernel", "mask": "rests on", "lengths": "rests on"}
"""Kinds of assumptions that a note spells out, and what a share of the step does."""


def resting_notes(step: Estimate) -> tuple[str, ...]:
    """A sentence for each such assumption that time rests on; a fallback that a rewrite took has
    none."""
    together: defaultdict[tuple[str, str], float] = defaultdict(float)
    for item in step.graph.assumptions:
        if item.kind in _SAID:
            seconds = step.assumption_seconds.get(item.id, 0.0)
            together[_SAID[item.kind], item.text] += seconds
    return tuple(
        f"{format_share(seconds / step.t_est)} of the step {does}: {text}"
        for (does, text), seconds in together.items()
        if seconds
    )
