"""What the host does in a step: it enqueues kernel groups, and waits at syncs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fusion import FusionGroup
from rooftrace.tracer.collectives import marks
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
    singles: int = 0  # ops between compiled graphs, which Python enqueues one by one
    entries: int = 0  # compiled graphs that the host enters behind another one


def launches_of(
    graph: OpGraph, groups: Sequence[FusionGroup], execution: ExecutionModel
) -> tuple[Launch, ...]:
    """The launches of a step in order: the host enqueues groups, and waits at syncs.

    Under eager dispatch the host enqueues every kernel of the graph, makes every view and calls
    every module; under compiled it enqueues every group; under graph everything up to the next
    wait or graph break at once.  A wait or a break stands before the first group with an op that
    comes after it.
    """
    return _Host(graph, execution).launches_of(groups)


class _Host:
    """What the host does, group after group."""

    def __init__(self, graph: OpGraph, execution: ExecutionModel) -> None:
        self.graph, self.dispatch = graph, execution.dispatch
        eager = self.dispatch == "eager"
        self.alone = range(len(graph.ops)) if eager else marks.eager_ops(graph.ops)
        # Ops that are enqueued one by one, and were not yet.
        self.singles = deque(
            op for op in graph.ops if op.id in self.alone and op.name != marks.GRAPH_BREAK
        )
        self.stops = deque(op for op in graph.ops if op.kind == "sync" or self._breaks(op))
        self.calls = calls_before(graph) if self.singles else ()
        self.launches: list[Launch] = []

    def _breaks(self, op: Op) -> bool:
        return op.name == marks.GRAPH_BREAK and self.dispatch != "eager"

    def launches_of(self, groups: Sequence[FusionGroup]) -> tuple[Launch, ...]:
        """The launches for these groups."""
        for group in groups:
            while self.stops and self.stops[0].id < group.ops[-1]:
                self._stop()
            before = self._enqueue(group.ops[-1], group.repeats)
            self.launches.append(replace(before, on_device=True, repeats=group.repeats))
        while self.stops:
            self._stop()
        if self.singles:
            self._one_by_one(len(self.graph.ops) - 1, None)
        return tuple(self.launches)

    def _enqueue(self, last: int, repeats: tuple[int, ...]) -> Launch:
        """What the host does for what is next; in other repeats that is launches of their own."""
        if last in self.alone:
            return self._one_by_one(last, repeats)
        if self.dispatch in ("compiled", "mixed"):
            return Launch(1, on_device=False)
        launches = self.launches
        if repeats and not launches:
            launches.append(Launch(1, on_device=False))
        return Launch(1 if not launches or launches[-1].sync else 0, on_device=False)

    def _one_by_one(self, last: int, repeats: tuple[int, ...] | None) -> Launch:
        ops: list[Op] = []
        while self.singles and self.singles[0].id <= last:
            ops.append(self.singles.popleft())
        for inside, members in groupby(ops, lambda op: op.repeats):
            launch = _eager(list(members), self.calls, inside)
            if self.dispatch != "eager":
                launch = replace(launch, dispatches=0, singles=launch.dispatches)
            self.launches.append(launch)
        if ops and ops[-1].repeats == repeats:
            return self.launches.pop()
        return Launch(0, on_device=False)

    def _stop(self) -> None:
        """Wait for the device, or go on with another compiled graph or with code in Python."""
        stop = self.stops.popleft()
        before = Launch(0, on_device=False)
        if self.singles and self.singles[0].id <= stop.id:
            before = self._one_by_one(stop.id, stop.repeats)
        if stop.kind == "sync":
            self.launches.append(replace(before, sync=True, repeats=stop.repeats))
            return
        if marks.is_eager(stop):
            self.launches.append(replace(before, repeats=stop.repeats))
            return
        graph = 1 if self.dispatch == "graph" else 0  # captured on its own, and launched on its own
        self.launches.append(replace(before, dispatches=graph, entries=1, repeats=stop.repeats))


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
