"""Sorting, selecting, searching and counting: work on bits and indices, so bytes only."""

from __future__ import annotations

from rooftrace.costmodels.cost import Cost, OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import axes, extent, needed, reading, streamed

IN_SHARED_MEMORY = 4096
"""Rows up to this length are sorted on chip, in one pass (aten/src/ATen/native/cuda/Sort.cu)."""
DIGIT = 8
"""Bits per pass of a radix sort (cub::DeviceSegmentedRadixSort uses 6 to 8)."""


@builtin("aten.sort", "aten.argsort", "aten.msort")
def sort(op: OpView) -> Cost:
    """Rows read, sorted values and their indices written.

    Longer rows take one pass per 8 bits of key, each reading and writing keys and indices: all
    passes but the last move what the outputs hold once more in both directions.
    """
    x = needed(op, "self")
    n = extent(x.shape, axes(op, x.dim, "dim", -1)) if x.dim else 1
    cost = streamed(op)
    if n > IN_SHARED_MEMORY:
        key_bits = 8 * x.nbytes // max(x.unique_elements, 1)
        for out in op.outputs:
            again = out.nbytes * (max(key_bits // DIGIT, 1) - 1)
            cost += op.read(out, again) + op.write(out, again)
    return cost


@builtin("aten.topk")
def topk(op: OpView) -> Cost:
    """Radix selection: rows read, k values and indices written.  Later passes hit in cache."""
    return streamed(op)


@builtin("aten._unique", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive",
         "aten.searchsorted", "aten.bucketize")
def searched(op: OpView) -> Cost:
    """Inputs read once, outputs written once: a lower bound where the kernel sorts first."""
    return streamed(op)


@builtin("aten.histc", "aten.bincount", "aten.histogram")
def histogram(op: OpView) -> Cost:
    """Values (and weights) read, counts written: how experts count their tokens."""
    return reading(op, "self", "weights", "weight")
