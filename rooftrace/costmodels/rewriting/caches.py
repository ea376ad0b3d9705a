"""Caches that grow in place, as in a server: a `cat` becomes a write of the new rows."""

from __future__ import annotations

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor
from rooftrace.tracer.arguments import Argument, Ref, refs
from rooftrace.tracer.graph import OpGraph

CACHE_APPEND = "rooftrace.cache_append.default"


def append_in_place(graph: OpGraph) -> tuple[OpGraph, int]:
    """`cat` of a cache with new rows becomes a write of the new rows into a cache that has room.

    What the `cat` made is then another view of the cache.  A cache that is still empty (prefill)
    is made by its first `cat` as before; in a step of requests it is a part of the server's.
    """
    values, ops = graph.values, []
    moved: dict[int, int] = {}
    grown: set[int] = set()
    count = 0
    for op in graph.ops:
        # By name: of all ops that join tensors, `cat` is the one by which caches grow.
        if op.name == "aten.cat" and op.outputs and values[op.outputs[0]].role == "kv":
            whole, *new = op.reads
            old = whole.id
            cache = moved.get(values[old].storage, values[old].storage)
            there = values[old].elements or graph.phase == "requests"
            is_cache = values[old].role == "kv" and there and not whole.every
            if is_cache and new and old not in grown:
                grown.add(old)
                moved[values[op.outputs[0]].storage] = cache
                count += graph.times(op)
                arguments: dict[str, Argument] = {
                    "cache": whole,
                    "new": tuple(new),
                    "dim": op.arguments.get("dim", 0),
                }
                op = replace(
                    op, target=CACHE_APPEND, arguments=arguments, inputs=tuple(refs(arguments))
                )
        ops.append(op)
    if not moved:
        return graph, 0
    shared = tuple(
        replace(t, storage=moved[t.storage]) if t.storage in moved else t for t in values
    )
    return graph.replace(values=shared, ops=tuple(ops)), count


def static_caches(graph: OpGraph) -> tuple[OpGraph, int]:
    """`append_in_place`; and of a prompt a cache with a window keeps the last rows, not all.

    As it is written what leaves the step is a view, which holds the rows of the whole prompt.
    """
    graph, appended = append_in_place(graph)
    views = {value: graph.producers[value] for value in graph.outputs if _is_window(graph, value)}
    if not views:
        return graph, appended
    edit, count = Editor(graph), 0
    made = {op: value for value, op in views.items()}
    for op in graph.ops:
        edit.ops.append(op)
        if op.id in made:
            view = graph.values[made[op.id]]
            kept = edit.made(op, "aten.clone.default", {"self": Ref(made[op.id])}, view.shape,
                             view.dtype, "kv")  # fmt: skip
            edit.replaced[made[op.id]] = kept.id
            count += graph.times(op)
    return edit.done(), appended + count


def _is_window(graph: OpGraph, value: int) -> bool:
    """Whether a value is a part of a cache that a `cat` of this step made, and all that leaves."""
    tensor = graph.values[value]
    owner = graph.producers.get(tensor.storage)
    if tensor.role != "kv" or owner is None or graph.ops[owner].name != "aten.cat":
        return False
    leaving = [v for v in graph.outputs if graph.values[v].storage == tensor.storage]
    return leaving == [value] and tensor.elements < graph.values[tensor.storage].elements
