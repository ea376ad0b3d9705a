"""What the host does in a step: it enqueues kernel groups, and waits at syncs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fusion import FusionGroup
from rooftrace.tracer.graph import Op, OpGraph
from rooftrace.tracer.vocabulary import PARTS


@dataclass(frozen=True, slots=True)
class Launch:
    """What the host does next, once in every iteration of `repeats`."""

    dispatches: int  # things that the host enqueues
    on_device: bool  # whether the last of them is a kernel group
    sync: bool = False  # whether the host then waits for the device
    repeats: tuple[int, ...] = ()
    views: int = 0  # views that the host makes beside them
    calls: int = 0  # modules that Python calls beside them


def launches_of(
    graph: OpGraph, groups: Sequence[FusionGroup], execution: ExecutionModel
) -> tuple[Launch, ...]:
    """The launches of a step in order: the host enqueues groups, and waits at syncs.

    Under eager dispatch the host enqueues every kernel of the graph, makes every view and calls
    every module; under compiled it enqueues every group; under graph everything up to the next
    wait at once.  A wait stands before the first group
    with an op that comes after it.
    """
    dispatch = execution.dispatch
    syncs = deque(op for op in graph.ops if op.kind == "sync")
    launches: list[Launch] = []
    calls = calls_before(graph) if dispatch == "eager" else ()
    done = 0  # ops dispatched so far

    def enqueue(last: int, repeats: tuple[int, ...] | None) -> Launch:
        """What the host does for what is next; in other repeats that is launches of their own."""
        nonlocal done
        if dispatch == "graph":
            if repeats and not launches:
                launches.append(Launch(1, on_device=False))
            return Launch(1 if not launches or launches[-1].sync else 0, on_device=False)
        if dispatch == "compiled":
            return Launch(1, on_device=False)
        ops, done = graph.ops[done : last + 1], max(done, last + 1)
        for inside, members in groupby(ops, lambda op: op.repeats):
            launches.append(_eager(list(members), calls, inside))
        if ops and ops[-1].repeats == repeats:
            return launches.pop()
        return Launch(0, on_device=False)

    def wait() -> None:
        sync = syncs.popleft()
        before = Launch(0, on_device=False)
        if dispatch == "eager":
            before = enqueue(sync.id, sync.repeats)
        launches.append(replace(before, sync=True, repeats=sync.repeats))

    for group in groups:
        while syncs and syncs[0].id < group.ops[-1]:
            wait()
        before = enqueue(group.ops[-1], group.repeats)
        launches.append(replace(before, on_device=True, repeats=group.repeats))
    while syncs:
        wait()
    if dispatch == "eager" and done < len(graph.ops):
        enqueue(len(graph.ops) - 1, None)
    return tuple(launches)


def _eager(ops: Sequence[Op], calls: Sequence[int], repeats: tuple[int, ...]) -> Launch:
    """The launch that stands for these ops in eager mode."""
    views = sum(op.kind == "view" for op in ops)
    return Launch(
        len(ops) - views,
        on_device=False,
        repeats=repeats,
        views=views,
        calls=sum(calls[op.id] for op in ops),
    )


_PYTHON = frozenset({PARTS[0], PARTS[2]})
"""Parts whose ops Python code of modules calls; autograd runs backward without it."""
_NOT_CALLED = frozenset({"ModuleList", "ModuleDict"})


def calls_before(graph: OpGraph) -> tuple[int, ...]:
    """How many modules are called between each op and the one before it."""
    counts = []
    path: list[str] = []
    call = 0
    for op in graph.ops:
        if op.part not in _PYTHON:
            counts.append(0)
            continue
        here = op.module.split(".") if op.module else []
        pairs = zip(path, here, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if here == path and op.call != call:
            shared -= 1
        entered = (".".join(here[: depth + 1]) for depth in range(max(0, shared), len(here)))
        counts.append(sum(graph.modules.get(name, "") not in _NOT_CALLED for name in entered))
        path, call = here, op.call
    return tuple(counts)
