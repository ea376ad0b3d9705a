"""Scores by which sparse attention chooses keys, as the one kernel that makes them.

I[b, s, l] = sum over h of w[b, s, h] relu(scale q[b, s, h] k[b, l]) (DeepSeek-V3.2, section 2.1).
As written, the scores of every head go through memory in fp32, and keys are copied for each query;
`fp8_mqa_logits` of DeepGEMM adds the heads up before it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.regions import (
    can_be_one,
    ops_between,
    own_storage,
    times_rows,
)
from rooftrace.costmodels.rewriting.unused import with_matches
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

INDEX_SCORES = "rooftrace.index_scores.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Scores of the keys for each query, added up over heads."""

    total: Op  # adds up over heads
    query: int  # [B, S, H, D]
    key: int  # [B, L, D]
    weights: int  # [B, S, H]
    scale: float
    inside: frozenset[int] = frozenset()


def fuse_index_scores(graph: OpGraph) -> tuple[OpGraph, int]:
    """Products of queries of several heads with the same keys, cut off below zero, weighed and
    added up over heads, become one op."""
    places = Places(graph)
    matches = {
        op.id: match
        for op in graph.ops
        if op.name in ("aten.bmm", "aten.sum") and (match := _match(places, op)) is not None
    }
    gone = {number for match in matches.values() for number in match.inside}
    return with_matches(graph, matches, partial(_emit, places), gone)


def _emit(places: Places, edit: Editor, match: _Scores) -> None:
    op, values = match.total, edit.values
    (out,) = op.outputs
    batch, length, _ = values[match.key].shape
    old = values[out]
    arguments: dict[str, Argument] = {
        "query": Ref(match.query), "key": Ref(match.key), "weights": Ref(match.weights),
        "scale": match.scale, "dtype": f"dtype:{old.dtype}",
    }  # fmt: skip
    shape = (batch, values[match.query].shape[1], length)
    made = edit.made(op, INDEX_SCORES, arguments, shape, old.dtype, old.role)
    for value in own_storage(places, out):
        values[value] = replace(values[value], storage=made.id)
    viewed: dict[str, Argument] = {"self": made, "shape": old.shape}
    edit.emit(op, "aten.reshape.default", viewed, (out,), kind="view")


def _match(places: Places, total: Op) -> _Scores | None:
    values = places.graph.values
    added = _added(places, total)
    headed = None if added is None else _headed(places, added[0])
    key = None if headed is None else _key(places, operand(headed[0], "mat2").id)
    if added is None or headed is None or key is None:
        return None
    product, scale = headed
    batch, length, width = values[key].shape
    rows, heads, _ = values[operand(product, "self").id].shape
    sizes = (batch, rows // batch, heads)
    query = places.shaped(operand(product, "self").id, (*sizes, width))
    weights = places.shaped(added[1], sizes)
    together = values[total.outputs[0]].elements == rows * length
    if query is None or weights is None or not together:
        return None
    start = {query, key, weights}
    inside = ops_between(places, start, total.outputs)
    if not can_be_one(places, inside, total.outputs, start):
        return None
    return _Scores(
        total=total, query=query, key=key, weights=weights, scale=scale, inside=inside
    )  # fmt: skip


def _added(places: Places, total: Op) -> tuple[int, int] | None:
    """The scores of every head, and what weighs the heads, of which an op is the sum."""
    values, source = places.graph.values, operand(total, "self").id
    shape = values[source].shape
    if total.name == "aten.bmm":
        weighs = shape[1] == 1 and shape[2] > 1
        return (operand(total, "mat2").id, source) if weighs else None
    heads = total.arguments.get("dim") in ((2,), (-2,), 2, -2) and len(shape) == 4
    split = times_rows(places, places.straight(source)) if heads else None
    return None if split is None or total.arguments.get("keepdim", False) else split


def _headed(places: Places, value: int) -> tuple[Op, float] | None:
    """The product that makes the scores of every head, and what these are multiplied by, where
    they are cut off below zero."""
    scale, cut = 1.0, False
    while True:
        op = places.made_by(places.straight(value))
        if op is None:
            return None
        number = op.arguments.get("other")
        if op.name == "aten.bmm":
            return (op, scale) if cut and scale > 0 else None
        if op.name == "aten.relu":
            cut = True
        elif op.name in ("aten.mul", "aten.div") and isinstance(number, (int, float)) and number:
            scale = scale * number if op.name == "aten.mul" else scale / number
        else:
            return None
        value = op.inputs[0]


def _key(places: Places, value: int) -> int | None:
    """The keys [B, L, D] that a value has turned round, the same ones for every query."""
    values = places.graph.values
    value = places.straight(value)
    op = places.made_by(value)
    if op is not None and op.name == "aten.expand":
        if len(values[value].shape) != 4 or values[value].stride[1]:
            return None
        value = places.straight(op.inputs[0])
        op = places.made_by(value)
    turns = {op.arguments.get(name) for name in ("dim0", "dim1")} if op is not None else set()
    if op is None or op.name != "aten.transpose" or turns not in ({-1, -2}, {1, 2}):
        return None
    shape = values[op.inputs[0]].shape
    return places.straight(op.inputs[0], shape) if len(shape) == 3 else None
