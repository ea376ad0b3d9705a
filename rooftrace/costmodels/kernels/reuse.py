"""Bytes that a kernel reads from the last-level cache, because they were touched recently.

A cache that evicts the least recently used bytes still holds those that were touched within the
last `capacity` bytes of traffic (reuse distance; Mattson et al., "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970).  Each step follows an equal step, so the weights of a
small model stay.  A result need not reach memory if it is dead, and its block is written again,
within that distance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import larger, smaller
from rooftrace.costmodels.costs import Access
from rooftrace.costmodels.liveness import Visits
from rooftrace.costmodels.planning import Plan

if TYPE_CHECKING:
    from rooftrace._amounts import Array


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
    walk = _Walk(planned, lambda group, access: planned.costs[group].traffic[access])
    walk.both(cold)
    return [
        {
            access: sum(_held(capacity, *amounts) for amounts in parts) / walk.visits[group]
            for access, parts in walk.parts[group].items()
        }
        for group in range(len(planned.groups))
    ]


# -- at many sizes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class WarmPart:
    """Bytes of a kernel that may still be in a cache; vectors as `warm_parts` was passed them."""

    weight: float  # the share of the kernel's iterations that touch them so
    size: Array
    distances: tuple[Array, ...]  # bytes of other traffic since; the smallest holds


def warm_parts(
    planned: Plan, amounts: Callable[[int, Access], Array], cold: bool = False
) -> list[list[WarmPart]]:
    """For each group the bytes that a cache may still hold, for sizes that are not known yet.

    amounts: the bytes of an access of a group, as a vector: an array over points, or coefficients
    of terms of which the bytes are the sum; all of one length.  Sizes and distances are linear in
    them.  An access whose vector is zero touches nothing.  Where a repeat stands in the graph, its
    count is that of `planned`.  `warm_columns` says how much of them a cache holds; for one plan,
    that is `warm_bytes`.
    """
    walk = _Walk(planned, amounts)
    walk.both(cold)
    result: list[list[WarmPart]] = []
    for group in range(len(planned.groups)):
        equal: dict[tuple[bytes, ...], tuple[int, tuple[Array, ...]]] = {}
        for parts in walk.parts[group].values():
            for vectors in parts:
                key = tuple(vector.tobytes() for vector in vectors)
                count, _ = equal.get(key, (0, vectors))
                equal[key] = count + 1, vectors
        result.append(
            [
                WarmPart(count / walk.visits[group], size, tuple(distances))
                for count, (size, *distances) in equal.values()
            ]
        )
    return result


def warm_columns(
    parts: Iterable[WarmPart],
    capacity: float,
    told: Callable[[Array], Array] = lambda vector: vector,
) -> Array | float:
    """Bytes of a group [P] that a cache of `capacity` bytes still holds; 0.0 without parts.

    told: from a vector of `warm_parts` to an array over points.
    """
    held: Array | float = 0.0
    for part in parts:
        amounts = map(told, (part.size, *part.distances))
        held = held + part.weight * _held(capacity, *amounts)
    return held


def _held(capacity: float, size: Any, *distances: Any) -> Any:
    """Bytes of `size` that are still in the cache after the least of these bytes of other traffic.

    Numbers, or arrays over points.
    """
    room = larger(0.0, capacity - larger(0.0, reduce(smaller, distances)) - size)
    return smaller(size, room)


# -- two steps in a row ----------------------------------------------------------------------------


class _Walk:
    """Two steps in a row, kernel by kernel, with the time (in bytes) of every storage's last touch.

    An iteration that stands for many others moves the clock on for all of them.  It is not measured
    itself; its neighbours are.  Amounts are numbers, or vectors of one length.
    """

    def __init__(self, planned: Plan, amounts: Callable[[int, Access], Any]) -> None:
        self.planned, self.amounts = planned, amounts
        self.ops = Visits(planned.graph)
        self.group_of = {op: i for i, group in enumerate(planned.groups) for op in group.ops}
        self.closing = {group.ops[-1] for group in planned.groups}
        values = planned.graph.values
        self.kept = {values[i].storage for i in (*planned.graph.outputs, *planned.graph.external)}
        self.clock: Any = 0.0
        self.began: dict[int, Any] = {}  # when the kernel that touched it last began, and ended
        self.last: dict[int, Any] = {}
        # By group and access what may be held: the size, and distances of which the least holds.
        self.parts: dict[int, dict[Access, list[tuple[Any, ...]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.visits: dict[int, int] = defaultdict(int)

    def both(self, cold: bool) -> None:
        """Run a step and measure the one after it; cold: measure the first."""
        if not cold:
            self.step(measured=False)
        self.step(measured=True)

    def step(self, measured: bool) -> None:
        """Run a step; add up what was warm if it is `measured`."""
        self.writes: list[tuple[int, Access, int, Any, tuple[Any, ...]]] = []
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
            for group, access, number, wrote, known in self.writes:
                self.parts[group][access].append((*known, self.began[number] - wrote))

    def _run(self, group: int, touched: dict[int, set[int]], times: int, measured: bool) -> None:
        """Run one kernel, which stands for `times` of them."""
        parts: list[tuple[int, Any, Access]] = []
        stays = set()
        for access in self.planned.costs[group].traffic:
            amount = self.amounts(group, access) if access.wire == "hbm" else 0
            if amount if isinstance(amount, (int, float)) else amount.any():
                numbers = touched.get(access.storage) or {-1 - access.storage}
                parts += [(n, amount / len(numbers), access) for n in sorted(numbers)]
                if access.storage in self.kept:
                    stays |= numbers
        moved = sum(size for _, size, _ in parts)
        if measured:
            self.visits[group] += 1
            for number, size, access in parts:
                last = self.last.get(number)
                known = (size,) if last is None else (size, self.clock - last)
                if access.write and number not in stays:
                    wrote = self.clock + moved
                    self.writes.append((group, access, number, wrote, known))
                elif last is not None:
                    self.parts[group][access].append(known)
        begin = self.clock
        self.clock = self.clock + times * moved
        for number, _, _ in parts:
            self.began[number], self.last[number] = begin, self.clock
