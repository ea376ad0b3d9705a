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
    together = Sets()
    for pair in sides.matching.pairs:
        _join(together, [*_rows(sides, 0, pair.before), *_rows(sides, 1, pair.after)])
    owners: dict[tuple[int, int], Hashable] = {}
    for edit in edits:
        nodes = [node for side, op in edit.ops for node in _rows(sides, side, op)]
        _join(together, nodes)
        owners |= {place: nodes[0] for place in edit.ops if nodes}
    _join_by_flow(together, sides, edits, owners)
    _join_by_readers(together, sides, owners)
    _join_by_lines(together, sides, edits, owners)
    _take_in(together, sides, edits, owners)
    return list(_changed(together, sides, edits, owners))


def _rows(sides: Sides, side: int, op: int) -> list[tuple[int, int]]:
    return [(side, row) for row in sides[side].rows_of.get(op, ())]


def _join(together: Sets, nodes: Sequence[Hashable]) -> None:
    for node in nodes[1:]:
        together.join(nodes[0], node)


def _join_by_flow(
    together: Sets,
    sides: Sides,
    edits: Sequence[Edit],
    owners: Mapping[tuple[int, int], Hashable],
) -> None:
    """Join an edit with the edits that made what it reads, or that read the same changed tensor.

    An optimizer reads all parameters: it would join whatever there is.
    """
    for edit in edits:
        if op_of(sides, edit).part == OPTIMIZER:
            continue
        outside = set()
        for _, op, partner in pairs_of([edit]):
            for _, first, second in differing_reads(sides, op, partner):
                outside |= {(0, first.origin), (1, second.origin)}
        for side, op in edit.ops:
            for read in sides[side].flow.reads[op]:
                place = side, read.origin
                if place in owners or place in outside:
                    together.join(owners[side, op], owners.get(place, place))


def _join_by_readers(
    together: Sets,
    sides: Sides,
    owners: Mapping[tuple[int, int], Hashable],
) -> None:
    """Join edits of either side that make the same tensor of a kernel which did not change."""
    for pair in sides.matching.pairs:
        ops = (sides.before, pair.before), (sides.after, pair.after)
        reads = zip(*(side.flow.reads[op] for side, op in ops), strict=False)
        for a, b in reads:
            if (0, a.origin) in owners and (1, b.origin) in owners:
                together.join(owners[0, a.origin], owners[1, b.origin])


def _join_by_lines(
    together: Sets,
    sides: Sides,
    edits: Sequence[Edit],
    owners: Mapping[tuple[int, int], Hashable],
) -> None:
    """Join the clusters whose first edits stand in one line: equal layers, forward and backward."""
    for edit in edits:
        if edit.is_root:
            for side, op in edit.ops:
                place = site(sides[side], op)
                together.join(owners[side, op], ("line", side, place))


def site(side: Side, op: int) -> tuple[str, str]:
    """Where the cause of an edit is: its line, or its op and module where no line is known."""
    node = side.graph.ops[op]
    if node.part == OPTIMIZER:
        return OPTIMIZER, node.function
    return ("", node.source) if node.source else (node.name, pattern_of(node.module))


def _take_in(
    together: Sets,
    sides: Sides,
    edits: Sequence[Edit],
    owners: Mapping[tuple[int, int], Hashable],
) -> None:
    """Join groups that cost something else without an edit of their own to an edit beside."""
    edited = {together.find(owner) for owner in owners.values()}
    for rows in _members(together, sides).values():
        node = next(iter(rows))
        if together.find(node) in edited or not _delta(sides, rows):
            continue
        for side, row in rows:
            place = next(_edits_beside(sides[side], side, row, owners), None)
            if place is not None:
                together.join(owners[place], node)
                break


def _edits_beside(
    side: Side, number: int, row: int, owners: Mapping[tuple[int, int], Hashable]
) -> Iterator[tuple[int, int]]:
    flow = side.flow
    for op in side.estimate.rows[row].ops:
        if op in flow.reads:
            near = (*(read.origin for read in flow.reads[op]), *flow.readers.get(op, ()))
            yield from ((number, other) for other in near if (number, other) in owners)


def _members(together: Sets, sides: Sides) -> Mapping[Hashable, dict[tuple[int, int], None]]:
    members: dict[Hashable, dict[tuple[int, int], None]] = defaultdict(dict)
    for side in range(2):
        for row in range(len(sides[side].estimate.rows)):
            members[together.find((side, row))][side, row] = None
    return members


def _changed(
    together: Sets,
    sides: Sides,
    edits: Sequence[Edit],
    owners: Mapping[tuple[int, int], Hashable],
) -> Iterator[Cluster]:
    inside: dict[Hashable, list[Edit]] = defaultdict(list)
    for edit in edits:
        owner = next((owners[place] for place in edit.ops if place in owners), None)
        if owner is not None:
            inside[together.find(owner)].append(edit)
    for root, rows in _members(together, sides).items():
        if root in inside or _delta(sides, rows):
            yield Cluster(
                tuple(row for side, row in rows if side == 0),
                tuple(row for side, row in rows if side == 1),
                tuple(inside.get(root, ())),
            )


def _delta(sides: Sides, rows: Mapping[tuple[int, int], None]) -> bool:
    """Whether some rows cost something else on the two sides."""
    sums = [[0.0, 0, 0, 0], [0.0, 0, 0, 0]]
    for side, number in rows:
        row = sides[side].estimate.rows[number]
        parts = (row.timing.t_device, row.bytes, row.flops, row.count)
        sums[side] = [a + b for a, b in zip(sums[side], parts, strict=True)]
    (first, *counts), (second, *others) = sums
    return counts != others or abs(second - first) > ROUNDING * max(first, second)
