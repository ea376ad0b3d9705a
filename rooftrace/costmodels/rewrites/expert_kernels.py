"""Routed experts as the kernels of a server: row numbers, gathered weights, and fused products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace as with_fields
from functools import partial

from msgspec.structs import replace

from rooftrace.costmodels.ops import find_rule
from rooftrace.costmodels.rewrites.dataflow import ValueFlow
from rooftrace.costmodels.rewrites.editing import Editor, operand, rewritten, with_matches
from rooftrace.costmodels.rewrites.patterns import (
    Along,
    Bindings,
    NonTensor,
    Pat,
    Pattern,
    can_be_one,
    match,
    name_of,
    ops_between,
    row_product,
    swapped,
)
from rooftrace.graph import Argument, Op, OpGraph, Ref, Tensor

# -- row numbers -----------------------------------------------------------------------------------
# Patterns of the integers of routed experts: the order of rows, their tokens, where experts end.
#
# T tokens have k experts each; row t k + j is the j-th of token t.  `chosen` are the experts of all
# rows, in this order.

_FLAT = (None, 0, -1)
"""The dimension of a tensor with only one."""


def taking(rows: Pattern, numbers: Pattern) -> tuple[Pat, ...]:
    """Rows gathered by their numbers."""
    return Pat("index", rows, [numbers]), Pat("index_select", rows, 0, numbers)


ORDER = (Pat("sort", "chosen", dim=_FLAT, out=1), Pat("argsort", "chosen", dim=_FLAT))
"""The rows, sorted by expert."""
_SORTED = (Pat("sort", "chosen", dim=_FLAT), *taking("chosen", ORDER))
SORTED = (*_SORTED, Pat("clamp", _SORTED, min=NonTensor("least"), max=NonTensor("most")))
"""The experts in this order; those of other processes may be clamped to a local one."""
TOKEN = (
    Pat("floor_divide", ORDER, NonTensor("count")),
    Pat("div", ORDER, NonTensor("count"), rounding_mode=("floor", "trunc")),
)
"""The tokens of the rows in this order."""
BACK = (
    Pat("sort", ORDER, dim=_FLAT, out=1),
    Pat("argsort", ORDER, dim=_FLAT),
    Pat("index_put", "room", [ORDER], Pat("arange", start=(None, 0))),
    Pat("scatter", "room", 0, ORDER, Pat("arange", start=(None, 0))),
)
"""The position of each row in this order."""
_COUNTS = (
    Pat("histc", (*SORTED, "chosen"), bins=NonTensor("bins"), min=(None, 0), max=NonTensor("last")),
    Pat("bincount", (*SORTED, "chosen"), minlength=NonTensor("bins")),
)
_ENDS = Pat("cumsum", _COUNTS, dim=_FLAT, bind="ends")
PRODUCT = Pat("_grouped_mm", "rows", "weight", _ENDS, bind="product")
"""A product with the rows of each chosen expert."""
BIASED = Pat("add", PRODUCT, taking("bias", SORTED))
"""PRODUCT, and the bias [E, N] of its expert on each row."""
MASKED = Pat("masked_fill", "unmasked", Pat("ge", SORTED, NonTensor("experts")), 0)
"""Rows with zeros for the experts of other processes."""


def in_order(flow: ValueFlow, value: int, chosen: int) -> int | None:
    """The numbers, one for each row, that a value has in the order of experts."""
    values = flow.values
    bound = match(flow, value, taking("numbers", ORDER), {"chosen": chosen})
    source = None if bound is None else flow.root(bound["numbers"])
    fits = source is not None and values[source].elements == values[chosen].elements
    return source if fits else None


def unmasked(flow: ValueFlow, value: int, chosen: int, experts: int) -> int:
    """Rows before those of other processes' experts were zeroed, which no product makes."""
    bound = match(flow, value, MASKED, {"chosen": chosen})
    masked = bound is not None and bound["experts"] == experts
    return flow.root(bound["unmasked"] if bound is not None and masked else value)


# -- gathered experts ------------------------------------------------------------------------------
# Weights that are copied for each row, as products that read each expert once.
#
# Some code copies the weights of an expert for every token that chose it, and multiplies row by
# row.  The copies take more bytes than the weights; a server's kernel multiplies all rows of an
# expert with its weights in place.

ALIGN = "rooftrace.align_experts.default"
EXPERT_MM = "rooftrace.expert_mm.default"
_TAKEN = (
    Pat("index", "weight", ["chosen"], bind="taken"),
    Pat("index_select", "weight", 0, "chosen", bind="taken"),
)
_COPIED = (*_TAKEN, swapped(_TAKEN))
"""The weights of an expert for each row, as stored or transposed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A product of each row with the weights of its expert, on either side."""

    op: Op  # the batched product
    taken: Op  # copies the weights
    weight: int  # [E, K, N], or transposed
    transposed: bool
    chosen: int  # the experts of all rows
    rows: int  # [R, 1, K], or [R / share, K]
    share: int  # rows of each token
    inside: frozenset[int] = frozenset()


def ungather_experts(graph: OpGraph) -> tuple[OpGraph, int]:
    """Products with copies of experts' weights become products that read each expert once.

    Returns the number of choices of experts, of which each has several products.
    """
    orders: dict[int, tuple[Ref, Ref]] = {}
    first: dict[int, Op] = {}

    def emit(edit: Editor, seen: _Gathered) -> None:
        if seen.chosen not in orders:
            experts = edit.values[seen.weight].shape[0]
            orders[seen.chosen] = aligned(edit, seen.op, seen.chosen, experts)
            first[seen.chosen] = seen.op
        _emit(edit, seen, orders[seen.chosen])

    result, _ = rewritten(graph, ("aten.bmm",), _match, emit)
    return result, sum(graph.times(op) for op in first.values())


def aligned(edit: Editor, like: Op, chosen: int, experts: int) -> tuple[Ref, Ref]:
    """The rows in the order of their experts, and where those of each expert end."""
    sizes = edit.values[chosen].elements, experts
    made = [edit.value((n,), "int32", "activations", like.repeats) for n in sizes]
    edit.emit(like, ALIGN, {"chosen": Ref(chosen), "experts": experts}, tuple(made))
    return Ref(made[0]), Ref(made[1])


def product_of(
    rows: Ref, weight: Ref, order: tuple[Ref, Ref], share: int, bias: int | None = None,
    scores: int | None = None,
) -> dict[str, Argument]:  # fmt: skip
    """The arguments of a product of the rows of each expert.  share: rows of each token."""
    return {
        "rows": rows, "mat2": weight, "order": order[0], "offs": order[1],
        "bias": None if bias is None else Ref(bias),
        "scores": None if scores is None else Ref(scores), "share": share,
    }  # fmt: skip


def _emit(edit: Editor, seen: _Gathered, order: tuple[Ref, Ref]) -> None:
    op, values, count = seen.op, edit.values, edit.values[seen.chosen].elements
    weight = Ref(seen.weight)
    weight = edit.permuted(op, weight, (0, 2, 1)) if seen.transposed else weight
    width = values[weight.id].shape[1]
    flat, rows = (values[seen.rows].elements // width, width), Ref(seen.rows)
    rows = rows if values[rows.id].shape == flat else edit.viewed(op, rows, flat)
    (out,) = op.outputs
    old = values[out]
    touched = seen.taken.facts.get("rows_touched", min(values[weight.id].shape[0], count))
    facts = {"groups_touched": touched, "rows_routed": count}
    like = replace(op, assumptions=tuple({*op.assumptions, *seen.taken.assumptions}))
    shape, arguments = (count, old.elements // count), product_of(rows, weight, order, seen.share)
    made = edit.made(like, EXPERT_MM, arguments, shape, old.dtype, old.role, facts=facts)
    edit.becomes(op, out, made)


def _match(flow: ValueFlow, op: Op) -> _Gathered | None:
    values = flow.values
    left, right = operand(op, "self").id, operand(op, "mat2").id
    flipped = values[right].shape[2] == 1 != values[left].shape[1]  # W x in place of x W
    row, weights = (right, left) if flipped else (left, right)
    bound = match(flow, weights, _COPIED) if 1 in values[row].shape[1:] else None
    if bound is None:
        return None
    taken, transposed = bound["taken"], ("swap" in bound) != flipped
    rows, width, weight = values[row].shape[0], max(values[row].shape[1:]), taken.inputs[0]
    chosen = flow.root(bound["chosen"])
    if len(values[weight].shape) != 3 or values[chosen].elements != rows:
        return None
    if flow.graph.owner(weight).role != "weights":
        return None
    if values[weight].shape[2 if transposed else 1] != width:
        return None
    source, share = _tokens(flow, row)
    start = {source, weight, chosen}
    inside = ops_between(flow, start, op.outputs)
    contiguous = values[source].stride == Tensor.contiguous(values[source].shape)
    if not contiguous or not can_be_one(flow, inside, op.outputs, start):
        return None
    return _Gathered(
        op=op, taken=taken, weight=weight, transposed=transposed, chosen=chosen, rows=source,
        share=share, inside=inside,
    )  # fmt: skip


def _tokens(flow: ValueFlow, value: int) -> tuple[int, int]:
    """The rows before they were repeated, and how often each was."""
    values, bound = flow.values, match(flow, value, Pat("expand", "rows", bind="wide"))
    if bound is None:
        return value, 1
    wide, source = values[bound["wide"].outputs[0]], bound["rows"]
    if len(wide.shape) < 3 or wide.stride[1]:
        return value, 1
    count = wide.shape[1]
    return (source, count) if values[source].elements * count == wide.elements else (value, 1)


# -- expert kernels --------------------------------------------------------------------------------
# Routed experts as the kernels of a server.
#
# As written, tokens are sorted by expert and copied, multiplied, weighted, put back in order and
# added up.  vLLM's `fused_moe` launches five kernels: the rows of each expert
# (`moe_align_block_size`), a product that gathers rows by number, the activation, a product that
# weights its rows and scatters them by number, and the sum over the experts of a token.

COMBINE = "rooftrace.combine_experts.default"
_LONGEST = 32
"""The most ops between the two products of an expert, or after the second one."""
_ZEROS = Pat("zeros zeros_like new_zeros")
_ADDED_BY_NUMBER = (
    Pat("index_add", _ZEROS, 0, TOKEN, "sorted"),
    Pat("scatter_add", _ZEROS, 0, Pat("expand", TOKEN, bind="wide"), "sorted"),
)
"""Rows added to zeros at the numbers of their tokens."""
_PUT = (*taking("sorted", BACK), Pat("index_put", "room", [ORDER], "sorted"))
"""Sorted rows put back in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """One product of the rows of each expert, with its bias and the scores of rows."""

    op: Op  # the grouped product
    out: int  # its result, with the bias
    bias: int | None  # [E, N]; nothing reads the product without it
    scores: int | None = None  # [T, k], one for each row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """Experts that compute the rows routed to them, from the tokens to their sums."""

    end: Op  # adds up the results of the experts of a token
    out: int  # the sum, in the precision in which it is read
    firsts: tuple[_Product, ...]
    second: _Product
    tokens: int  # [T, K]
    chosen: int  # T k experts
    count: int  # k
    inside: frozenset[int]  # ops that go: all but those between the products


def fuse_experts(graph: OpGraph) -> tuple[OpGraph, int]:
    """Routed experts run as the kernels of a server, which move rows only inside the products.

    The rows must be those of a choice of k experts for each token, sorted by expert, and the ops
    between the products must act on every row alone.
    """
    graph, gathered = ungather_experts(graph)
    flow = ValueFlow(graph)
    if not any(op.name == "aten._grouped_mm" for op in graph.ops):
        return graph, gathered
    layers = [layer for op in graph.ops if (layer := _match_kernels(flow, op)) is not None]
    if not layers:
        return graph, gathered
    order: dict[int, tuple[Ref, Ref]] = {}
    emits: dict[int, Callable[[Editor], None]] = {}
    for layer in layers:
        for index, first in enumerate(layer.firsts):
            begins = index == 0
            emits[first.op.id] = partial(
                _first, layer=layer, first=first, order=order, begins=begins
            )
        emits[layer.end.id] = partial(_last, layer=layer, order=order)
    gone = {number for layer in layers for number in layer.inside}
    result, _ = with_matches(graph, emits, lambda edit, emit: emit(edit), gone)
    return result, gathered + sum(graph.times(layer.end) for layer in layers)


# -- new ops ---------------------------------------------------------------------------------------


def _first(
    edit: Editor, layer: _Experts, first: _Product, order: dict[int, tuple[Ref, Ref]], begins: bool
) -> None:
    """Emit a first product; before the first of them, the order of the rows."""
    if begins:
        experts = edit.values[operand(first.op, "mat2").id].shape[0]
        order[layer.end.id] = aligned(edit, first.op, layer.chosen, experts)
    edit.move(first.out, first.out)
    shape = edit.values[layer.tokens].shape
    flat = (edit.values[layer.tokens].elements // shape[-1], shape[-1])
    tokens = Ref(layer.tokens)
    tokens = tokens if shape == flat else edit.viewed(first.op, tokens, flat)
    _product(edit, first, tokens, order[layer.end.id], layer.count, first.out)


def _last(edit: Editor, layer: _Experts, order: dict[int, tuple[Ref, Ref]]) -> None:
    """Emit the product that puts its rows back, and the sum over the experts of a token."""
    second, end, values = layer.second, layer.end, edit.values
    like, total = values[second.op.outputs[0]], values[layer.out]
    alone = layer.count == 1 and total.dtype == like.dtype
    out = layer.out if alone else edit.value(like.shape, like.dtype, like.role, end.repeats)
    _product(edit, second, operand(second.op, "self"), order[end.id], 1, out)
    if not alone:
        dtype = f"dtype:{total.dtype}"
        arguments: dict[str, Argument] = {"rows": Ref(out), "k": layer.count, "dtype": dtype}
        edit.emit(end, COMBINE, arguments, (layer.out,))


def _product(
    edit: Editor, product: _Product, rows: Ref, order: tuple[Ref, Ref], share: int, out: int
) -> None:
    like = product.op
    weight, bias, scores = operand(like, "mat2"), product.bias, product.scores
    facts = {name: fact for name, fact in like.facts.items() if name != "fallback"}
    arguments = product_of(rows, weight, order, share, bias, scores)
    edit.emit(like, EXPERT_MM, arguments, (out,), facts=facts)


# -- matches ---------------------------------------------------------------------------------------


def _match_kernels(flow: ValueFlow, end: Op) -> _Experts | None:
    values = flow.values
    added = _sum_by_token(flow, end)
    if added is None:
        return None
    chosen, count, scores = added.chosen, added.count, added.scores
    second = _scored(flow, added.rows, chosen, scores)
    walked = None if second is None else _between(flow, second.op, chosen)
    if second is None or walked is None:
        return None
    products, between = walked
    taken = [_taken(flow, product.op, chosen, count) for product in products]
    sources = {source for source in taken if source is not None}
    if len(sources) != 1 or None in taken:
        return None
    ((tokens, weights),) = sources
    if weights is not None and (scores is not None or any(p.bias is not None for p in products)):
        return None  # a bias is not weighted
    firsts = tuple(with_fields(product, scores=weights) for product in products)
    start = {tokens, chosen}
    for product in (*firsts, second):
        read = (operand(product.op, "mat2").id, product.bias, product.scores)
        start |= {item for item in read if item is not None}
    out = _narrowed(flow, end.outputs[0])
    inside = ops_between(flow, start, (out,))
    made, starts = flow.graph.producers, min(first.op.id for first in firsts)
    late = start - {operand(second.op, "mat2").id, second.bias, second.scores}
    if any(made.get(i, -1) > starts for i in late) or values[tokens].then is not None:
        return None  # the first product reads them
    if not can_be_one(flow, inside, (out,), start):
        return None
    return _Experts(
        end=end, out=out, firsts=firsts, second=second, tokens=tokens, chosen=chosen, count=count,
        inside=inside - between,
    )  # fmt: skip


def _narrowed(flow: ValueFlow, total: int) -> int:
    """The sum in another precision, if nothing reads it in its own."""
    values = flow.values
    readers = [op for op in flow.storage_users[values[total].storage] if total in op.inputs]
    alone = len(readers) == 1 and total not in flow.graph.outputs
    return readers[0].outputs[0] if alone and readers[0].name == "aten._to_copy" else total


@dataclass(frozen=True, slots=True)
class _TokenSum:
    """The sorted rows that an op adds up by token."""

    rows: int
    chosen: int  # the experts of all rows
    count: int  # k rows of each token
    scores: int | None = None  # of rows that are back in order


def _sum_by_token(flow: ValueFlow, end: Op) -> _TokenSum | None:
    if name_of(end) not in ("sum", "index_add", "scatter_add"):
        return None
    values, (out,) = flow.values, end.outputs
    bound, scores = match(flow, out, _ADDED_BY_NUMBER), None
    count = None if bound is None else bound["count"]
    if bound is None:  # or they are put back in order, and added up k by k
        bound, count, scores = _summed(flow, out)
    if bound is None or not isinstance(count, int):
        return None
    wide, chosen = bound.get("wide"), flow.root(bound["chosen"])
    flat = wide is None or values[wide.outputs[0]].stride[-1] == 0
    experts = values[bound["chosen"]]
    fits = len(experts.shape) == 1 and experts.dtype.startswith("int")
    fits = fits and values[chosen].elements == count * values[out].shape[0]
    return _TokenSum(bound["sorted"], chosen, count, scores) if fits and flat else None


def _summed(flow: ValueFlow, out: int) -> tuple[Bindings | None, int, int | None]:
    """Sorted rows that are put back in order and added up, how many of each token, and their
    scores after that."""
    values = flow.values
    bound = match(flow, out, Pat("sum", "added", dim=Along(-2)))
    if bound is None or len(values[bound["added"]].shape) != 3:
        return None, 0, None
    tokens, count, _ = values[bound["added"]].shape
    split = row_product(flow, flow.root(bound["added"]))
    put = None if split is None else match(flow, split[0], _PUT)
    if split is None or put is None:
        return match(flow, bound["added"], _PUT), count, None
    scores = flow.root(split[1])
    return (put, count, scores) if values[scores].elements == tokens * count else (None, 0, None)


def _scored(flow: ValueFlow, value: int, chosen: int, scores: int | None) -> _Product | None:
    """The product of sorted rows, with its bias and scores."""
    split = None if scores is not None else row_product(flow, flow.root(value))
    if split is not None:
        value, scores = split[0], in_order(flow, split[1], chosen)
        if scores is None:
            return None
    product = _with_bias(flow, value, chosen)
    return None if product is None else with_fields(product, scores=scores)


def _with_bias(flow: ValueFlow, value: int, chosen: int) -> _Product | None:
    """The grouped product that made a value, with its bias."""
    values, rows = flow.values, {"chosen": chosen}
    masked = match(flow, value, MASKED, rows)
    value = flow.root(value if masked is None else masked["unmasked"])
    bound = match(flow, value, (BIASED, PRODUCT), rows)
    if bound is None:
        return None
    op, bias = bound["product"], bound.get("bias")
    experts, weight = values[operand(op, "offs").id].shape[0], values[bound["weight"]].shape
    fits = len(weight) == 3 and weight[0] == experts and bound.get("last") in (None, experts - 1)
    fits = fits and (masked is None or masked["experts"] == experts)
    flat = bias is None or len(values[bias].shape) == 2
    return _Product(op=op, out=value, bias=bias) if fits and flat else None


def _between(
    flow: ValueFlow, second: Op, chosen: int
) -> tuple[list[_Product], frozenset[int]] | None:
    """The first products, and the ops between them and the second one, which act on rows alone."""
    values = flow.values
    size = values[chosen].elements
    inner: set[int] = set()
    firsts: dict[int, _Product] = {}
    front = [operand(second, "self").id]
    while front:
        value = front.pop()
        op, shape = flow.producer(value), values[value].shape
        if op is None and (len(shape) < 2 or shape[0] == 1):
            continue  # a weight, with one number for each column
        if op is None or shape[:1] != (size,) or len(inner) > _LONGEST:
            return None
        product = _with_bias(flow, value, chosen)
        if product is not None:
            firsts[product.op.id] = with_fields(product, out=value)
        elif op.id not in inner:
            if not _by_row(flow, op):
                return None
            inner.add(op.id)
            front += op.inputs
    return [firsts[i] for i in sorted(firsts)], frozenset(inner)


def _by_row(flow: ValueFlow, op: Op) -> bool:
    """Whether each row of the results depends on the same row of the operands alone."""
    if op.kind == "view":
        first = (0, -len(flow.values[op.inputs[0]].shape))
        return op.name not in ("aten.select", "aten.t") and op.arguments.get("dim", 1) not in first
    rule = find_rule(op.target)
    return rule is not None and rule.fusion == "pointwise"


def _taken(flow: ValueFlow, op: Op, chosen: int, count: int) -> tuple[int, int | None] | None:
    """The tokens of which a product reads rows, sorted by expert, and their scores."""
    values = flow.values
    value, scores = flow.root(operand(op, "self").id), None
    split = row_product(flow, value)
    if split is not None:
        value, scores = split[0], in_order(flow, split[1], chosen)
        if scores is None:
            return None
    experts = values[operand(op, "mat2").id].shape[0]
    value = unmasked(flow, value, chosen, experts)
    bound = match(flow, value, taking("tokens", (*TOKEN, *ORDER)), {"chosen": chosen})
    if bound is None or bound.get("count", count) != count:
        return None
    tokens = bound["tokens"]
    if "count" not in bound and count > 1:  # each token is repeated k times
        repeated = match(flow, tokens, Pat("expand", "tokens", bind="repeated"))
        if repeated is None:
            return None
        tokens, wide = repeated["tokens"], values[repeated["repeated"].outputs[0]]
        if len(wide.shape) != 3 or wide.shape[1] != count or wide.stride[1] or wide.stride[0] == 0:
            return None
    fits = values[tokens].elements == values[chosen].elements // count * values[tokens].shape[-1]
    return (tokens, scores) if fits else None
