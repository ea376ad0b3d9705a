"""What a step runs in place of kernels whose packages are missing, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rooftrace.hardware.units import format_share
from rooftrace.tracer.asking import assumptions as asked
from rooftrace.tracer.graph import Assumption


def fallback_notes(
    assumptions: Iterable[Assumption], shares: Callable[[], Mapping[int, float]]
) -> tuple[str, ...]:
    """A sentence for each fallback whose ops no rewrite took.

    shares: of the step that rests on each assumption, by its id; asked for where it is needed.
    """
    fallbacks = [item for item in assumptions if item.kind == asked.FALLBACK]
    known = shares() if fallbacks else {}
    return tuple(
        f"{format_share(known[item.id])} of the step runs in place of a kernel: {item.text}"
        for item in fallbacks
        if known.get(item.id)
    )
