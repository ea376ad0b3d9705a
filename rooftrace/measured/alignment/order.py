"""Matches the calls of each step and the ops of a graph in order."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from rooftrace.measured.alignment.alignment import Alignment, Sums
from rooftrace.measured.alignment.calls import CallTree, OpCall
from rooftrace.measured.alignment.keys import Key, key_of_op, key_words, paired, written_out
from rooftrace.measured.alignment.periods import Period, periods
from rooftrace.measured.traces import Trace, TraceStep, records
from rooftrace.tracer.graph import OpGraph

_ENOUGH = 0.75
"""A trace of two equal steps, taken as one, matches by half."""


def by_order(trace: Trace, graph: OpGraph) -> Alignment:
    """The alignment of a trace by order.

    Steps are as the trace marks them.  Without the profiler's own marks, the whole trace as one
    step and a cut by periods are tried too; the best match wins.
    """
    order = _Order(trace, graph)
    best = order.matched(trace)
    if trace.cut is None or trace.marked_by == records.PROFILER_STEP or best.score > _ENOUGH:
        return best
    whole = trace.cut.all()
    if trace.marked_by:
        other = order.matched(replace(trace, steps=(whole,)))
        best = other if other.score > best.score else best
    calls = order.of_the_graph(whole)
    for period in periods([call.key for call in calls], order.wanted):
        steps = order.steps_of(period, calls, trace.cut)
        if len(steps) < 2:
            continue
        other = order.matched(replace(trace, steps=steps))
        # What comes twice inside of a step is at most half of the graph.
        if other.ops_matched_share > 0.5 and other.score > best.score:
            best = replace(other, outside=order.outside(whole, steps))
    return best


class _Order:
    """Matches steps of a trace to a graph, both in order."""

    def __init__(self, trace: Trace, graph: OpGraph) -> None:
        self.trace, self.graph = trace, graph
        self.kernels = [
            (op, turn) for op, turn in written_out(graph) if graph.ops[op].kind == "kernel"
        ]
        keys = {op.id: key_of_op(graph, op) for op in graph.ops if op.kind == "kernel"}
        self.wanted = [keys[op] for op, _ in self.kernels]
        self.level = CallTree(trace, frozenset(self.wanted))
        self.known: dict[tuple[Key, ...], tuple[list[tuple[int, int]], int]] = {}

    def matched(self, trace: Trace) -> Alignment:
        """The steps of `trace` beside the graph."""
        sums = Sums(trace, self.graph)
        differing: tuple[list[OpCall], list[tuple[int, int]]] | None = None
        reshaped = 0
        for step in trace.steps:
            calls = self._calls(step)
            have = tuple(call.key for call in calls)
            if have not in self.known:
                self.known[have] = paired(have, self.wanted)
            pairs, loosely = self.known[have]
            reshaped += loosely
            differing = differing or (calls, pairs)
            partner = dict(pairs)
            for place, call in enumerate(calls):
                sums.add(step, call, self.kernels[partner[place]] if place in partner else None)
            sums.end()
        first = ""
        if differing:
            first = _first_difference(self.graph, *differing, self.kernels, self.wanted)
        return replace(sums.alignment("order", first), reshaped=reshaped)

    def _calls(self, step: TraceStep) -> list[OpCall]:
        level = self.level
        return [call for call in level.of(step) if not call.host or call.key in level.keys]

    # -- steps without marks -----------------------------------------------------------------------

    def of_the_graph(self, whole: TraceStep) -> list[OpCall]:
        """The calls of a trace that the graph has too."""
        level = self.level
        return [
            call
            for call in self._calls(whole)
            if call.op != records.NONE and (call.key in level.keys or level.nearly(call.key))
        ]

    def steps_of(
        self, period: Period, calls: Sequence[OpCall], cut: records.Cut
    ) -> tuple[TraceStep, ...]:
        """From the first call of each period to that of the next; the last is as long as others."""
        steps: list[TraceStep] = []
        for first, count in period.runs:
            places = [first + turn * period.length for turn in range(count)]
            starts = [self._start(calls[place].op) for place in places]
            last = calls[places[-1] + period.length - 1].op
            end = self._end(last)
            if starts != sorted(set(starts)):
                return ()  # one call is around several of them
            if len(starts) > 1:
                lengths = [b - a for a, b in pairwise(starts)]
                after = places[-1] + period.length
                until = self._start(calls[after].op) if after < len(calls) else math.inf
                end = max(end, min(starts[-1] + statistics.median(lengths), until))
            for start, stop in zip(starts, [*starts[1:], end], strict=True):
                steps.append(cut(f"step {len(steps)}", start, stop))
        return tuple(steps)

    def _outermost(self, op: int) -> int:
        parents = self.trace.ops.parent
        while parents[op] != records.NONE:
            op = parents[op]
        return op

    def _start(self, op: int) -> float:
        return self.trace.ops.start[self._outermost(op)]

    def _end(self, op: int) -> float:
        ops, op = self.trace.ops, self._outermost(op)
        return ops.start[op] + ops.duration[op]

    def outside(self, whole: TraceStep, steps: Sequence[TraceStep]) -> float:
        """Share of the measured seconds that is in none of the steps."""
        total = sum(call.seconds for call in self._calls(whole))
        inside = sum(call.seconds for step in steps for call in self._calls(step))
        return max(0.0, 1 - inside / total) if total else 0.0


def _first_difference(
    graph: OpGraph,
    calls: Sequence[OpCall],
    pairs: Sequence[tuple[int, int]],
    kernels: Sequence[tuple[int, int]],
    wanted: Sequence[Key],
) -> str:
    """In words, the first difference between trace and graph."""
    paired = dict(pairs)
    place = next((i for i in range(len(calls)) if paired.get(i) != i), len(calls))
    other = min(place, len(wanted))
    here = key_words(calls[place].key) if place < len(calls) else "its end"
    if other >= len(wanted):
        return f"after {place} equal ops the trace has {here}, the graph its end"
    op = graph.ops[kernels[other][0]]
    where = f" in {op.module}" if op.module else ""
    return (
        f"after {place} equal ops the trace has {here}, "
        f"the graph {key_words(wanted[other])} (op {op.id}{where})"
    )
