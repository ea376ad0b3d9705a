"""Experts whose weights are copied for each row, as products that read each expert once.

Some code takes a copy of an expert's weights for every token that chose it, and multiplies row by
row.  The copies take more bytes than the weights; a server's kernel multiplies all rows of an
expert with its weights where they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.places import Places
from rooftrace.costmodels.rewriting.regions import can_be_one, ops_between, own_storage
from rooftrace.costmodels.rewriting.unused import without_left_behind
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph, Tensor

ALIGN = "rooftrace.align_experts.default"
PRODUCT = "rooftrace.expert_mm.default"


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
    places = Places(graph)
    matches = {
        op.id: match
        for op in graph.ops
        if op.name == "aten.bmm" and (match := _match(places, op)) is not None
    }
    if not matches:
        return graph, 0
    edit = Editor(graph)
    order: dict[int, tuple[Ref, Ref]] = {}
    gone = {number for match in matches.values() for number in match.inside}
    edit.rewrite(matches, lambda match: _emit(edit, places, match, order), dropped=gone)
    result = without_left_behind(edit.done(), graph)
    first = {match.chosen: match.op for match in reversed(matches.values())}
    return result, sum(graph.times(op) for op in first.values())


def _emit(
    edit: Editor, places: Places, match: _Gathered, order: dict[int, tuple[Ref, Ref]]
) -> None:
    op, values, count = match.op, edit.values, edit.values[match.chosen].elements
    experts = values[match.weight].shape[0]
    if match.chosen not in order:
        made = [edit.value((n,), "int32", "activations", op.repeats) for n in (count, experts)]
        chosen: dict[str, Argument] = {"chosen": Ref(match.chosen), "experts": experts}
        edit.emit(op, ALIGN, chosen, tuple(made))
        order[match.chosen] = Ref(made[0]), Ref(made[1])
    weight = Ref(match.weight)
    weight = edit.permuted(op, weight, (0, 2, 1)) if match.turned else weight
    width = values[weight.id].shape[1]
    flat = (values[match.rows].elements // width, width)
    rows = Ref(match.rows)
    rows = rows if values[rows.id].shape == flat else edit.viewed(op, rows, flat)
    arguments: dict[str, Argument] = {
        "rows": rows, "mat2": weight, "order": order[match.chosen][0],
        "offs": order[match.chosen][1], "bias": None, "scores": None, "share": match.share,
    }  # fmt: skip
    (out,) = op.outputs
    old = values[out]
    touched = match.taken.facts.get("rows_touched", min(experts, count))
    facts = {"groups_touched": touched, "rows_routed": count}
    like = replace(op, assumptions=tuple({*op.assumptions, *match.taken.assumptions}))
    made_of = edit.made(
        like, PRODUCT, arguments, (count, old.elements // count), old.dtype, old.role, facts=facts
    )
    for value in own_storage(places, out):
        values[value] = replace(values[value], storage=made_of.id)
    edit.emit(
        op, "aten.reshape.default", {"self": made_of, "shape": old.shape}, (out,), kind="view"
    )


def _match(places: Places, op: Op) -> _Gathered | None:
    values = places.graph.values
    left, right = operand(op, "self").id, operand(op, "mat2").id
    behind = values[right].shape[2] == 1 != values[left].shape[1]  # W x, where others write x W
    row, weights = (right, left) if behind else (left, right)
    walked = _copied(places, weights) if 1 in values[row].shape[1:] else None
    if walked is None:
        return None
    taken, turned = walked[0], walked[1] != behind
    rows, width = values[row].shape[0], max(values[row].shape[1:])
    indices = taken.arguments.get("indices", (taken.arguments.get("index"),))
    weight, index = taken.inputs[0], indices[0] if isinstance(indices, tuple) else None
    plain = isinstance(indices, tuple) and len(indices) == 1 and taken.arguments.get("dim", 0) == 0
    if not plain or not isinstance(index, Ref) or len(values[weight].shape) != 3:
        return None
    chosen = places.straight(index.id)
    if values[chosen].elements != rows or places.graph.owner(weight).role != "weights":
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


def _copied(places: Places, value: int) -> tuple[Op, bool] | None:
    """The op that copies the weights of an expert for each row, and whether they are turned."""
    turned = False
    while True:
        value = places.straight(value)
        op = places.made_by(value)
        if op is None:
            return None
        if op.name in ("aten.index", "aten.index_select"):
            return op, turned
        rank = len(places.graph.values[value].shape)
        dims = {op.arguments.get(name) for name in ("dim0", "dim1")}
        if op.name != "aten.transpose" or dims not in ({-1, -2}, {rank - 1, rank - 2}):
            return None
        turned, value = not turned, op.inputs[0]


def _tokens(places: Places, value: int) -> tuple[int, int]:
    """What rows are repeated of, and how often each; themselves, once, where they are not."""
    values = places.graph.values
    repeated = places.straight(value)
    op = places.made_by(repeated)
    wide = values[repeated]
    if op is None or op.name != "aten.expand" or len(wide.shape) < 3 or wide.stride[1]:
        return value, 1
    count = wide.shape[1]
    source = op.inputs[0]
    return (source, count) if values[source].elements * count == wide.elements else (value, 1)
