"""Puts ops into kernels, one after the other, right before something needs them.

Ops that may fuse wait until something that may not (or the end) needs them, so that a chain is
formed right before its use.  A wait of the host closes every kernel before it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

from rooftrace.costmodels.fusion.index_space import (
    goes_down,
    is_split,
    writes_many,
    writes_split_rows,
)
from rooftrace.costmodels.fusion.joins import GATHER, OP, SIBLING, TAKE, Join, fitting, joins_at
from rooftrace.costmodels.fusion.kernels import MAX_GROUP, KernelView, single
from rooftrace.costmodels.fusion.partition import Open, Partition
from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import Op


def grow(partition: Partition) -> None:
    """Put every op that runs on the device into a kernel."""
    _Grower(partition).run()


class _Grower:
    """The state of `grow`, op after op."""

    def __init__(self, partition: Partition) -> None:
        self.partition, self.facts = partition, partition.facts
        self.graph, self.needs = self.facts.graph, self.facts.needs
        self.by_stage = {stage: joins_at(stage) for stage in (OP, GATHER, SIBLING, TAKE)}
        self.waiting: dict[int, None] = {}  # ops that no other op has needed yet, in order
        self.user: Op | None = None  # the op that needs those that are placed now
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
            # One kernel reduces, the next writes the rows, and takes what comes after it.
            part.reduced = None
            self._start(part).split = True
        elif writes_many(op):
            self._start(part, late=True)
        elif part.reduced is not None and goes_down(self.graph, op):
            kernel = self._start(part, late=True)
            kernel.down = True
            self._take(part, kernel, producers)
        elif not self._join(part, producers):
            kernel = self._start(part)
            if part.reduced is not None:
                self._take(part, kernel, producers)

    def _join(self, part: KernelView, producers: Sequence[Open]) -> bool:
        """Put an op into the last kernel that makes what it reads, or beside one that reads the
        same tensor (halves of a rotary embedding); whether there is such a kernel."""
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

    def _take(self, part: KernelView, own: Open, producers: Sequence[Open]) -> None:
        """Move ops that so far only this reduction needs from their kernels into its own.

        A residual sum and its square belong to the norm that follows, not to the reduction before.
        """
        for kernel in reversed(producers):
            if kernel.fusable and kernel.rank >= self.closed:
                self._take_from(kernel, part, own)

    def _take_from(self, kernel: Open, part: KernelView, own: Open) -> None:
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
            if self._is_needed_elsewhere(number, own, taken):
                del taken[number]
        if not taken or len(taken) == len(members):
            return
        if not self.partition.may_share(sorted(taken), own):
            return
        self.partition.withdraw(taken.keys(), kernel)
        for number in sorted(taken):
            candidate, join = taken[number]
            self.partition.add(candidate, own, late=False, join=join)

    def _is_needed_elsewhere(self, number: int, own: Open, taken: Collection[int]) -> bool:
        """Whether anything but this kernel and the ops moved into it needs an op.

        Ops that wait to be placed do not count, except for a kernel that reduces columns.
        """
        kernel_of = self.partition.kernel_of
        return any(
            (own.down or user in kernel_of) and kernel_of.get(user) is not own and user not in taken
            for user in self.facts.needed_by[number]
        )

    def _start(self, part: KernelView, late: bool = False) -> Open:
        op = part.ops[0]
        beside = (
            part.fusable and self.user is not None and self.partition.around.beside(self.user, op)
        )
        repeats = self.user.repeats if beside and self.user else op.repeats
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
