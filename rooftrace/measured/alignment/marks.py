"""Matches a trace whose ops are annotated: each inside `record_function("op 17")`."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rooftrace.errors import ProfileError
from rooftrace.measured.alignment.alignment import Alignment, Sums
from rooftrace.measured.alignment.calls import CallTree, OpCall
from rooftrace.measured.alignment.keys import written_out
from rooftrace.measured.traces import Trace, TraceStep, records
from rooftrace.tracer.graph import OpGraph

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
