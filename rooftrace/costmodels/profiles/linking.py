"""How the events of a trace hang together: who called whom, who launched what, in which step.

Ops and module calls nest in time on their thread.  A kernel belongs to the op with its external id,
else to the innermost op around the runtime call that has its correlation.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from rooftrace.costmodels.profiles.records import (
    NONE,
    Annotation,
    Kernels,
    Names,
    Ops,
    Step,
    busy_and_gaps,
)

STEP = re.compile(r"ProfilerStep#\d+")
_SLACK = 0.5e-9
"""Seconds: times are written with three decimals of a microsecond."""


class Launches:
    """Calls of the device runtime by correlation: when, on which thread, for which external id."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.start, self.thread, self.external = array("d"), array("i"), array("q")

    def add(self, correlation: int, start: float, thread: int, external: int) -> None:
        """One call."""
        self.rows[correlation] = len(self.start)
        self.start.append(start)
        self.thread.append(thread)
        self.external.append(external)


class Calls:
    """Calls of modules."""

    def __init__(self) -> None:
        self.names = Names()
        self.name, self.thread = array("i"), array("i")
        self.start, self.duration = array("d"), array("d")

    def add(self, name: str, start: float, duration: float, thread: int) -> None:
        """One call."""
        self.name.append(self.names.number(name))
        self.start.append(start)
        self.duration.append(duration)
        self.thread.append(thread)


def link(
    ops: Ops,
    kernels: Kernels,
    launches: Launches,
    modules: Calls,
    annotations: Sequence[Annotation],
) -> tuple[Step, ...]:
    """Fill in parents, self times, module stacks, and the op of each kernel; the steps."""
    _nest(ops, modules)
    _lend_modules_to_backward(ops)
    _launched_by(ops, kernels, launches)
    return _steps(ops, kernels, annotations)


def _nest(ops: Ops, modules: Calls) -> None:
    """Parents, self times and module stacks, by how intervals lie in each other on a thread."""
    count = len(ops)
    ops.parent = array("i", [NONE]) * count
    ops.own = array("d", ops.duration)
    # Of two that start and end together, a module is outside of an op.
    start = modules.start + ops.start
    duration = modules.duration + ops.duration
    thread = modules.thread + ops.thread
    stack: list[tuple[int, float, tuple[str, ...]]] = []
    current = NONE
    for place in by_time(start, duration, thread):
        index = place - len(modules.start)
        if thread[place] != current:
            stack, current = [], thread[place]
        begin = start[place]
        while stack and stack[-1][1] <= begin + _SLACK:
            stack.pop()
        path = stack[-1][2] if stack else ()
        end = begin + duration[place]
        if index < 0:
            name = modules.names.items[modules.name[place]]
            stack.append((stack[-1][0] if stack else NONE, end, (*path, name)))
            continue
        if stack and stack[-1][0] != NONE:
            parent = ops.parent[index] = stack[-1][0]
            ops.own[parent] = max(0.0, ops.own[parent] - ops.duration[index])
        if path and ops.modules[index] == NONE:
            ops.modules[index] = ops.stacks.number(path)
        stack.append((index, end, path))


def _lend_modules_to_backward(ops: Ops) -> None:
    """A backward op, and what it calls, is in the modules of the forward op with its number."""
    forward: dict[int, int] = {}
    for sequence, backward, stack in zip(ops.sequence, ops.backward, ops.modules, strict=True):
        if sequence != NONE and not backward and stack != NONE:
            forward[sequence] = stack
    if not forward:
        return
    lent: dict[int, int] = {}
    for index in by_time(ops.start, ops.duration):
        stack = NONE
        if ops.backward[index]:
            stack = forward.get(ops.sequence[index], NONE)
        elif ops.parent[index] in lent:
            stack = lent[ops.parent[index]]
        if stack != NONE:
            ops.modules[index] = lent[index] = stack


def _launched_by(ops: Ops, kernels: Kernels, launches: Launches) -> None:
    by_external = {number: i for i, number in enumerate(ops.external) if number != NONE}
    around = _Innermost(ops)
    for correlation, external in zip(kernels.correlation, kernels.external, strict=True):
        row = launches.rows.get(correlation, NONE) if correlation != NONE else NONE
        if external == NONE and row != NONE:
            external = launches.external[row]
        op = by_external.get(external, NONE) if external != NONE else NONE
        if op == NONE and row != NONE:
            op = around.at(launches.thread[row], launches.start[row])
        kernels.op.append(op)
        kernels.launched.append(launches.start[row] if row != NONE else -1.0)


class _Innermost:
    """The innermost op around a moment of a thread."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.threads: dict[int, tuple[list[float], list[int]]] = {}

    def at(self, thread: int, moment: float) -> int:
        """Its index, NONE where no op runs then."""
        if thread not in self.threads:
            ops = self.ops
            order = by_time(ops.start, ops.duration)
            mine = [i for i in order if ops.thread[i] == thread]
            self.threads[thread] = [ops.start[i] for i in mine], mine
        starts, mine = self.threads[thread]
        place = bisect_right(starts, moment + _SLACK) - 1
        op = mine[place] if place >= 0 else NONE
        while op != NONE and self.ops.start[op] + self.ops.duration[op] + _SLACK < moment:
            op = self.ops.parent[op]
        return op


def by_time(
    start: array[float], duration: array[float], thread: array[int] | None = None
) -> array[int]:
    """Indices by thread, then by start; of those that start together the longest first."""
    import numpy

    keys = [-numpy.frombuffer(duration), numpy.frombuffer(start)]
    if thread is not None:
        keys.append(numpy.frombuffer(thread, dtype=numpy.intc))
    order: array[int] = array("q")
    if len(start):
        order.frombytes(numpy.lexsort(keys).astype(numpy.int64).tobytes())
    return order


def _steps(ops: Ops, kernels: Kernels, annotations: Sequence[Annotation]) -> tuple[Step, ...]:
    """The ProfilerStep ranges with what was called and launched in them; else one step of all."""
    order = by_time(ops.start, ops.duration)
    moments = array("d", (_moment(ops, kernels, i) for i in range(len(kernels))))
    launched = by_time(moments, kernels.duration)
    named = [one for one in annotations if STEP.fullmatch(one.name)]
    if not named:
        first, last = ops.start[order[0]] if order else moments[launched[0]], 0.0
        for table in (ops, kernels):
            ends = map(sum, zip(table.start, table.duration, strict=True))
            last = max(last, max(ends, default=0.0))
        return (_step(kernels, "the whole trace", first, last - first, order, launched),)
    op_starts = array("d", (ops.start[i] for i in order))
    kernel_moments = array("d", (moments[i] for i in launched))
    return tuple(
        _step(
            kernels,
            one.name,
            one.start,
            one.duration,
            order[bisect_left(op_starts, one.start - _SLACK) : bisect_left(op_starts, one.end)],
            launched[
                bisect_left(kernel_moments, one.start - _SLACK) : bisect_left(
                    kernel_moments, one.end
                )
            ],
        )
        for one in named
    )


def _moment(ops: Ops, kernels: Kernels, index: int) -> float:
    """When the host launched a kernel; its own start where the trace does not say."""
    if kernels.launched[index] >= 0:
        return kernels.launched[index]
    op = kernels.op[index]
    return ops.start[op] if op != NONE else kernels.start[index]


def _step(
    kernels: Kernels,
    name: str,
    start: float,
    duration: float,
    ops: Sequence[int],
    launched: Sequence[int],
) -> Step:
    intervals = [(kernels.start[i], kernels.start[i] + kernels.duration[i]) for i in launched]
    busy, gaps = busy_and_gaps(intervals)
    return Step(
        name,
        start,
        duration,
        busy if len(kernels) else None,
        gaps,
        ops,
        launched,
    )
