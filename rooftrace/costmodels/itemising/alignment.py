"""Sizes whose rows in memory are no whole number of loads, and what padded ones would cost.

A thread loads 16 bytes at once.  Where the rows of a matrix do not begin at multiples of that, as
with 50257 logits in bf16, kernels load it in smaller pieces, and take longer for it (`Share.odd`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec.structs import replace

from rooftrace.costmodels.costs import Access, Cost, Work
from rooftrace.costmodels.kernels import engines
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.graph import Op, OpGraph

BYTES = 16
"""What a thread loads at once."""
NAMES = ("M", "N", "K")


@dataclass(frozen=True, slots=True)
class Aligned:
    """A product with its odd sizes up to the next aligned ones."""

    odd: tuple[str, ...]  # which of NAMES
    shape: tuple[float, int, float]  # M, N, K with these
    grown: float  # FLOP of this shape over those of the product as it is


def aligned(graph: OpGraph, op: Op, work: Work, bytes_aligned: int) -> Aligned | None:
    """The next aligned sizes of a product of an op; None where all are aligned or not known.

    A size is odd where it is the length of the rows of an operand or of the result, as they lie in
    memory, and these are no whole number of `bytes_aligned`.  Convolutions are left out: their K is
    no row in memory.
    """
    if work.operation != "matmul" or work.shape is None or 0 in work.shape:
        return None
    multiples = _rows_in_memory(graph, op, bytes_aligned)
    sizes = [
        -(-size // multiples[size]) * multiples[size] if size in multiples else size
        for size in work.shape
    ]
    odd = tuple(name for name, old, new in zip(NAMES, work.shape, sizes, strict=True) if old != new)
    if not odd:
        return None
    rows, columns, inner = sizes
    return Aligned(odd, (rows, int(columns), inner), math.prod(sizes) / math.prod(work.shape))


def _rows_in_memory(graph: OpGraph, op: Op, bytes_aligned: int) -> dict[float, int]:
    """Lengths of rows of the matrices that an op reads and writes: elements that align each."""
    multiples: dict[float, int] = {}
    for number in (*op.inputs, *op.outputs):
        value = graph.values[number]
        stored = precision(value.dtype)
        if len(value.shape) < 2 or stored.kind != "float" or bytes_aligned * 8 % stored.bits:
            continue
        multiple = int(bytes_aligned * 8 / stored.bits)
        for size, stride in zip(value.shape, value.stride, strict=True):
            if stride == 1 and size > 1:
                multiples[size] = max(multiple, multiples.get(size, 1))
    return multiples


def with_shape(
    cost: Cost, work: Work, flop: int, made: Aligned, batch: float, output: tuple[int, float]
) -> tuple[Cost, int]:
    """The cost of a kernel with one of its products at other sizes, and how many FLOP more.

    flop: of that product, which may be a part of what `cost.work` has under its key.  batch: how
    many products of the shape it is.  output: the storage of its result, and bytes of an element.
    """
    assert work.shape is not None
    larger = round(flop * made.grown)
    rows, columns, inner = made.shape
    changed = dict(cost.work)
    changed[work] -= flop
    if not changed[work]:
        del changed[work]
    key = replace(work, rows=rows, columns=columns, inner=inner)
    changed[key] = changed.get(key, 0) + larger
    storage, width = output
    a, b = engines.stored_widths(work)
    (m, n, k), (old_m, old_n, old_k) = made.shape, work.shape
    more = (m * k - old_m * old_k) * a + (k * n - old_k * old_n) * b
    more += (m * n - old_m * old_n) * width
    access = Access(storage, True)
    traffic = {**cost.traffic, access: cost.traffic.get(access, 0) + round(batch * more)}
    return Cost(changed, traffic), larger - flop
