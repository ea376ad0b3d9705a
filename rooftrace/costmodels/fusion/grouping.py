"""Which ops share a kernel, and which join made it so.

`fuse` partitions the kernels of a graph: every kernel op is in exactly one group, and contracting
the groups leaves no cycle.  Rules say which ops may fuse (pointwise, reduction, gather), the table
`JOINS` why they do, the table `PATTERNS` the name of a group.

The graph shows one iteration of a repeat between two equal neighbours.  A kernel that joins it to a
neighbour does so between every two iterations, and never spans more than two (see `Neighbourhood`).
Inductor, which sees the loop unrolled, would put as many iterations into one kernel as MAX_GROUP
has room for.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import takewhile

from rooftrace.costmodels.fusion import traffic
from rooftrace.costmodels.fusion.executions import ExecutionModel
from rooftrace.costmodels.fusion.index_space import (
    goes_down,
    is_split,
    writes_many,
    writes_split_rows,
)
from rooftrace.costmodels.fusion.joins import (
    GATHER,
    MOVE,
    NEAR,
    OP,
    PLACE,
    READER,
    SIBLING,
    TAKE,
    Join,
    fitting,
    joins_at,
    own_joins,
)
from rooftrace.costmodels.fusion.kernels import MAX_GROUP, Facts, KernelView, single
from rooftrace.costmodels.fusion.partition import (
    FusionGroup,
    Open,
    Partition,
    larger_groups,
    with_apart,
)
from rooftrace.costmodels.fusion.runs import Neighbourhood
from rooftrace.costmodels.ops import Cost, price_ops
from rooftrace.graph import Op, OpGraph, marks


def fuse(
    graph: OpGraph, execution: ExecutionModel, op_costs: Sequence[Cost] | None = None
) -> tuple[FusionGroup, ...]:
    """The kernels of `graph` in launch order under this execution model.

    op_costs: those of the graph's ops, if computed before; joins of users may need them.
    """
    if execution.fusion != "detected":
        classes = Facts(graph).classes
        launched = (op for op in graph.ops if classes[op.id] not in (None, "free"))
        return tuple(FusionGroup.of(graph, [op.id], op.repeats) for op in launched)
    grown = _grown(graph)
    groups = tuple(FusionGroup.of(graph, k.members, k.repeats, k.merges) for k in grown)
    if not _adds_up(graph, groups):
        groups = tuple(FusionGroup.of(graph, k.members, None, k.merges) for k in grown)
    return _with_own_joins(graph, groups, op_costs, execution) if own_joins() else groups


def _with_own_joins(
    graph: OpGraph,
    groups: tuple[FusionGroup, ...],
    op_costs: Sequence[Cost] | None,
    execution: ExecutionModel,
) -> tuple[FusionGroup, ...]:
    """The groups that joins of users leave, applied until they make no larger one."""
    op_costs = price_ops(graph)[0] if op_costs is None else op_costs
    before, costs_before = groups, traffic.group_costs(graph, groups, op_costs, execution)
    costs = costs_before
    while True:
        larger = larger_groups(graph, groups, op_costs, costs, own_joins())
        if len(larger) == len(groups):
            break
        groups = larger
        costs = traffic.group_costs(graph, groups, op_costs, execution)
    return with_apart(graph, before, op_costs, costs_before, own_joins(), groups)


def _adds_up(graph: OpGraph, groups: Sequence[FusionGroup]) -> bool:
    """Whether the launches of each kind of kernel add up to the number of such kernels."""
    if not graph.repeats:
        return True
    left: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        launched = math.prod(graph.repeats[r].count for r in group.repeats)
        left[tuple(graph.ops[i].target for i in group.ops)] += group.times - launched
    return not any(left.values())


def _grown(graph: OpGraph) -> list[Open]:
    """Kernels by rank, equal between every two iterations of a repeat."""
    facts, around = Facts(graph), Neighbourhood(graph)
    while True:
        partition = Partition(facts, around)
        grow(partition)
        _move_to_only_consumer(partition)
        _merge_into_first_consumer(partition)
        _merge_readers(partition)
        kernels = [kernel for kernel in partition.kernels if kernel.members]
        if not around.sites or not around.bar_uneven([kernel.members for kernel in kernels]):
            return kernels


# -- merging ---------------------------------------------------------------------------------------
# Merges grown kernels with their readers, and with readers of the same tensor.
#
# `benchmarks/inductor` compares the result with Inductor's.


def _move_to_only_consumer(partition: Partition) -> None:
    """An op that only one later kernel uses is computed there, where that moves no more bytes."""
    joins = joins_at(MOVE)
    for kernel in reversed(partition.kernels):
        if not kernel.fusable or kernel.reduced is not None:
            continue
        for number in sorted(kernel.members, reverse=True):
            users = partition.facts.needed_by[number]
            targets = {id(k): k for k in map(partition.kernel_of.get, users)}
            if len(targets) != 1:
                continue
            (target,) = targets.values()
            if target is None or target is kernel:
                continue
            part = single(partition.facts, number)
            join = fitting(joins, part, target)
            if join is not None and _may_move(partition, number, kernel, target):
                partition.withdraw((number,), kernel)
                partition.add(part, target, late=False, join=join)


def _may_move(partition: Partition, number: int, kernel: Open, target: Open) -> bool:
    """Whether an op can leave its kernel for another one, and each result that it reads is
    written anyway."""
    facts = partition.facts
    return (
        target.fusable
        and target.repeats == kernel.repeats
        and target.size == kernel.size
        and not kernel.late
        and not target.late
        and number not in facts.stored
        and len(kernel.members) > 1
        and len(target.members) < MAX_GROUP
        and all(_is_written(partition, n, number, kernel) for n in facts.needs[number])
        and partition.may_share([number], target)
    )


def _is_written(partition: Partition, number: int, reader: int, kernel: Open) -> bool:
    """Whether a result leaves the kernel, or was made outside of it, whatever `reader` does."""
    kernel_of = partition.kernel_of
    return (
        kernel_of.get(number) is not kernel
        or number in partition.facts.stored
        or any(
            kernel_of.get(user) is not kernel
            for user in partition.facts.needed_by[number]
            if user != reader
        )
    )


def _merge_into_first_consumer(partition: Partition) -> None:
    """A kernel moves into the first one that needs it, where a join says so.

    That keeps the order: all that the kernel needs is launched before it, so before its consumers,
    and every other consumer comes later than the first.
    """
    readers, places = joins_at(READER), joins_at(PLACE)
    consumers = _consumers(partition)
    into = list(range(len(partition.kernels)))
    for kernel in reversed(partition.kernels):
        targets = {into[rank] if rank >= 0 else -1 for rank in consumers[kernel.rank]}
        if not targets or -1 in targets or not kernel.members:
            continue
        target = partition.kernels[min(targets)]
        alone = len(targets) == 1 and not kernel.stored
        again = partition.facts.again.issuperset(kernel.members)
        if target.down and not alone and not again:
            continue
        join = partition.joining(readers, kernel, target)
        join = join or partition.placing(places, kernel, target)
        if join is not None:
            partition.merge(kernel, target, join)
            into[kernel.rank] = target.rank


def _consumers(partition: Partition) -> dict[int, set[int]]:
    """By rank: the ranks of kernels that need it; -1 for a wait, before which it has to stay."""
    consumers: dict[int, set[int]] = defaultdict(set)
    for op, before in enumerate(partition.facts.needs):
        kernel = partition.kernel_of.get(op)
        for source in partition.kernels_of(before):
            if source is not kernel:
                consumers[source.rank].add(kernel.rank if kernel is not None else -1)
    return consumers


def _merge_readers(partition: Partition) -> None:
    """Kernels over the same elements that share a tensor become one, the earlier of them.

    That keeps the order where all that the later one needs is launched before the earlier one.
    """
    joins = joins_at(SIBLING)
    last: dict[tuple[int, int | None, int], Open] = {}
    for kernel in partition.kernels:
        if not kernel.members or not kernel.fusable:
            continue
        kernel.floor = partition.floor(kernel)
        for storage in kernel.reads - kernel.made:
            other = last.get((kernel.size, kernel.reduced, storage))
            if other is None or not _may_go_first(kernel, other):
                continue
            join = partition.joining(joins, kernel, other)
            if join is not None:
                partition.merge(kernel, other, join)
                kernel = other
                break
        for storage in kernel.reads | kernel.made:
            last[kernel.size, kernel.reduced, storage] = kernel


def _may_go_first(kernel: Open, other: Open) -> bool:
    """Whether all that a kernel needs is launched before an earlier one, which lies near."""
    ready = kernel.floor < other.rank or (kernel.floor == other.rank and not other.late)
    return (
        ready
        and kernel.rank - other.rank <= NEAR
        and kernel.epoch == other.epoch
        and not (kernel.split or kernel.down or other.down)
    )


# -- growing ---------------------------------------------------------------------------------------
# Puts ops into kernels, one after the other, right before something needs them.
#
# Ops that may fuse wait until something that may not (or the end) needs them, so that a chain is
# formed right before its use.  A wait of the host closes every kernel before it.


def grow(partition: Partition) -> None:
    """Put every op that runs on the device into a kernel."""
    _Grower(partition).run()


class _Grower:
    """The state of `grow`, op after op."""

    def __init__(self, partition: Partition) -> None:
        self.partition, self.facts = partition, partition.facts
        self.graph, self.needs = self.facts.graph, self.facts.needs
        self.channels_last = traffic.reduces_images_apart(self.graph)
        self.by_stage = {stage: joins_at(stage) for stage in (OP, GATHER, SIBLING, TAKE)}
        self.waiting: dict[int, None] = {}  # ops that no other op has needed yet, in order
        self.user: Op | None = None  # the op that needs the ops being placed
        self.recent: list[Open] = []  # the kernels that were begun for it
        self.closed = 0  # how many kernels stood before the last wait

    def run(self) -> None:
        """Place every op of the graph."""
        for op in self.graph.ops:
            kind = self.facts.classes[op.id]
            if op.kind == "sync" or op.name in marks.BOUNDARIES:
                self._flush(list(self.waiting) if op.kind != "sync" else self.needs[op.id], op)
                self.closed = len(self.partition.kernels)
            elif kind == "opaque":
                self._flush(self.needs[op.id], op)
                self._start(single(self.facts, op.id, fusable=False))
            elif kind not in (None, "free"):
                self.waiting[op.id] = None
        self._flush(list(self.waiting))

    def _flush(self, roots: Sequence[int], user: Op | None = None) -> None:
        """Place the waiting ops that `roots` depend on, in execution order.

        They are launched where their `user` is.
        """
        reached: set[int] = set()
        stack = [r for r in roots if r in self.waiting]
        while stack:
            op = stack.pop()
            if op in reached:
                continue
            reached.add(op)
            stack.extend(n for n in self.needs[op] if n in self.waiting)
        self.recent, self.user = [], user
        for op in sorted(reached):
            del self.waiting[op]
            self._place(self.graph.ops[op])

    def _place(self, op: Op) -> None:
        part = single(self.facts, op.id)
        producers = self._gathered(self.needs[op.id], part.size)
        if writes_split_rows(self.graph, op, part.size, part.reduced):
            # One kernel reduces, the next writes the rows, and takes the ops after it.
            part.reduced = None
            self._start(part).split = True
        elif writes_many(op):
            self._start(part, late=True)
        elif part.reduced is not None and goes_down(self.graph, op, self.channels_last):
            kernel = self._start(part, late=True)
            kernel.down = True
            self._take(part, kernel, producers)
        elif not self._join(part, producers):
            kernel = self._start(part)
            if part.reduced is not None:
                self._take(part, kernel, producers)

    def _join(self, part: KernelView, producers: Sequence[Open]) -> bool:
        """Put an op into the last kernel that makes its operands, or into one that reads the same
        tensor (halves of a rotary embedding); whether there is such a kernel."""
        (number,) = part.members
        floor = producers[-1].rank if producers else -1
        later = takewhile(lambda kernel: kernel.rank > floor, reversed(self.recent))
        siblings = [k for k in later if k.members and not k.reads.isdisjoint(part.reads)]
        tries = [(kernel, OP) for kernel in producers[-1:]]
        tries += [(kernel, SIBLING) for kernel in siblings]
        for kernel, stage in tries:
            if not kernel.fusable or kernel.rank < self.closed or len(kernel.members) >= MAX_GROUP:
                continue
            after = not kernel.late.isdisjoint(self.needs[number])
            if after and part.size != kernel.reduced:
                continue
            join = fitting(self.by_stage[stage], kernel, part)
            if (
                join is None
                or self.partition.reads_part([number], kernel)
                or not self.partition.may_share([number], kernel)
            ):
                continue
            if kernel.reduced is None:
                kernel.size, kernel.reduced = part.size, part.reduced
            late = after or self._is_long(part)
            self.partition.add(part, kernel, late, join)
            return True
        return False

    def _gathered(self, needs: Sequence[int], size: int) -> list[Open]:
        """The kernels that made these values, by rank, after merging the last where a join says so.

        So the scale of a norm, made from its weight between the norm and its use, joins the norm.
        """
        kernels = {kernel.rank: kernel for kernel in self.partition.kernels_of(needs)}
        producers = [kernels[rank] for rank in sorted(kernels)]
        while len(producers) > 1:
            last, before = producers[-1], producers[-2]
            if (
                last.floor > before.rank
                or before.rank < self.closed
                or size not in (before.size, before.reduced)
                or (last.floor == before.rank and before.late)
            ):
                break
            join = self.partition.joining(self.by_stage[GATHER], last, before)
            if join is None:
                break
            self.partition.merge(last, before, join)
            producers.pop()
        return producers

    def _take(self, part: KernelView, target: Open, producers: Sequence[Open]) -> None:
        """Move ops that so far only this reduction needs from their kernels into `target`.

        A residual sum and its square belong to the norm that follows, not to the reduction before.
        """
        for kernel in reversed(producers):
            if kernel.fusable and kernel.rank >= self.closed:
                self._take_from(kernel, part, target)

    def _take_from(self, kernel: Open, part: KernelView, target: Open) -> None:
        members = set(kernel.members)
        taken: dict[int, tuple[KernelView, Join]] = {}
        stack = [n for n in self.needs[part.members[0]] if n in members]
        while stack:
            number = stack.pop()
            if number in taken or len(taken) + 1 >= MAX_GROUP or number in kernel.late:
                continue
            candidate = single(self.facts, number)
            join = fitting(self.by_stage[TAKE], candidate, part)
            if join is None:
                continue
            taken[number] = candidate, join
            stack.extend(n for n in self.needs[number] if n in members)
        for number in sorted(taken, reverse=True):
            if self._is_needed_elsewhere(number, target, taken):
                del taken[number]
        if not taken or len(taken) == len(members):
            return
        if not self.partition.may_share(sorted(taken), target):
            return
        self.partition.withdraw(taken.keys(), kernel)
        for number in sorted(taken):
            candidate, join = taken[number]
            self.partition.add(candidate, target, late=False, join=join)

    def _is_needed_elsewhere(self, number: int, target: Open, taken: Collection[int]) -> bool:
        """Whether anything but this kernel and the ops moved into it needs an op.

        Ops that wait to be placed do not count, except for a kernel that reduces columns.
        """
        kernel_of = self.partition.kernel_of
        return any(
            (target.down or user in kernel_of)
            and kernel_of.get(user) is not target
            and user not in taken
            for user in self.facts.needed_by[number]
        )

    def _start(self, part: KernelView, late: bool = False) -> Open:
        op = part.ops[0]
        user, around = self.user, self.partition.around
        near = part.fusable and user is not None and around.are_neighbours(user, op)
        repeats = user.repeats if near and user is not None else op.repeats
        kernel = self.partition.start(part, self.closed, repeats, late or self._is_long(part))
        if kernel.fusable:
            self.recent.append(kernel)
        return kernel

    def _is_long(self, part: KernelView) -> bool:
        """Whether the op reduces rows too long to stay on the SM, and writes only the result."""
        if part.reduced is None:
            return False
        values, (op,) = self.graph.values, part.ops
        row = max((values[i].elements for i in op.inputs), default=0)
        left = max((values[i].elements for i in op.outputs), default=0)
        return left <= part.reduced and is_split(row, max(part.reduced, 1))
