"""Which joins of ours a compiler made too: each step by which a detected kernel grew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rooftrace.costmodels.fusion import FusionGroup
from rooftrace.hardware.units import plural


@dataclass(frozen=True, slots=True)
class JoinCheck:
    """How often one join of the table in docs/fusion.md was made by us, and by a compiler."""

    join: str  # its name; its limit and the option of Inductor stand in the table
    ours: int  # steps by which our kernels grew, of ops in kernels that the compiler wrote
    made: int  # of these steps: how many it made too

    def __str__(self) -> str:
        return f"{self.join}: the compiler made {self.made:,} of {plural(self.ours, 'step')}"


def join_checks(groups: Iterable[FusionGroup], theirs: Mapping[int, int]) -> tuple[JoinCheck, ...]:
    """The joins that made `groups`, most steps that the compiler did not make first.

    theirs: the compiler's kernel by op.  A step is made too if some op that came to a kernel by it
    is in one kernel of the compiler with an op that was there before.
    """
    ours: dict[str, int] = {}
    made: dict[str, int] = {}
    for group in groups:
        came = {op for merge in group.merges for op in merge.ops}
        there = {theirs[op] for op in group.ops if op not in came and op in theirs}
        for merge in group.merges:
            kernels = {theirs[op] for op in merge.ops if op in theirs}
            if kernels and there:
                ours[merge.join] = ours.get(merge.join, 0) + 1
                made[merge.join] = made.get(merge.join, 0) + (not kernels.isdisjoint(there))
            there |= kernels
    checks = (JoinCheck(name, count, made[name]) for name, count in ours.items())
    return tuple(sorted(checks, key=lambda check: (check.made - check.ours, check.join)))
