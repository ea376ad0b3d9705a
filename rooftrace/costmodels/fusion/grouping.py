"""Which ops share a kernel.

`fuse` partitions the kernels of a graph: every kernel op is in exactly one group, and contracting
the groups leaves no cycle.  Which ops may fuse comes from their rules (pointwise, reduction,
gather); how groups grow is here; what a group is called comes from the table in `patterns`.

Of a repeat one iteration stands in the graph, between two equal ones.  What joins those to it joins
every two; a kernel never goes on through more than two (see `Neighbourhood`), where Inductor, of a
loop written out, would put as many turns into one as MAX_GROUP has room for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fusion.index_space import (
    UNROLLED,
    dependencies,
    goes_down,
    is_split,
    iteration,
    long_chains,
    needed_by,
    stored,
    writes_many,
    writes_split_rows,
)
from rooftrace.costmodels.fusion.inductor_stores import stored_wide
from rooftrace.costmodels.fusion.labels import group_name
from rooftrace.costmodels.fusion.runs import Neighbourhood, listed
from rooftrace.costmodels.pricing import PLACES, FusionClass, find_rule
from rooftrace.tracer.graph import Op, OpGraph

MAX_GROUP = 64
"""No more ops than this in one group (Inductor's own limit, config.max_fusion_size)."""

SMALL = 4096
"""A producer of at most this many elements is computed inside its consumer, whatever its size."""

FEW_READS = 4
"""So is a larger one that is broadcast and reads no more than this (realize_reads_threshold).

Inductor computes it again in every consumer; here it stands in the first, which writes it.
"""

NEAR = 64
"""Kernels further apart in launch order are not merged for a tensor that both read (as Inductor's
scheduler leaves nodes alone that are that far apart)."""


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """One kernel: indices of its ops in execution order, and what to call it.

    pattern: the name of a fused group, "op" for a single one.  name: that, or the op's name.
    known: whether every op has a rule.  times: how many kernels it stands for, those of its first
    op.  repeats: in whose iterations it is launched.

    What joins the end of an iteration to the beginning of the next stands there twice: once for the
    first iteration, and once for all others.
    """

    ops: tuple[int, ...]
    pattern: str
    name: str
    known: bool = True
    times: int = 1
    repeats: tuple[int, ...] = ()


@dataclass(slots=True)
class _Open:
    """A group while it grows.

    size: elements of its iteration space.  reduced: elements after its reduction, None without
    one.  floor: the highest rank of a group that it needs.  epoch: how many groups stood before the
    last wait.  stored: whether a library kernel or the caller reads a result of it.  split: whether
    it takes up what a split reduction left, and so finds its inputs in HBM.  down: whether it
    reduces columns (see DOWN).  long: whether a result
    larger than SMALL is one of a LONG_CHAIN.  reads, made: storages.
    late: members whose results are there only when the kernel has ended.  repeats: in whose
    iterations it is launched.
    """

    rank: int
    size: int
    reduced: int | None
    fusable: bool
    members: list[int]
    floor: int = -1
    stored: bool = False
    epoch: int = 0
    split: bool = False
    down: bool = False
    long: bool = False
    reads: set[int] = field(default_factory=set)
    made: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    repeats: tuple[int, ...] = ()


def fuse(graph: OpGraph, execution: ExecutionModel) -> tuple[FusionGroup, ...]:
    """The kernels of `graph` in launch order under this execution model."""
    classes = _classes(graph)
    if execution.fusion == "detected":
        found = _grown(graph, classes)
        groups = [sorted(group.members) for group in found]
        repeats = [group.repeats for group in found]
    else:
        groups = [[op.id] for op in graph.ops if classes[op.id] not in (None, "free")]
        repeats = [graph.ops[members[0]].repeats for members in groups]
    named = tuple(map(partial(_named, graph), groups, repeats))
    return named if _adds_up(graph, named) else tuple(map(partial(_named, graph), groups))


def _named(
    graph: OpGraph, members: Sequence[int], repeats: tuple[int, ...] | None = None
) -> FusionGroup:
    ops = [graph.ops[i] for i in members]
    known = all(find_rule(op.target) is not None for op in ops)
    name = group_name(ops)
    return FusionGroup(
        tuple(members),
        name if len(ops) > 1 else "op",
        name,
        known,
        graph.times(ops[0]),
        ops[0].repeats if repeats is None else repeats,
    )


def _adds_up(graph: OpGraph, groups: Sequence[FusionGroup]) -> bool:
    """Whether as many kernels of each kind are launched as there are."""
    if not graph.repeats:
        return True
    left: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        launched = math.prod(graph.repeats[r].count for r in group.repeats)
        left[tuple(graph.ops[i].target for i in group.ops)] += group.times - launched
    return not any(left.values())


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


def _grown(graph: OpGraph, classes: Sequence[FusionClass | None]) -> list[_Open]:
    """Groups by rank, alike between every two iterations of a repeat."""
    around = Neighbourhood(graph)
    while True:
        groups = _Grower(graph, classes, around).run()
        if not around.sites or not around.bar_uneven([group.members for group in groups]):
            return groups


class _Grower:
    """Grows groups greedily.

    Ops that may fuse wait until something that may not (or the end) needs them, so that a chain is
    formed right before its use.  Groups have ranks in launch order; an op joins only a group whose
    rank is at least that of every group it depends on, so every edge between groups goes to a
    higher rank and no cycle can arise.  A wait closes every group before it.

    In the end a group that its consumer can compute as it goes moves into the first one, and groups
    over the same space that share a tensor become one.  `benchmarks/inductor` compares the result
    with Inductor's own.
    """

    def __init__(
        self,
        graph: OpGraph,
        classes: Sequence[FusionClass | None],
        around: Neighbourhood,
    ) -> None:
        self.graph, self.classes, self.around = graph, classes, around
        self.listed = listed(graph)
        self.groups: list[_Open] = []
        self.group_of: dict[int, _Open] = {}
        self.waiting: dict[int, None] = {}
        self.needs = dependencies(graph, classes)
        self.needed_by = needed_by(self.needs)
        self.stored = stored(graph, classes, self.needs)
        self.long = long_chains(graph, classes, self.needs)
        self.wide = stored_wide(graph).keys()
        self.recent: list[_Open] = []
        self.user: Op | None = None
        self.closed = 0

    def run(self) -> list[_Open]:
        """All groups by rank."""
        for op in self.graph.ops:
            kind = self.classes[op.id]
            if op.kind == "sync":
                self._flush(self.needs[op.id], op)
                self.closed = len(self.groups)
                continue
            if kind is None or kind == "free":
                continue
            if kind == "opaque":
                self._flush(self.needs[op.id], op)
                self._start(op, 0, None, False)
            else:
                self.waiting[op.id] = None
        self._flush(list(self.waiting))
        self._move_to_only_consumer()
        self._merge_into_first_consumer()
        self._merge_readers()
        return [group for group in self.groups if group.members]

    def _move_to_only_consumer(self) -> None:
        """What only one later group uses is computed there, where that moves no more bytes: it has
        one large input, and that is written anyway."""
        for group in reversed(self.groups):
            if not group.fusable or group.reduced is not None:
                continue
            for number in sorted(group.members, reverse=True):
                users = [self.group_of.get(user) for user in self.needed_by[number]]
                target = users[0] if users else None
                if (
                    target is not None
                    and target is not group
                    and all(user is target for user in users)
                    and self._may_move(number, group, target)
                ):
                    group.members.remove(number)
                    self._add(self.graph.ops[number], target, late=False)

    def _may_move(self, number: int, group: _Open, target: _Open) -> bool:
        op, values = self.graph.ops[number], self.graph.values
        size, reduced = iteration(self.graph, op, self.classes[number])
        return (
            target.fusable
            and target.reduced is None is reduced
            and target.size == size == group.size
            and target.repeats == group.repeats
            and not group.late
            and not target.late
            and number not in self.stored
            and len(group.members) > 1
            and len(target.members) < MAX_GROUP
            and sum(values[i].elements > SMALL for i in op.inputs) == 1
            and all(self._is_written(n, number, group) for n in self.needs[number])
            and self._may_share([number], target)
        )

    def _is_written(self, number: int, reader: int, group: _Open) -> bool:
        """Whether a result leaves the group, or was made outside of it, whatever `reader` does."""
        return (
            self.group_of.get(number) is not group
            or number in self.stored
            or any(
                self.group_of.get(user) is not group
                for user in self.needed_by[number]
                if user != reader
            )
        )

    def _merge_into_first_consumer(self) -> None:
        """A group moves into the first group that needs it where their iteration spaces agree.

        That keeps the order: all that the group needs is launched before it, so before its
        consumers, and every other consumer comes later than the first.
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
            if not targets or -1 in targets or not group.members:
                continue
            target = self.groups[min(targets)]
            alone = len(targets) == 1 and not group.stored
            if target.down and not alone:
                continue
            if self._may_merge(group, target) or self._is_placed(group, target):
                self._merge(group, target)
                into[group.rank] = target.rank

    def _merge_readers(self) -> None:
        """Groups over the same space that share a tensor become one, the earlier of them.

        That keeps the order where all that the later one needs is launched before the earlier one.
        """
        last: dict[tuple[int, int | None, int], _Open] = {}
        for group in self.groups:
            if not group.members or not group.fusable:
                continue
            group.floor = self._floor(group)
            for storage in group.reads - group.made:
                other = last.get((group.size, group.reduced, storage))
                if (
                    other is not None
                    and (group.floor < other.rank or (group.floor == other.rank and not other.late))
                    and group.rank - other.rank <= NEAR
                    and group.epoch == other.epoch
                    and not (group.split or group.down or other.down)
                    and self._may_merge(group, other)
                ):
                    self._merge(group, other)
                    group = other
                    break
            for storage in group.reads | group.made:
                last[group.size, group.reduced, storage] = group

    def _merge(self, group: _Open, target: _Open) -> None:
        target.members.extend(group.members)
        target.reads |= group.reads
        target.made |= group.made
        target.late |= group.late
        target.stored |= group.stored
        target.split |= group.split
        target.down |= group.down
        target.size = max(target.size, group.size)
        target.reduced = target.reduced if group.reduced is None else group.reduced
        for op in group.members:
            self.group_of[op] = target
        group.members = []
        target.floor = self._floor(target)
        target.long |= group.long

    def _floor(self, group: _Open) -> int:
        """The highest rank among the other groups that this one needs."""
        others = (self.group_of.get(n) for op in group.members for n in self.needs[op])
        return max((g.rank for g in others if g is not None and g is not group), default=-1)

    def _may_merge(self, group: _Open, target: _Open) -> bool:
        return (
            _may_merge(group, target)
            and not self._reads_part(target.members, group)
            and not self._reads_part(group.members, target)
            and self._may_share(group.members, target)
        )

    def _is_placed(self, group: _Open, target: _Open) -> bool:
        """Whether all that the group makes is put into a larger tensor there (cat, pad)."""
        return (
            group.fusable
            and target.fusable
            and group.reduced is None
            and not group.stored
            and self.wide.isdisjoint(group.members)
            and group.size < target.size
            and len(target.members) + len(group.members) <= MAX_GROUP
            and all(
                self.group_of.get(user) is group
                or (self.group_of.get(user) is target and self._places(user))
                for op in group.members
                for user in self.needed_by[op]
            )
            and self._may_share(group.members, target)
        )

    def _places(self, user: int) -> bool:
        rule = find_rule(self.graph.ops[user].target)
        return rule is not None and PLACES in rule.traits

    def _reads_part(self, members: Iterable[int], group: _Open) -> bool:
        """Whether one of these ops reads a part of something long in the group."""
        if group.reduced is not None:
            return False
        values, graph = self.graph.values, self.graph
        parts = {
            values[i].storage
            for op in members
            for i in graph.ops[op].inputs
            if values[i].storage in group.made
            and values[i].elements < values[values[i].storage].elements
        }
        long = self.long.intersection(group.members) if parts else ()
        return any(not parts.isdisjoint(graph.ops[op].outputs) for op in long)

    def _may_share(self, members: Sequence[int], group: _Open) -> bool:
        """Whether that would not join iterations of a repeat in an uneven way."""
        return not self.around.sites or self.around.may_share([*members, *group.members])

    def _flush(self, roots: Sequence[int], user: Op | None = None) -> None:
        """Place the waiting ops that `roots` depend on, in execution order.

        They are launched where their `user` is.
        """
        found: set[int] = set()
        stack = [r for r in roots if r in self.waiting]
        while stack:
            op = stack.pop()
            if op in found:
                continue
            found.add(op)
            stack.extend(n for n in self.needs[op] if n in self.waiting)
        self.recent, self.user = [], user
        for op in sorted(found):
            del self.waiting[op]
            self._place(self.graph.ops[op])

    def _place(self, op: Op) -> None:
        kind = self.classes[op.id]
        size, reduced = iteration(self.graph, op, kind)
        needs = self.needs[op.id]
        producers = self._gathered(needs, size)
        floor = producers[-1].rank if producers else -1
        reads = self._storages(op, op.inputs)
        if writes_split_rows(self.graph, op, size, reduced):
            # One kernel reduces, the next writes the rows, and takes what comes after it.
            self._start(op, size, None, True)
            self.group_of[op.id].split = True
            return
        if writes_many(op):
            self._start(op, size, reduced, True)
            self.group_of[op.id].late.add(op.id)
            return
        if reduced is not None and goes_down(self.graph, op):
            self._start(op, size, reduced, True)
            self.group_of[op.id].down = True
            self.group_of[op.id].late.add(op.id)
            for producer in reversed(producers):
                self._take_from(producer, op, size)
            return
        # Siblings: groups of this flush that read the same tensor (halves of a rotary embedding).
        siblings = [
            g
            for g in takewhile(lambda g: g.rank > floor, reversed(self.recent))
            if g.size == size and g.members and not g.reads.isdisjoint(reads)
        ]
        for group in [*producers[-1:], *siblings]:
            if group.rank < self.closed or len(group.members) >= MAX_GROUP:
                continue
            joined = _joined(group, size, reduced)
            after = not group.late.isdisjoint(needs)
            if joined is None or (after and size != group.reduced):
                continue
            if self._reads_part([op.id], group) or not self._may_share([op.id], group):
                continue
            group.size, group.reduced = joined
            self._add(op, group, late=after or self._is_long(op, reduced))
            return
        self._start(op, size, reduced, True)
        if reduced is not None:
            for producer in reversed(producers):
                self._take_from(producer, op, size)

    def _gathered(self, needs: Sequence[int], size: int) -> list[_Open]:
        """The groups that made these, by rank; those that may are put into an earlier one of them.

        So the scale of a norm, made from its weight between the norm and its use, joins the norm.
        """
        groups = {id(g): g for n in needs if (g := self.group_of.get(n)) is not None}
        producers = sorted(groups.values(), key=lambda g: g.rank)
        while len(producers) > 1:
            last, before = producers[-1], producers[-2]
            if (
                last.floor > before.rank
                or before.rank < self.closed
                or size not in (before.size, before.reduced)
                or (last.floor == before.rank and before.late)
                or not self._may_merge(last, before)
            ):
                break
            self._merge(last, before)
            producers.pop()
        return producers

    def _take_from(self, group: _Open, op: Op, size: int) -> None:
        """Move what only this reduction needs so far out of the group that made it, to its own.

        A residual sum and its square belong to the norm that follows, not to the reduction before.
        """
        if not group.fusable or group.rank < self.closed:
            return
        own, members = self.group_of[op.id], set(group.members)
        found: set[int] = set()
        stack = [n for n in self.needs[op.id] if n in members]
        while stack:
            number = stack.pop()
            if number in found or len(found) + 1 >= MAX_GROUP or number in group.late:
                continue
            kind = self.classes[number]
            if (
                kind == "reduction"
                or iteration(self.graph, self.graph.ops[number], kind)[0] != size
            ):
                continue
            found.add(number)
            stack.extend(n for n in self.needs[number] if n in members)
        for number in sorted(found, reverse=True):
            if any(
                (own.down or user in self.group_of)
                and self.group_of.get(user) is not own
                and user not in found
                for user in self.needed_by[number]
            ):
                found.discard(number)
        if not found or len(found) == len(members) or not self._may_share(sorted(found), own):
            return
        group.members = [number for number in group.members if number not in found]
        for number in sorted(found):
            self._add(self.graph.ops[number], own, late=False)

    def _start(self, op: Op, size: int, reduced: int | None, fusable: bool) -> None:
        group = _Open(len(self.groups), size, reduced, fusable, [], epoch=self.closed)
        beside = fusable and self.user is not None and self.around.beside(self.user, op)
        group.repeats = self.user.repeats if beside and self.user else op.repeats
        self.groups.append(group)
        self._add(op, group, late=self._is_long(op, reduced))
        if fusable:
            self.recent.append(group)

    def _add(self, op: Op, group: _Open, late: bool) -> None:
        group.members.append(op.id)
        group.reads |= self._storages(op, op.inputs)
        group.made |= self._storages(op, op.outputs)
        group.stored = group.stored or op.id in self.stored
        for number in self.needs[op.id]:
            other = self.group_of.get(number)
            if other is not None and other is not group:
                group.floor = max(group.floor, other.rank)
        if late:
            group.late.add(op.id)
        self.group_of[op.id] = group
        if op.id in self.long:
            group.long |= any(self.graph.values[i].elements > SMALL for i in op.outputs)

    def _storages(self, op: Op, values: Sequence[int]) -> set[int]:
        """Storages of an op's inputs or outputs.

        Where it takes or makes all copies of one, there is a negative number for each further copy;
        of these no more than FEW_READS make a difference.
        """
        found = {self.graph.values[i].storage for i in values}
        for storage, count in self.listed.get(op.id, {}).items():
            if storage in found:
                more = range(min(count - 1, FEW_READS))
                found.update(-1 - storage * FEW_READS - copy for copy in more)
        return found

    def _is_long(self, op: Op, reduced: int | None) -> bool:
        """Whether the op reduces rows too long to stay on the SM, and writes only the result."""
        if reduced is None:
            return False
        values = self.graph.values
        row = max((values[i].elements for i in op.inputs), default=0)
        left = max((values[i].elements for i in op.outputs), default=0)
        return left <= reduced and is_split(row, max(reduced, 1))


def _may_merge(group: _Open, target: _Open) -> bool:
    """Whether a group can move into one that needs it, or that its consumer needs."""
    if (
        not group.fusable
        or not target.fusable
        or target.split
        or len(target.members) + len(group.members) > MAX_GROUP
    ):
        return False
    if group.late and target.size != group.reduced:
        return False
    if _is_inlined(group, target.size):
        return True
    return target.size == group.size and (
        target.reduced is None or group.reduced is None or target.reduced == group.reduced
    )


def _is_inlined(group: _Open, size: int) -> bool:
    """Whether a kernel over `size` elements computes this broadcast group as it goes."""
    if group.reduced is not None or not group.size or size % group.size:
        return False
    if group.size <= SMALL:
        return True
    return len(group.reads - group.made) <= FEW_READS and not group.stored and not group.long


def _is_cut(group: _Open, size: int) -> bool:
    """Whether what the group makes is inlined into a consumer of a part (halves, unrolled sums)."""
    return (
        group.reduced is None
        and not group.stored
        and 0 < size < group.size < UNROLLED * size
        and len(group.reads - group.made) <= FEW_READS
    )


def _joined(group: _Open, size: int, reduced: int | None) -> tuple[int, int | None] | None:
    """Iteration space of the group with one more op of this size, None where they do not fit."""
    if not group.fusable:
        return None
    if reduced is None:
        if size in (group.size, group.reduced):
            return group.size, group.reduced
        if group.reduced is None:
            return (size, None) if _is_inlined(group, size) or _is_cut(group, size) else None
        inlined = size and size <= SMALL and group.size % size == 0
        return (group.size, group.reduced) if inlined else None
    if group.reduced is not None:
        return (size, reduced) if (size, reduced) == (group.size, group.reduced) else None
    return (size, reduced) if size == group.size or _is_inlined(group, size) else None
