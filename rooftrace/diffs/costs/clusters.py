"""Kernel edits between two revisions, and clusters of kernels that changed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.diffs.changes import Pair
from rooftrace.diffs.costs.sides import Read, Side, Sides, in_any_order
from rooftrace.graph import PARTS, Op, Tensor, pattern_of

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
        """The representative of the set of an item."""
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
    """The place of an edit's cause: its line, or else its op and module."""
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
        """Join an edit with those that made its inputs, or that read the same changed tensor.

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
        """Join groups with other costs but without an edit to an edit next to them."""
        edited = {self.together.find(owner) for owner in self.owners.values()}
        for rows in self._members().values():
            if self.together.find(rows[0]) in edited or not self._differs(rows):
                continue
            place = next((p for row in rows for p in self._edits_around(*row)), None)
            if place is not None:
                self.together.join(self.owners[place], rows[0])

    def _edits_around(self, number: int, row: int) -> Iterator[Node]:
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
        costs = self.sides.costs(*_numbers(rows)).values()
        return any(cost.before != cost.after for cost in costs)


def _numbers(rows: Sequence[Node]) -> Iterator[tuple[int, ...]]:
    """The numbers of the rows of either side."""
    for number in range(2):
        yield tuple(row for side, row in rows if side == number)


# -- edits -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Edit:
    """A kernel that is new, gone, or does the same to other tensors; `times` of its runs.

    before, after: numbers of the ops, None where that side has none.  is_root: whether it is more
    than the consequence of an edit before it in the dataflow.  reads: of a changed kernel that is a
    root, the positions of the tensors it reads that differ for another reason than an edit.
    """

    before: int | None
    after: int | None
    times: int
    is_root: bool = True
    reads: tuple[int, ...] = ()

    @property
    def is_pair(self) -> bool:
        """Whether both sides have the kernel."""
        return self.before is not None and self.after is not None

    @property
    def ops(self) -> Iterator[tuple[int, int]]:
        """Side (0 or 1) and number of its ops."""
        for side, op in enumerate((self.before, self.after)):
            if op is not None:
                yield side, op


def edits_of(sides: Sides) -> list[Edit]:
    """Every kernel that differs between two sides, those of the second side in its order first."""
    removed, added = sides.matching.left
    changed = [pair for pair in sides.matching.pairs if _differs(sides, pair)]
    gone = {pair.before for pair in changed} | set(removed)
    new = {pair.after for pair in changed} | set(added)
    edits = [_of_pair(sides, pair, gone, new) for pair in changed]
    edits += [Edit(None, op, times) for op, times in added.items()]
    edits.sort(key=lambda edit: edit.after or 0)
    return edits + [Edit(op, None, times) for op, times in sorted(removed.items())]


def _differs(sides: Sides, pair: Pair[int]) -> bool:
    """Whether the two of a pair work on other tensors, or cost something else for themselves."""
    before, after = sides.before, sides.after
    if before.flow.exact(pair.before) != after.flow.exact(pair.after):
        return True
    if before.exchange(pair.before) != after.exchange(pair.after):
        return True
    first, second = before.cost(pair.before), after.cost(pair.after)
    if first.work != second.work:
        return True
    return any(first.bytes(wire) != second.bytes(wire) for wire in ("hbm", "link"))


def _of_pair(sides: Sides, pair: Pair[int], gone: Collection[int], new: Collection[int]) -> Edit:
    """The edit of a changed pair: a root unless edited kernels made all that differs."""
    edit = Edit(pair.before, pair.after, pair.times)
    differing = list(differing_reads(sides, pair.before, pair.after))
    roots = tuple(
        position
        for position, first, second in differing
        if first.origin not in gone and second.origin not in new
    )
    return replace(edit, is_root=bool(roots) or not differing, reads=roots)


def pairs_of(edits: Iterable[Edit]) -> Iterator[tuple[Edit, int, int]]:
    """The edits that both sides have, each with the numbers of its ops."""
    for edit in edits:
        if edit.before is not None and edit.after is not None:
            yield edit, edit.before, edit.after


def differing_reads(sides: Sides, first: int, second: int) -> Iterator[tuple[int, Read, Read]]:
    """Position and reads of the tensors whose size or precision differs between two kernels."""
    reads = zip(_in_order(sides.before, first), _in_order(sides.after, second), strict=False)
    for position, (a, b) in enumerate(reads):
        if size(tensor_of(sides.before, a)) != size(tensor_of(sides.after, b)):
            yield position, a, b


def _in_order(side: Side, op: int) -> list[Read]:
    reads = list(side.flow.reads[op])
    if in_any_order(side.graph.ops[op]):
        reads.sort(key=lambda read: (size(tensor_of(side, read)), read.origin < 0))
    return reads


def tensor_of(side: Side, read: Read) -> Tensor:
    """The tensor that is read, as the kernel sees it."""
    return side.graph.values[read.value]


def size(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Precision and shape of a tensor."""
    return tensor.dtype, tensor.shape


def op_of(sides: Sides, edit: Edit) -> Op:
    """The op of an edit, of the second side where it has one."""
    if edit.after is not None:
        return sides.after.graph.ops[edit.after]
    assert edit.before is not None
    return sides.before.graph.ops[edit.before]
