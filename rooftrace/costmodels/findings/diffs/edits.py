"""What changed kernel by kernel, and which of the changes follow from others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from rooftrace.costmodels.findings.diffs.flow import Read, in_any_order
from rooftrace.costmodels.findings.diffs.sides import Side, Sides
from rooftrace.tracer.changes.aligning import Pair
from rooftrace.tracer.graph import Op, Tensor


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
    own = tuple(
        position
        for position, first, second in differing
        if first.origin not in gone and second.origin not in new
    )
    return replace(edit, is_root=bool(own) or not differing, reads=own)


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
    """What tells two tensors apart: precision and shape."""
    return tensor.dtype, tensor.shape


def op_of(sides: Sides, edit: Edit) -> Op:
    """The op of an edit, of the second side where it has one."""
    if edit.after is not None:
        return sides.after.graph.ops[edit.after]
    assert edit.before is not None
    return sides.before.graph.ops[edit.before]
