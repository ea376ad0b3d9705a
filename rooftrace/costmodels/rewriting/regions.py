"""Ops that one kernel can stand for: what lies between some values and what is made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor
from rooftrace.costmodels.rewriting.places import Places, beside
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op


def ops_between(places: Places, start: Collection[int], ends: Iterable[int]) -> frozenset[int]:
    """The ops that make the values `ends` of the values `start` and of what comes from outside.

    With them go ops that read what they make, where nothing reads the result.  Views of what there
    was before do not count.
    """
    graph, inside = places.graph, set[int]()
    front = [value for value in ends if value not in start]
    while front:
        op = places.made_by(front.pop())
        if op is not None and op.id not in inside:
            inside.add(op.id)
            front += [value for value in op.inputs if value not in start]
    made = {value for number in inside for value in graph.ops[number].outputs}
    inside = {
        number
        for number in inside
        if any(graph.values[value].storage in made for value in graph.ops[number].outputs)
    }
    return frozenset(inside | _unread(places, inside, ends))


def _unread(places: Places, inside: Collection[int], ends: Iterable[int]) -> set[int]:
    """Further ops that read what these make, and whose results nothing reads."""
    graph, more = places.graph, set[int]()
    kept = {*graph.outputs, *ends}
    front = {i for number in inside for i in graph.ops[number].outputs} - kept
    for storage in front & {graph.values[i].storage for i in front}:
        for op in places.readers[storage]:
            if op.id in inside or op.kind == "sync" or "writes" in op.facts or not op.outputs:
                continue
            owners = {graph.values[i].storage for i in op.outputs}
            read = {
                i for owner in owners for reader in places.readers[owner] for i in reader.inputs
            }
            mine = owners <= {*op.outputs, *front}
            if mine and not kept & set(op.outputs) and read.isdisjoint(op.outputs):
                more.add(op.id)
    return more


def can_be_one(
    places: Places, inside: Collection[int], ends: Collection[int], start: Collection[int]
) -> bool:
    """Whether nothing but `ends` of what these ops make is read elsewhere, they run in the same
    iterations, and what they read of `start` is not overwritten while they run."""
    graph = places.graph
    ops = [graph.ops[number] for number in inside]
    if not ops or len({op.repeats for op in ops}) > 1 or any(beside(op) for op in ops):
        return False
    if any(op.kind == "sync" or op.collective is not None for op in ops):
        return False
    made = {value for op in ops for value in op.outputs}
    if made & set(graph.outputs) - set(ends):
        return False
    storages = {graph.values[value].storage for value in made}
    if storages & places.neighbours:
        return False
    last = max(inside)
    if any(places.overwritten(v, graph.producers.get(v, -1), last) for v in start):
        return False
    return all(
        op.id in inside or made.isdisjoint(op.inputs) or made.intersection(op.inputs) <= set(ends)
        for storage in storages
        for op in places.readers[storage]
    )


def apart(places: Places, edit: Editor, value: int, storage: int) -> None:
    """Let a value, and all that lies where it does, lie in another storage."""
    for member in places.members[places.graph.values[value].storage]:
        edit.values[member] = replace(edit.values[member], storage=storage)


def stands_for(places: Places, edit: Editor, like: Op, made: Ref, value: int) -> None:
    """Let a value be a view of a new one that has its elements in order."""
    apart(places, edit, value, made.id)
    edit.stands_for(like, made, value)


def times_rows(places: Places, value: int) -> tuple[int, int] | None:
    """Rows, and what each is multiplied by, where a value is their product."""
    values, op = places.graph.values, places.made_by(value)
    if op is None or op.name not in ("aten.mul", "aten.mul_") or len(op.inputs) != 2:
        return None
    for row, score in (op.inputs, op.inputs[::-1]):
        shape = values[row].shape
        if values[score].shape == (*shape[:-1], 1) and values[value].shape == shape:
            return row, score
    return None
