"""Which op of a graph each measured second of a trace belongs to.

Two ways.  A run that wrapped every op in `record_function("op 17")` says so itself.  Any other
trace is matched in order: the calls of each step and the ops of the graph are two sequences of
(name, input shapes), and the longest common subsequence pairs them.  Calls are taken at the level
of the graph: if `linear` calls `addmm`, the call whose name the graph has counts.

Equal shapes pair first.  Calls and ops left between two pairs may pair by looser shapes: without
dimensions of 1, with leading dimensions merged, or with a weight transposed.

A trace without marks around its steps is cut where the ops of the graph come again (`periods`).
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
from rooftrace.measured.alignment.alignment import Alignment, Sums
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
    theirs: Counter[str] = Counter()
    ours: Counter[str] = Counter()
    keys: dict[str, Key] = {}
    for stray in match.only_in_trace:
        theirs[key_of_call(stray.name, stray.shapes)[0]] += round(stray.count)
    for index in match.only_in_graph:
        key = key_of_op(graph, graph.ops[index])
        ours[key[0]] += graph.times(graph.ops[index])
        keys.setdefault(key[0], key)
    if 5 * (ours & theirs).total() < 4 * ours.total():
        return ""
    for stray in match.only_in_trace:
        name = key_of_call(stray.name, stray.shapes)[0]
        if name in keys and stray.shapes:
            return f"trace {key_words((stray.name, stray.shapes))}, graph {key_words(keys[name])}"
    return ""


# -- marks -----------------------------------------------------------------------------------------
# Matches a trace whose ops are annotated: each inside `record_function("op 17")`.


_OP = re.compile(r"op (\d+)")


def marks_of(trace: Trace) -> list[tuple[int, records.Annotation]]:
    """(op id, range) of each `record_function("op 17")`, by start."""
    matches = ((_OP.fullmatch(annotation.name), annotation) for annotation in trace.annotations)
    return [(int(match[1]), annotation) for match, annotation in matches if match]


@dataclass(frozen=True, slots=True)
class _Marked:
    """A range around an op, with the op, its iteration, and the pass over the graph."""

    range: records.Annotation
    target: tuple[int, int]
    run: int


def by_annotation(
    trace: Trace, graph: OpGraph, marks: Sequence[tuple[int, records.Annotation]]
) -> Alignment:
    """The alignment of a trace by its marks.

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
    sums = Sums(trace, graph)
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


def _add_marked(level: CallTree, sums: Sums, step: TraceStep, marked: Sequence[_Marked]) -> None:
    """Add each call of a step to the range in which it begins; its kernels go with it."""
    starts = [mark.range.start for mark in marked]
    ops, kernels = level.trace.ops, level.trace.kernels
    runs: dict[int, list[tuple[OpCall, tuple[int, int] | None]]] = defaultdict(list)
    for call in level.of(step):
        known = call.op != records.NONE
        start = ops.start[call.op] if known else kernels.launched[call.kernels[0]]
        place = bisect_right(starts, start) - 1
        mark = marked[place] if place >= 0 else None
        inside = mark is not None and start <= mark.range.end
        if mark is not None and known:
            inside = inside and ops.thread[call.op] == mark.range.thread
        target = mark.target if mark is not None and inside else None
        if target is not None or not call.host:
            runs[mark.run if mark is not None else 0].append((call, target))
    for _, calls in sorted(runs.items()):
        for call, target in calls:
            sums.add(step, call, target)
        sums.end()


# -- order -----------------------------------------------------------------------------------------
# Matches the calls of each step and the ops of a graph in order.


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


# -- periods ---------------------------------------------------------------------------------------
# The periods of a sequence of calls: the steps of a trace without marks.
#
# Layers repeat inside of a step as steps repeat inside of a trace, so a sequence alone does not
# tell which of its periods is a step.  Periods that look most like the graph come first.


_ANCHORS = 4
"""The number of rarest keys that are examined: in a step they come once, or a few times."""
_PLACES = 48
"""How many places of each are compared with its first two."""
_BEGINNINGS = 8
"""How many places where a step may begin are compared with the graph."""
_STRETCHES = 4
"""How many stretches, the longest, are compared with it."""
_TRIED = 3
"""How many periods are tried."""


@dataclass(frozen=True, slots=True)
class Period:
    """`length` calls that come again.  runs: (first call, how many times) of each stretch in which
    nothing else is between them."""

    length: int
    runs: tuple[tuple[int, int], ...]


def periods(have: Sequence[Hashable], wanted: Sequence[Hashable]) -> list[Period]:
    """The periods of `have` that look like `wanted`, best first; none where nothing comes twice.

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
        stretches = [(int(a), int(b)) for a, b in edges.reshape(-1, 2) if b - a >= length]
        if not stretches:
            continue
        first, score = _beginning(calls, graph, length, stretches)
        runs = tuple(_runs(calls, first, length, stretches))
        if runs:
            ranked.append((-score, length, Period(length, runs)))
    return [period for _, _, period in sorted(ranked, key=lambda entry: entry[:2])[:_TRIED]]


def _lengths(calls: Sequence[int]) -> set[int]:
    """The distances between the rarest calls."""
    counts = Counter(calls)
    often = sorted((count, number) for number, count in counts.items() if count > 1)
    anchors = {number for _, number in often[:_ANCHORS]}
    places: dict[int, list[int]] = {}
    for place, number in enumerate(calls):
        if number in anchors:
            places.setdefault(number, []).append(place)
    return {
        after - before
        for positions in places.values()
        for start in (0, 1)
        for before in positions[start : start + 1]
        for after in positions[start + 1 : start + 1 + _PLACES]
    }


def _beginning(
    calls: Sequence[int], graph: Sequence[int], length: int, stretches: Sequence[tuple[int, int]]
) -> tuple[int, float]:
    """The beginning of the period that looks most like the graph, and its likeness (0 to 1)."""
    from rapidfuzz.distance import LCSseq

    best, most = stretches[0][0], -1.0
    for start, end in sorted(stretches, key=lambda stretch: stretch[0] - stretch[1])[:_STRETCHES]:
        turn = calls[start : start + length]
        there = set(turn)
        heads = [number for number in dict.fromkeys(graph) if number in there][:2]
        places = [start + offset for offset in range(length) if turn[offset] in heads]
        for place in [start, *places[:_BEGINNINGS]]:
            if place > end:
                break
            same = LCSseq.similarity(calls[place : place + length], graph)
            score = min(same / length, same / len(graph)) if graph else 0.0
            if score > most:
                best, most = place, score
    return best, most


def _runs(
    calls: Sequence[int], first: int, length: int, stretches: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The periods in each stretch, all of them beginning with the same call."""
    turn = calls[first : first + length]
    for start, end in stretches:
        begins = (
            place
            for place in range(start, min(start + length, end + 1))
            if calls[place] == turn[0] and calls[place : place + length] == turn
        )
        begin = next(begins, None)
        if begin is not None:
            yield begin, (end + length - begin) // length
