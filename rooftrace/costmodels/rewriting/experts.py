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
from rooftrace.costmodels.rewriting.places import COPIES, Places
from rooftrace.costmodels.rewriting.unused import with_matches
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


def route_experts(graph: OpGraph) -> tuple[OpGraph, int]:
    """Experts that compute every token, most of them weighed by zero, compute the chosen ones.

    The scores must come from a top k over the experts by a scatter into zeros (or into minus
    infinity before a sigmoid or softmax), and what lies between the products must keep zeros zero
    where the tokens are weighed before them.
    """
    places = Places(graph)
    layers = {}
    for op in graph.ops:
        if op.name == "aten.sum" and op.part == "forward":
            match = _match(places, op)
            if match is not None:
                layers[op.id] = match
    return with_matches(graph, layers, emit)


# -- what is there ---------------------------------------------------------------------------------


def _match(places: Places, total: Op) -> ExpertLayer | None:
    graph = places.graph
    added = operand(total, "self").id
    if not _adds_over_experts(graph, total):
        return None
    experts, tokens, _ = graph.values[added].shape
    weighed = _weighed(places, added, experts, tokens)
    results = added if weighed is None else weighed[0]
    second = _product(places, results, experts, tokens)
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
        weighed = _weighed(places, rows, experts, tokens)
        if weighed is None:
            return None
        rows = weighed[0]
    source = _repeated(places, rows, experts, tokens)
    routing = None if weighed is None else _routing(places, weighed[1], experts, tokens)
    if source is None or routing is None:
        return None
    scores, chosen, choice = routing
    ops = (total, first, second, *between)
    made = graph.producers
    if any(places.overwritten(i, made.get(i, -1), total.id) for i in (source, chosen, scores)):
        return None  # they are read at the sum, later than before
    alike = {op.repeats for op in ops} == {total.repeats} and total.repeats == choice.repeats
    if not alike or any(r.then or r.every for op in ops for r in op.reads):
        return None
    return ExpertLayer(
        total=total, first=first, second=second, between=tuple(between), tokens=Ref(source),
        chosen=Ref(chosen), scores=Ref(scores), scored_first=scored_first, count=experts,
        choice=choice,
    )  # fmt: skip


def _adds_over_experts(graph: OpGraph, total: Op) -> bool:
    added, out = (graph.values[i] for i in (operand(total, "self").id, total.outputs[0]))
    dims = total.arguments.get("dim")
    plain = not total.arguments.get("keepdim", False) and out.dtype == added.dtype
    first = dims in ((0,), 0, (-3,))
    return bool(plain and first and len(added.shape) == 3 and out.storage == total.outputs[0])


def _rows(places: Places, value: int, experts: int, tokens: int) -> int:
    """The value [E, T, n] or [E T, n] that a value is a view of, in the same order."""
    graph = places.graph
    while True:
        op, shape = places.made_by(value), graph.values[value].shape
        if op is None or op.kind != "view" or len(op.inputs) != 1 or len(op.outputs) != 1:
            return value
        source = graph.values[op.inputs[0]]
        alike = source.shape[-1:] == shape[-1:] and source.shape in (
            (experts, tokens, *shape[-1:]), (experts * tokens, *shape[-1:]),
        )  # fmt: skip
        reshapes = op.name in ("aten.view", "aten._unsafe_view", "aten.reshape")
        if not (alike and reshapes) or any(r.then or r.every for r in op.reads):
            return value
        value = op.inputs[0]


def _weighed(places: Places, value: int, experts: int, tokens: int) -> tuple[int, int] | None:
    """The two factors of what is weighed by a score each row; None where nothing is."""
    op = places.made_by(_rows(places, value, experts, tokens))
    if op is None or op.name != "aten.mul" or len(op.inputs) != 2:
        return None
    if any(r.then or r.every for r in op.reads):
        return None
    values = places.graph.values
    out = values[op.outputs[0]]
    for rows, score in (op.inputs, op.inputs[::-1]):
        narrow = values[score].shape
        if narrow == (*out.shape[:-1], 1) and values[rows].shape == out.shape:
            return rows, score
    return None


def _product(places: Places, value: int, experts: int, tokens: int) -> Op | None:
    """The batched product with weights that made a value, one matrix for each expert."""
    graph = places.graph
    op = places.made_by(_rows(places, value, experts, tokens))
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
    graph = places.graph
    rows = _rows(places, rows, experts, tokens)
    op = places.made_by(rows)
    width = graph.values[rows].shape[-1]
    if op is None or any(r.then or r.every for r in op.reads):
        return None
    if op.name == "aten.repeat":
        source = graph.values[op.inputs[0]].shape
        times = op.arguments.get("repeats")
        wanted = {(tokens, width): ((experts, 1), (experts, 1, 1)),
                  (1, tokens, width): ((experts, 1, 1),)}  # fmt: skip
        return _two(places, op.inputs[0]) if times in wanted.get(source, ()) else None
    tensor = graph.values[rows]
    if op.name == "aten.expand" and len(tensor.shape) == 3 and tensor.stride[0] == 0:
        source = graph.values[op.inputs[0]].shape
        return _two(places, op.inputs[0]) if source in ((tokens, width), (1, tokens, width)) else (
            None
        )  # fmt: skip
    return None


def _two(places: Places, value: int) -> int | None:
    """A value [T, K]: this one, or what it is a view of."""
    values = places.graph.values
    if len(values[value].shape) == 2:
        return value
    op = places.made_by(value)
    source = op.inputs[0] if op is not None and op.name == "aten.unsqueeze" else None
    return source if source is not None and len(values[source].shape) == 2 else None


# -- where the scores come from --------------------------------------------------------------------


def _routing(places: Places, score: int, experts: int, tokens: int) -> tuple[int, int, Op] | None:
    """Scores [T, E] that are zero but for the experts of a top k, its indices [T, k], and its op.

    score: the scores as they weigh the rows, expert by expert.
    """
    graph = places.graph
    whole = _by_token(places, score, experts, tokens)
    if whole is None:
        return None
    value, after = whole, list[Op]()
    while True:
        op = places.made_by(value)
        if op is None or any(r.then or r.every for r in op.reads):
            return None
        if op.name in ("aten.scatter", "aten.scatter_"):
            break
        if op.name not in _BACKGROUND or graph.values[op.inputs[0]].shape != (tokens, experts):
            return None
        after.append(op)
        value = op.inputs[0]
    filled = _filled(places, operand(op, "self").id)
    chosen = operand(op, "index").id
    choice = places.made_by(chosen)
    if (
        filled is None
        or op.arguments.get("dim") not in (1, -1)
        or choice is None
        or choice.name != "aten.topk"
        or choice.arguments.get("dim", -1) not in (1, -1)
        or graph.values[choice.inputs[0]].shape != (tokens, experts)
        or chosen != choice.outputs[1]
    ):
        return None
    for later in reversed(after):
        filled = _BACKGROUND[later.name](filled, later)
    return (whole, chosen, choice) if filled == 0 else None


def _by_token(places: Places, score: int, experts: int, tokens: int) -> int | None:
    """The scores [T, E] of which a value has one for each row, expert by expert."""
    graph, value = places.graph, score
    for _ in range(_LONGEST):
        place = places.place(value)
        if place is None:
            return None
        stride, owner = place.stride[:2], graph.values[place.storage]
        if place.shape in ((experts, tokens, 1), (experts, tokens)) and _same(
            place.shape[:2], stride, (1, experts)
        ):
            plain = owner.shape == (tokens, experts) and not place.offset
            return _last_written(places, place.storage, value) if plain else None
        rows = graph.values[value]
        op = places.made_by(place.storage)
        copied = op is not None and op.name in COPIES and owner.shape[:2] == (experts, tokens)
        straight = rows.elements == owner.elements and not place.offset
        if op is None or not (copied and straight and _is_flat(place.shape, stride)):
            return None
        value = op.inputs[0]
    return None


def _is_flat(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the first dimensions of scores run over memory without a gap."""
    if len(shape) == 2 and shape[1] == 1:
        return shape[0] == 1 or stride[0] == 1
    return _same(shape[:2], stride, (shape[1], 1))


def _same(shape: tuple[int, ...], stride: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(shape, stride, wanted, strict=False))


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


def _filled(places: Places, value: int) -> float | None:
    """The number that a tensor was filled with; None for any other tensor."""
    op = places.made_by(value)
    if op is None:
        return None
    if op.name in ("aten.zeros", "aten.zeros_like", "aten.new_zeros"):
        return 0.0
    if op.name in ("aten.full", "aten.full_like", "aten.new_full"):
        number = op.arguments.get("fill_value")
        return float(number) if isinstance(number, (int, float)) else None
    return None


def _sigmoid(x: float, op: Op) -> float:
    return 0.0 if x == -math.inf else 1 / (1 + math.exp(-x))


def _softmax(x: float, op: Op) -> float:
    along = op.arguments.get("dim") in (1, -1)
    return 0.0 if x == -math.inf and along else math.nan


def _unchanged(x: float, op: Op) -> float:
    return x


def _zero_only(x: float, op: Op) -> float:
    return 0.0 if x == 0 else math.nan


_BACKGROUND: dict[str, Callable[[float, Op], float]] = {
    "aten.sigmoid": _sigmoid,
    "aten._softmax": _softmax,
    "aten._to_copy": _unchanged,
    "aten.clone": _unchanged,
    "aten.relu": _zero_only,
    "aten.mul": _zero_only,
    "aten.div": _zero_only,
}
"""What an op makes of the number that stands where no expert was chosen."""
