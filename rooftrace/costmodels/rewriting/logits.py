"""The head of a prompt on its last position alone: a server needs no other logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.unused import without_left_behind
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

_PRODUCTS = {"aten.mm": "self", "aten.addmm": "mat1"}
"""Products with a weight, and what they call their input."""
_BY_POSITION = frozenset({
    "aten._to_copy", "aten.mul", "aten.div", "aten.tanh", "aten.add", "aten.clone",
})  # fmt: skip
"""Ops on logits that act on every position alone; their other operands are numbers."""
_VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape"})
_LONGEST = 16


@dataclass(frozen=True, slots=True)
class _Head:
    """The product that makes the logits [B S, V], and what is done to them, in order."""

    product: Op
    after: tuple[Op, ...]
    output: int  # the logits [B, S, V] that leave the step


def last_logits(graph: OpGraph) -> tuple[OpGraph, int]:
    """The logits [B, S, V] of a prompt become those of its last position, [B, 1, V].

    It does so where they leave the step and nothing else reads them.
    """
    sizes = tuple(graph.workload.get(name) for name in ("batch", "seq"))
    places = Places(graph)
    heads = [head for output in graph.outputs if (head := _match(places, output, sizes))]
    if len(heads) != 1:
        return graph, 0
    (head,) = heads
    edit, skipped = Editor(graph), {op.id for op in head.after}
    last = head.output
    for op in graph.ops:
        if op.id == head.product.id:
            last = _emit(edit, head)
        elif op.id not in skipped:
            edit.ops.append(op)
    edit.replaced[head.output] = last
    return without_left_behind(edit.done(), graph), 1


def _match(places: Places, output: int, sizes: tuple[object, ...]) -> _Head | None:
    graph = places.graph
    shape = graph.values[output].shape
    if len(shape) != 3 or shape[:2] != sizes or shape[1] < 2:
        return None
    value, after = output, list[Op]()
    for _ in range(_LONGEST):
        op = places.made_by(value)
        refs = () if op is None else op.reads
        if op is None or op.repeats or any(r.then or r.every for r in refs):
            return None
        rows = (shape[0] * shape[1], shape[2])
        if op.name in _PRODUCTS:
            inputs = graph.values[operand(op, _PRODUCTS[op.name]).id]
            plain = graph.values[op.outputs[0]].shape == rows and inputs.shape[0] == rows[0]
            read = _read_elsewhere(places, op, after, output)
            return _Head(op, tuple(reversed(after)), output) if plain and not read else None
        source = graph.values[op.inputs[0]].shape if op.inputs else ()
        if len(op.inputs) != 1 or source not in (shape, rows):
            return None
        if op.name not in _VIEWS and (op.name not in _BY_POSITION or source != shape):
            return None
        after.append(op)
        value = op.inputs[0]
    return None


def _read_elsewhere(places: Places, product: Op, after: list[Op], output: int) -> bool:
    """Whether the logits, or what they are made of on the way, have other readers or leave."""
    graph = places.graph
    known = {product.id, *(op.id for op in after)}
    made = {value for op in (product, *after) for value in op.outputs}
    storages = {graph.values[value].storage for value in made}
    readers = {op.id for storage in storages for op in places.readers[storage]}
    leaving = [v for v in graph.outputs if graph.values[v].storage in storages]
    return bool(readers - known) or leaving != [output]


def _emit(edit: Editor, head: _Head) -> int:
    """The product of the last rows, and what is done to it; returns the new logits."""
    op, (batch, length, size) = head.product, edit.values[head.output].shape
    name = _PRODUCTS[op.name]
    rows = operand(op, name)
    source = edit.values[rows.id]
    down, across = source.stride
    whole = edit.viewed(op, rows, (batch, length, source.shape[1]), (length * down, down, across))
    last = edit.sliced(op, whole, 1, length - 1, length)
    flat = edit.viewed(op, last, (batch, source.shape[1]), (length * down, across))
    arguments: Mapping[str, Argument] = {**op.arguments, name: flat}
    out = edit.values[op.outputs[0]]
    made = edit.made(op, op.target, arguments, (batch, size), out.dtype, out.role).id
    now = {op.outputs[0]: made}
    for later in head.after:
        old = edit.values[later.outputs[0]]
        (source_id,) = later.inputs
        shape = (batch, 1, size) if len(old.shape) == 3 else (batch, size)
        if later.kind == "view":
            made = edit.viewed(later, Ref(now[source_id]), shape).id
        else:
            changed = {
                key: Ref(now[item.id]) if isinstance(item, Ref) else item
                for key, item in later.arguments.items()
            }
            made = edit.value(shape, old.dtype, old.role, later.repeats)
            edit.emit(later, later.target, changed, (made,), facts=later.facts)
        now[later.outputs[0]] = made
    return made
