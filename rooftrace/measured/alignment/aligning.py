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

from collections import Counter

from rooftrace.errors import ProfileError
from rooftrace.hardware.units import format_share
from rooftrace.measured.alignment.alignment import Alignment
from rooftrace.measured.alignment.keys import Key, key_of_call, key_of_op, key_words
from rooftrace.measured.alignment.marks import by_annotation, marks_of
from rooftrace.measured.alignment.order import by_order
from rooftrace.measured.traces import Trace
from rooftrace.tracer.graph import OpGraph


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
