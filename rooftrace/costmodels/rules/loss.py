"""Rules of losses and softmax, and of their gradients."""

from __future__ import annotations

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import (
    along_rows,
    axes,
    extent,
    product_precision,
    share,
    vector,
)
from rooftrace.costmodels.rules.elementwise import flop_per_element

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

def _rows(op: OpView, x: TensorView) -> tuple[int, int]:
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
    rows, n = _rows(op, x)
    return along_rows(op, rows * (5 * n - 2), x, n) + op.streamed()


@builtin("aten._log_softmax", fusion="reduction", kind="softmax", family="loss",
         fused="cross entropy")
@builtin("aten.log_softmax", "aten.special_log_softmax", fusion="reduction", kind="softmax")
def log_softmax(op: OpView) -> Cost:
    """y = (x - m) - log sum exp(x - m), m = max x, over n values.

    n - 1 comparisons, n differences, n exponentials, n - 1 adds, a log, n differences: 5 n - 1.
    """
    x = op.needed("self")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (5 * n - 1), x, n) + op.streamed()


@builtin("aten._softmax_backward_data", fusion="reduction", kind="softmax",
         fused="softmax backward")
def softmax_backward(op: OpView) -> Cost:
    """dx = y (dy - sum dy y): n products, n - 1 adds, n differences, n products: 4 n - 1."""
    x = op.needed("output")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.reading("grad_output", "output")


@builtin("aten._log_softmax_backward_data", fusion="reduction", kind="softmax", family="loss",
         fused="cross entropy")
def log_softmax_backward(op: OpView) -> Cost:
    """dx = dy - exp(y) sum dy: n - 1 adds, n exponentials, n products, n differences: 4 n - 1."""
    x = op.needed("output")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.reading("grad_output", "output")


@builtin("aten._masked_softmax", fusion="reduction", kind="softmax")
def masked_softmax(op: OpView) -> Cost:
    """Softmax over n values, 5 n - 2 per row; selecting by the mask is free."""
    x = op.needed("self")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (5 * n - 2), x, n) + op.streamed()


@builtin("aten._masked_softmax_backward", fusion="reduction", kind="softmax")
def masked_softmax_backward(op: OpView) -> Cost:
    """dx = y (dy - sum dy y): 4 n - 1 per row; selecting by the mask is free."""
    x = op.needed("output")
    rows, n = _rows(op, x)
    return along_rows(op, rows * (4 * n - 1), x, n) + op.streamed()
