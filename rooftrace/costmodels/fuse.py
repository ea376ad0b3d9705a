"""Which ops share a kernel.

`fuse` partitions the kernels of a graph: every kernel op is in exactly one group, and contracting
the groups leaves no cycle.  Which ops may fuse comes from their rules (pointwise, reduction,
gather); how groups grow is here; what a group is called comes from the table in `patterns`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.patterns import group_name
from rooftrace.costmodels.registry import FusionClass, find_rule
from rooftrace.tracer.graph import Op, OpGraph

MAX_GROUP = 64
"""No more ops than this in one group (Inductor's own limit, config.max_fusion_size)."""

SMALL = 4096
"""A producer of at most this many elements is recomputed inside its consumer, whatever its size."""

LONGEST_ROW = 1 << 18
"""Rows up to this length stay near the SM that reduces them, so that the same kernel can go over
them again.  What a longer reduction leaves (the norm of all gradients) is there when it has ended.
"""


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """One kernel: indices of its ops in execution order, and what to call it.

    pattern: the name of a fused group, "op" for a single one.  name: that, or the op's name.
    known: whether every op has a rule.
    """

    ops: tuple[int, ...]
    pattern: str
    name: str
    known: bool = True


@dataclass(slots=True)
class _Open:
    """A group while it grows.

    size: elements of its iteration space.  reduced: elements after its reduction, None without
    one.  late: members whose results are there only when the kernel has ended.
    """

    rank: int
    size: int
    reduced: int | None
    fusable: bool
    members: list[int]
    reads: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)


def fuse(graph: OpGraph, execution: ExecutionModel) -> tuple[FusionGroup, ...]:
    """The kernels of `graph` in launch order under this execution model."""
    classes = _classes(graph)
    if execution.fusion == "detected":
        groups = [sorted(group.members) for group in _Grower(graph, classes).run()]
    else:
        groups = [[op.id] for op in graph.ops if classes[op.id] not in (None, "free")]
    return tuple(_named(graph, members) for members in groups)


def _named(graph: OpGraph, members: Sequence[int]) -> FusionGroup:
    ops = [graph.ops[i] for i in members]
    known = all(find_rule(op.target) is not None for op in ops)
    name = group_name(ops)
    return FusionGroup(tuple(members), name if len(ops) > 1 else "op", name, known)


def _classes(graph: OpGraph) -> list[FusionClass | None]:
    """Fusion class by op: None for views and waits, opaque without a rule."""
    memo: dict[str, FusionClass] = {}
    found: list[FusionClass | None] = []
    for op in graph.ops:
        if op.kind != "kernel":
            found.append(None)
            continue
        kind = memo.get(op.target)
        if kind is None:
            rule = find_rule(op.target)
            kind = memo[op.target] = rule.fusion if rule else "opaque"
        found.append(kind)
    return found


class _Grower:
    """Grows groups greedily.

    Ops that may fuse wait until something that may not (or the end) needs them, so that a chain is
    formed right before its use.  Groups have ranks in launch order; an op joins only a group whose
    rank is at least that of every group it depends on, so every edge between groups goes to a
    higher rank and no cycle can arise.  A wait closes every group before it.
    """

    def __init__(self, graph: OpGraph, classes: Sequence[FusionClass | None]) -> None:
        self.graph, self.classes = graph, classes
        self.groups: list[_Open] = []
        self.group_of: dict[int, _Open] = {}
        self.waiting: dict[int, None] = {}
        self.needs = _dependencies(graph, classes)
        self.recent: list[_Open] = []
        self.closed = 0

    def run(self) -> list[_Open]:
        """All groups by rank."""
        for op in self.graph.ops:
            kind = self.classes[op.id]
            if op.kind == "sync":
                self._flush(self.needs[op.id])
                self.closed = len(self.groups)
                continue
            if kind is None or kind == "free":
                continue
            if kind == "opaque":
                self._flush(self.needs[op.id])
                self._start(op, 0, None, False)
            else:
                self.waiting[op.id] = None
        self._flush(list(self.waiting))
        self._merge_into_only_consumer()
        return [group for group in self.groups if group.members]

    def _merge_into_only_consumer(self) -> None:
        """A group that only one other group needs moves into it where their iteration spaces agree.

        That keeps the order: all that the first needs is launched before it, so before the second.
        """
        consumers: dict[int, set[int]] = defaultdict(set)
        for op, before in enumerate(self.needs):
            group = self.group_of.get(op)
            for other in before:
                source = self.group_of.get(other)
                if source is not None and source is not group:
                    # -1: needed by what is no kernel (a wait), so it has to stay where it is.
                    consumers[source.rank].add(group.rank if group is not None else -1)
        into = list(range(len(self.groups)))
        for group in reversed(self.groups):
            targets = {into[rank] if rank >= 0 else -1 for rank in consumers[group.rank]}
            if len(targets) != 1 or -1 in targets:
                continue
            target = self.groups[targets.pop()]
            if _may_merge(group, target):
                target.members.extend(group.members)
                target.reads |= group.reads
                target.reduced = target.reduced if group.reduced is None else group.reduced
                into[group.rank] = target.rank
                group.members = []

    def _flush(self, roots: Sequence[int]) -> None:
        """Place the waiting ops that `roots` depend on, in execution order."""
        found: set[int] = set()
        stack = [r for r in roots if r in self.waiting]
        while stack:
            op = stack.pop()
            if op in found:
                continue
            found.add(op)
            stack.extend(n for n in self.needs[op] if n in self.waiting)
        self.recent = []
        for op in sorted(found):
            del self.waiting[op]
            self._place(self.graph.ops[op])

    def _place(self, op: Op) -> None:
        size, reduced = _iteration(self.graph, op, self.classes[op.id])
        needs = self.needs[op.id]
        producers = [self.group_of[n] for n in needs if n in self.group_of]
        floor = max((g.rank for g in producers), default=-1)
        reads = {self.graph.values[i].storage for i in op.inputs}
        candidates = [g for g in producers if g.rank == floor]
        # Siblings: groups of this flush that read the same tensor (halves of a rotary embedding).
        candidates += [
            g
            for g in reversed(self.recent)
            if g.rank > floor and g.size == size and g.reads & reads
        ]
        for group in candidates:
            if group.rank < self.closed or len(group.members) >= MAX_GROUP:
                continue
            joined = _joined(group, size, reduced)
            after = not group.late.isdisjoint(needs)
            if joined is None or (after and size != group.reduced):
                continue
            group.size, group.reduced = joined
            self._add(op, group, reads, late=after or self._is_long(op, reduced))
            return
        self._start(op, size, reduced, True)

    def _start(self, op: Op, size: int, reduced: int | None, fusable: bool) -> None:
        group = _Open(len(self.groups), size, reduced, fusable, [])
        self.groups.append(group)
        self._add(
            op,
            group,
            {self.graph.values[i].storage for i in op.inputs},
            late=self._is_long(op, reduced),
        )
        if fusable:
            self.recent.append(group)

    def _add(self, op: Op, group: _Open, reads: set[int], late: bool) -> None:
        group.members.append(op.id)
        group.reads |= reads
        if late:
            group.late.add(op.id)
        self.group_of[op.id] = group

    def _is_long(self, op: Op, reduced: int | None) -> bool:
        """Whether the op reduces rows too long to stay on the SM, and writes only the result."""
        if reduced is None:
            return False
        values = self.graph.values
        row = max((values[i].elements for i in op.inputs), default=0)
        left = max((values[i].elements for i in op.outputs), default=0)
        return left <= reduced and row > LONGEST_ROW * max(reduced, 1)


def _may_merge(group: _Open, target: _Open) -> bool:
    """Whether a group can move into its only consumer."""
    if (
        not group.fusable
        or not target.fusable
        or len(target.members) + len(group.members) > MAX_GROUP
    ):
        return False
    if group.late and target.size != group.reduced:
        return False
    if (
        group.size <= SMALL
        and group.reduced is None
        and group.size
        and target.size % group.size == 0
    ):
        return True
    return target.size == group.size and (
        target.reduced is None or group.reduced is None or target.reduced == group.reduced
    )


def _joined(group: _Open, size: int, reduced: int | None) -> tuple[int, int | None] | None:
    """Iteration space of the group with one more op of this size, None where they do not fit."""
    if not group.fusable:
        return None
    if reduced is None:
        if size in (group.size, group.reduced):
            return group.size, group.reduced
        if group.reduced is None:
            big, small = max(size, group.size), min(size, group.size)
            if small and big % small == 0 and (big // small <= 4 or small <= SMALL):
                return big, None
            return None
        inlined = size and size <= SMALL and group.size % size == 0
        return (group.size, group.reduced) if inlined else None
    if group.reduced is not None:
        if size == group.size and reduced == group.reduced:
            return group.size, group.reduced
        # A reduction of what a reduction left, down to next to nothing (a mean of losses).
        again = size == group.reduced and reduced <= 1
        return (group.size, group.reduced) if again else None
    if size == group.size or (group.size <= SMALL and group.size and size % group.size == 0):
        return size, reduced
    return None


def _iteration(graph: OpGraph, op: Op, kind: FusionClass | None) -> tuple[int, int | None]:
    """(elements iterated over, elements after the reduction or None)."""
    outputs = [graph.values[i].elements for i in op.outputs]
    if kind != "reduction":
        # A list of outputs that are not alike (_foreach_add) is iterated over as a whole.
        lists = op.name.startswith("aten._foreach")
        return sum(outputs) if lists else max(outputs, default=0), None
    inputs = [graph.values[i].elements for i in op.inputs]
    size = max([*inputs, *outputs], default=0)
    smallest = min((n for n in outputs if n), default=1)
    if smallest < size:
        return size, smallest
    # Writes whole rows back (softmax): the reduction runs along `dim`, or along the last dimension.
    shape = graph.values[op.inputs[0]].shape if op.inputs else ()
    dimension = op.arguments.get("dim", -1)
    axis = dimension if isinstance(dimension, int) and -len(shape) <= dimension < len(shape) else -1
    length = shape[axis] if shape else 1
    return size, size // max(length, 1)


def _dependencies(graph: OpGraph, classes: Sequence[FusionClass | None]) -> list[list[int]]:
    """For each op the kernels that have to run before it.

    Those are writers of what it reads and, for what it overwrites, earlier readers too.
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    needs: list[list[int]] = []
    values = graph.values
    for op in graph.ops:
        if op.kind == "view" or classes[op.id] == "free":
            needs.append([])
            continue
        read = {values[i].storage for i in op.inputs}
        before = {writer[s] for s in read if s in writer}
        if op.kind == "kernel":
            for storage in {values[i].storage for i in op.outputs}:
                if storage in read or storage in writer:
                    before.update(readers.pop(storage, ()))
                    if storage in writer:
                        before.add(writer[storage])
                writer[storage] = op.id
            for storage in read:
                readers[storage].append(op.id)
        before.discard(op.id)
        needs.append(sorted(before))
    return needs
