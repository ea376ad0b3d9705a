"""The choice of experts as one kernel, from the logits of a router to the experts and weights.

A server's kernel reads the logits once, and writes k indices and k weights for each token: vLLM's
`fused_topk` and `grouped_topk`, SGLang's `moe_fused_gate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rooftrace.costmodels.rewrites.dataflow import ValueFlow
from rooftrace.costmodels.rewrites.editing import Editor, operand, rewritten
from rooftrace.costmodels.rewrites.patterns import (
    LAST,
    LAST_OF_TOPK,
    NonTensor,
    Number,
    Pat,
    can_be_one,
    match,
    ops_between,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref

ROUTE = "rooftrace.route_experts.default"
_PRODUCTS = {"aten.mm": "mat2", "aten.addmm": "mat2", "aten.bmm": "mat2", "aten._scaled_mm": "mat2"}
"""Products that make logits -> the argument name of their weight."""
_GROUPED = frozenset({"aten._grouped_mm", "rooftrace.expert_mm"})
_INDEXED = frozenset({"aten.index", "aten.index_select", "aten.index_put"})
_WALK = 32
"""The most ops from the choice to the experts, or from the product to the logits."""

_SCORES = {
    "softmax": Pat("softmax _softmax", "logits", dim=LAST),
    "sigmoid": Pat("sigmoid", "logits"),
    "root of softplus": Pat("sqrt", Pat("softplus", "logits")),
}
"""Functions of all logits of a token."""
_BEST = (
    Pat("sum", Pat("topk", "parts", k=NonTensor("best"), dim=LAST_OF_TOPK), dim=LAST),
    Pat("max amax", "parts", dim=LAST),
)
"""The criterion of groups of experts: a sum of their best scores, or the best one."""
_KEPT = Pat(
    "expand",
    Pat(
        "scatter",
        Pat("zeros zeros_like new_zeros"),
        dim=LAST,
        index=Pat("topk", _BEST, k=NonTensor("kept"), dim=LAST_OF_TOPK, out=1),
        value=1,
    ),
    bind="mask",
)
_GROUPED_SCORES = (
    Pat("where", _KEPT, "scores", Number("fill")),
    Pat("masked_fill", "scores", Pat("bitwise_not logical_not", _KEPT), Number("fill")),
)
"""Scores with a number for all groups but the best."""
_SPREAD = Pat(
    "scatter", Pat("full full_like new_full", fill_value=-math.inf), dim=LAST, index="chosen",
    src="top",
)  # fmt: skip
"""The chosen scores, scattered back into minus infinity."""
_GATHER = Pat("gather", "source", dim=LAST, index="index")
_TOTAL = Pat("sum", "now", dim=LAST, keepdim=True)
_STEPS: tuple[tuple[int, Pat, Mapping[str, Any]], ...] = (
    (1, Pat("_to_copy clone", "now", bind="last"), {}),
    (1, Pat("mul", "now", Number("scale"), bind="last"), {}),
    (2, Pat("div", "now", _TOTAL, bind="last"), {"after": "sum"}),
    (2, Pat("div", "now", Pat("add", _TOTAL, Number("least")), bind="last"), {"after": "sum"}),
    (2, Pat("div", "now", Pat("clamp clamp_min", _TOTAL, min=Number("least")), bind="last"),
     {"after": "clamped sum"}),
    (1, Pat("_softmax", "now", dim=LAST, bind="last"), {"after": "softmax"}),
    (1, Pat("sigmoid", "now", bind="last"), {"after": "sigmoid"}),
)  # fmt: skip
"""The functions of a kernel on the weights: how many ops read them, the pattern, its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RouterKernel:
    """The arguments of one `route_experts` kernel."""

    choice: Op  # the top k over the experts
    logits: int
    weights: int
    bias: int | None  # added for the choice alone
    score: str  # the function of all logits
    groups: tuple[int, int, int, float]  # how many, how many kept, by how many best, the fill
    after: str = "none"  # the function of the chosen scores
    least: float = 0.0  # added to their sum, or its lower bound
    scale: float = 1.0
    inside: frozenset[int] = frozenset()  # the ops that it replaces


def fuse_routing(graph: OpGraph) -> tuple[OpGraph, int]:
    """The ops between a router's logits, and the experts of a token and their weights, become one.

    The top k must run over the columns of a product with weights, and its indices must select rows;
    no other op may read a score in between.
    """
    return rewritten(graph, ("aten.topk",), _match, _emit)


def _emit(edit: Editor, router: _RouterKernel) -> None:
    values, weights = edit.values, router.weights
    edit.move(weights, weights)
    groups, kept, best, fill = router.groups
    arguments: dict[str, Argument] = {
        "logits": Ref(router.logits),
        "bias": None if router.bias is None else Ref(router.bias),
        "k": int(router.choice.arguments["k"]),
        "score": router.score, "groups": groups, "kept": kept, "best": best, "fill": fill,
        "after": router.after, "least": router.least, "scale": router.scale,
        "dtype": f"dtype:{values[weights].dtype}",
    }  # fmt: skip
    edit.emit(router.choice, ROUTE, arguments, (weights, router.choice.outputs[1]))


# -- matches ---------------------------------------------------------------------------------------


def _match(flow: ValueFlow, choice: Op) -> _RouterKernel | None:
    source = operand(choice, "self").id
    shape = flow.values[source].shape
    along = choice.arguments.get("dim", -1) in (-1, len(shape) - 1)
    if not along or choice.arguments.get("largest", True) is not True or len(shape) < 2:
        return None
    value, groups = _groups(flow, flow.root(source, shape))
    scores, bias = _bias(flow, flow.root(value, shape))
    score, logits = _function(flow, scores)
    if not _is_router(flow, logits) or not _reaches_experts(flow, choice.outputs[1]):
        return None
    if bias is not None and flow.root(bias) not in flow.graph.external:
        return None
    routing = _RouterKernel(
        choice=choice, logits=logits, weights=-1, bias=bias, score=score, groups=groups
    )
    start = {logits} if bias is None else {logits, bias}
    for weights, after in _first_weights(flow, choice, scores, routing):
        finished = _finished(flow, replace(routing, weights=weights, after=after))
        ends = {finished.weights, choice.outputs[1]}
        inside = ops_between(flow, start, ends)
        if can_be_one(flow, inside, ends, start):
            return replace(finished, inside=inside)
    return None


def _function(flow: ValueFlow, scores: int) -> tuple[str, int]:
    """The function of the logits of a token, and the logits."""
    shape = flow.values[scores].shape
    for name, pattern in _SCORES.items():
        bound = match(flow, scores, pattern, shape=shape)
        if bound is not None:
            return name, flow.root(bound["logits"], shape)
    return "none", flow.root(scores, shape)


def _bias(flow: ValueFlow, value: int) -> tuple[int, int | None]:
    """The scores, and the bias that is added to them for the choice alone.

    A bias of the logits themselves is a part of these.
    """
    values, op = flow.values, flow.producer(value)
    bound = match(flow, value, Pat("add", "scores", "bias"), shape=values[value].shape)
    for scores, bias in (op.inputs, op.inputs[::-1]) if op is not None and bound else ():
        experts = values[value].shape[-1]
        narrow = values[bias].elements == experts == values[bias].shape[-1]
        wide = values[scores].shape == values[value].shape
        if narrow and wide and _function(flow, scores)[0] != "none":
            return scores, bias
    return value, None


def _groups(flow: ValueFlow, value: int) -> tuple[int, tuple[int, int, int, float]]:
    """The scores before all groups but the best were masked, and `_RouterKernel.groups`."""
    values, ungrouped = flow.values, (value, (1, 1, 1, 0.0))
    bound = match(flow, value, _GROUPED_SCORES)
    if bound is None:
        return ungrouped
    scores, parts = bound["scores"], values[bound["parts"]].shape
    same = flow.root(bound["parts"]) == flow.root(scores)
    groups = parts[1] if len(parts) == 3 else 0
    width = values[bound["mask"].outputs[0]].shape[-1]
    if not same or groups * width != values[scores].shape[-1]:
        return ungrouped
    return scores, (groups, int(bound["kept"]), int(bound.get("best", 1)), bound["fill"])


# -- weights of the chosen experts -----------------------------------------------------------------


def _first_weights(
    flow: ValueFlow, choice: Op, scores: int, routing: _RouterKernel
) -> list[tuple[int, str]]:
    """Values with the chosen scores, and the function that was applied to them."""
    top, chosen = choice.outputs
    shape = flow.values[scores].shape
    starts = [] if routing.bias is not None else [(top, "none")]
    for reader in flow.storage_users[flow.values[chosen].storage]:
        if reader.name != "aten.gather":
            continue
        bound = match(flow, reader.outputs[0], _GATHER, {"index": chosen})
        if bound is None:
            continue
        source = flow.root(bound["source"], shape)
        name, inner = _function(flow, source)
        spread = match(flow, inner, _SPREAD, {"chosen": chosen, "top": top}, shape)
        if (name, inner) == (routing.score, routing.logits):
            starts.insert(0, (reader.outputs[0], "none"))
        elif name != "none" and spread is not None:
            starts.insert(0, (reader.outputs[0], name))
    return starts


def _finished(flow: ValueFlow, routing: _RouterKernel) -> _RouterKernel:
    """The routing with all ops on the weights [T, k] alone, up to the first other reader."""
    for _ in range(_WALK):
        value = routing.weights
        storage = flow.values[value].storage
        readers = [op for op in flow.storage_users[storage] if value in op.inputs]
        fields = _step(flow, routing, readers[-1], len(readers)) if readers else None
        if fields is None:
            return routing
        routing = replace(routing, weights=readers[-1].outputs[0], **fields)
    return routing


def _step(
    flow: ValueFlow, routing: _RouterKernel, reader: Op, readers: int
) -> dict[str, Any] | None:
    """The fields that the last op that reads the weights changes."""
    plain = routing.after == "none" and routing.scale == 1
    for count, pattern, fields in _STEPS:
        if count != readers or (fields and not plain):
            continue
        bound = match(flow, reader.outputs[0], pattern, {"now": routing.weights})
        if bound is not None and bound["last"] is reader:
            scale = {"scale": routing.scale * bound["scale"]} if "scale" in bound else {}
            least = {"least": bound["least"]} if "least" in bound else {}
            return {**fields, **scale, **least}
    return None


# -- routers ---------------------------------------------------------------------------------------


def _is_router(flow: ValueFlow, logits: int) -> bool:
    """Whether the columns of logits are those of a product with weights."""
    values, value = flow.values, logits
    experts = values[logits].shape[-1]
    for _ in range(_WALK):
        op = flow.producer(value)
        if op is None or values[value].shape[-1] != experts:
            return False
        if op.name in _PRODUCTS:
            weight = flow.location(operand(op, _PRODUCTS[op.name]).id)
            stored = None if weight is None else flow.location(flow.root(weight.storage))
            return stored is not None and values[stored.storage].role == "weights"
        others = [i for i in op.inputs if values[i].elements == values[value].elements]
        if len(others) != 1 or values[others[0]].shape[-1] != experts:
            return False
        if op.name in ("aten.transpose", "aten.t", "aten.permute", "aten._softmax"):
            return False
        value = others[0]
    return False


def _reaches_experts(flow: ValueFlow, chosen: int) -> bool:
    """Whether the chosen experts select rows, or count the rows of each expert."""
    graph, front, seen = flow.graph, [chosen], set[int]()
    for _ in range(_WALK):
        following = []
        for value in front:
            for op in flow.storage_users[graph.values[value].storage]:
                if value not in op.inputs or op.id in seen:
                    continue
                seen.add(op.id)
                floats = any(graph.values[i].dtype.startswith(("bf", "fp")) for i in op.inputs)
                wide = any(len(graph.values[i].shape) > 1 for i in op.outputs)
                if op.name in _GROUPED or (op.name in _INDEXED and floats and wide):
                    return True
                following += [
                    i for i in op.outputs if graph.values[i].dtype in ("int64", "int32", "bool")
                ]
        front = following
    return False
