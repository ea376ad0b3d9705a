"""Scores by which sparse attention chooses keys, as the one kernel that makes them.

I[b, s, l] = sum over h of w[b, s, h] relu(scale q[b, s, h] k[b, l]) (DeepSeek-V3.2, section 2.1).
As written, the scores of every head go through memory in fp32, and keys are copied for each query;
`fp8_mqa_logits` of DeepGEMM adds the heads up before it writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.matching import Pat, match, swapped
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.regions import (
    can_be_one,
    ops_between,
    stands_for,
    times_rows,
)
from rooftrace.costmodels.rewriting.unused import rewritten
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

INDEX_SCORES = "rooftrace.index_scores.default"
_KEYS = (swapped("key"), Pat("expand", swapped("key"), said="wide"))


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
    return rewritten(graph, ("aten.bmm", "aten.sum"), _match, _emit)


def _emit(places: Places, edit: Editor, scores: _Scores) -> None:
    op, values = scores.total, edit.values
    (out,) = op.outputs
    batch, length, _ = values[scores.key].shape
    old = values[out]
    arguments: dict[str, Argument] = {
        "query": Ref(scores.query), "key": Ref(scores.key), "weights": Ref(scores.weights),
        "scale": scores.scale, "dtype": f"dtype:{old.dtype}",
    }  # fmt: skip
    shape = (batch, values[scores.query].shape[1], length)
    made = edit.made(op, INDEX_SCORES, arguments, shape, old.dtype, old.role)
    stands_for(places, edit, op, made, out)


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
    values, words = places.graph.values, match(places, value, _KEYS)
    if words is None:
        return None
    wide, shape = words.get("wide"), values[words["key"]].shape
    copied = wide is not None and (
        len(values[wide.outputs[0]].shape) != 4 or values[wide.outputs[0]].stride[1]
    )
    return None if copied or len(shape) != 3 else places.straight(words["key"], shape)
