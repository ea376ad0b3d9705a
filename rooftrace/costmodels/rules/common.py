"""Helpers of rules: the precisions of products and vector work, and sizes along dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rooftrace.costmodels.ops import Access, Cost, OpView, TensorView
from rooftrace.graph.formulas import expected
from rooftrace.hardware.precisions import PRECISIONS, precision, widest


def is_complex(tensor: TensorView) -> bool:
    """Whether the elements have a real and an imaginary part."""
    return tensor.dtype.startswith("complex")


def has_arithmetic(op: OpView) -> bool:
    """Whether the op touches a floating or complex tensor; integer and index work is bytes only."""
    return any(t.floating for t in (*op.inputs, *op.outputs))


def vector_precision(op: OpView) -> str:
    """fp64 if anything is stored in it, else fp32: GPU kernels compute low precisions in fp32."""
    wide = any(t.dtype in ("fp64", "complex128") for t in (*op.inputs, *op.outputs))
    return "fp64" if wide else "fp32"


def along_rows(op: OpView, flop: int, row: TensorView, length: int) -> Cost:
    """`vector` work that goes along rows of `length` elements of a tensor, one after the other.

    The rows lie in memory as such only if the last dimension is the one that they go along.
    """
    if not has_arithmetic(op):
        return Cost()
    width, contiguous = stored_width(row), length == (row.shape[-1] if row.dim else 1)
    return Cost.of(
        vector=flop,
        precision=vector_precision(op),
        columns=length if contiguous else None,
        widths=(width, width),
        lined="N" if contiguous else "",
    )


def vector(op: OpView, flop: int, count: str = "useful") -> Cost:
    """`flop` on the vector engine, none if the op is on integers."""
    if not has_arithmetic(op):
        return Cost()
    return Cost.of(vector=flop, precision=vector_precision(op), count=count)


def product_precision(*operands: TensorView | None) -> str:
    """The precision of a matrix product of these operands; scales and biases do not matter.

    Integers of 8 bits compute in int8; wider ones at the rate of fp32, as no chip has another.
    """
    tensors = [t for t in operands if t is not None]
    if all(precision(t.dtype).kind in ("int", "bool") for t in tensors):
        return "int8" if all(precision(t.dtype).bits <= 8 for t in tensors) else "fp32"
    return widest(*(t.dtype for t in tensors))


def stored_width(tensor: TensorView) -> float:
    """Bytes from one number of a tensor to the next in a row; fp4_x2 has two in an element."""
    return precision(tensor.dtype).width / 8 / (2 if tensor.dtype == "fp4_x2" else 1)


def widths(a: TensorView, b: TensorView) -> tuple[float, float]:
    """`stored_width` of the two operands of a product, as it loads them.

    Activations that a product rounds are loaded rounded: a kernel before it has written them.
    """
    computes = {precision(t.dtype).computes for t in (a, b)} - {""}
    most = min((PRECISIONS[name].width / 8 for name in computes), default=math.inf)
    return min(stored_width(a), most), min(stored_width(b), most)


def lined(a: TensorView, b: TensorView, of_a: str = "MK", of_b: str = "KN") -> str:
    """The sizes among M, N and K that are lengths of rows in memory, of A, of B and of the result.

    of_a, of_b: the last two sizes of the operands.  The result has rows of N.
    """
    rows = {"N"}
    for tensor, names in ((a, of_a), (b, of_b)):
        pair = list(zip(tensor.stride[-2:], names[-tensor.dim :], strict=False))
        rows.update([name for stride, name in reversed(pair) if stride == 1][:1])
    return "".join(name for name in "MNK" if name in rows)


def total(tensors: Iterable[TensorView]) -> int:
    """Elements of all of them."""
    return sum(t.elements for t in tensors)


def axes(op: OpView, rank: int, name: str = "dim", default: Any = None) -> tuple[int, ...]:
    """A dimension argument as non-negative indices; None and () mean all of them."""
    value = op.attribute(name, default)
    if value is None or value == ():
        return tuple(range(rank))
    values = value if isinstance(value, tuple) else (value,)
    return tuple(int(v) % rank for v in values) if rank else ()


def extent(shape: tuple[int, ...], dims: Iterable[int]) -> int:
    """Product of the sizes of these dimensions."""
    return math.prod(shape[d] for d in dims)


def share(tensor: TensorView, part: float, total: int) -> int:
    """Bytes of `part` of `total` equal pieces of a tensor; part may be an expected number."""
    if total <= 0:
        return 0
    part = min(part, total)
    if isinstance(part, int):
        return -(-tensor.nbytes * part // total)
    return round(tensor.nbytes * part / total)


def number_of(op: OpView, name: str, otherwise: int) -> float:
    """A count by the tracer; an expected number of experts may be no integer."""
    return as_integer(op.fact(name, otherwise))


def whole_number_of(op: OpView, name: str, otherwise: int) -> int:
    """A count by the tracer, without the fraction of an expected number."""
    number: float = op.fact(name, otherwise)
    return int(number) if isinstance(number, float) else number


def as_integer(number: float) -> float:
    """The number as an int where it is one."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def rows_reached(op: OpView, indices: int) -> float:
    """How many different rows so many indices reach, by facts or expected; else all."""
    classes = op.fact("uniform_over")
    if classes is not None and op.fact("rows_touched") is None:
        alone = op.fact("own_rows")
        function, chosen = ("distinct", 1) if alone is None else ("rows", int(alone))
        return as_integer(expected(function, indices, chosen, int(classes)))
    return number_of(op, "rows_touched", indices)


def over_link(tensor: TensorView, size: int) -> Cost:
    """`size` bytes of a tensor sent to other devices."""
    return Cost({}, {Access(tensor.storage, False, "link"): size}) if size else Cost()
