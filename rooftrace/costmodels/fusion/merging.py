"""Merges kernels that have grown: with what reads them, and with what reads the same tensor.

`benchmarks/inductor` compares the result with Inductor's own.
"""

from __future__ import annotations

from collections import defaultdict

from rooftrace.costmodels.fusion.joins import (
    MOVE,
    NEAR,
    PLACE,
    READER,
    SIBLING,
    fitting,
    joins_at,
)
from rooftrace.costmodels.fusion.kernels import MAX_GROUP, single
from rooftrace.costmodels.fusion.partition import Open, Partition


def merge_kernels(partition: Partition) -> None:
    """Ops move to their only consumer, kernels to their first one, and readers of a tensor meet."""
    _move_to_only_consumer(partition)
    _merge_into_first_consumer(partition)
    _merge_readers(partition)


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
        if target.down and not alone:
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
