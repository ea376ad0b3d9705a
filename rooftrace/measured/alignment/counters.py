"""Measured DRAM bytes of each op of a graph: kernels with their counters beside a trace.

Both are the same step, run twice: their kernels are two sequences of (name, blocks), matched in
order.  ncu empties the caches before each kernel (unless --cache-control none), so a tensor that a
kernel finds in L2 in the real run counts as read here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rooftrace.errors import ProfileError
from rooftrace.hardware.units import format_share
from rooftrace.measured.alignment.alignment import Alignment
from rooftrace.measured.alignment.keys import Key, base_name, common
from rooftrace.measured.tables import KernelCounters
from rooftrace.measured.traces import records

_KERNEL = records.KINDS.index("kernel")
_LEAST = 0.5
"""Share of a step's kernels that must have counters."""


@dataclass(frozen=True)
class Counted:
    """The DRAM bytes of the ops of a step."""

    bytes: Mapping[int, float]  # byte by op id, all iterations; ops with every kernel counted
    kernels: int  # how many kernels the step launched
    with_counters: int  # how many of those kernels have counters


def counted(alignment: Alignment, counters: Sequence[KernelCounters], source: str = "") -> Counted:
    """The bytes of each op of `alignment.graph`, in the step of median length.

    counters: of that step, in order; other steps before and after are ignored.  Raises ProfileError
    for a trace without kernels, and where less than half of the step's kernels have counters.
    """
    kernels = alignment.trace.kernels
    mine = [index for index in alignment.step.kernels if kernels.kind[index] == _KERNEL]
    if not mine:
        raise ProfileError(
            f"{alignment.trace.source}: no kernels in the trace to set counters beside; profile "
            "with ProfilerActivity.CUDA"
        )
    have = [_key(kernels[index].name, kernels[index].grid) for index in mine]
    wanted = [_key(launch.name, launch.grid) for launch in counters]
    pairs = common(have, wanted)
    if len(pairs) < _LEAST * len(mine):
        taken = {i for i, _ in pairs}
        first = next(i for i in range(len(mine)) if i not in taken)
        raise ProfileError(
            f"{source or 'the counters'}: {format_share(len(pairs) / len(mine))} of the "
            f"{len(mine):,} kernels of {alignment.step.name!r} are there in order; the first that "
            f"is not: {have[first][0]}: count the step that the trace has"
        )
    moved = {mine[i]: float(counters[j].bytes) for i, j in pairs}
    return Counted(bytes=_by_op(alignment, moved), kernels=len(mine), with_counters=len(pairs))


def _by_op(alignment: Alignment, moved: Mapping[int, float]) -> dict[int, float]:
    """Bytes by op; an op with a kernel (or a copy) that was not counted has none."""
    kernels, owners = alignment.trace.kernels, alignment.owners
    sums: dict[int, float] = defaultdict(float)
    unknown: set[int] = set()
    for index in alignment.step.kernels:
        call = kernels.op[index]
        target = owners.get(call) if call != records.NONE else None
        if target is None:
            continue
        if index in moved:
            sums[target[0]] += moved[index]
        else:
            unknown.add(target[0])
    return {op: size for op, size in sums.items() if op not in unknown}


def _key(name: str, grid: tuple[int, ...] | None) -> Key:
    """The key of a launch: the function without arguments, templates and namespaces, and
    how many blocks there are."""
    return base_name(name), () if grid is None else ((math.prod(grid),),)
