"""Kernel groups that changed together, so that what they cost before and after can be compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.findings.diffs.edits import Edit, differing_reads, op_of, pairs_of
from rooftrace.costmodels.findings.diffs.sides import Side, Sides
from rooftrace.tracer.paths import pattern_of
from rooftrace.tracer.vocabulary import PARTS

ROUNDING = 1e-9
OPTIMIZER = PARTS[3]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Rows of either estimate, by their numbers, that hold the same work, and their edits."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    edits: tuple[Edit, ...]


class Sets:
    """Sets of things that belong together, joined one by one (a union-find)."""

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """What stands for the set of an item."""
        parents = self._parents
        root = item
        while (parent := parents.setdefault(root, root)) != root:
            root = parent
        while parents[item] != root:
            parents[item], item = root, parents[item]
        return root

    def join(self, first: Hashable, second: Hashable) -> None:
        """Put the sets of two items together."""
        self._parents[self.find(second)] = self.find(first)


def clusters_of(sides: Sides, edits: Sequence[Edit]) -> list[Cluster]:
    """The clusters in which something changed; edits of one line of the code are in one cluster."""
    joining = _Joining(sides, edits)
    joining.by_flow()
    joining.by_readers()
    joining.by_lines()
    joining.take_in()
    return list(joining.changed())


Node = tuple[int, int]
"""A row of an estimate, or an op of a graph: its side, and its number."""


def site(side: Side, op: int) -> tuple[str, str]:
    """Where the cause of an edit is: its line, or its op and module where no line is known."""
    node = side.graph.ops[op]
    if node.part == OPTIMIZER:
        return OPTIMIZER, node.function
    return ("", node.source) if node.source else (node.name, pattern_of(node.module))


class _Joining:
    """Rows of both sides, put together step by step; owners: by edited op, one of its rows."""

    def __init__(self, sides: Sides, edits: Sequence[Edit]) -> None:
        self.sides, self.edits, self.together = sides, edits, Sets()
        self.owners: dict[Node, Hashable] = {}
        for pair in sides.matching.pairs:
            self._join([*self._rows(0, pair.before), *self._rows(1, pair.after)])
        for edit in edits:
            nodes = [node for side, op in edit.ops for node in self._rows(side, op)]
            self._join(nodes)
            self.owners |= {place: nodes[0] for place in edit.ops if nodes}

    def _rows(self, side: int, op: int) -> list[Node]:
        return [(side, row) for row in self.sides[side].rows_of.get(op, ())]

    def _join(self, nodes: Sequence[Hashable]) -> None:
        for node in nodes[1:]:
            self.together.join(nodes[0], node)

    def by_flow(self) -> None:
        """Join an edit with those that made what it reads, or that read the same changed tensor.

        An optimizer reads all parameters: it would join whatever there is.
        """
        for edit in self.edits:
            if op_of(self.sides, edit).part == OPTIMIZER:
                continue
            outside = set()
            for _, op, partner in pairs_of([edit]):
                for _, first, second in differing_reads(self.sides, op, partner):
                    outside |= {(0, first.origin), (1, second.origin)}
            for side, op in edit.ops:
                for read in self.sides[side].flow.reads[op]:
                    place = side, read.origin
                    if place in self.owners or place in outside:
                        self.together.join(self.owners[side, op], self.owners.get(place, place))

    def by_readers(self) -> None:
        """Join edits of either side that make the same tensor of a kernel which did not change."""
        for pair in self.sides.matching.pairs:
            for first, second in self.sides.reads(pair.before, pair.after):
                made = (0, first.origin), (1, second.origin)
                if all(place in self.owners for place in made):
                    self._join([self.owners[place] for place in made])

    def by_lines(self) -> None:
        """Join clusters whose first edits stand in one line: equal layers, forward and backward."""
        for edit in self.edits:
            if edit.is_root:
                for side, op in edit.ops:
                    line = "line", side, site(self.sides[side], op)
                    self.together.join(self.owners[side, op], line)

    def take_in(self) -> None:
        """Join groups that cost something else without an edit of their own to an edit beside."""
        edited = {self.together.find(owner) for owner in self.owners.values()}
        for rows in self._members().values():
            if self.together.find(rows[0]) in edited or not self._differs(rows):
                continue
            place = next((p for row in rows for p in self._edits_beside(*row)), None)
            if place is not None:
                self.together.join(self.owners[place], rows[0])

    def _edits_beside(self, number: int, row: int) -> Iterator[Node]:
        side = self.sides[number]
        for op in side.estimate.rows[row].ops:
            if op in side.flow.reads:
                made = (read.origin for read in side.flow.reads[op])
                near = (*made, *side.flow.readers.get(op, ()))
                yield from ((number, other) for other in near if (number, other) in self.owners)

    def _members(self) -> Mapping[Hashable, list[Node]]:
        members: dict[Hashable, list[Node]] = defaultdict(list)
        for side in range(2):
            for row in range(len(self.sides[side].estimate.rows)):
                members[self.together.find((side, row))].append((side, row))
        return members

    def changed(self) -> Iterator[Cluster]:
        """The clusters that have an edit, or cost something else."""
        inside: dict[Hashable, list[Edit]] = defaultdict(list)
        for edit in self.edits:
            owner = next((self.owners[p] for p in edit.ops if p in self.owners), None)
            if owner is not None:
                inside[self.together.find(owner)].append(edit)
        for root, rows in self._members().items():
            if root in inside or self._differs(rows):
                before, after = _numbers(rows)
                yield Cluster(before, after, tuple(inside.get(root, ())))

    def _differs(self, rows: Sequence[Node]) -> bool:
        """Whether some rows cost something else on the two sides."""
        time, *counts = self.sides.costs(*_numbers(rows)).values()
        larger = max(time.before, time.after)
        return abs(time.after - time.before) > ROUNDING * larger or any(
            count.before != count.after for count in counts
        )


def _numbers(rows: Sequence[Node]) -> Iterator[tuple[int, ...]]:
    """The numbers of the rows of either side."""
    for number in range(2):
        yield tuple(row for side, row in rows if side == number)
