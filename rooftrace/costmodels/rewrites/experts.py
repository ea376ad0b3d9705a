"""Experts that compute every token become a product of the tokens routed to them.

Some models repeat all tokens for every expert, weight them by scores that are zero for all but the
top k experts of a token, and add the results up.  Products with zero need not be computed: a server
sorts the T k chosen rows by expert and runs one grouped product over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.rewrites.dataflow import ValueFlow, reads_across
from rooftrace.costmodels.rewrites.editing import Editor, operand, rewritten
from rooftrace.costmodels.rewrites.patterns import (
    LAST,
    LAST_OF_TOPK,
    Along,
    NonTensor,
    Number,
    Pat,
    match,
    row_product,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref
from rooftrace.graph.formulas import expected

_ZERO_STAYS = frozenset({
    "aten.silu", "aten.gelu", "aten.relu", "aten.tanh", "aten.mul", "aten._to_copy", "aten.clone",
})  # fmt: skip
"""Ops between the products that make zero of zeros, element by element."""
_BY_ROW = frozenset({
    "aten.add", "aten.sub", "aten.div", "aten.neg", "aten.pow", "aten.exp", "aten.sigmoid",
    "aten.clamp",
})  # fmt: skip
"""Further ops that act on every row alone, for rows that are weighted after the products."""
_PARTS = frozenset({"aten.split", "aten.split_with_sizes", "aten.chunk", "aten.slice"})
_LONGEST = 24
"""The most ops between the two products of an expert."""
_ADDED = Pat("sum", "added", dim=Along(-3))
_REPEATED = (Pat("repeat", "tokens", repeats=NonTensor("times")), Pat("expand", "tokens"))
_CHOSEN = Pat(
    "scatter",
    (Pat("zeros zeros_like new_zeros"), Pat("full full_like new_full", fill_value=Number("fill"))),
    dim=LAST,
    index=Pat("topk", "ranked", k=NonTensor("k"), dim=LAST_OF_TOPK, out=1, bind="choice"),
    src="scores",
)
"""Scores of the chosen experts, and one number for all others."""


def route_experts(graph: OpGraph) -> tuple[OpGraph, int]:
    """Experts that compute every token, most of them weighted by zero, compute the chosen ones.

    The scores must come from a top k over the experts by a scatter into zeros (or into minus
    infinity before a sigmoid or softmax), and the ops between the products must keep zeros zero
    where the tokens are weighted before them.
    """
    return rewritten(graph, ("aten.sum",), _match, _emit)


# -- matches ---------------------------------------------------------------------------------------


def _match(flow: ValueFlow, total: Op) -> _ExpertLayer | None:
    graph, (out,) = flow.graph, total.outputs
    added = operand(total, "self").id
    result, terms = graph.values[out], graph.values[added]
    plain = result.dtype == terms.dtype and result.storage == out and len(terms.shape) == 3
    plain = plain and total.part == "forward"
    if not plain or match(flow, out, _ADDED) is None:
        return None
    experts, tokens, _ = terms.shape
    weighed = row_product(flow, flow.root(added))
    second = _product(flow, added if weighed is None else weighed[0], experts, tokens)
    if second is None or second.repeats != total.repeats:
        return None
    scored_first = weighed is None
    allowed = _ZERO_STAYS if scored_first else _ZERO_STAYS | _BY_ROW
    walked = _between(flow, second, (experts, tokens), allowed)
    if walked is None:
        return None
    first, between = walked
    rows = operand(first, "self").id
    if scored_first:
        weighed = row_product(flow, flow.root(rows))
        if weighed is None:
            return None
        rows = weighed[0]
    source = _repeated(flow, rows, experts, tokens)
    routing = None if weighed is None else _routing(flow, weighed[1], experts, tokens)
    if source is None or routing is None:
        return None
    scores, choice = routing
    chosen = choice.outputs[1]
    made = graph.producers
    if any(flow.overwritten(i, made.get(i, -1), total.id) for i in (source, chosen, scores)):
        return None  # the sum reads them, later than before
    ops = (total, first, second, *between)
    if {op.repeats for op in (*ops, choice)} != {total.repeats} or any(map(reads_across, ops)):
        return None
    return _ExpertLayer(
        total=total, first=first, second=second, between=tuple(between), tokens=Ref(source),
        chosen=Ref(chosen), scores=Ref(scores), scored_first=scored_first, count=experts,
        choice=choice,
    )  # fmt: skip


def _product(flow: ValueFlow, value: int, experts: int, tokens: int) -> Op | None:
    """The batched product with weights that made a value, one matrix for each expert."""
    graph = flow.graph
    op = flow.producer(flow.root(value))
    if op is None or op.name != "aten.bmm":
        return None
    weight = graph.values[operand(op, "mat2").id]
    rows = graph.values[operand(op, "self").id]
    fits = weight.shape[0] == experts and rows.shape[:2] == (experts, tokens)
    return op if fits and graph.owner(operand(op, "mat2").id).role == "weights" else None


def _between(
    flow: ValueFlow, second: Op, rows: tuple[int, int], allowed: Collection[str]
) -> tuple[Op, list[Op]] | None:
    """The first product of the experts, and the ops between it and the second one, in order."""
    graph = flow.graph
    inner: dict[int, Op] = {}
    first: Op | None = None
    front = [operand(second, "self").id]
    while front:
        op = flow.producer(front.pop())
        if op is None:
            return None
        if op.id in inner or op is first:
            continue
        if op.name == "aten.bmm":
            if first is not None or _product(flow, op.outputs[0], *rows) is None:
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


def _repeated(flow: ValueFlow, rows: int, experts: int, tokens: int) -> int | None:
    """The tokens [T, K] that are repeated, or expanded, for every expert."""
    values, bound = flow.values, match(flow, rows, _REPEATED)
    if bound is None or bound.get("times", (experts, 1)) not in ((experts, 1), (experts, 1, 1)):
        return None
    chain, shape = flow.chain(bound["tokens"]), (tokens, values[rows].shape[-1])
    return next((value for value in chain if values[value].shape == shape), None)


# -- scores ----------------------------------------------------------------------------------------


def _routing(flow: ValueFlow, score: int, experts: int, tokens: int) -> tuple[int, Op] | None:
    """Scores [T, E] that are zero but for the experts of a top k, and its op.

    score: the factors of the rows, expert by expert.
    """
    graph = flow.graph
    scores = _by_token(flow, score, experts, tokens)
    value, after = scores, list[Op]()
    while value is not None:
        bound = match(flow, value, _CHOSEN)
        if bound is not None:
            choice, filled = bound["choice"], bound.get("fill", 0.0)
            for later in reversed(after):
                filled = _BACKGROUND[later.name](filled, later)
            by_token = graph.values[choice.inputs[0]].shape == (tokens, experts)
            return (scores, choice) if scores is not None and by_token and filled == 0 else None
        op = flow.producer(flow.root(value))
        if op is None or reads_across(op) or op.name not in _BACKGROUND:
            return None
        after.append(op)
        value = op.inputs[0] if graph.values[op.inputs[0]].shape == (tokens, experts) else None
    return None


def _by_token(flow: ValueFlow, score: int, experts: int, tokens: int) -> int | None:
    """The scores [T, E] behind a value with one for each row, expert by expert."""
    for value in flow.chain(score):
        place = flow.location(value)
        if place is None or place.shape not in ((experts, tokens, 1), (experts, tokens)):
            continue
        steps = zip(place.shape[:2], place.stride, (1, experts), strict=False)
        if all(n == 1 or step == wanted for n, step, wanted in steps):
            owner = flow.values[place.storage]
            plain = owner.shape == (tokens, experts) and not place.offset
            return _last_written(flow, place.storage, value) if plain else None
    return None


def _last_written(flow: ValueFlow, storage: int, view: int) -> int | None:
    """The value of an entire storage when a view of it is read."""
    value = storage
    made = flow.producer(view)
    for op in flow.storage_users[storage]:
        for out in op.outputs:
            tensor = flow.values[out]
            full = tensor.storage == storage and tensor.shape == flow.values[storage].shape
            if full and op.kind == "kernel" and (made is None or op.id < made.id):
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
"""By op: its result for the number in place of experts that were not chosen."""


# -- new ops ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertLayer:
    """One layer of E experts that compute all of T tokens."""

    total: Op  # adds up the results of the experts of a token
    first: Op  # the products with the weights of all experts
    second: Op
    between: tuple[Op, ...]  # in order
    tokens: Ref  # [T, K]
    chosen: Ref  # [T, k], the experts of each token
    scores: Ref  # [T, E], zero but for those
    scored_first: bool  # whether the tokens are weighted, and not their results
    count: int  # E
    choice: Op  # the top k
    inside: frozenset[int] = frozenset()  # none: other ops may read their results


def _emit(edit: Editor, match: _ExpertLayer) -> None:
    """Sort the chosen rows by expert, multiply, put them back in order and add them up."""
    op, values = match.total, edit.values
    tokens, width = values[match.tokens.id].shape
    k = values[match.chosen.id].shape[1]
    rows = tokens * k
    out = op.outputs[0]

    flat = edit.viewed(match.choice, match.chosen, (rows,))
    order = _RowOrder(edit, match, flat, rows, k)
    gathered: dict[str, Argument] = {"self": match.scores, "dim": 1, "index": match.chosen}
    weights = values[match.scores.id].dtype
    score = edit.made(op, "aten.gather.default", gathered, (tokens, k), weights)
    score = order.taken(edit.viewed(op, score, (rows,)), order.permutation, (rows,), rows)
    score = edit.viewed(op, score, (rows, 1))
    made = order.taken(match.tokens, order.token, (rows, width), tokens)
    if match.scored_first:
        made = _times(edit, op, made, score)
    made = order.product(match.first, made)
    made = order.repeated(match, made)
    made = order.product(match.second, made)
    if not match.scored_first:
        made = _times(edit, op, made, score)
    width = values[made.id].shape[1]
    made = order.taken(made, order.back, (rows, width), rows)
    wide = edit.viewed(op, made, (tokens, k, width))
    edit.emit(op, "aten.sum.dim_IntList", {"self": wide, "dim": (1,)}, (out,))


def _times(edit: Editor, op: Op, rows: Ref, score: Ref) -> Ref:
    tensor = edit.values[rows.id]
    product: dict[str, Argument] = {"self": rows, "other": score}
    return edit.made(op, "aten.mul.Tensor", product, tensor.shape, tensor.dtype)


class _RowOrder:
    """The chosen rows, sorted by expert."""

    def __init__(self, edit: Editor, match: _ExpertLayer, flat: Ref, rows: int, k: int) -> None:
        self.edit, self.op, self.rows = edit, match.total, rows
        self.facts, self.rests_on = _facts(edit, match)
        sorted_ids = edit.value((rows,), "int64", "activations", self.op.repeats)
        permutation = edit.value((rows,), "int64", "activations", self.op.repeats)
        edit.emit(self.op, "aten.sort.default", {"self": flat}, (sorted_ids, permutation))
        self.permutation = Ref(permutation)
        back = edit.value((rows,), "int64", "activations", self.op.repeats)
        unused = edit.value((rows,), "int64", "activations", self.op.repeats)
        edit.emit(self.op, "aten.sort.default", {"self": self.permutation}, (unused, back))
        self.back = Ref(back)
        self.token = self._made(
            "aten.floor_divide.default", {"self": self.permutation, "other": k}, rows, "int64"
        )
        ids = self._made(
            "aten._to_copy.default", {"self": Ref(sorted_ids), "dtype": "dtype:int32"}, rows
        )
        counted = {"self": ids, "bins": match.count, "min": 0, "max": match.count - 1}
        sizes = self._made("aten.histc.default", counted, match.count)
        summed = {"self": sizes, "dim": 0, "dtype": "dtype:int32"}
        self.offsets = self._made("aten.cumsum.default", summed, match.count)

    def _made(
        self, target: str, arguments: dict[str, Argument], size: int, dtype: str = "int32"
    ) -> Ref:
        return self.edit.made(self.op, target, arguments, (size,), dtype)

    def taken(self, of: Ref, index: Ref, shape: tuple[int, ...], touched: int) -> Ref:
        """Rows of a value by their numbers."""
        arguments: dict[str, Argument] = {"self": of, "indices": (index,)}
        dtype = self.edit.values[of.id].dtype
        facts = {"rows_touched": touched}
        return self.edit.made(self.op, "aten.index.Tensor", arguments, shape, dtype, facts=facts)

    def product(self, like: Op, rows: Ref) -> Ref:
        """The rows of each expert times its weights."""
        weight = operand(like, "mat2")
        columns = self.edit.values[weight.id].shape[2]
        arguments: dict[str, Argument] = {"self": rows, "mat2": weight, "offs": self.offsets}
        dtype = self.edit.values[like.outputs[0]].dtype
        out = self.edit.value((self.rows, columns), dtype, "activations", like.repeats)
        rests_on = tuple(dict.fromkeys((*like.assumptions, *self.rests_on)))
        like = replace(like, assumptions=rests_on)
        self.edit.emit(like, "aten._grouped_mm.default", arguments, (out,), facts=self.facts)
        return Ref(out)

    def repeated(self, match: _ExpertLayer, first: Ref) -> Ref:
        """Emit the ops between the products, on the chosen rows."""
        edit, now = self.edit, {match.first.outputs[0]: first.id}
        for op in match.between:
            arguments = dict(op.arguments)
            for name, item in arguments.items():
                if isinstance(item, Ref):
                    arguments[name] = Ref(now[item.id])
            if "dim" in arguments:
                arguments["dim"] = -1
            for value in op.outputs:
                old = edit.values[value]
                shape = (self.rows, old.shape[2])
                if op.kind == "view":
                    source = edit.values[now[op.inputs[0]]]
                    stride = (source.stride[0], old.stride[2])
                    now[value] = edit.view(Ref(now[op.inputs[0]]), shape, stride, op.repeats)
                else:
                    now[value] = edit.value(shape, old.dtype, old.role, op.repeats)
            outputs = tuple(now[value] for value in op.outputs)
            edit.emit(op, op.target, arguments, outputs, kind=op.kind)
        return Ref(now[operand(match.second, "self").id])


def _facts(edit: Editor, match: _ExpertLayer) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Facts of the grouped products (rows, and experts that have some), and their assumptions.

    The trace may assume how many experts are chosen; else each expert is as likely as any other,
    and E (1 - (1 - k / E)^T) are expected.
    """
    tokens, k = edit.values[match.chosen.id].shape
    experts = match.count
    touched = expected("distinct", tokens, k, experts)
    rests_on: tuple[int, ...] = ()
    for assumption in edit.graph.assumptions:
        facts = getattr(assumption, "facts", {})
        sizes = tuple(facts.get(name) for name in ("rows", "chosen", "classes"))
        if assumption.where == match.choice.module and sizes == (tokens, k, experts):
            touched, rests_on = facts["distinct"], (assumption.id,)
    return {"groups_touched": touched, "rows_routed": tokens * k}, rests_on
