"""Normalisations: layer, group, batch, instance and RMS norm, forward and backward.

Kernels pass over a row more than once.  Where a row stays on the chip the later passes come from
there, and the input counts once; where it does not, it is read again (`ON_CHIP`).  Statistics are
textbook two-pass: mean, differences, mean of their squares.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.ops import Cost, OpView, TensorView, builtin
from rooftrace.costmodels.rules.common import vector

ON_CHIP = 128 * 1024
"""Bytes of a row that a kernel keeps while it goes over the row again: the registers of a block of
1024 threads that hold 32 numbers each (CUDA C++ Programming Guide, "Compute Capabilities": an SM
has 64 K registers of 4 bytes)."""


def _again(op: OpView, rows: int, *tensors: TensorView | None) -> Cost:
    """A second reading of tensors of `rows` rows whose rows are too long to stay on the chip."""
    return op.read_all(t for t in tensors if t is not None and t.nbytes > rows * ON_CHIP)


def _affine(op: OpView) -> int:
    """Flop per element of weight and bias: a product and an add, where they are given."""
    return sum(op.tensor(name) is not None for name in ("weight", "bias"))


def standardise_flop(rows: int, n: int) -> int:
    """y = (x - mean) / sqrt(var + eps) for rows of n: 5 n + 2 each.

    Mean: n - 1 adds, a division.  Variance: n differences, n squares, n - 1 adds, a division.
    1 / sqrt(var + eps): an add, a reciprocal root.  Then n products (the differences are there).
    """
    return rows * (5 * n + 2)


def moments_flop(rows: int, n: int) -> int:
    """Of `standardise_flop`, the mean and 1 / sqrt(var + eps): 4 n + 2 for each row."""
    return rows * (4 * n + 2)


def standardise_backward_flop(rows: int, n: int, weighted: bool) -> int:
    """dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy w, xhat = (x - mean) rstd, for rows of n.

    xhat: 2 n.  g: n if there is a weight.  sum g: n - 1.  sum g xhat: 2 n - 1.  Two means: 2.
    dx: a product, two differences and a product per element, 4 n.
    """
    return rows * (9 * n + (n if weighted else 0))


@builtin("aten.native_layer_norm", fusion="reduction", kind="layer norm", fused="layer norm")
@builtin("aten.layer_norm", fusion="reduction", kind="layer norm")
def layer_norm(op: OpView) -> Cost:
    """y[M, n] = standardised x[M, n] times weight[n] plus bias[n]; mean and rstd are written."""
    x = op.needed("input")
    n = math.prod(op.attribute("normalized_shape"))
    rows = x.elements // n if n else 0
    flop = _standardised(op, rows, n) + _affine(op) * x.elements
    return vector(op, flop) + op.streamed()


def _standardised(op: OpView, rows: int, n: int) -> int:
    """Flop of `standardise_flop`, less those of a kernel before that made the moments."""
    flop = standardise_flop(rows, n)
    return flop if op.tensor("mean") is None else flop - moments_flop(rows, n)


@builtin("rooftrace.moments", fusion="reduction", kind="group norm", label="moments")
def moments(op: OpView) -> Cost:
    """The mean and 1 / sqrt(var + eps) of the rows of a norm, which a kernel before it makes."""
    x, rows = op.needed("input"), op.outputs[0].elements
    return vector(op, moments_flop(rows, x.elements // rows if rows else 0)) + op.streamed()


@builtin("aten.native_layer_norm_backward", fusion="reduction", kind="layer norm",
         fused="layer norm backward")
def layer_norm_backward(op: OpView) -> Cost:
    """dx as in `standardise_backward_flop`; dw[n] = sum_M dy xhat, db[n] = sum_M dy.

    dw: M n products and (M - 1) n adds.  db: (M - 1) n adds.
    """
    x = op.needed("input")
    n = math.prod(op.attribute("normalized_shape"))
    rows = x.elements // n if n else 0
    flop = _backward_flop(op, x, rows, n, n)
    return vector(op, flop) + op.streamed(unread=("bias",))


def _backward_flop(op: OpView, x: TensorView, rows: int, n: int, channels: int) -> int:
    """Gradients of input, weight and bias, as far as `output_mask` asks for them."""
    mask = op.attribute("output_mask", (True, True, True))
    wants_x, wants_weight, wants_bias = mask[0], mask[1], mask[2] if len(mask) > 2 else False
    flop = standardise_backward_flop(rows, n, op.tensor("weight") is not None) if wants_x else 0
    if wants_weight:
        # Without dx, xhat is made for the weight alone.
        flop += 2 * x.elements - channels + (0 if wants_x else 2 * x.elements)
    if wants_bias:
        flop += x.elements - channels
    return flop


@builtin("aten.native_group_norm", fusion="reduction", kind="group norm", fused="group norm")
def group_norm(op: OpView) -> Cost:
    """x[N, C, HW] standardised over each of N * group slices, times weight[C] plus bias[C]."""
    x = op.needed("input")
    rows = int(op.attribute("N")) * int(op.attribute("group"))
    n = x.elements // rows if rows else 0
    flop = _standardised(op, rows, n) + _affine(op) * x.elements
    again = _again(op, rows, x) if op.tensor("mean") is None else Cost()
    return vector(op, flop) + op.streamed() + again


@builtin("aten.native_group_norm_backward", fusion="reduction", kind="group norm")
def group_norm_backward(op: OpView) -> Cost:
    """Gradients of layer norm over N * group slices; gradients of weight and bias have C values."""
    x = op.needed("input")
    rows = int(op.attribute("N")) * int(op.attribute("group"))
    n = x.elements // rows if rows else 0
    flop = _backward_flop(op, x, rows, n, int(op.attribute("C")))
    if op.tensor("sums") is not None:
        return vector(op, flop - SUMMED * x.elements) + op.streamed()
    return vector(op, flop) + op.streamed() + _again(op, rows, x, op.tensor("grad_out"))


SUMMED = 3
"""Flop per element of the sums of dy and of dy x over each channel of a sample."""


@builtin("rooftrace.group_sums", fusion="reduction", kind="group norm", label="group norm sums")
def group_sums(op: OpView) -> Cost:
    """Sums of dy and of dy x over each channel of a sample, for gradients of a group norm."""
    return vector(op, SUMMED * op.needed("input").elements) + op.streamed()


@builtin("rooftrace.group_weights", fusion="reduction", kind="group norm",
         label="group norm weights")
def group_weights(op: OpView) -> Cost:
    """dw = sum_N rstd (sum dy x - mean sum dy), db = sum_N sum dy, by sums[2, N, C]: 5 flop."""
    return vector(op, 5 * op.needed("sums").elements // 2) + op.streamed()


@builtin("aten.instance_norm", fusion="reduction", kind="batch norm")
@builtin("aten.group_norm", fusion="reduction", kind="group norm")
def composite_group_norm(op: OpView) -> Cost:
    """Group norm before decomposition; instance norm has one group per channel."""
    x = op.needed("input")
    rows = x.shape[0] * int(op.attribute("num_groups", x.shape[1]))
    n = x.elements // rows if rows else 0
    return vector(op, standardise_flop(rows, n) + _affine(op) * x.elements) + op.streamed()


# -- batch norm: statistics over N and space, one row per channel ----------------------------------

RUNNING = 7
"""Flop per channel to update running statistics: (1 - m) r + m s twice, variance made unbiased."""


def _batch_norm(op: OpView, training: bool) -> Cost:
    x = op.needed("input")
    channels = x.shape[1] if x.dim > 1 else 1
    n = x.elements // channels if channels else 0
    running = (op.tensor("running_mean"), op.tensor("running_var"))
    if not training:
        # (x - mean) * rstd * w + b per element; eps added and a reciprocal root per channel.
        flop = (2 + _affine(op)) * x.elements + 2 * channels
        return vector(op, flop) + op.streamed()
    flop = _standardised(op, channels, n) + _affine(op) * x.elements
    cost = op.streamed()
    if op.tensor("mean") is None:
        cost += _again(op, channels, x)
    if running[0] is not None:
        flop += RUNNING * channels
        written = {t.storage for t in op.outputs}
        cost += op.write_all(t for t in running if t is not None and t.storage not in written)
    return vector(op, flop) + cost


@builtin("aten.native_batch_norm", "aten._native_batch_norm_legit", "aten.cudnn_batch_norm",
         fusion="reduction", kind="batch norm", fused="batch norm")
@builtin("aten.miopen_batch_norm", "aten.batch_norm", "aten._batch_norm_impl_index",
         "aten._native_batch_norm_legit_functional", fusion="reduction", kind="batch norm")
def batch_norm(op: OpView) -> Cost:
    """Training: x[N, C, HW] standardised per channel over N HW values, running statistics updated.

    Evaluation: the running statistics instead: difference, product, weight, bias per element.
    """
    return _batch_norm(op, bool(op.attribute("training", False)))


@builtin("aten._batch_norm_with_update", fusion="reduction", kind="batch norm", fused="batch norm")
@builtin("aten._batch_norm_with_update_functional",
         fusion="reduction", kind="batch norm")
def batch_norm_with_update(op: OpView) -> Cost:
    """`batch_norm` in training."""
    return _batch_norm(op, True)


@builtin("aten._native_batch_norm_legit_no_training", fusion="pointwise", kind="batch norm",
         fused="batch norm")
@builtin("aten._batch_norm_no_update",
         fusion="pointwise", kind="batch norm")
def batch_norm_no_training(op: OpView) -> Cost:
    """`batch_norm` in evaluation."""
    return _batch_norm(op, False)


@builtin("aten.native_batch_norm_backward", "aten.cudnn_batch_norm_backward",
         "aten.batch_norm_backward", fusion="reduction", kind="batch norm",
         fused="batch norm backward")
@builtin("aten.miopen_batch_norm_backward", "aten._batch_norm_impl_index_backward",
         fusion="reduction", kind="batch norm")
def batch_norm_backward(op: OpView) -> Cost:
    """Per channel of n values, S1 = sum dy, S2 = sum dy (x - mean).

    The two sums: n - 1, and 3 n - 1 with the differences; db = S1, dw = S2 rstd (1 flop).
    dx = (dy - S1 / n - (x - mean) S2 rstd^2 / n) w rstd: 4 n, and 5 for the constants: S1 / n,
    rstd^2, its product with S2, its division by n, w rstd.
    In evaluation dx = dy w rstd: n + 1.
    """
    x = op.needed("input")
    channels = x.shape[1] if x.dim > 1 else 1
    n = x.elements // channels if channels else 0
    training = bool(op.attribute("train", op.attribute("update", True)))
    wants_x, wants_weight, wants_bias = op.attribute("output_mask", (True, True, True))
    per_channel = 0
    if wants_weight or (wants_x and training):
        per_channel += 3 * n - 1
    if wants_bias or (wants_x and training):
        per_channel += n - 1
    if wants_weight:
        per_channel += 1
    if wants_x:
        per_channel += 4 * n + 5 if training else n + 1
    saved = ("save_mean", "save_invstd", "save_var")
    unread = ("running_mean", "running_var") if training else saved
    again = Cost()
    if training and wants_x:
        again = _again(op, channels, x, op.tensor("grad_out") or op.tensor("grad_output"))
    return vector(op, channels * per_channel) + op.streamed(unread=unread) + again


@builtin("aten.batch_norm_stats", fusion="reduction", kind="batch norm")
def batch_norm_stats(op: OpView) -> Cost:
    """Mean and reciprocal deviation per channel: 4 n + 2 (SyncBatchNorm)."""
    x = op.needed("input")
    channels = x.shape[1]
    return vector(op, 4 * x.elements + 2 * channels) + op.streamed()


@builtin("aten.batch_norm_elemt", fusion="pointwise", kind="batch norm")
def batch_norm_elemt(op: OpView) -> Cost:
    """Difference, product, and weight and bias where given, per element."""
    return vector(op, (2 + _affine(op)) * op.needed("input").elements) + op.streamed()


@builtin("aten.batch_norm_gather_stats_with_counts", "aten.batch_norm_gather_stats",
         kind="batch norm")
def batch_norm_gather_stats(op: OpView) -> Cost:
    """Merges statistics of W ranks: of the order of 10 flop per rank and channel."""
    return vector(op, 10 * op.needed("mean").elements) + op.streamed()


@builtin("aten.batch_norm_backward_reduce", fusion="reduction", kind="batch norm")
def batch_norm_backward_reduce(op: OpView) -> Cost:
    """The two sums of `batch_norm_backward`: 4 n per channel."""
    return vector(op, 4 * op.needed("input").elements) + op.streamed()


@builtin("aten.batch_norm_backward_elemt", fusion="pointwise", kind="batch norm")
def batch_norm_backward_elemt(op: OpView) -> Cost:
    """dx of `batch_norm_backward`: the difference again and 4 flop, per element."""
    return vector(op, 5 * op.needed("input").elements) + op.streamed()


# -- RMS norm --------------------------------------------------------------------------------------


@builtin("rooftrace.rms_norm", fusion="reduction", kind="layer norm", label="rms norm")
@builtin("aten._fused_rms_norm", "aten.rms_norm", fusion="reduction", kind="layer norm",
         fused="rms norm")
def rms_norm(op: OpView) -> Cost:
    """y[M, n] = x / sqrt(mean(x^2) + eps) * weight[n].

    n squares, n - 1 adds, a division, eps, a reciprocal root, n products; n more with a weight: as
    many as the ops that it is spelled with, one by one.
    """
    x = op.needed("input")
    n = math.prod(op.attribute("normalized_shape"))
    rows = x.elements // n if n else 0
    weight = x.elements if op.tensor("weight") is not None else 0
    return vector(op, rows * (3 * n + 2) + weight) + op.streamed()


@builtin("rooftrace.rms_norm_backward", fusion="reduction", kind="layer norm",
         label="rms norm backward")
@builtin("aten._fused_rms_norm_backward", fusion="reduction", kind="layer norm")
def rms_norm_backward(op: OpView) -> Cost:
    """dx = rstd (g - xhat mean(g xhat)), g = dy w, xhat = x rstd; dw = sum_M dy xhat.

    xhat: n.  g: n if there is a weight.  sum g xhat: 2 n - 1, a division.  dx: 3 n.  dw: as layer
    norm.  That is 9 n with a weight; the ops that autograd makes of the spelled norm do 11 n, since
    they square and divide again.
    """
    x = op.needed("input")
    n = math.prod(op.attribute("normalized_shape"))
    rows = x.elements // n if n else 0
    wants_x, wants_weight = op.attribute("output_mask", (True, True))
    weighted = op.tensor("weight") is not None
    flop = rows * (6 * n + (n if weighted else 0)) if wants_x else 0
    if wants_weight and weighted:
        flop += 2 * x.elements - n + (0 if wants_x else x.elements)
    return vector(op, flop) + op.streamed()


@builtin("aten._weight_norm_interface", fusion="reduction")
def weight_norm(op: OpView) -> Cost:
    """w = g v / ||v||: squares, adds and a root per slice, then a product; and g / ||v||."""
    v = op.needed("v")
    return vector(op, 3 * v.elements + 2 * op.needed("g").elements) + op.streamed()


@builtin("aten._weight_norm_interface_backward", fusion="reduction")
def weight_norm_backward(op: OpView) -> Cost:
    """dg = sum dw v / ||v||, dv = g / ||v|| (dw - v sum(dw v) / ||v||^2): 5 per element."""
    v = op.needed("saved_v")
    return vector(op, 5 * v.elements + 4 * op.needed("saved_g").elements) + op.streamed()


@builtin("aten.linalg_norm", "aten.linalg_matrix_norm", fusion="reduction")
def matrix_norm(op: OpView) -> Cost:
    """The Frobenius norm: a square and an add per element, a root.  Other orders decompose."""
    return vector(op, 2 * op.inputs[0].elements) + op.streamed()
