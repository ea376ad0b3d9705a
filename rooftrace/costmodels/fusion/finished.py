"""Applies joins to finished kernels: the joins that users register, and those of `headroom`.

A kernel moves into the only kernel that reads its results.  It stays where something in between
waits for the device or overwrites what the kernel touches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.fusion.groups import Apart, FusionGroup, Merge
from rooftrace.costmodels.fusion.joins import JOINS, Join
from rooftrace.costmodels.fusion.kernels import Facts, KernelView
from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import OpGraph


def larger_groups(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    op_costs: Sequence[Cost],
    costs: Sequence[Cost],
    joins: Sequence[Join],
) -> tuple[FusionGroup, ...]:
    """The groups in launch order, with the larger ones that joins make in place of their last part.

    op_costs, costs: of the graph's ops, and of the groups.  Each group goes into one larger group
    at most.
    """
    return _Finished(graph, groups, op_costs, costs).joined(joins)


def with_apart(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    op_costs: Sequence[Cost],
    costs: Sequence[Cost],
    joins: Sequence[Join],
    larger: Sequence[FusionGroup],
) -> tuple[FusionGroup, ...]:
    """What joins made of groups (`larger`), with what else fits their conditions and stays apart.

    groups, costs: before the joins were applied.
    """
    of = {op: place for place, group in enumerate(larger) for op in group.ops}
    apart: dict[int, list[Apart]] = defaultdict(list)
    kernels = _Finished(graph, groups, op_costs, costs)
    for join in joins:
        for row in kernels.all_rows(join.parts):
            places = [of[groups[i].ops[0]] for i in row]
            if len(set(places)) == 1:
                continue
            reason = kernels.obstacle_of(row)
            if not reason and any(larger[place].own_joins for place in places):
                reason = "one of them is joined with another kernel"
            if reason and kernels.fits(join, row):
                for place in dict.fromkeys(places):
                    others = [
                        groups[i].ops for i, at in zip(row, places, strict=True) if at != place
                    ]
                    ops = tuple(op for other in others for op in other)
                    apart[place].append(Apart(join.name, ops, reason, place == places[0]))
    return tuple(
        replace(group, apart=tuple(apart[place])) if place in apart else group
        for place, group in enumerate(larger)
    )


def beyond(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    op_costs: Sequence[Cost],
    costs: Sequence[Cost],
) -> tuple[FusionGroup, ...]:
    """Larger groups than these, by the joins that are off: what a compiler leaves undone."""
    joins = [join for join in JOINS if not join.on]
    return larger_groups(graph, groups, op_costs, costs, joins)


class _Finished:
    """The kernels of a graph, and which of them read what each one writes."""

    def __init__(
        self,
        graph: OpGraph,
        groups: Sequence[FusionGroup],
        op_costs: Sequence[Cost],
        costs: Sequence[Cost],
    ) -> None:
        self.groups, self.costs = groups, costs
        facts = Facts(graph, op_costs)
        self.kernels = [_kernel(facts, g, cost) for g, cost in zip(groups, costs, strict=True)]
        self.syncs = [op.id for op in graph.ops if op.kind == "sync" or op.name in marks.BOUNDARIES]
        self.sources: list[list[int]] = []  # the kernels that each one reads from
        self.readers: dict[tuple[int, int], set[int]] = defaultdict(set)  # of (kernel, storage)
        writer: dict[int, int] = {}
        for i, kernel in enumerate(self.kernels):
            read = [storage for storage in kernel.reads if storage in writer]
            for storage in read:
                self.readers[writer[storage], storage].add(i)
            self.sources.append(sorted({writer[storage] for storage in read}))
            writer.update(dict.fromkeys(kernel.made, i))

    def joined(self, joins: Sequence[Join]) -> tuple[FusionGroup, ...]:
        """All groups in launch order after each join, one after the other, was applied once."""
        taken: set[int] = set()
        larger: dict[int, FusionGroup] = {}
        for join in joins:
            for row in self._rows(join):
                if taken.isdisjoint(row):
                    taken.update(row)
                    larger[row[-1]] = self._larger(join, row)
        return tuple(
            larger.get(i, group)
            for i, group in enumerate(self.groups)
            if i in larger or i not in taken
        )

    def _rows(self, join: Join) -> Iterator[tuple[int, ...]]:
        """Kernels in a row, each read by the next alone, that a join makes one."""
        for i, kernel in enumerate(self.kernels):
            before = [j for j in self.sources[i] if self._next(j) == i]
            if join.parts == 2:
                firsts = [j for j in before if join.when(self.kernels[j], kernel)]
                if firsts:
                    yield max(firsts, key=lambda j: self._shared(j, i)), i
            elif before and (last := self._next(i)) is not None:
                after = self.kernels[last]
                firsts = [j for j in before if join.when(self.kernels[j], kernel, after)]
                if firsts:
                    yield firsts[-1], i, last

    def _larger(self, join: Join, row: Sequence[int]) -> FusionGroup:
        parts = [self.groups[i] for i in row]
        merges = [
            merge for part in parts[1:] for merge in (*part.merges, Merge(join.name, part.ops))
        ]
        # As in reports, names of torch's own ops have no namespace.
        names = " + ".join(part.name.removeprefix("aten.") for part in parts)
        return replace(
            parts[0],
            ops=tuple(sorted(op for part in parts for op in part.ops)),
            pattern=join.name,
            name=join.label or names,
            known=all(part.known for part in parts),
            merges=(*parts[0].merges, *merges),
        )

    def all_rows(self, parts: int) -> Iterator[tuple[int, ...]]:
        """Two or three kernels in a row, of which each reads what the one before it makes."""
        for second, sources in enumerate(self.sources):
            for first in sources:
                if parts == 2:
                    yield first, second
                else:
                    yield from ((first, second, third) for third in sorted(self._readers(second)))

    def obstacle_of(self, row: Sequence[int]) -> str:
        """What keeps kernels in a row apart; "" where nothing does."""
        obstacles = (self._obstacle(*pair) for pair in pairwise(row))
        return next((text for text in obstacles if text), "")

    def fits(self, join: Join, row: Sequence[int]) -> bool:
        """Whether the condition of a join holds for kernels in a row."""
        return bool(join.when(*(self.kernels[i] for i in row)))

    def _readers(self, first: int) -> set[int]:
        return set[int]().union(*(self.readers[first, s] for s in self.kernels[first].made))

    def _next(self, first: int) -> int | None:
        """The only kernel that reads what this one writes, if the two may be one kernel."""
        readers = self._readers(first)
        if len(readers) != 1:
            return None
        (second,) = readers
        return None if self._obstacle(first, second) else second

    def _obstacle(self, first: int, second: int) -> str:
        """Why a kernel cannot move into one that reads what it writes; "" where it can."""
        if self._readers(first) != {second}:
            return "something else reads the first"
        kernel, group, other = self.kernels[first], self.groups[first], self.groups[second]
        if (group.times, group.repeats) != (other.times, other.repeats):
            return "they run in other iterations"
        if bisect_left(self.syncs, group.ops[0]) != bisect_left(self.syncs, other.ops[-1]):
            return "the host waits between them"
        touched = kernel.reads | kernel.made
        between = self.kernels[first + 1 : second]
        if any(not touched.isdisjoint(other.made) for other in between):
            return "something between them overwrites what the first touches"
        return ""

    def _shared(self, first: int, second: int) -> int:
        """Bytes that the second kernel reads of what the first one writes."""
        return sum(
            size
            for access, size in self.costs[second].traffic.items()
            if not access.write and access.storage in self.kernels[first].made
        )


def _kernel(facts: Facts, group: FusionGroup, cost: Cost) -> KernelView:
    """A finished kernel; one of a library goes over the elements that it writes."""
    values = facts.graph.values
    spaces = [facts.space(n) for n in group.ops if facts.classes[n] != "opaque"]
    made = {access.storage for access in cost.traffic if access.write}
    written = max((values[storage].elements for storage in made), default=0)
    return KernelView(
        facts=facts,
        members=list(group.ops),
        size=max((size for size, _ in spaces), default=written),
        reduced=next((reduced for _, reduced in spaces if reduced is not None), None),
        fusable=len(spaces) == len(group.ops),
        reads={access.storage for access in cost.traffic if not access.write},
        made=made,
    )
