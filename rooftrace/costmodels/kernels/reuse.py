"""Bytes that a kernel reads from the last-level cache, because they were touched recently.

A cache that evicts the least recently used bytes still holds those that were touched within the
last `capacity` bytes of traffic (reuse distance; Mattson et al., "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970).  Each step follows an equal step, so the weights of a
small model stay.  A result need not reach memory if it is dead, and its block is written again,
within that distance.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from rooftrace.costmodels.costs import Access
from rooftrace.costmodels.liveness import Visits
from rooftrace.costmodels.planning import Plan


def warm_bytes(planned: Plan, capacity: float, cold: bool = False) -> list[float]:
    """How many HBM bytes of each group a cache of `capacity` bytes still holds.

    The mean over the iterations that a group stands for.  Distances are in bytes of traffic, and
    the bytes that a kernel touches take room too: a storage as large as the room that is left is
    evicted entirely, and a storage half as large stays entirely.  cold: the step begins with a
    cache that holds none of its data.
    """
    return [sum(held.values()) for held in warm_accesses(planned, capacity, cold)]


def warm_accesses(
    planned: Plan, capacity: float, cold: bool = False
) -> list[Mapping[Access, float]]:
    """How many bytes of each access of each group a cache of `capacity` bytes still holds.

    They are those of `warm_bytes`, told apart.
    """
    walk = _Walk(planned, capacity)
    if not cold:
        walk.step(measured=False)
    walk.step(measured=True)
    return [
        {access: size / walk.visits[group] for access, size in walk.sums[group].items()}
        for group in range(len(planned.groups))
    ]


class _Walk:
    """Two steps in a row, kernel by kernel, with the time (in bytes) of every storage's last touch.

    An iteration that stands for many others moves the clock on for all of them.  It is not measured
    itself; its neighbours are.
    """

    def __init__(self, planned: Plan, capacity: float) -> None:
        self.planned, self.capacity = planned, capacity
        self.ops = Visits(planned.graph)
        self.group_of = {op: i for i, group in enumerate(planned.groups) for op in group.ops}
        self.closing = {group.ops[-1] for group in planned.groups}
        values = planned.graph.values
        self.kept = {values[i].storage for i in (*planned.graph.outputs, *planned.graph.external)}
        self.clock = 0.0
        self.began: dict[int, float] = {}  # when the kernel that touched it last began, and ended
        self.last: dict[int, float] = {}
        self.sums: dict[int, dict[Access, float]] = defaultdict(lambda: defaultdict(float))
        self.visits: dict[int, int] = defaultdict(int)

    def step(self, measured: bool) -> None:
        """Run a step; add up what was warm if it is `measured`."""
        self.writes: list[tuple[int, Access, int, float, float, float]] = []
        touched: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for visit in self.ops.order:
            group = self.group_of.get(visit.op.id)
            if group is None:
                continue
            for storage, number in self.ops.bound(visit):
                touched[group][storage].add(number)
            if visit.op.id in self.closing:
                others = self.ops.standing(visit.at)
                self._run(group, touched.pop(group), others, measured and others == 1)
        if measured:
            for group, access, number, wrote, size, before in self.writes:
                life = self.began[number] - wrote
                self.sums[group][access] += self._held(size, min(before, life))

    def _run(self, group: int, touched: dict[int, set[int]], times: int, measured: bool) -> None:
        """Run one kernel, which stands for `times` of them."""
        traffic = self.planned.costs[group].traffic
        parts: list[tuple[int, float, Access]] = []
        stays = set()
        for access, amount in traffic.items():
            if access.wire == "hbm" and amount:
                numbers = touched.get(access.storage) or {-1 - access.storage}
                parts += [(n, amount / len(numbers), access) for n in sorted(numbers)]
                if access.storage in self.kept:
                    stays |= numbers
        moved = sum(size for _, size, _ in parts)
        if measured:
            self.visits[group] += 1
            for number, size, access in parts:
                since = self.clock - self.last.get(number, -math.inf)
                if access.write and number not in stays:
                    wrote = self.clock + moved
                    self.writes.append((group, access, number, wrote, size, since))
                else:
                    self.sums[group][access] += self._held(size, since)
        begin = self.clock
        self.clock += times * moved
        for number, _, _ in parts:
            self.began[number], self.last[number] = begin, self.clock

    def _held(self, size: float, distance: float) -> float:
        """Bytes of `size` that are still in the cache after `distance` bytes of other traffic."""
        return min(size, max(0.0, self.capacity - max(0.0, distance) - size))
