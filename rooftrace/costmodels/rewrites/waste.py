"""Work that the code could leave out: the graph without it, with the same results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.rewrites.dataflow import ValueFlow, reads_across
from rooftrace.costmodels.rewrites.editing import Editor, operand, reading_others, released
from rooftrace.graph import Argument, Op, OpGraph


def without_waits(graph: OpGraph) -> OpGraph:
    """The graph without ops at which the host asks the device for a value."""
    return graph.with_ops(op for op in graph.ops if op.kind != "sync")


_ASKED = frozenset({"contiguous", "clone"})
"""Functions by which the code asks for a copy; reshape and others make one only where they must."""


def needless_copies(graph: OpGraph) -> tuple[Op, ...]:
    """Copies that the code asks for, all of whose readers are elementwise or reduce."""
    flow = ValueFlow(graph)
    return tuple(
        op
        for op in graph.ops
        if op.name == "aten.clone" and op.function in _ASKED and _is_needless(flow, op)
    )


def _is_needless(flow: ValueFlow, copy: Op) -> bool:
    (made,), before = copy.outputs, operand(copy, "self")
    storage = flow.values[made].storage
    if before.then or before.every or made in flow.escaping or flow.writers.get(storage):
        return False
    users = [op for op in flow.storage_users[storage] if op.id != copy.id]
    last = max((op.id for op in users), default=copy.id)
    if not users or flow.overwritten(before.id, copy.id, last):
        return False
    same = flow.values[made].stride == flow.values[before.id].stride
    rules = [find_rule(op.target) for op in users]
    return all(
        made in op.inputs and rule is not None and (same or rule.fusion in _ANY_LAYOUT)
        for op, rule in zip(users, rules, strict=True)
    )


_ANY_LAYOUT = frozenset({"pointwise", "reduction"})


def without_copies(graph: OpGraph) -> OpGraph:
    """The graph without needless copies."""
    copies = {op.outputs[0]: operand(op, "self").id for op in needless_copies(graph)}
    return _without(Editor(graph), copies)


DOUBLES: Mapping[str, str] = {"fp64": "fp32", "complex128": "complex64"}
"""Precisions of 64 bits a number, and those of 32."""


def without_doubles(graph: OpGraph) -> OpGraph:
    """The graph whose values in fp64 are in fp32, without the casts between the two."""
    doubles = enumerate(t.dtype for t in graph.values)
    return _recast(graph, {value: DOUBLES[was] for value, was in doubles if was in DOUBLES})


def cast_weights(graph: OpGraph) -> Mapping[int, str]:
    """Weights that are only read by casts to one precision, and that precision."""
    flow, casts = ValueFlow(graph), dict[int, str]()
    for value in graph.external:
        users, tensor = flow.users[value], graph.values[value]
        made = {graph.values[v].dtype for op in users for v in op.outputs} - {tensor.dtype}
        alone = flow.storage_users[tensor.storage] == users and value not in flow.escaping
        if tensor.role == "weights" and alone and {op.name for op in users} == {"aten._to_copy"}:
            casts |= dict.fromkeys([value], *made) if len(made) == 1 else {}
    return casts


def without_weight_casts(graph: OpGraph) -> OpGraph:
    """The graph whose weights are stored as each step casts them."""
    return _recast(graph, cast_weights(graph))


def _recast(graph: OpGraph, dtypes: Mapping[int, str]) -> OpGraph:
    """The graph with values in other precisions, without the casts that then change nothing."""
    edit, flow = Editor(graph), ValueFlow(graph)
    edit.values = [replace(t, dtype=dtypes.get(i, t.dtype)) for i, t in enumerate(graph.values)]
    casts = dict[int, int]()
    for op in graph.ops:
        if op.name == "aten._to_copy" and not reads_across(op):
            (made,), (source,) = op.outputs, op.inputs
            was, now = (
                [side[v].dtype for v in (source, made)] for side in (graph.values, edit.values)
            )
            strides = [edit.values[v].stride for v in (source, made)]
            written = {made, graph.values[source].storage} & flow.writers.keys()
            alike = now[0] == now[1] and strides[0] == strides[1]
            if was[0] != was[1] and alike and not written and made not in flow.escaping:
                casts[made] = source
    return _without(edit, casts)


def _without(edit: Editor, copies: Mapping[int, int]) -> OpGraph:
    """The graph whose readers of copies read the originals; elementwise results lie as these do."""
    graph, instead = edit.graph, dict[int, int]()
    for op in graph.ops:
        if not copies.keys().isdisjoint(op.outputs):
            (made,) = op.outputs
            instead[made] = source = instead.get(copies[made], copies[made])
            storage = edit.values[source].storage
            edit.moved[made] = edit.moved.get(storage, storage)
            continue
        pairs = [(graph.values[v], edit.values[instead.get(v, v)]) for v in op.inputs]
        op, rule = reading_others(op, instead), find_rule(op.target)
        if rule and rule.fusion == "pointwise" and any(a.stride != b.stride for a, b in pairs):
            like = pairs[0][1]
            for value in op.outputs:
                if edit.values[value].shape == like.shape and graph.values[value].storage == value:
                    edit.values[value] = replace(edit.values[value], stride=like.stride)
        edit.ops.append(op)
    return released(edit.done(), graph).verify()


def without_repeated_work(graph: OpGraph) -> OpGraph:
    """Ops of forward that make the same as an earlier one go, and those of all iterations too.

    The latter run once, before the first iteration.  torch.compile does the same to the steps that
    it differentiates (`fx_graph_cse` of functorch's partitioners).
    """
    edit, flow = Editor(graph), ValueFlow(graph)
    begins, front = dict[int, int](), dict[int, list[Op]]()
    first, instead = dict[Any, Op](), dict[int, int]()
    for op in graph.ops:
        for repeat in op.repeats:
            begins.setdefault(repeat, len(edit.ops))
        op = reading_others(op, instead)
        if not _is_pure(flow, op):
            edit.ops.append(op)
            continue
        read = [repeat for value in op.inputs for repeat in _repeats_of(edit, value)]
        depth = max((op.repeats.index(r) + 1 for r in read if r in op.repeats), default=0)
        inner = op.repeats if op.steps else op.repeats[:depth]
        same = first.setdefault((op.target, inner, _key(op.arguments)), op)
        if (same is op and inner == op.repeats) or _is_random(op):
            edit.ops.append(op)
            continue
        if same is not op:
            instead |= dict(zip(op.outputs, same.outputs, strict=True))
            edit.moved |= {v: edit.values[instead[v]].storage for v in op.outputs}
            continue
        for value in op.outputs:
            edit.values[value] = replace(edit.values[value], repeats=inner)
        place = begins[op.repeats[depth]]
        front.setdefault(place, []).append(replace(op, repeats=inner))
    edit.ops = [op for n, own in enumerate(edit.ops) for op in (*front.get(n, ()), own)]
    return released(edit.done(), graph).verify()


def _repeats_of(edit: Editor, value: int) -> tuple[int, ...]:
    """The repeats in whose iterations a value differs."""
    tensor = edit.values[value]
    return tensor.repeats + edit.values[tensor.storage].repeats


def _is_pure(flow: ValueFlow, op: Op) -> bool:
    """Whether an op of forward makes the same wherever it reads the same."""
    storages = {flow.values[value].storage for value in (*op.inputs, *op.outputs)}
    return (
        op.part == "forward"
        and op.kind in ("kernel", "view")
        and op.collective is None
        and "writes" not in op.facts
        and not reads_across(op)
        and storages.isdisjoint(flow.writers)
        and flow.escaping.isdisjoint(flow.values[value].storage for value in op.outputs)
        and all(flow.values[value].then is None for value in (*op.inputs, *op.outputs))
    )


def _is_random(op: Op) -> bool:
    """Whether an op draws random numbers."""
    if op.kind == "view":
        return False
    from rooftrace.tracer.recording.ops import draws  # loads torch

    return draws(op.target)


def _key(item: Argument) -> Argument:
    """An argument as a key of a mapping."""
    if isinstance(item, Mapping):
        return tuple(sorted((name, _key(value)) for name, value in item.items()))
    return tuple(map(_key, item)) if isinstance(item, tuple) else (type(item), repr(item))
