"""Experts whose weights are copied for each row, as products that read each expert once.

Some code takes a copy of an expert's weights for every token that chose it, and multiplies row by
row.  The copies take more bytes than the weights; a server's kernel multiplies all rows of an
expert with its weights where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.matching import Pat, match, swapped
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.regions import can_be_one, ops_between, stands_for
from rooftrace.costmodels.rewriting.unused import rewritten
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor

ALIGN = "rooftrace.align_experts.default"
PRODUCT = "rooftrace.expert_mm.default"
_TAKEN = (
    Pat("index", "weight", ["chosen"], said="taken"),
    Pat("index_select", "weight", 0, "chosen", said="taken"),
)
_COPIED = (*_TAKEN, swapped(_TAKEN))
"""The weights of an expert for each row, as they lie or turned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A product of each row with the weights of its expert, before or behind it."""

    op: Op  # the batched product
    taken: Op  # copies the weights
    weight: int  # [E, K, N], or turned round
    turned: bool
    chosen: int  # the experts of all rows
    rows: int  # [R, 1, K], or [R / share, K]
    share: int  # how many rows have the same token
    inside: frozenset[int] = frozenset()


def ungather_experts(graph: OpGraph) -> tuple[OpGraph, int]:
    """Products with copies of experts' weights become products that read each expert once.

    The count is that of choices of experts, of which each has several products.
    """
    orders: dict[int, tuple[Ref, Ref]] = {}
    first: dict[int, Op] = {}

    def emit(places: Places, edit: Editor, seen: _Gathered) -> None:
        if seen.chosen not in orders:
            experts = edit.values[seen.weight].shape[0]
            orders[seen.chosen] = aligned(edit, seen.op, seen.chosen, experts)
            first[seen.chosen] = seen.op
        _emit(places, edit, seen, orders[seen.chosen])

    result, _ = rewritten(graph, ("aten.bmm",), _match, emit)
    return result, sum(graph.times(op) for op in first.values())


def aligned(edit: Editor, like: Op, chosen: int, experts: int) -> tuple[Ref, Ref]:
    """The rows in the order of the experts that were chosen, and where those of each end."""
    sizes = edit.values[chosen].elements, experts
    made = [edit.value((n,), "int32", "activations", like.repeats) for n in sizes]
    edit.emit(like, ALIGN, {"chosen": Ref(chosen), "experts": experts}, tuple(made))
    return Ref(made[0]), Ref(made[1])


def product_of(
    rows: Ref, weight: Ref, order: tuple[Ref, Ref], share: int, bias: int | None = None,
    scores: int | None = None,
) -> dict[str, Argument]:  # fmt: skip
    """The arguments of a product of the rows of each expert.  share: how many have one token."""
    return {
        "rows": rows, "mat2": weight, "order": order[0], "offs": order[1],
        "bias": None if bias is None else Ref(bias),
        "scores": None if scores is None else Ref(scores), "share": share,
    }  # fmt: skip


def _emit(places: Places, edit: Editor, seen: _Gathered, order: tuple[Ref, Ref]) -> None:
    op, values, count = seen.op, edit.values, edit.values[seen.chosen].elements
    weight = Ref(seen.weight)
    weight = edit.permuted(op, weight, (0, 2, 1)) if seen.turned else weight
    width = values[weight.id].shape[1]
    flat, rows = (values[seen.rows].elements // width, width), Ref(seen.rows)
    rows = rows if values[rows.id].shape == flat else edit.viewed(op, rows, flat)
    (out,) = op.outputs
    old = values[out]
    touched = seen.taken.facts.get("rows_touched", min(values[weight.id].shape[0], count))
    facts = {"groups_touched": touched, "rows_routed": count}
    like = replace(op, assumptions=tuple({*op.assumptions, *seen.taken.assumptions}))
    shape, arguments = (count, old.elements // count), product_of(rows, weight, order, seen.share)
    made = edit.made(like, PRODUCT, arguments, shape, old.dtype, old.role, facts=facts)
    stands_for(places, edit, op, made, out)


def _match(places: Places, op: Op) -> _Gathered | None:
    values = places.graph.values
    left, right = operand(op, "self").id, operand(op, "mat2").id
    behind = values[right].shape[2] == 1 != values[left].shape[1]  # W x, where others write x W
    row, weights = (right, left) if behind else (left, right)
    words = match(places, weights, _COPIED) if 1 in values[row].shape[1:] else None
    if words is None:
        return None
    taken, turned = words["taken"], ("swap" in words) != behind
    rows, width, weight = values[row].shape[0], max(values[row].shape[1:]), taken.inputs[0]
    chosen = places.straight(words["chosen"])
    if len(values[weight].shape) != 3 or values[chosen].elements != rows:
        return None
    if places.graph.owner(weight).role != "weights":
        return None
    if values[weight].shape[2 if turned else 1] != width:
        return None
    source, share = _tokens(places, row)
    start = {source, weight, chosen}
    inside = ops_between(places, start, op.outputs)
    contiguous = values[source].stride == Tensor.contiguous(values[source].shape)
    if not contiguous or not can_be_one(places, inside, op.outputs, start):
        return None
    return _Gathered(
        op=op, taken=taken, weight=weight, turned=turned, chosen=chosen, rows=source,
        share=share, inside=inside,
    )  # fmt: skip


def _tokens(places: Places, value: int) -> tuple[int, int]:
    """What rows are repeated of, and how often each; themselves, once, where they are not."""
    values, words = places.graph.values, match(places, value, Pat("expand", "rows", said="wide"))
    if words is None:
        return value, 1
    wide, source = values[words["wide"].outputs[0]], words["rows"]
    if len(wide.shape) < 3 or wide.stride[1]:
        return value, 1
    count = wide.shape[1]
    return (source, count) if values[source].elements * count == wide.elements else (value, 1)
