"""Rules of reductions, running sums, sorting, searching, softmax and losses."""

from __future__ import annotations

from collections.abc import Callable

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import (
    along_rows,
    axes,
    extent,
    has_arithmetic,
    is_complex,
    product_precision,
    share,
    total,
    vector,
)
from rooftrace.costmodels.rules.elementwise import flop_per_element

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


# -- Rules of losses and softmax, and of their gradients -------------------------------------------

# -- losses ----------------------------------------------------------------------------------------
# Losses: an elementwise formula, then a reduction to one number; and their gradients.
#
# `reduction` is torch's: 0 none, 1 mean, 2 sum.  Formulas are written as in `elementwise`.

FORWARD: dict[str, str] = {
    "mse_loss": "(d := x - t) * d",
    "l1_loss": "abs(x - t)",
    "smooth_l1_loss": "0.5 * z * z / BETA if (z := abs(x - t)) < BETA else z - 0.5 * BETA",
    "huber_loss": "0.5 * z * z if (z := abs(x - t)) < DELTA else DELTA * (z - 0.5 * DELTA)",
    "binary_cross_entropy": "-(t * max(log(x), FLOOR) + (1 - t) * max(log(1 - x), FLOOR))",
    "binary_cross_entropy_with_logits":
        "(1 - t) * x + (m := max(-x, 0)) + log(exp(-m) + exp(-x - m))",
    "soft_margin_loss": "log1p(exp(-t * x))",
    "kl_div": "t * (log(t) - x)",
    "poisson_nll_loss": "exp(x) - t * x",
    "hinge_embedding_loss": "max(MARGIN - x, 0)",
    "multilabel_margin_loss_forward": "max(1 - x, 0)",
}
"""Per element.  `weight` multiplies once more."""

BACKWARD: dict[str, str] = {
    "mse_loss_backward": "NORM * (x - t) * g",
    "smooth_l1_loss_backward":
        "NORM * z * g / BETA if abs(z := x - t) < BETA else NORM * g * sign(z)",
    "huber_loss_backward":
        "NORM * g * z if abs(z := x - t) <= DELTA else NORM * g * DELTA * sign(z)",
    "binary_cross_entropy_backward": "g * (x - t) / max((1 - x) * x, EPS) * NORM",
    "soft_margin_loss_backward": "-NORM * t * (z := exp(-t * x)) / (z + 1) * g",
    "multilabel_margin_loss_backward": "g * NORM",
}


def reduction_flop(op: OpView, elements: int) -> int:
    """n - 1 adds for a sum, and a division for a mean."""
    kind = op.attribute("reduction", 1)
    return 0 if kind == 0 else elements if kind == 1 else max(elements - 1, 0)


def _forward(name: str, formula: str) -> None:
    @builtin(f"aten.{name}", fusion="reduction", kind="elementwise", family="loss")
    def price(op: OpView) -> Cost:
        n = op.needed("self").elements
        weights = sum(op.tensor(w) is not None for w in ("weight", "pos_weight"))
        flop = (flop_per_element(formula) + weights) * n + reduction_flop(op, n)
        return vector(op, flop) + op.streamed()


def _backward(name: str, formula: str) -> None:
    @builtin(f"aten.{name}", fusion="pointwise", family="loss")
    def price(op: OpView) -> Cost:
        n = op.needed("self").elements
        weight = op.tensor("weight") is not None
        return vector(op, (flop_per_element(formula) + weight) * n) + op.streamed()


for _name, _formula in FORWARD.items():
    _forward(_name, _formula)
for _name, _formula in BACKWARD.items():
    _backward(_name, _formula)


@builtin("aten.nll_loss_forward", fusion="reduction", kind="elementwise", family="loss",
         fused="cross entropy", traits=("picks",))
@builtin("aten.nll_loss2d_forward", "aten.nll_loss", "aten.nll_loss2d",
         "aten.nll_loss_nd", fusion="reduction", kind="elementwise", family="loss",
         traits=("picks",))
def nll_loss(op: OpView) -> Cost:
    """loss = -sum_i w[t_i] x[i, t_i] / sum_i w[t_i]: of x only the chosen value per target is read.

    Per target a negation; with weights a product, and an add for the sum of weights; then the
    reduction.
    """
    x, target = op.needed("self"), op.needed("target")
    n = target.elements
    weights = 2 * n if op.tensor("weight") is not None else 0
    return (vector(op, n + weights + reduction_flop(op, n))
            + op.read(x, share(x, n, max(x.unique_elements, 1))) + op.reading("target", "weight"))


@builtin("aten.nll_loss_backward", "aten.nll_loss2d_backward", fusion="pointwise", family="loss")
def nll_loss_backward(op: OpView) -> Cost:
    """Zeros everywhere, then -g w / total at the target of each row: 2 flop, 3 with weights.

    The log-probabilities only say the shape.
    """
    out, n = op.outputs[0], op.needed("target").elements
    each = 3 if op.tensor("weight") is not None else 2
    return (vector(op, each * n) + op.reading("grad_output", "target", "weight", "total_weight")
            + op.write(out, share(out, n, max(out.unique_elements, 1))))


@builtin("aten.multi_margin_loss", fusion="reduction", kind="elementwise", family="loss")
def multi_margin_loss(op: OpView) -> Cost:
    """max(0, margin - x[t] + x[j])^p over the classes: difference, add, comparison, power, add."""
    x = op.needed("self")
    reduced = reduction_flop(op, op.needed("target").elements)
    return vector(op, 5 * x.elements + reduced) + op.streamed()


@builtin("aten.multi_margin_loss_backward", family="loss")
def multi_margin_loss_backward(op: OpView) -> Cost:
    """Difference, add, comparison, product, add to the target's gradient, per class."""
    return vector(op, 5 * op.needed("self").elements) + op.streamed()


@builtin("aten._ctc_loss", "aten._cudnn_ctc_loss", "aten.ctc_loss", family="loss")
def ctc_loss(op: OpView) -> Cost:
    """alpha[T, 2 S + 1]: log-sum-exp of three and an add each, 11 flop (Graves et al. 2006, eq. 6).

    Three comparisons, three differences, three exponentials, two adds, a log, two sums, less the
    first.
    """
    alpha = op.outputs[-1].elements
    return vector(op, 11 * alpha) + op.streamed()


@builtin("aten._ctc_loss_backward", family="loss")
def ctc_loss_backward(op: OpView) -> Cost:
    """beta as alpha, then 3 flop per class and step for the gradient (eq. 16)."""
    alpha, out = op.needed("log_alpha").elements, op.outputs[0]
    return vector(op, 11 * alpha + 3 * out.elements) + op.streamed()


@builtin("aten.cross_entropy_loss", fusion="reduction", kind="elementwise", family="loss")
def cross_entropy(op: OpView) -> Cost:
    """The composite: log-softmax over classes (5 n - 1 per row) and a picked value per row."""
    x = op.needed("self", "input")
    classes = x.shape[1] if x.dim > 1 else x.elements
    rows = x.elements // classes if classes else 0
    return vector(op, rows * (5 * classes - 1) + 2 * rows) + op.streamed()


@builtin("torch_nn._linear_cross_entropy_batch_chunked",
         "torch_nn._linear_cross_entropy_batch_chunked_no_reduction", family="loss")
def linear_cross_entropy(op: OpView) -> Cost:
    """Logits[N, C] = x[N, K] W[C, K]^T and their loss, chunk by chunk, never written in full.

    2 N K C flop, and as much for the gradient of x and for that of W, which are made at once.
    Vector: log-softmax as in `softmax` (5 per logit), and 3 for its gradient.
    """
    x, weight = op.needed("input"), op.needed("linear_weight")
    n, (c, k) = x.elements // x.shape[-1], weight.shape
    wanted = [bool(op.attribute(f"compute_{name}_grad", False))
              for name in ("input", "linear_weight")]
    flop = 2 * n * k * c * (1 + sum(wanted))
    rows = min(int(op.attribute("batch_chunk_size", 0)) or n, n)
    return (Cost.of(matmul=flop, precision=product_precision(x, weight), rows=rows)
            + vector(op, n * c * (5 + 3 * any(wanted))) + op.streamed())


# -- softmax ---------------------------------------------------------------------------------------
# Softmax and log-softmax over rows, and their gradients.
#
# Their kernels load entire rows, so their work has the length of rows (`along_rows`).

def _loss_rows(op: OpView, x: TensorView) -> tuple[int, int]:
    """(rows, n): how many rows are normalised and how long each is."""
    n = extent(x.shape, axes(op, x.dim, "dim", -1)) if x.dim else 1
    return (x.elements // n if n else 0), n


@builtin("aten._softmax", "aten._safe_softmax", fusion="reduction", kind="softmax", fused="softmax")
@builtin("aten.softmax", "aten.special_softmax",
         fusion="reduction", kind="softmax")
def softmax(op: OpView) -> Cost:
    """y = exp(x - max x) / sum exp(x - max x) over n values.

    n - 1 comparisons, n differences, n exponentials, n - 1 adds, n divisions: 5 n - 2.
    """
    x = op.needed("self")
    rows, n = _loss_rows(op, x)
    return along_rows(op, rows * (5 * n - 2), x, n) + op.streamed()


@builtin("aten._log_softmax", fusion="reduction", kind="softmax", family="loss",
         fused="cross entropy")
@builtin("aten.log_softmax", "aten.special_log_softmax", fusion="reduction", kind="softmax")
def log_softmax(op: OpView) -> Cost:
    """y = (x - m) - log sum exp(x - m), m = max x, over n values.

    n - 1 comparisons, n differences, n exponentials, n - 1 adds, a log, n differences: 5 n - 1.
    """
    x = op.needed("self")
    rows, n = _loss_rows(op, x)
    return along_rows(op, rows * (5 * n - 1), x, n) + op.streamed()


@builtin("aten._softmax_backward_data", fusion="reduction", kind="softmax",
         fused="softmax backward")
def softmax_backward(op: OpView) -> Cost:
    """dx = y (dy - sum dy y): n products, n - 1 adds, n differences, n products: 4 n - 1."""
    x = op.needed("output")
    rows, n = _loss_rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.reading("grad_output", "output")


@builtin("aten._log_softmax_backward_data", fusion="reduction", kind="softmax", family="loss",
         fused="cross entropy")
def log_softmax_backward(op: OpView) -> Cost:
    """dx = dy - exp(y) sum dy: n - 1 adds, n exponentials, n products, n differences: 4 n - 1."""
    x = op.needed("output")
    rows, n = _loss_rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.reading("grad_output", "output")


@builtin("aten._masked_softmax", fusion="reduction", kind="softmax")
def masked_softmax(op: OpView) -> Cost:
    """Softmax over n values, 5 n - 2 per row; selecting by the mask is free."""
    x = op.needed("self")
    rows, n = _loss_rows(op, x)
    return along_rows(op, rows * (5 * n - 2), x, n) + op.streamed()


@builtin("aten._masked_softmax_backward", fusion="reduction", kind="softmax")
def masked_softmax_backward(op: OpView) -> Cost:
    """dx = y (dy - sum dy y): 4 n - 1 per row; selecting by the mask is free."""
    x = op.needed("output")
    rows, n = _loss_rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.streamed()
