"""Counted bytes of the kernels of a compiled step: launches of a profiler beside its row."""

from __future__ import annotations

from collections.abc import Sequence

from rooftrace.errors import ProfileError
from rooftrace.hardware.units import format_share
from rooftrace.measured.alignment import keys
from rooftrace.measured.fused.kerneltimes import KernelTime
from rooftrace.measured.tables import KernelCounters

_LEAST = 0.5
"""Share of the kernels that the compiler wrote that must have counters."""


def counted_kernels(
    calls: Sequence[KernelTime], counters: Sequence[KernelCounters], source: str
) -> dict[int, float]:
    """The bytes of each call of a step by its number; one without counters is not there.

    source: the file of the counters.  Kernels that the compiler wrote are matched in order by name.
    A call of a library has what was launched between two of them, if it is the only one there, or
    if there are as many launches as calls.  Raises ProfileError where less than half of the
    compiler's kernels have counters.
    """
    have = [(keys.base_name(kernel.name), ()) for kernel in calls]
    wanted = [(keys.base_name(launch.name), ()) for launch in counters]
    pairs = keys.common(have, wanted)
    written = [number for number, kernel in enumerate(calls) if kernel.generated]
    known = {a for a, _ in pairs} & set(written)
    if len(known) < _LEAST * len(written):
        first = next(calls[number].name for number in written if number not in known)
        raise ProfileError(
            f"{source}: {format_share(len(known) / len(written))} of the {len(written):,} kernels "
            f"that the compiler wrote are there in order; the first that is not: {first}: count "
            "the step that was measured"
        )
    moved: dict[int, float] = {a: float(counters[b].bytes) for a, b in pairs}
    for mine, other in keys.gaps(pairs, len(calls), len(counters)):
        sizes = [float(counters[j].bytes) for j in other]
        if len(mine) == 1:
            moved[mine[0]] = sum(sizes)
        elif len(mine) == len(sizes):
            moved.update(zip(mine, sizes, strict=True))
    return moved
