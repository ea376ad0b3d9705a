"""Rules of reductions, running sums, sorting, and searching."""

from __future__ import annotations

from collections.abc import Callable

from rooftrace.costmodels.ops import Cost, OpView, builtin
from rooftrace.costmodels.rules.common import (
    axes,
    extent,
    has_arithmetic,
    is_complex,
    product_precision,
    total,
    vector,
)

# -- reductions ------------------------------------------------------------------------------------
# Reductions: n values to one, over some dimensions.  Adding n values is n - 1 adds.
#
# A tree or a block-wise reduction does the same number of operations in another order.


def _rows(op: OpView) -> tuple[int, int]:
    """(outputs, inputs per output): rows and their length."""
    rows = op.outputs[0].elements if op.outputs else 1
    return rows, op.inputs[0].elements // rows if rows else 0


def _reduction(*names: str, flop: Callable[[int], int], why: str,
               fused: str | None = "reduction") -> None:
    """Register ops whose flop per row of n values is `flop(n)`, for floats (complex: twice)."""

    @builtin(*(f"aten.{name}" for name in names), fusion="reduction", fused=fused)
    def price(op: OpView) -> Cost:
        rows, n = _rows(op)
        parts = 2 if is_complex(op.inputs[0]) else 1
        return vector(op, parts * rows * max(flop(n), 0)) + op.streamed()

    price.__doc__ = why


_reduction("sum", "max", "min", "amax", "amin", "argmax", "argmin", "prod",
           flop=lambda n: n - 1, why="n - 1 adds, products or comparisons.")
_reduction("nansum", flop=lambda n: 2 * n - 1, why="n tests for NaN, n - 1 adds.")
_reduction("mean", flop=lambda n: n, why="n - 1 adds and a division.")
_reduction("nanmean", flop=lambda n: 2 * n, why="As mean, with n tests for NaN.")
_reduction("var", "var_mean", flop=lambda n: 4 * n,
           why="Mean (n), differences (n), squares (n), n - 1 adds and a division.")
_reduction("std", "std_mean", flop=lambda n: 4 * n + 1, why="As var, and a root.")
_reduction("logsumexp", "special_logsumexp", flop=lambda n: 4 * n,
           why="Maximum (n - 1), differences (n), exp (n), n - 1 adds, a log, the maximum added.")
_reduction("aminmax", "_aminmax", flop=lambda n: 2 * (n - 1), why="n - 1 comparisons each way.")
_reduction("count_nonzero", flop=lambda n: n, why="n comparisons; counting is integer work.")


@builtin("aten.all", "aten.any", fusion="reduction", fused="reduction")
@builtin("aten.equal", "aten.is_nonzero", "aten._is_all_true",
         "aten._is_any_true", fusion="reduction")
def truth(op: OpView) -> Cost:
    """Bytes only: the operands are truth values."""
    return op.streamed()


@builtin("aten.linalg_vector_norm", "aten.norm", fusion="reduction", fused="reduction")
@builtin("aten.native_norm", "aten._foreach_norm",
         "aten.dist", "aten.frobenius_norm", "aten.linalg__powsum", "aten._foreach_powsum",
         fusion="reduction")
def vector_norm(op: OpView) -> Cost:
    """(sum |x|^p)^(1/p) over rows of n.

    p = 2: n squares, n - 1 adds, a root.  p = 1: n absolute values, n - 1 adds.  p = inf: the same
    with comparisons.  p = 0: n comparisons, n - 1 adds.  Else: n absolute values, n powers, n - 1
    adds, a root.
    """
    order = op.attribute("ord", op.attribute("p", 2))
    order = 2.0 if order is None or isinstance(order, str) else float(order)
    outputs = total(op.outputs)
    elements = total(op.inputs) if "_foreach_" in op.target else op.inputs[0].elements
    if order == 2:
        flop = 2 * elements
    elif order in (0, 1, float("inf"), float("-inf")):
        flop = 2 * elements - outputs
    else:
        flop = 3 * elements
    extra = elements if op.target.startswith("aten.dist") else 0
    return vector(op, max(flop, 0) + extra) + op.streamed()


@builtin("aten._foreach_max", fusion="reduction")
def foreach_max(op: OpView) -> Cost:
    """n - 1 comparisons per tensor."""
    return vector(op, total(op.inputs) - total(op.outputs)) + op.streamed()


@builtin("aten.trace", fusion="reduction")
def trace(op: OpView) -> Cost:
    """Adds the n values of the diagonal, and reads no others."""
    matrix = op.needed("self")
    n = min(matrix.shape)
    size = matrix.nbytes // max(matrix.unique_elements, 1)
    return (vector(op, max(n - 1, 0)) + op.read(matrix, n * size)
            + op.write(op.outputs[0]))


@builtin("aten.sum_to_size", "aten._sparse_sum", fusion="reduction")
def sum_to_size(op: OpView) -> Cost:
    """One add per value that disappears."""
    return vector(op, op.inputs[0].elements - op.outputs[0].elements) + op.streamed()


@builtin("aten.segment_reduce", "aten._segment_reduce_backward")
def segment_reduce(op: OpView) -> Cost:
    """An add (or comparison, or product) per value of the segments."""
    return vector(op, max(op.inputs[0].elements, op.outputs[0].elements)) + op.streamed()


@builtin("aten.median", "aten.nanmedian", "aten.kthvalue", "aten.mode", "aten.nanquantile",
         "aten.quantile", kind="sort")
def selection(op: OpView) -> Cost:
    """Radix selection works on the bits of the values: bytes only, read once per row."""
    return op.streamed()


@builtin("aten.renorm", "aten.renorm_", fusion="reduction")
def renorm(op: OpView) -> Cost:
    """The norm of every slice along `dim` (as `vector_norm`, p = 2), then a product per element."""
    x = op.needed("self")
    slices = extent(x.shape, axes(op, x.dim, "dim", 0))
    return vector(op, 3 * x.elements + 2 * slices) + op.streamed()


@builtin("aten._cdist_forward", "aten.cdist")
def cdist(op: OpView) -> Cost:
    """d[P, R] = ||x1[P, M] - x2[R, M]||_p: a difference, a power and an add per term, a root each.

    For p = 1 and inf the power is an absolute value and there is no root.  For p = 2 and many rows
    torch uses a matrix product instead, which is then seen as one.
    """
    terms = op.outputs[0].elements * op.needed("x1").shape[-1]
    return vector(op, 3 * terms) + op.streamed()


@builtin("aten._euclidean_dist", kind="mm")
def euclidean_dist(op: OpView) -> Cost:
    """d[P, R] = sqrt(max([-2 x1, |x1|^2, 1] [x2, 1, |x2|^2]^T, 0)): cdist by one matrix product.

    2 P R (M + 2) flop for each pair of matrices, as the two columns of squares are multiplied too.
    Vector: a square and an add per value of x1 and x2, a product by -2, and a comparison and a root
    per distance.
    """
    x1, x2 = op.needed("x1"), op.needed("x2")
    p, r, inner = x1.shape[-2], x2.shape[-2], x1.shape[-1] + 2
    batch = op.outputs[0].elements // (p * r) if p * r else 0
    squares = 3 * x1.elements + 2 * x2.elements
    return (Cost.of(matmul=2 * batch * p * r * inner, precision=product_precision(x1, x2), rows=p,
                    columns=r, inner=inner)
            + vector(op, squares + 2 * op.outputs[0].elements) + op.streamed())


@builtin("aten._cdist_backward")
def cdist_backward(op: OpView) -> Cost:
    """Per term: a difference, its share of the distance, a product with the gradient, an add."""
    terms = op.needed("grad").elements * op.needed("x1").shape[-1]
    return vector(op, 4 * terms) + op.streamed()


@builtin("aten._pdist_forward", "aten._pdist_backward", "aten.pdist")
def pdist(op: OpView) -> Cost:
    """Distances of the n (n - 1) / 2 pairs of rows of one matrix: 3 flop a term, backward 4."""
    n, m = op.needed("self").shape
    per_term = 4 if "backward" in op.target else 3
    return vector(op, per_term * m * n * (n - 1) // 2) + op.streamed()


@builtin("aten._local_scalar_dense", "aten.item", "aten._linalg_check_errors", "aten._assert_async",
         "aten._assert_tensor_metadata", "aten._assert_scalar", "aten._functional_assert_async",
         "aten._functional_assert_scalar")
def to_host(op: OpView) -> Cost:
    """A value the host waits for: its bytes."""
    return op.reading("self", "info") if has_arithmetic(op) or op.inputs else Cost()


# -- scan ------------------------------------------------------------------------------------------
# Running sums, products and extremes along one dimension: output i depends on inputs 0..i.

def _steps(op: OpView) -> int:
    """Combinations done: n - 1 per row of n."""
    x = op.needed("self")
    n = extent(x.shape, axes(op, x.dim, "dim", 0)) if x.dim else 1
    return x.elements - x.elements // n if n else 0


@builtin("aten.cumsum", "aten.cumsum_", "aten.cumprod", "aten.cumprod_", "aten.cummax",
         "aten.cummin", "aten._cummax_helper", "aten._cummin_helper", kind="reduction")
def scan(op: OpView) -> Cost:
    """n - 1 adds, products or comparisons per row of n.

    A parallel scan does up to twice as many; the count is of the sums, not of an algorithm.
    """
    product = 6 if "cumprod" in op.target else 2
    each = product if is_complex(op.inputs[0]) else 1
    return vector(op, each * _steps(op)) + op.streamed()


@builtin("aten.logcumsumexp", "aten._logcumsumexp")
def logcumsumexp(op: OpView) -> Cost:
    """Per step max(x, y) + log1p(exp(-|x - y|)): 7 flop."""
    return vector(op, 7 * _steps(op)) + op.streamed()


# -- sort ------------------------------------------------------------------------------------------
# Sorting, selecting, searching and counting.
#
# Sorting and selecting work on the bits of keys (radix), so they are bytes only; searching
# compares.

IN_SHARED_MEMORY = 4096
"""Rows up to this length are sorted on chip, in one pass (aten/src/ATen/native/cuda/Sort.cu)."""
DIGIT = 8
"""Bits per pass of a radix sort (cub::DeviceSegmentedRadixSort uses 6 to 8)."""


@builtin("aten.sort", "aten.argsort", "aten.msort", kind="sort")
def sort(op: OpView) -> Cost:
    """Rows read, sorted values and their indices written.

    Longer rows take one pass per 8 bits of key, each reading and writing keys and indices: all
    passes but the last move the bytes of the outputs once more in both directions.
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
