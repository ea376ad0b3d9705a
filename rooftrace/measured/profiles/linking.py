"""Links the events of a trace: callers of ops, launches of kernels, and their steps.

Ops and module calls nest in time on their thread.  A kernel belongs to the op with its external id,
else to the innermost op around the runtime call that has its correlation.

A kernel belongs to the step in which the host launched it, on any thread, not to the step in which
the device runs it: the device lags behind.  If the trace lacks the launch, its correlation tells
between which two launches it was, because correlations rise.  Without a correlation (CUPTI and ROCm
write 0, often for communication) it goes with the kernel of its device that began before it.
Kernels that the host launched before the trace begins are in no step.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles.records import (
    BESIDE,
    DEVICE,
    EARLIER,
    LAUNCH,
    NONE,
    OP,
    ORDER,
    OUTSIDE,
    START,
    WHOLE,
    Annotation,
    Kernels,
    Numbered,
    Ops,
    Placement,
    TraceStep,
    busy_and_gaps,
)

STEP = re.compile(r"ProfilerStep#\d+")
_NAMED_STEP = re.compile(r"(train(ing)?[ _]?)?(step|iter(ation)?)[ _#:]*\d*", re.IGNORECASE)
"""Usual names of the range around a step: record_function("step"), "iteration 3"."""
_SLACK = 0.5e-9
"""Seconds: times are written with three decimals of a microsecond."""
_DEEPEST = 1000
"""The most nested calls of modules: the path of each is kept."""


class Launches:
    """Calls of the device runtime by correlation: when, on which thread, for which external id.

    waits: (start, end) of calls in which the host waits for the device.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.start, self.thread, self.external = array("d"), array("i"), array("q")
        self.waits: list[tuple[float, float]] = []

    def add(self, correlation: int, start: float, thread: int, external: int) -> None:
        """One call."""
        self.rows[correlation] = len(self.start)
        self.start.append(start)
        self.thread.append(thread)
        self.external.append(external)


class ModuleSpans:
    """The calls of modules, as columns: name, start, duration and thread."""

    def __init__(self) -> None:
        self.names = Numbered()
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
    modules: ModuleSpans,
    annotations: Sequence[Annotation],
    device_steps: Sequence[Annotation] = (),
) -> Linked:
    """Fill in parents, self times, module stacks, and the op of each kernel; return the steps.

    device_steps: ranges of steps as the device saw them, for traces without any launch.
    """
    _nest(ops, modules)
    _lend_modules_to_backward(ops)
    _launched_by(ops, kernels, launches)
    marks = _marks(annotations)
    begun = {mark.name: mark.start for mark in marks}
    ranges = [(d.start, d.end, begun[d.name]) for d in device_steps if d.name in begun]
    moments, how = _moments(ops, kernels, launches, sorted(ranges))
    cut = Cutter(ops, kernels, moments, launches.waits)
    steps = tuple(cut(mark.name, mark.start, mark.end) for mark in marks) or (cut.all(),)
    marked_by = "" if not marks else marks[0].name.rstrip("0123456789").rstrip("# _:")
    return Linked(steps, marked_by, cut, _placements(kernels, how, steps, bool(marks)))


def _nest(ops: Ops, modules: ModuleSpans) -> None:
    """Parents, self times and module stacks, by the nesting of intervals on a thread."""
    count = len(ops)
    ops.parent = array("i", [NONE]) * count
    ops.self_duration = array("d", ops.duration)
    # Of two that start and end together, a module is outside of an op.
    start = modules.start + ops.start
    duration = modules.duration + ops.duration
    thread = modules.thread + ops.thread
    stack: list[tuple[int, float, tuple[str, ...]]] = []
    current = NONE
    for position in by_time(start, duration, thread):
        index = position - len(modules.start)
        if thread[position] != current:
            stack, current = [], thread[position]
        begin = start[position]
        while stack and stack[-1][1] <= begin + _SLACK:
            stack.pop()
        path = stack[-1][2] if stack else ()
        end = begin + duration[position]
        if index < 0:
            if len(path) >= _DEEPEST:
                raise ProfileError(
                    f"calls of modules nest more than {_DEEPEST:,} deep in the trace"
                )
            name = modules.names.items[modules.name[position]]
            stack.append((stack[-1][0] if stack else NONE, end, (*path, name)))
            continue
        if stack and stack[-1][0] != NONE:
            parent = ops.parent[index] = stack[-1][0]
            ops.self_duration[parent] = max(0.0, ops.self_duration[parent] - ops.duration[index])
        if path and ops.modules[index] == NONE:
            ops.modules[index] = ops.stacks.number(path)
        stack.append((index, end, path))


def _lend_modules_to_backward(ops: Ops) -> None:
    """Give backward ops and their calls the modules of the forward op with the same number."""
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
            on_thread = [i for i in order if ops.thread[i] == thread]
            self.threads[thread] = [ops.start[i] for i in on_thread], on_thread
        starts, on_thread = self.threads[thread]
        last = bisect_right(starts, moment + _SLACK) - 1
        op = on_thread[last] if last >= 0 else NONE
        while op != NONE and self.ops.start[op] + self.ops.duration[op] + _SLACK < moment:
            op = self.ops.parent[op]
        return op


def by_time(
    start: array[float], duration: array[float], thread: array[int] | None = None
) -> array[int]:
    """Indices by thread, then by start, then the longest first."""
    keys = [-numpy.frombuffer(duration), numpy.frombuffer(start)]
    if thread is not None:
        keys.append(numpy.frombuffer(thread, dtype=numpy.intc))
    order: array[int] = array("q")
    if len(start):
        order.frombytes(numpy.lexsort(keys).astype(numpy.int64).tobytes())
    return order


# -- steps ---------------------------------------------------------------------------------------


class Linked(NamedTuple):
    """The steps of a trace, with fields of `Trace`."""

    steps: tuple[TraceStep, ...]
    marked_by: str
    cut: Cutter
    placements: tuple[Placement, ...]


def _marks(annotations: Sequence[Annotation]) -> list[Annotation]:
    """The ranges around steps: of the profiler's schedule, else with a name like "step"."""
    for pattern in (STEP, _NAMED_STEP):
        marks: list[Annotation] = []
        for annotation in annotations:
            if pattern.fullmatch(annotation.name) and (
                not marks or annotation.start >= marks[-1].end - _SLACK
            ):
                marks.append(annotation)
        if marks:
            return marks
    return []


_BEFORE = -1.0
"""The moment of launches before the trace begins; all others are 0 or later."""


def _moments(
    ops: Ops,
    kernels: Kernels,
    launches: Launches,
    ranges: Sequence[tuple[float, float, float]],
) -> tuple[array[float], list[str]]:
    """The time at which the host launched each kernel, and the rule that gave it.

    ranges: (begin on the device, end on the device, begin on the host) of each step.
    """
    numbers = sorted((number, launches.start[row]) for number, row in launches.rows.items())
    correlations = [number for number, _ in numbers]
    starts = [start for start, _, _ in ranges]
    moments, how = array("d"), list[str]()
    for index, correlation in enumerate(kernels.correlation):
        start, op = kernels.start[index], kernels.op[index]
        if kernels.launched[index] >= 0:
            moment, rule = kernels.launched[index], LAUNCH
        elif op != NONE:
            moment, rule = ops.start[op], OP
        elif correlations and correlation != NONE:
            last = bisect_right(correlations, correlation) - 1
            moment, rule = (_BEFORE, EARLIER) if last < 0 else (numbers[last][1], ORDER)
            if moment > start:  # of another process or device: correlations do not compare
                moment, rule = start, START
        elif ranges and not correlations:
            last = bisect_right(starts, start + _SLACK) - 1
            inside = last >= 0 and start <= ranges[last][1]
            moment, rule = (ranges[last][2], DEVICE) if inside else (_BEFORE, OUTSIDE)
        else:
            moment, rule = start, START
        moments.append(moment)
        how.append(rule)
    if correlations:
        _join_those_before(kernels, moments, how)
    return moments, how


def _join_those_before(kernels: Kernels, moments: array[float], how: list[str]) -> None:
    """Put kernels without a correlation to the one of their device that began before them."""
    latest: dict[int, float] = {}
    for index in by_time(kernels.start, kernels.duration):
        device = kernels.device[index]
        if how[index] != START or kernels.correlation[index] != NONE:
            latest[device] = moments[index]
        elif device in latest:
            moments[index], how[index] = latest[device], BESIDE


def _placements(
    kernels: Kernels, how: Sequence[str], steps: Sequence[TraceStep], marked: bool
) -> tuple[Placement, ...]:
    """Sums of the kernels of each rule, most seconds first."""
    inside = {index for step in steps for index in step.kernels}
    by_rule: dict[str, list[int]] = {}
    for index, rule in enumerate(how):
        outside = index not in inside and rule != EARLIER
        by_rule.setdefault(OUTSIDE if outside and marked else rule, []).append(index)
    rows = [
        Placement(
            rule,
            sum(kernels.kind[i] == 0 for i in listed),
            sum(kernels.kind[i] != 0 for i in listed),
            sum(kernels.duration[i] for i in listed),
            _most(kernels, listed) if rule not in (LAUNCH, OP) else (),
        )
        for rule, listed in by_rule.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.how)))


def _most(kernels: Kernels, listed: Sequence[int]) -> tuple[str, ...]:
    """The names of those with most seconds."""
    seconds: dict[int, float] = {}
    for index in listed:
        name = kernels.name[index]
        seconds[name] = seconds.get(name, 0.0) + kernels.duration[index]
    most = sorted(seconds, key=lambda name: -seconds[name])[:_SHOWN]
    return tuple(kernels.names.items[name] for name in most)


_SHOWN = 3
"""Names of kernels that a placement lists."""


class Cutter:
    """Cuts steps out of a trace at times of the host."""

    def __init__(
        self,
        ops: Ops,
        kernels: Kernels,
        moments: array[float],
        waits: Sequence[tuple[float, float]],
    ) -> None:
        self.kernels = kernels
        self.ops = by_time(ops.start, ops.duration)
        launched = by_time(moments, kernels.duration)
        self.moments = array("d", (moments[i] for i in launched))
        first = bisect_left(self.moments, 0.0)
        self.launched, earlier = launched[first:], launched[:first]
        self.moments = self.moments[first:]
        self.op_starts = array("d", (ops.start[i] for i in self.ops))
        self.earlier_end = max(
            (kernels.start[i] + kernels.duration[i] for i in earlier), default=0.0
        )
        self.waits = waits
        self.host_end = _last(zip(ops.start, ops.duration, strict=True))

    def __call__(self, name: str, start: float, end: float) -> TraceStep:
        """The step with all calls and launches of the host from `start` until `end`."""
        return self._step(
            name,
            start,
            end,
            self.ops[_from(self.op_starts, start) : _from(self.op_starts, end, 0.0)],
            self.launched[_from(self.moments, start) : _from(self.moments, end, 0.0)],
        )

    def all(self) -> TraceStep:
        """One step of the trace, without kernels that the host launched before it begins."""
        starts = [*self.op_starts[:1], *self.moments[:1]]
        kernels = self.kernels
        ran = ((kernels.start[i], kernels.duration[i]) for i in self.launched)
        start = min(starts, default=0.0)
        end = max(start, self.host_end, _last(ran))
        return self._step(WHOLE, start, end, self.ops, self.launched)

    def _step(
        self, name: str, start: float, end: float, ops: Sequence[int], launched: Sequence[int]
    ) -> TraceStep:
        kernels = self.kernels
        intervals = [(kernels.start[i], kernels.start[i] + kernels.duration[i]) for i in launched]
        busy, gaps = busy_and_gaps(intervals)
        # Kernels launched before the trace are in no step, and neither are waits for them.
        until = min(end, self.earlier_end)
        waits = ((max(start, a), min(until, b)) for a, b in self.waits)
        waited, _ = busy_and_gaps([(a, b) for a, b in waits if a < b])
        return TraceStep(
            name=name,
            start=start,
            duration=end - start,
            busy=busy if len(kernels) else None,
            gaps=gaps,
            ops=ops,
            kernels=launched,
            waited=waited,
        )


def _from(moments: Sequence[float], moment: float, slack: float = _SLACK) -> int:
    return bisect_left(moments, moment - slack)


def _last(intervals: Iterable[tuple[float, float]]) -> float:
    return max((start + duration for start, duration in intervals), default=0.0)
