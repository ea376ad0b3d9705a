"""The op of a graph that each measured second of a trace belongs to.

Ops that a run wrapped in `record_function("op 17")` are matched by that number.  Other traces are
matched in order: the calls of each step and the ops of the graph are two sequences of (name, input
shapes), paired by their longest common subsequence.  Calls are taken at the level of the graph: if
`linear` calls `addmm`, the call whose name the graph has counts.

Equal shapes pair first.  Calls and ops between two pairs may pair by looser shapes: without
dimensions of 1, with leading dimensions merged, or with a weight transposed.

A trace without marks around its steps is cut where the ops of the graph repeat (`periods`).
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy

from rooftrace.errors import ProfileError
from rooftrace.graph import OpGraph
from rooftrace.hardware.units import format_share
from rooftrace.measured.alignment.alignment import Alignment, CallSums
from rooftrace.measured.alignment.keys import (
    CallTree,
    Key,
    OpCall,
    key_of_call,
    key_of_op,
    key_words,
    paired,
    written_out,
)
from rooftrace.measured.profiles import Trace, TraceStep, records


def align(trace: Trace, graph: OpGraph, minimum: float = 0.5) -> Alignment:
    """Match the calls of a trace to the ops of `graph`, step by step.

    Raises ProfileError for a trace without shapes (unless its ops are annotated), and where less
    than `minimum` of its seconds, or of the graph's kernels, find their counterpart: a trace of
    another model, or of other sizes.
    """
    marks = marks_of(trace)
    if marks:
        return _checked(by_annotation(trace, graph, marks), minimum)
    if not trace.has_shapes:
        raise ProfileError(
            f"{trace.source}: no input shapes in the trace, so its ops cannot be told apart: "
            "profile with record_shapes=True"
        )
    return _checked(by_order(trace, graph), minimum)


def _checked(match: Alignment, minimum: float) -> Alignment:
    """Return `match`; raise ProfileError where trace and graph are not of the same step."""
    if match.coverage >= minimum and match.ops_matched_share >= minimum:
        return match
    first = match.first_difference
    advice = "trace the model, the sizes and the phase that were run"
    sizes = _other_sizes(match)
    if sizes:
        advice = f"the names agree and the sizes do not ({sizes}): trace the sizes that were run"
    elif not match.trace.marked_by and match.ops_matched_share >= minimum:
        advice = (
            "the trace holds the graph and more, and says not where a step begins: it has no "
            "range ProfilerStep#N and none named step, and no sequence of the graph's ops that "
            "comes twice without a difference; mark the steps with "
            "profile(..., schedule=...) and prof.step(), or with record_function('step')"
        )
    raise ProfileError(
        f"{match.trace.source}: not a run of this graph: "
        f"{format_share(match.coverage)} of its measured time and "
        f"{format_share(match.ops_matched_share)} of the graph's kernels find a counterpart"
        f"{'; ' + first if first else ''}; {advice}"
    )


def _other_sizes(match: Alignment) -> str:
    """In words: an op that both sides have in different sizes; "" without one."""
    graph = match.graph
    in_trace: Counter[str] = Counter()
    in_graph: Counter[str] = Counter()
    keys: dict[str, Key] = {}
    for stray in match.only_in_trace:
        in_trace[key_of_call(stray.name, stray.shapes)[0]] += round(stray.count)
    for index in match.only_in_graph:
        key = key_of_op(graph, graph.ops[index])
        in_graph[key[0]] += graph.times(graph.ops[index])
        keys.setdefault(key[0], key)
    if 5 * (in_graph & in_trace).total() < 4 * in_graph.total():
        return ""
    for stray in match.only_in_trace:
        name = key_of_call(stray.name, stray.shapes)[0]
        if name in keys and stray.shapes:
            return f"trace {key_words((stray.name, stray.shapes))}, graph {key_words(keys[name])}"
    return ""


# -- marks -----------------------------------------------------------------------------------------

_OP = re.compile(r"op (\d+)")


def marks_of(trace: Trace) -> list[tuple[int, records.Annotation]]:
    """(op id, range) of each `record_function("op 17")`, by start."""
    matches = ((_OP.fullmatch(annotation.name), annotation) for annotation in trace.annotations)
    return [(int(match[1]), annotation) for match, annotation in matches if match]


@dataclass(frozen=True, slots=True)
class _Marked:
    """A range around an op."""

    range: records.Annotation
    target: tuple[int, int]  # (op id, iteration)
    run: int  # number of the pass over the graph


def by_annotation(
    trace: Trace, graph: OpGraph, marks: Sequence[tuple[int, records.Annotation]]
) -> Alignment:
    """The alignment of a trace by the marks around its ops.

    Their numbers are ids of `graph.expand()`, or of `graph` itself where none is beyond its ops.
    Raises ProfileError for a number that the graph does not have.
    """
    order = written_out(graph)
    last = max(number for number, _ in marks)
    if last >= len(order):
        raise ProfileError(
            f'{trace.source}: the trace has "op {last}", the graph {len(order):,} ops: '
            "it is a run of another graph"
        )
    short = last < len(graph.ops)
    level = CallTree(trace, frozenset())
    sums = CallSums(trace, graph)
    for step in trace.steps:
        end = step.start + step.duration
        inside = [
            (number, annotation)
            for number, annotation in marks
            if step.start <= annotation.start <= end
        ]
        _add_marked(level, sums, step, _passes(graph, inside, order, short))
    return sums.alignment("annotations")


def _passes(
    graph: OpGraph,
    marks: Sequence[tuple[int, records.Annotation]],
    order: Sequence[tuple[int, int]],
    short: bool,
) -> list[_Marked]:
    """The op, iteration and pass of each range.  A pass ends before an op would repeat."""
    marked: list[_Marked] = []
    seen: Counter[int] = Counter()
    run = 0
    for number, annotation in marks:
        if seen[number] == (graph.times(graph.ops[number]) if short else 1):
            seen.clear()
            run += 1
        marked.append(_Marked(annotation, (number, seen[number]) if short else order[number], run))
        seen[number] += 1
    return marked


def _add_marked(
    level: CallTree, sums: CallSums, step: TraceStep, marked: Sequence[_Marked]
) -> None:
    """Add each call of a step to the range in which it begins; its kernels go with it."""
    starts = [mark.range.start for mark in marked]
    ops, kernels = level.trace.ops, level.trace.kernels
    runs: dict[int, list[tuple[OpCall, tuple[int, int] | None]]] = defaultdict(list)
    for call in level.of(step):
        has_op = call.op != records.NONE
        start = ops.start[call.op] if has_op else kernels.launched[call.kernels[0]]
        index = bisect_right(starts, start) - 1
        mark = marked[index] if index >= 0 else None
        inside = mark is not None and start <= mark.range.end
        if mark is not None and has_op:
            inside = inside and ops.thread[call.op] == mark.range.thread
        target = mark.target if mark is not None and inside else None
        if target is not None or not call.host:
            runs[mark.run if mark is not None else 0].append((call, target))
    for _, calls in sorted(runs.items()):
        for call, target in calls:
            sums.add(step, call, target)
        sums.end()


# -- order -----------------------------------------------------------------------------------------

_ENOUGH = 0.75
"""Accept a match above this score: two equal steps read as one score 0.5."""


def by_order(trace: Trace, graph: OpGraph) -> Alignment:
    """The alignment of a trace by order.

    Steps are those that the trace marks.  Without marks of the profiler, the trace as one step and
    a cut by periods are tried too; the best match wins.
    """
    order = _OrderMatcher(trace, graph)
    best = order.matched(trace)
    if trace.cut is None or trace.marked_by == records.PROFILER_STEP or best.score > _ENOUGH:
        return best
    everything = trace.cut.all()
    if trace.marked_by:
        other = order.matched(replace(trace, steps=(everything,)))
        best = other if other.score > best.score else best
    calls = order.of_the_graph(everything)
    for period in periods([call.key for call in calls], order.wanted):
        steps = order.steps_of(period, calls, trace.cut)
        if len(steps) < 2:
            continue
        other = order.matched(replace(trace, steps=steps))
        # A sequence that repeats inside of a step is at most half of the graph.
        if other.ops_matched_share > 0.5 and other.score > best.score:
            best = replace(other, outside=order.outside(everything, steps))
    return best


class _OrderMatcher:
    """Matches steps of a trace to a graph, both in order."""

    def __init__(self, trace: Trace, graph: OpGraph) -> None:
        self.trace, self.graph = trace, graph
        self.kernels = [
            (op, iteration)
            for op, iteration in written_out(graph)
            if graph.ops[op].kind == "kernel"
        ]
        keys = {op.id: key_of_op(graph, op) for op in graph.ops if op.kind == "kernel"}
        self.wanted = [keys[op] for op, _ in self.kernels]
        self.level = CallTree(trace, frozenset(self.wanted))
        self.pairs: dict[tuple[Key, ...], tuple[list[tuple[int, int]], int]] = {}

    def matched(self, trace: Trace) -> Alignment:
        """The alignment of the steps of `trace`."""
        sums = CallSums(trace, self.graph)
        differing: tuple[list[OpCall], list[tuple[int, int]]] | None = None
        reshaped = 0
        for step in trace.steps:
            calls = self._calls(step)
            have = tuple(call.key for call in calls)
            if have not in self.pairs:
                self.pairs[have] = paired(have, self.wanted)
            pairs, loosely = self.pairs[have]
            reshaped += loosely
            differing = differing or (calls, pairs)
            partner = dict(pairs)
            for index, call in enumerate(calls):
                sums.add(step, call, self.kernels[partner[index]] if index in partner else None)
            sums.end()
        first = ""
        if differing:
            first = _first_difference(self.graph, *differing, self.kernels, self.wanted)
        return replace(sums.alignment("order", first), reshaped=reshaped)

    def _calls(self, step: TraceStep) -> list[OpCall]:
        level = self.level
        return [call for call in level.of(step) if not call.host or call.key in level.keys]

    # -- steps without marks -----------------------------------------------------------------------

    def of_the_graph(self, step: TraceStep) -> list[OpCall]:
        """The calls of a step that the graph has too."""
        level = self.level
        return [
            call
            for call in self._calls(step)
            if call.op != records.NONE and (call.key in level.keys or level.nearly(call.key))
        ]

    def steps_of(
        self, period: Period, calls: Sequence[OpCall], cut: records.Cut
    ) -> tuple[TraceStep, ...]:
        """From the first call of each period to that of the next; the last has median length."""
        steps: list[TraceStep] = []
        for first, count in period.runs:
            firsts = [first + number * period.length for number in range(count)]
            starts = [self._start(calls[index].op) for index in firsts]
            last = calls[firsts[-1] + period.length - 1].op
            end = self._end(last)
            if starts != sorted(set(starts)):
                return ()  # one call is around several of them
            if len(starts) > 1:
                lengths = [b - a for a, b in pairwise(starts)]
                after = firsts[-1] + period.length
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

    def outside(self, everything: TraceStep, steps: Sequence[TraceStep]) -> float:
        """Share of the measured seconds that is in none of the steps."""
        total = sum(call.seconds for call in self._calls(everything))
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
    equal = next((i for i in range(len(calls)) if paired.get(i) != i), len(calls))
    other = min(equal, len(wanted))
    call = key_words(calls[equal].key) if equal < len(calls) else "its end"
    if other >= len(wanted):
        return f"after {equal} equal ops: the trace has {call}, the graph its end"
    op = graph.ops[kernels[other][0]]
    where = f" in {op.module}" if op.module else ""
    return (
        f"after {equal} equal ops: the trace has {call}, "
        f"the graph {key_words(wanted[other])} (op {op.id}{where})"
    )


# -- periods ---------------------------------------------------------------------------------------
# Layers repeat inside of a step as steps repeat inside of a trace, so a sequence alone does not
# tell which of its periods is a step.  Periods most similar to the graph come first.


_ANCHORS = 4
"""Rarest keys that are examined: a step has them once, or a few times."""
_PLACES = 48
"""Positions of each that are compared with its first two."""
_BEGINNINGS = 8
"""Possible first calls of a step that are compared with the graph."""
_SEGMENTS = 4
"""Longest segments that are compared with the graph."""
_TRIED = 3
"""Periods that are tried."""


@dataclass(frozen=True, slots=True)
class Period:
    """`length` calls that repeat.  runs: (first call, repetitions) of each segment without calls
    between repetitions."""

    length: int
    runs: tuple[tuple[int, int], ...]


def periods(have: Sequence[Hashable], wanted: Sequence[Hashable]) -> list[Period]:
    """The periods of `have` that are similar to `wanted`, best first.

    Calls before the first period, and after the last one, are in no run.
    """
    numbers: dict[Hashable, int] = {}
    calls = [numbers.setdefault(key, len(numbers)) for key in have]
    graph = [numbers.setdefault(key, len(numbers)) for key in wanted]
    sequence = numpy.array(calls, dtype=numpy.int64)
    ranked: list[tuple[float, int, Period]] = []
    for length in sorted(_lengths(calls)):
        equal = sequence[length:] == sequence[:-length]
        edges = numpy.flatnonzero(numpy.diff(numpy.concatenate(([0], equal, [0]))))
        segments = [(int(a), int(b)) for a, b in edges.reshape(-1, 2) if b - a >= length]
        if not segments:
            continue
        first, score = _beginning(calls, graph, length, segments)
        runs = tuple(_runs(calls, first, length, segments))
        if runs:
            ranked.append((-score, length, Period(length, runs)))
    return [period for _, _, period in sorted(ranked, key=lambda entry: entry[:2])[:_TRIED]]


def _lengths(calls: Sequence[int]) -> set[int]:
    """The distances between the rarest calls."""
    counts = Counter(calls)
    often = sorted((count, number) for number, count in counts.items() if count > 1)
    anchors = {number for _, number in often[:_ANCHORS]}
    by_number: dict[int, list[int]] = {}
    for position, number in enumerate(calls):
        if number in anchors:
            by_number.setdefault(number, []).append(position)
    return {
        after - before
        for positions in by_number.values()
        for start in (0, 1)
        for before in positions[start : start + 1]
        for after in positions[start + 1 : start + 1 + _PLACES]
    }


def _beginning(
    calls: Sequence[int], graph: Sequence[int], length: int, segments: Sequence[tuple[int, int]]
) -> tuple[int, float]:
    """The beginning of the period most similar to the graph, and the similarity (0 to 1)."""
    from rapidfuzz.distance import LCSseq

    best, most = segments[0][0], -1.0
    for start, end in sorted(segments, key=lambda segment: segment[0] - segment[1])[:_SEGMENTS]:
        period = calls[start : start + length]
        numbers = set(period)
        heads = [number for number in dict.fromkeys(graph) if number in numbers][:2]
        begins = [start + offset for offset in range(length) if period[offset] in heads]
        for begin in [start, *begins[:_BEGINNINGS]]:
            if begin > end:
                break
            same = LCSseq.similarity(calls[begin : begin + length], graph)
            score = min(same / length, same / len(graph)) if graph else 0.0
            if score > most:
                best, most = begin, score
    return best, most


def _runs(
    calls: Sequence[int], first: int, length: int, segments: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The periods in each segment, all of them beginning with the same call."""
    period = calls[first : first + length]
    for start, end in segments:
        begins = (
            index
            for index in range(start, min(start + length, end + 1))
            if calls[index] == period[0] and calls[index : index + length] == period
        )
        begin = next(begins, None)
        if begin is not None:
            yield begin, (end + length - begin) // length
