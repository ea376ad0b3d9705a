"""The choice of experts as one kernel: what is written out between the logits of a router, and the
experts of each token with their weights.

A server's kernel reads the logits once, and writes k indices and k weights for each token: vLLM's
`fused_topk` and `grouped_topk`, SGLang's `moe_fused_gate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace as with_fields
from functools import partial

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.regions import can_be_one, ops_between, own_storage, straight
from rooftrace.costmodels.rewriting.unused import with_matches
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

ROUTE = "rooftrace.route_experts.default"
_PRODUCTS = {"aten.mm": "mat2", "aten.addmm": "mat2", "aten.bmm": "mat2", "aten._scaled_mm": "mat2"}
"""Products that make logits, and what they call their weight."""
_GROUPED = frozenset({"aten._grouped_mm", "rooftrace.expert_mm"})
_INDEXED = frozenset({"aten.index", "aten.index_select", "aten.index_put"})
_WALK = 32
"""The most ops from the choice to the experts, or from the product to the logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Routing:
    """What one kernel computes, as `route_experts` names it."""

    choice: Op  # the top k over the experts
    logits: int
    weights: int
    bias: int | None  # added for the choice alone
    score: str  # what is made of all logits
    groups: tuple[int, int, int, float]  # how many, how many are kept, by how many best, the rest
    after: str = "none"  # what is made of the scores that were chosen
    least: float = 0.0  # added to their sum, or the least that it is
    scale: float = 1.0
    inside: frozenset[int] = frozenset()  # the ops that it stands for


def fuse_routing(graph: OpGraph) -> tuple[OpGraph, int]:
    """What lies between a router's logits, and the experts of a token and their weights, becomes
    one op.

    The top k must run over the columns of a product with weights, and the experts that it names
    must say which rows are read; no score in between may be read by anything else.
    """
    places = Places(graph)
    routers = {
        op.id: match
        for op in graph.ops
        if op.name == "aten.topk" and (match := _match(places, op)) is not None
    }
    gone = {number for match in routers.values() for number in match.inside}
    return with_matches(graph, routers, partial(_emit, places), gone)


def _emit(places: Places, edit: Editor, match: _Routing) -> None:
    values, weights = edit.values, match.weights
    for value in own_storage(places, weights):
        values[value] = replace(values[value], storage=weights)
    groups, kept, best, fill = match.groups
    arguments: dict[str, Argument] = {
        "logits": Ref(match.logits),
        "bias": None if match.bias is None else Ref(match.bias),
        "k": int(match.choice.arguments["k"]),
        "score": match.score, "groups": groups, "kept": kept, "best": best, "fill": fill,
        "after": match.after, "least": match.least, "scale": match.scale,
        "dtype": f"dtype:{values[weights].dtype}",
    }  # fmt: skip
    edit.emit(match.choice, ROUTE, arguments, (weights, match.choice.outputs[1]))


# -- what is there ---------------------------------------------------------------------------------


def _match(places: Places, choice: Op) -> _Routing | None:
    values = places.graph.values
    source = operand(choice, "self").id
    shape = values[source].shape
    along = choice.arguments.get("dim", -1) in (-1, len(shape) - 1)
    if not along or choice.arguments.get("largest", True) is not True or len(shape) < 2:
        return None
    value = straight(places, source, shape)
    grouped = _groups(places, value)
    value, groups = grouped if grouped is not None else (value, (1, 1, 1, 0.0))
    scores, bias = _bias(places, straight(places, value, shape))
    score, logits = _function(places, scores)
    if not _is_router(places, logits) or not _reaches_experts(places, choice.outputs[1]):
        return None
    if bias is not None and straight(places, bias) not in places.outside:
        return None
    routing = _Routing(
        choice=choice, logits=logits, weights=-1, bias=bias, score=score, groups=groups
    )
    for start, after in _first_weights(places, choice, scores, routing):
        whole = _finished(places, routing, start, after)
        start_of = {logits} | ({bias} if bias is not None else set())
        ends = {whole.weights, choice.outputs[1]}
        inside = ops_between(places, start_of, ends)
        if can_be_one(places, inside, ends, start_of):
            return with_fields(whole, inside=inside)
    return None


def _function(places: Places, scores: int) -> tuple[str, int]:
    """What is made of the logits of a token, and the logits."""
    shape = places.graph.values[scores].shape
    value = straight(places, scores, shape)
    op = places.made_by(value)
    name = "none" if op is None else _FUNCTIONS.get(op.name, "none")
    if op is None or name == "none" or (name == "softmax" and not _last(op, len(shape))):
        return "none", value
    inner = straight(places, op.inputs[0], shape)
    if name == "root":
        op = places.made_by(inner)
        numbers = None if op is None else {op.arguments.get(n, d) for n, d in _SOFTPLUS.items()}
        if op is None or op.name != "aten.softplus" or numbers != set(_SOFTPLUS.values()):
            return "none", value
        name, inner = "root of softplus", straight(places, op.inputs[0], shape)
    return name, inner


_FUNCTIONS = {"aten.softmax": "softmax", "aten._softmax": "softmax", "aten.sigmoid": "sigmoid",
              "aten.sqrt": "root"}  # fmt: skip
_SOFTPLUS = {"beta": 1, "threshold": 20}
"""The arguments of a softplus, as they are where nothing is said."""


def _last(op: Op, rank: int) -> bool:
    dim = op.arguments.get("dim")
    return dim in (-1, rank - 1) or dim in ((-1,), (rank - 1,))


def _bias(places: Places, value: int) -> tuple[int, int | None]:
    """The scores, and what is added to them for the choice alone; None where nothing is."""
    op = places.made_by(value)
    values = places.graph.values
    if op is None or op.name not in ("aten.add", "aten.add_") or len(op.inputs) != 2:
        return value, None
    experts = values[value].shape[-1]
    for scores, bias in (op.inputs, op.inputs[::-1]):
        narrow = values[bias].elements == experts == values[bias].shape[-1]
        wide = values[scores].shape == values[value].shape
        if (
            narrow
            and wide
            and op.arguments.get("alpha", 1) == 1
            and _made_by_function(places, scores)
        ):
            return scores, bias
    return value, None


def _made_by_function(places: Places, scores: int) -> bool:
    """Whether scores were made of logits: what is added to logits themselves is a part of these."""
    return _function(places, scores)[0] != "none"


def _groups(places: Places, value: int) -> tuple[int, tuple[int, int, int, float]] | None:
    """The scores before all groups but the best were masked; how many groups, how many are kept,
    by how many of their best, and what stands in place of the others."""
    values = places.graph.values
    op = places.made_by(value)
    if op is None or op.name not in ("aten.masked_fill", "aten.where", "aten.masked_fill_"):
        return None
    if op.name == "aten.where":
        keep, scores, fill = (op.arguments.get(name) for name in ("condition", "self", "other"))
        wanted = True
    else:
        scores, keep, fill = (op.arguments.get(name) for name in ("self", "mask", "value"))
        wanted = False
    if not isinstance(keep, Ref) or not isinstance(scores, Ref):
        return None
    number = _number(places, fill)
    if number is None or len(values[scores.id].shape) < 2:
        return None
    mask = straight(places, keep.id)
    for _ in range(3):  # not of not of what was kept
        made = places.made_by(mask)
        if made is None or made.name not in ("aten.bitwise_not", "aten.logical_not"):
            break
        mask, wanted = straight(places, made.inputs[0]), not wanted
    made = places.made_by(mask)
    if made is None or made.name != "aten.expand" or not wanted:
        return None
    kept_of = places.made_by(straight(places, made.inputs[0]))
    if kept_of is None or kept_of.name not in ("aten.scatter", "aten.scatter_"):
        return None
    said = _best_groups(places, kept_of, straight(places, scores.id))
    if said is None or values[mask].shape[-1] * said[0] != values[scores.id].shape[-1]:
        return None
    return scores.id, (*said, number)


def _number(places: Places, item: Argument) -> float | None:
    """A number that an op was given, also as a tensor of no dimensions."""
    made = places.made_by(item.id) if isinstance(item, Ref) else None
    if made is not None and made.name == "aten.scalar_tensor":
        item = made.arguments.get("s")
    return float(item) if isinstance(item, (int, float)) else None


def _best_groups(places: Places, kept: Op, scores: int) -> tuple[int, int, int] | None:
    """How many groups there are, are kept, and by how many of their best scores."""
    values = places.graph.values
    base = places.made_by(operand(kept, "self").id)
    if base is None or base.name not in ("aten.zeros_like", "aten.zeros", "aten.new_zeros"):
        return None
    if kept.arguments.get("value") not in (1, 1.0, True) or not _last(kept, 2):
        return None
    choice = places.made_by(straight(places, operand(kept, "index").id))
    if (
        choice is None
        or choice.name != "aten.topk"
        or choice.arguments.get("dim", -1) not in (1, -1)
    ):
        return None
    whole = straight(places, choice.inputs[0])
    op = places.made_by(whole)
    best = 1
    if op is not None and op.name == "aten.sum" and _last(op, 3):
        op = places.made_by(straight(places, op.inputs[0]))
        if op is None or op.name != "aten.topk" or op.arguments.get("dim", -1) not in (2, -1):
            return None
        best = int(op.arguments["k"])
    elif op is None or op.name not in ("aten.max", "aten.amax") or not _last(op, 3):
        return None
    parts = values[op.inputs[0]].shape
    if len(parts) != 3 or straight(places, op.inputs[0]) != scores:
        return None
    return parts[1], int(choice.arguments["k"]), best


# -- the weights of what was chosen ----------------------------------------------------------------


def _first_weights(
    places: Places, choice: Op, scores: int, routing: _Routing
) -> list[tuple[int, str]]:
    """Values that hold the scores of what was chosen, and what was made of them by then."""
    graph = places.graph
    top, chosen = choice.outputs
    shape = graph.values[scores].shape
    starts = [] if routing.bias is not None else [(top, "none")]
    for reader in places.readers[graph.values[chosen].storage]:
        if reader.name != "aten.gather" or straight(places, operand(reader, "index").id) != chosen:
            continue
        if not _last(reader, len(shape)):
            continue
        source = straight(places, operand(reader, "self").id, shape)
        if _function(places, source) == (routing.score, routing.logits):
            starts.insert(0, (reader.outputs[0], "none"))
            continue
        name, inner = _function(places, source)
        scattered = places.made_by(inner)
        if name != "none" and scattered is not None and _is_spread(places, scattered, choice):
            starts.insert(0, (reader.outputs[0], name))
    return starts


def _is_spread(places: Places, op: Op, choice: Op) -> bool:
    """Whether an op puts what was chosen back where it was, with minus infinity around it."""
    if op.name not in ("aten.scatter", "aten.scatter_"):
        return False
    index, source = op.arguments.get("index"), op.arguments.get("src")
    base = places.made_by(operand(op, "self").id)
    filled = base is not None and base.arguments.get("fill_value") == -math.inf
    same = (index, source) == (Ref(choice.outputs[1]), Ref(choice.outputs[0]))
    return filled and same and _last(op, 2)


def _finished(places: Places, routing: _Routing, start: int, after: str) -> _Routing:
    """The routing with all that is done to the weights [T, k] alone, up to what else reads them."""
    value, done = start, with_fields(routing, weights=start, after=after)
    shape = places.graph.values[start].shape
    for _ in range(_WALK):
        step = next(
            (s for rule in _STEPS if (s := rule(places, value, shape, done)) is not None), None
        )
        if step is None:
            return done
        done = step
        value = done.weights
    return done


def _readers(places: Places, value: int) -> list[Op]:
    storage = places.graph.values[value].storage
    return [op for op in places.readers[storage] if value in op.inputs]


def _cast(places: Places, value: int, shape: tuple[int, ...], done: _Routing) -> _Routing | None:
    readers = _readers(places, value)
    if len(readers) == 1 and readers[0].name in ("aten._to_copy", "aten.clone"):
        return with_fields(done, weights=readers[0].outputs[0])
    return None


def _scaled(places: Places, value: int, shape: tuple[int, ...], done: _Routing) -> _Routing | None:
    readers = _readers(places, value)
    if len(readers) != 1 or readers[0].name not in ("aten.mul", "aten.mul_"):
        return None
    number = readers[0].arguments.get("other")
    if not isinstance(number, (int, float)):
        return None
    return with_fields(done, weights=readers[0].outputs[0], scale=done.scale * number)


def _normed(places: Places, value: int, shape: tuple[int, ...], done: _Routing) -> _Routing | None:
    """Weights over their sum, to which a number may be added, or which has a least value."""
    readers = _readers(places, value)
    if done.after != "none" or done.scale != 1 or len(readers) != 2:
        return None
    total = next((op for op in readers if op.name == "aten.sum"), None)
    division = next((op for op in readers if op.name in ("aten.div", "aten.div_")), None)
    if total is None or division is None or not _last(total, len(shape)):
        return None
    if division.inputs[0] != value or len(division.inputs) != 2:
        return None
    if division.arguments.get("rounding_mode") is not None:
        return None
    after, least, below = "sum", 0.0, straight(places, division.inputs[1])
    op = places.made_by(below)
    if op is not None and op.name in ("aten.add", "aten.add_", "aten.clamp", "aten.clamp_min"):
        name = "other" if op.name.startswith("aten.add") else "min"
        number = op.arguments.get(name)
        plain = op.arguments.get("alpha", 1) == 1 and op.arguments.get("max") is None
        if not isinstance(number, (int, float)) or not plain:
            return None
        after = "sum" if name == "other" else "clamped sum"
        least, below = float(number), straight(places, op.inputs[0])
    if below != straight(places, total.outputs[0]):
        return None
    return with_fields(done, weights=division.outputs[0], after=after, least=least)


def _mapped(places: Places, value: int, shape: tuple[int, ...], done: _Routing) -> _Routing | None:
    """A softmax or sigmoid of the logits that were chosen."""
    readers = _readers(places, value)
    if len(readers) != 1 or done.after != "none" or done.scale != 1:
        return None
    (op,) = readers
    softmax = op.name == "aten._softmax" and _last(op, len(shape))
    if op.name != "aten.sigmoid" and not softmax:
        return None
    name = "softmax" if softmax else "sigmoid"
    return with_fields(done, weights=op.outputs[0], after=name)


_Step = Callable[[Places, int, tuple[int, ...], _Routing], _Routing | None]
_STEPS: tuple[_Step, ...] = (_cast, _scaled, _normed, _mapped)
"""What a kernel can do to the weights, in order."""


# -- whether it is a router ------------------------------------------------------------------------


def _is_router(places: Places, logits: int) -> bool:
    """Whether the columns of logits are those of a product with weights."""
    values, value = places.graph.values, logits
    experts = values[logits].shape[-1]
    for _ in range(_WALK):
        op = places.made_by(value)
        if op is None or values[value].shape[-1] != experts:
            return False
        if op.name in _PRODUCTS:
            weight = places.place(operand(op, _PRODUCTS[op.name]).id)
            return weight is not None and _is_weight(places, weight.storage)
        others = [i for i in op.inputs if values[i].elements == values[value].elements]
        if len(others) != 1 or values[others[0]].shape[-1] != experts:
            return False
        if op.name in ("aten.transpose", "aten.t", "aten.permute", "aten._softmax"):
            return False
        value = others[0]
    return False


def _is_weight(places: Places, storage: int) -> bool:
    source = straight(places, storage)
    place = places.place(source)
    return place is not None and places.graph.values[place.storage].role == "weights"


def _reaches_experts(places: Places, chosen: int) -> bool:
    """Whether the experts that were chosen say which rows are read, or how many each expert has."""
    graph, front, seen = places.graph, [chosen], set[int]()
    for _ in range(_WALK):
        following = []
        for value in front:
            for op in places.readers[graph.values[value].storage]:
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
