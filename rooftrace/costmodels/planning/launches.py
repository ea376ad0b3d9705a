"""What the host does in a step: it enqueues kernel groups, and waits at syncs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fusion import FusionGroup
from rooftrace.tracer.graph import OpGraph


@dataclass(frozen=True, slots=True)
class Launch:
    """What the host does next, once in every iteration of `repeats`."""

    dispatches: int  # things that the host enqueues
    on_device: bool  # whether the last of them is a kernel group
    sync: bool = False  # whether the host then waits for the device
    repeats: tuple[int, ...] = ()


def launches_of(
    graph: OpGraph, groups: Sequence[FusionGroup], execution: ExecutionModel
) -> tuple[Launch, ...]:
    """The launches of a step in order: the host enqueues groups, and waits at syncs.

    Under eager dispatch the host enqueues every op of the graph, views too; under compiled every
    group; under graph everything up to the next wait at once.  A wait stands before the first group
    with an op that comes after it.
    """
    dispatch = execution.dispatch
    syncs = deque(op for op in graph.ops if op.kind == "sync")
    launches: list[Launch] = []
    done = 0  # ops dispatched so far

    def enqueue(last: int, repeats: tuple[int, ...] | None) -> int:
        """Dispatches for what is next; those in other repeats are launches of their own."""
        nonlocal done
        if dispatch == "graph":
            if repeats and not launches:
                launches.append(Launch(1, on_device=False))
            return 1 if not launches or launches[-1].sync else 0
        if dispatch == "compiled":
            return 1
        ops, done = graph.ops[done : last + 1], max(done, last + 1)
        for inside, members in groupby(ops, lambda op: op.repeats):
            launches.append(Launch(len(list(members)), on_device=False, repeats=inside))
        if ops and ops[-1].repeats == repeats:
            return launches.pop().dispatches
        return 0

    def wait() -> None:
        sync = syncs.popleft()
        count = enqueue(sync.id, sync.repeats) if dispatch == "eager" else 0
        launches.append(Launch(count, on_device=False, sync=True, repeats=sync.repeats))

    for group in groups:
        while syncs and syncs[0].id < group.ops[-1]:
            wait()
        count = enqueue(group.ops[-1], group.repeats)
        launches.append(Launch(count, on_device=True, repeats=group.repeats))
    while syncs:
        wait()
    if dispatch == "eager" and done < len(graph.ops):
        enqueue(len(graph.ops) - 1, None)
    return tuple(launches)
