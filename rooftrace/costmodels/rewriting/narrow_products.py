"""Products of numbers that were widened for them, as products of the narrow numbers.

A router in fp32 over tokens and weights in bf16 is written as two casts and a product on the vector
engine.  A matrix engine multiplies bf16 exactly and adds up in fp32: what differs is that the
result is written as it was added up (SGLang's and vLLM's `dsv3_router_gemm`, `torch.mm` with
`out_dtype`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftrace.costmodels.rewriting.editing import Editor, operand
from rooftrace.costmodels.rewriting.places import Places, beside
from rooftrace.costmodels.rewriting.unused import rewritten
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.arguments import Argument, Ref
from rooftrace.tracer.graph import Op, OpGraph

_OPERANDS = ("self", "mat2")
_PRODUCTS = ("aten.mm", "aten.bmm")


@dataclass(frozen=True, slots=True)
class _Widened:
    """An operand that was widened."""

    source: int  # before it was
    views: tuple[Op, ...]  # of the wide copy, in order


@dataclass(frozen=True, slots=True)
class _Product:
    """A product, and its operands before they were widened."""

    op: Op
    sides: tuple[_Widened, ...]
    inside: frozenset[int] = frozenset()


def narrow_operands(graph: OpGraph) -> tuple[OpGraph, int]:
    """Products of two operands that were widened to the result's precision read the narrow ones."""
    return rewritten(graph, _PRODUCTS, _match, _emit)


def _match(places: Places, op: Op) -> _Product | None:
    if beside(op):
        return None
    sides = [_widened(places, operand(op, name).id, op) for name in _OPERANDS]
    narrow = [side for side in sides if side is not None]
    kinds = {places.graph.values[side.source].dtype for side in narrow}
    fits = len(narrow) == len(sides) and len(kinds) == 1
    return _Product(op, tuple(narrow)) if fits else None


def _widened(places: Places, value: int, product: Op) -> _Widened | None:
    values, views = places.graph.values, list[Op]()
    while True:
        op = places.made_by(value)
        if op is None or len(op.inputs) != 1 or beside(op) or op.repeats != product.repeats:
            return None
        if op.name == "aten._to_copy":
            break
        if op.kind != "view" or len(op.outputs) != 1:
            return None
        views.append(op)
        value = op.inputs[0]
    wide, source = values[value], values[op.inputs[0]]
    kinds = [precision(tensor.dtype) for tensor in (wide, source)]
    narrower = all(kind.kind == "float" for kind in kinds) and kinds[1].bits < kinds[0].bits
    if not narrower or (wide.shape, wide.stride) != (source.shape, source.stride):
        return None
    if places.overwritten(op.inputs[0], op.id, product.id):
        return None
    return _Widened(op.inputs[0], tuple(reversed(views)))


def _emit(places: Places, edit: Editor, product: _Product) -> None:
    op, sides = product.op, product.sides
    arguments: dict[str, Argument] = {}
    for name, side in zip(_OPERANDS, sides, strict=True):
        now = Ref(side.source)
        for view in side.views:
            old = edit.values[view.outputs[0]]
            out = edit.view(now, old.shape, old.stride, op.repeats)
            edit.emit(view, view.target, {**view.arguments, "self": now}, (out,), kind="view")
            now = Ref(out)
        arguments[name] = now
    arguments["out_dtype"] = f"dtype:{edit.values[op.outputs[0]].dtype}"
    edit.emit(op, f"{op.name}.dtype", arguments, op.outputs, facts=op.facts)
