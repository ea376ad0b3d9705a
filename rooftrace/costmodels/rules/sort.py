"""Sorting, selecting, searching and counting.

Sorting and selecting work on the bits of keys (radix), so they are bytes only; searching compares.
"""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import axes, extent, vector

IN_SHARED_MEMORY = 4096
"""Rows up to this length are sorted on chip, in one pass (aten/src/ATen/native/cuda/Sort.cu)."""
DIGIT = 8
"""Bits per pass of a radix sort (cub::DeviceSegmentedRadixSort uses 6 to 8)."""


@builtin("aten.sort", "aten.argsort", "aten.msort", kind="sort")
def sort(op: OpView) -> Cost:
    """Rows read, sorted values and their indices written.

    Longer rows take one pass per 8 bits of key, each reading and writing keys and indices: all
    passes but the last move what the outputs hold once more in both directions.
    """
    x = op.needed("self")
    n = extent(x.shape, axes(op, x.dim, "dim", -1)) if x.dim else 1
    cost = op.streamed()
    if n > IN_SHARED_MEMORY:
        key_bits = 8 * x.nbytes // max(x.unique_elements, 1)
        for out in op.outputs:
            again = out.nbytes * (max(key_bits // DIGIT, 1) - 1)
            cost += op.read(out, again) + op.write(out, again)
    return cost


@builtin("aten.topk", kind="sort")
def topk(op: OpView) -> Cost:
    """Radix selection: rows read, k values and indices written.  Later passes hit in cache."""
    return op.streamed()


@builtin("aten._unique", "aten._unique2", "aten.unique_dim", "aten.unique_consecutive")
def unique(op: OpView) -> Cost:
    """Inputs read once, outputs written once: a lower bound where the kernel sorts first."""
    return op.streamed()


@builtin("aten.searchsorted", "aten.bucketize")
def searched(op: OpView) -> Cost:
    """Binary search of each value among n boundaries: up to log2(n) + 1 comparisons."""
    boundaries = op.needed("sorted_sequence", "boundaries")
    n = boundaries.shape[-1] if boundaries.dim else 1
    return vector(op, n.bit_length() * op.outputs[0].elements) + op.streamed()


@builtin("aten.isin")
def isin(op: OpView) -> Cost:
    """Is each of N elements among M?  Sorted, then searched: up to log2(M) + 1 comparisons."""
    among = op.tensor("test_elements")
    m = among.elements if among is not None else 1
    return vector(op, m.bit_length() * op.outputs[0].elements) + op.streamed()


@builtin("aten.bincount")
def bincount(op: OpView) -> Cost:
    """Values (and weights, an add each) read, counts written: how experts count their tokens."""
    weights = op.tensor("weights")
    adds = weights.elements if weights is not None else 0
    return vector(op, adds) + op.reading("self", "weights")


@builtin("aten.histc", "aten.histogram")
def histogram(op: OpView) -> Cost:
    """The bin of a value, (x - min) bins / (max - min), is 3 flop; a weight is added to it."""
    x, weight = op.needed("self"), op.tensor("weight")
    flop = 3 * x.elements + (weight.elements if weight is not None else 0)
    return (vector(op, flop) if x.floating else Cost()) + op.reading("self", "weight", "bins")
