"""Experts that compute every token become a product of the tokens routed to them.

Some models repeat all tokens for every expert, weigh them by scores that are zero for all but the
top k experts of a token, and add the results up.  What is multiplied by zero need not be computed:
a server sorts the T k chosen rows by expert and runs one grouped product over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from rooftrace.costmodels.rewriting.editing import operand
from rooftrace.costmodels.rewriting.expert_products import ExpertLayer, emit
from rooftrace.costmodels.rewriting.matching import (
    LAST,
    LAST_OF_TOPK,
    Along,
    Number,
    Pat,
    Scalar,
    match,
)
from rooftrace.costmodels.rewriting.places import Places, beside
from rooftrace.costmodels.rewriting.regions import times_rows
from rooftrace.costmodels.rewriting.unused import rewritten
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op, OpGraph

_ZERO_STAYS = frozenset({
    "aten.silu", "aten.gelu", "aten.relu", "aten.tanh", "aten.mul", "aten._to_copy", "aten.clone",
})  # fmt: skip
"""Ops between the products that make zero of zeros, element by element."""
_BY_ROW = frozenset({
    "aten.add", "aten.sub", "aten.div", "aten.neg", "aten.pow", "aten.exp", "aten.sigmoid",
    "aten.clamp",
})  # fmt: skip
"""Further ops that act on every row alone, for rows that are weighed behind the products."""
_PARTS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice"})
_LONGEST = 24
"""The most ops between the two products of an expert."""
_ADDED = Pat("sum", "added", dim=Along(-3))
_REPEATED = (Pat("repeat", "tokens", repeats=Scalar("times")), Pat("expand", "tokens"))
_CHOSEN = Pat(
    "scatter",
    (Pat("zeros zeros_like new_zeros"), Pat("full full_like new_full", fill_value=Number("fill"))),
    dim=LAST,
    index=Pat("topk", "ranked", k=Scalar("k"), dim=LAST_OF_TOPK, out=1, said="choice"),
    src="scores",
)
"""Scores of the chosen experts among those of all, which are a number."""


def route_experts(graph: OpGraph) -> tuple[OpGraph, int]:
    """Experts that compute every token, most of them weighed by zero, compute the chosen ones.

    The scores must come from a top k over the experts by a scatter into zeros (or into minus
    infinity before a sigmoid or softmax), and what lies between the products must keep zeros zero
    where the tokens are weighed before them.
    """
    return rewritten(graph, ("aten.sum",), _match, emit)


# -- what is there ---------------------------------------------------------------------------------


def _match(places: Places, total: Op) -> ExpertLayer | None:
    graph, (out,) = places.graph, total.outputs
    added = operand(total, "self").id
    result, terms = graph.values[out], graph.values[added]
    plain = result.dtype == terms.dtype and result.storage == out and len(terms.shape) == 3
    plain = plain and total.part == "forward"
    if not plain or match(places, out, _ADDED) is None:
        return None
    experts, tokens, _ = terms.shape
    weighed = times_rows(places, places.straight(added))
    second = _product(places, added if weighed is None else weighed[0], experts, tokens)
    if second is None or second.repeats != total.repeats:
        return None
    scored_first = weighed is None
    allowed = _ZERO_STAYS if scored_first else _ZERO_STAYS | _BY_ROW
    walked = _between(places, second, (experts, tokens), allowed)
    if walked is None:
        return None
    first, between = walked
    rows = operand(first, "self").id
    if scored_first:
        weighed = times_rows(places, places.straight(rows))
        if weighed is None:
            return None
        rows = weighed[0]
    source = _repeated(places, rows, experts, tokens)
    routing = None if weighed is None else _routing(places, weighed[1], experts, tokens)
    if source is None or routing is None:
        return None
    scores, choice = routing
    chosen = choice.outputs[1]
    ops = (total, first, second, *between)
    made = graph.producers
    if any(places.overwritten(i, made.get(i, -1), total.id) for i in (source, chosen, scores)):
        return None  # they are read at the sum, later than before
    alike = {op.repeats for op in ops} == {total.repeats} and total.repeats == choice.repeats
    if not alike or any(beside(op) for op in ops):
        return None
    return ExpertLayer(
        total=total, first=first, second=second, between=tuple(between), tokens=Ref(source),
        chosen=Ref(chosen), scores=Ref(scores), scored_first=scored_first, count=experts,
        choice=choice,
    )  # fmt: skip


def _product(places: Places, value: int, experts: int, tokens: int) -> Op | None:
    """The batched product with weights that made a value, one matrix for each expert."""
    graph = places.graph
    op = places.made_by(places.straight(value))
    if op is None or op.name != "aten.bmm":
        return None
    weight = graph.values[operand(op, "mat2").id]
    rows = graph.values[operand(op, "self").id]
    fits = weight.shape[0] == experts and rows.shape[:2] == (experts, tokens)
    return op if fits and graph.owner(operand(op, "mat2").id).role == "weights" else None


def _between(
    places: Places, second: Op, rows: tuple[int, int], allowed: Collection[str]
) -> tuple[Op, list[Op]] | None:
    """The first product of the experts, and the ops between it and the second one, in order."""
    graph = places.graph
    inner: dict[int, Op] = {}
    first: Op | None = None
    front = [operand(second, "self").id]
    while front:
        op = places.made_by(front.pop())
        if op is None:
            return None
        if op.id in inner or op is first:
            continue
        if op.name == "aten.bmm":
            if first is not None or _product(places, op.outputs[0], *rows) is None:
                return None
            first = op
            continue
        shapes = {graph.values[i].shape[:2] for i in (*op.inputs, *op.outputs)}
        last = op.arguments.get("dim", 0) in (-1, 2)
        plain = op.name in allowed or (op.name in _PARTS and last)
        if not plain or shapes != {rows} or len(inner) > _LONGEST:
            return None
        inner[op.id] = op
        front += op.inputs
    return None if first is None else (first, [inner[i] for i in sorted(inner)])


def _repeated(places: Places, rows: int, experts: int, tokens: int) -> int | None:
    """The tokens [T, K] that are repeated, or expanded, for every expert."""
    values, words = places.graph.values, match(places, rows, _REPEATED)
    if words is None or words.get("times", (experts, 1)) not in ((experts, 1), (experts, 1, 1)):
        return None
    behind, shape = places.behind(words["tokens"]), (tokens, values[rows].shape[-1])
    return next((value for value in behind if values[value].shape == shape), None)


# -- where the scores come from --------------------------------------------------------------------


def _routing(places: Places, score: int, experts: int, tokens: int) -> tuple[int, Op] | None:
    """Scores [T, E] that are zero but for the experts of a top k, and its op.

    score: the scores as they weigh the rows, expert by expert.
    """
    graph = places.graph
    whole = _by_token(places, score, experts, tokens)
    value, after = whole, list[Op]()
    while value is not None:
        words = match(places, value, _CHOSEN)
        if words is not None:
            choice, filled = words["choice"], words.get("fill", 0.0)
            for later in reversed(after):
                filled = _BACKGROUND[later.name](filled, later)
            by_token = graph.values[choice.inputs[0]].shape == (tokens, experts)
            return (whole, choice) if whole is not None and by_token and filled == 0 else None
        op = places.made_by(places.straight(value))
        if op is None or beside(op) or op.name not in _BACKGROUND:
            return None
        after.append(op)
        value = op.inputs[0] if graph.values[op.inputs[0]].shape == (tokens, experts) else None
    return None


def _by_token(places: Places, score: int, experts: int, tokens: int) -> int | None:
    """The scores [T, E] of which a value has one for each row, expert by expert."""
    for value in places.behind(score):
        place = places.place(value)
        if place is None or place.shape not in ((experts, tokens, 1), (experts, tokens)):
            continue
        steps = zip(place.shape[:2], place.stride, (1, experts), strict=False)
        if all(n == 1 or step == wanted for n, step, wanted in steps):
            owner = places.graph.values[place.storage]
            plain = owner.shape == (tokens, experts) and not place.offset
            return _last_written(places, place.storage, value) if plain else None
    return None


def _last_written(places: Places, storage: int, view: int) -> int | None:
    """The value of a whole storage at the time that a view of it is read."""
    value = storage
    made = places.made_by(view)
    for op in places.readers[storage]:
        for out in op.outputs:
            tensor = places.graph.values[out]
            whole = tensor.storage == storage and tensor.shape == places.graph.values[storage].shape
            if whole and op.kind == "kernel" and (made is None or op.id < made.id):
                value = out
    return value


def _sigmoid(x: float, op: Op) -> float:
    return 0.0 if x == -math.inf else 1 / (1 + math.exp(-x))


def _softmax(x: float, op: Op) -> float:
    along = op.arguments.get("dim") in (1, -1)
    return 0.0 if x == -math.inf and along else math.nan


def _zero_only(x: float, op: Op) -> float:
    return 0.0 if x == 0 else math.nan


_BACKGROUND: dict[str, Callable[[float, Op], float]] = {
    "aten.sigmoid": _sigmoid,
    "aten._softmax": _softmax,
    "aten.relu": _zero_only,
    "aten.mul": _zero_only,
    "aten.div": _zero_only,
}
"""What an op makes of the number that stands where no expert was chosen."""
