"""What shares of a step rest on: packages that are missing, masks and lengths that nobody knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from rooftrace.hardware.units import format_share
from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.graph import Assumption

_SAID = {asked.FALLBACK: "runs in place of a kernel", "mask": "rests on", "lengths": "rests on"}
"""Kinds of assumptions that a note spells out, and what a share of the step does."""


def resting_notes(
    assumptions: Iterable[Assumption], seconds_of: Callable[[], Mapping[int, float]], t_est: float
) -> tuple[str, ...]:
    """A sentence for each such assumption that time rests on; a fallback that a rewrite took has
    none.

    seconds_of: gives the seconds that rest on each assumption, by its id.  t_est: of the step.
    """
    together: defaultdict[tuple[str, str], float] = defaultdict(float)
    for item in assumptions:
        if item.kind in _SAID:
            together[_SAID[item.kind], item.text] += seconds_of().get(item.id, 0.0)
    return tuple(
        f"{format_share(seconds / t_est)} of the step {does}: {text}"
        for (does, text), seconds in together.items()
        if seconds
    )
