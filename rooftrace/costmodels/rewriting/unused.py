"""Ops whose results nobody uses: all of them, or those that a rewrite left behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Protocol, TypeVar

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor, Match
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import Op, OpGraph


def without_dead_ops(graph: OpGraph) -> tuple[OpGraph, int]:
    """Remove ops that neither make an output nor write into something that outlives the step.

    Returns the graph and how many kernels were left out.
    """
    kept = _used(graph)
    if len(kept) == len(graph.ops):
        return graph, 0
    smaller = graph.with_ops(kept)
    return smaller, _launched(graph) - _launched(smaller)


def with_matches(
    graph: OpGraph,
    matches: Mapping[int, Match],
    emit: Callable[[Editor, Match], object],
    dropped: Container[int] = (),
) -> tuple[OpGraph, int]:
    """The graph with what `emit` writes in the place of each match, by the id of its op, and how
    often these ops ran; ops that are dropped, or left without a use, are gone."""
    if not matches:
        return graph, 0
    edit = Editor(graph)
    edit.rewrite(matches, partial(emit, edit), dropped)
    count = sum(graph.times(graph.ops[place]) for place in matches)
    return without_left_behind(edit.done(), graph), count


class Found(Protocol):
    """What an op was found to end.  inside: the ops that go with it, by their ids."""

    @property
    def inside(self) -> frozenset[int]: ...


Seen = TypeVar("Seen", bound=Found)


def rewritten(
    graph: OpGraph,
    names: Collection[str],
    find: Callable[[Places, Op], Seen | None],
    emit: Callable[[Places, Editor, Seen], object],
) -> tuple[OpGraph, int]:
    """The graph with what `emit` writes for each op of these names of which `find` says what it
    ends, in its place and in that of the ops inside, and how often these ops ran."""
    places = Places(graph)
    there = {
        op.id: seen
        for op in graph.ops
        if op.name in names and (seen := find(places, op)) is not None
    }
    gone = {number for seen in there.values() for number in seen.inside}
    return with_matches(graph, there, partial(emit, places), gone)


def without_left_behind(graph: OpGraph, before: OpGraph) -> OpGraph:
    """Remove the ops that a rewrite of `before` left without a use; unused ones of `before` stay.

    Values keep their ids in a rewrite, so an op is known by the values that it makes.
    """
    used_before = {op.outputs for op in _used(before)}
    unused_before = {op.outputs for op in before.ops} - used_before
    used = {op.id for op in _used(graph)}
    kept = [op for op in graph.ops if op.id in used or op.outputs in unused_before]
    kept = _without_unread_views(graph, kept, _read(before, before.ops))
    gone = before.producers.keys() - {value for op in kept for value in op.outputs}
    gone |= set(before.external) & _read(before, before.ops) - _read(graph, kept)
    return graph.with_ops(_letting_go(op, gone) for op in kept)


def letting_go(graph: OpGraph, before: OpGraph) -> OpGraph:
    """The graph without the values that an op made in `before`, and that none makes any more,
    among those that ops hold."""
    gone = before.producers.keys() - graph.producers.keys()
    if not gone:
        return graph
    return graph.replace(ops=tuple(_letting_go(op, gone) for op in graph.ops))


def _read(graph: OpGraph, ops: Sequence[Op]) -> set[int]:
    """The values that ops read, here or in a neighbouring iteration, and those that leave."""
    read = {value for op in ops for value in op.inputs} | set(graph.outputs)
    neighbours = [ref.then for op in ops for ref in op.reads]
    neighbours += [tensor.then for tensor in graph.values]
    return read | {then.value for then in neighbours if then is not None}


def _without_unread_views(graph: OpGraph, ops: list[Op], before: Set[int]) -> list[Op]:
    """Ops without the views that nothing reads any more, among those that were read `before`.

    Views of what comes from outside are kept by `_used`, since they may be written.
    """
    while True:
        read = _read(graph, ops)
        kept = [
            op
            for op in ops
            if op.kind != "view"
            or before.isdisjoint(op.outputs)
            or any(i in read or graph.values[i].storage == i for i in op.outputs)
        ]
        if len(kept) == len(ops):
            return kept
        ops = kept


def _letting_go(op: Op, gone: Collection[int]) -> Op:
    """The op without the values in `gone` among those that it holds."""
    if not op.holds or not any(ref.id in gone for ref in op.holds):
        return op
    return replace(op, holds=tuple(ref for ref in op.holds if ref.id not in gone))


def _used(graph: OpGraph) -> list[Op]:
    """The ops that make an output, or write into something that outlives the step."""
    across: set[tuple[int, int]] = set()
    while True:  # an iteration also makes what the next iteration reads
        kept = _needed(graph, across)
        more = {pair for op in kept if op.repeats for pair in _read_across(graph, op)}
        if more <= across:
            return kept
        across |= more


def _needed(graph: OpGraph, across: Collection[tuple[int, int]]) -> list[Op]:
    """The ops that make an output, or write what a later op reads.

    across: repeats, and storages that the next iteration reads when one of the repeat has ended.
    """
    storage = [t.storage for t in graph.values]
    live = {storage[i] for i in (*graph.outputs, *graph.external)}
    inside: tuple[int, ...] = ()
    eager = marks.eager_ops(graph.ops)
    kept = []
    for op in reversed(graph.ops):
        if op.repeats != inside:
            entered = set(op.repeats) - set(inside)
            live.update(value for repeat, value in across if repeat in entered)
            inside = op.repeats
        made = [storage[i] for i in op.outputs]
        beside = "writes" in op.facts  # it overwrites an operand, too
        if beside or op.id in eager or not made or not live.isdisjoint(made) or op.kind == "sync":
            kept.append(op)
            live.update([storage[i] for i in op.inputs])
    return kept[::-1]


def _read_across(graph: OpGraph, op: Op) -> Iterator[tuple[int, int]]:
    """Repeats, and storages that an op of one iteration takes from the iteration beside it: of a
    neighbour, or of what all iterations share."""
    values = graph.values
    neighbours = [ref.then for ref in op.reads]
    neighbours += [values[i].then for i in (*op.inputs, *op.outputs)]
    for then in neighbours:
        if then is not None:
            yield then.repeat, values[then.value].storage
    for repeat in op.repeats:
        for storage in (values[i].storage for i in op.inputs):
            if repeat not in values[storage].repeats:
                yield repeat, storage


def _launched(graph: OpGraph) -> int:
    return sum(graph.times(op) for op in graph.kernels())
