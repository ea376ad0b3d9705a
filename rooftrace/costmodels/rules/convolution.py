"""Convolutions, forward and backward.  FLOPs as in torch.utils.flop_counter, with one exception.

The exception is the weight gradient of a grouped convolution: that counter multiplies all input
with all output channels, which is `groups` times too much (torch 2.13, `conv_backward_flop`).
Winograd and FFT algorithms do fewer multiplications; which one runs is the library's choice, not
counted.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import product_precision, vector, widths


def convolution_flop(batch: int, positions: int, weight: TensorView) -> int:
    """2 N P C_out (C_in / groups) R S: every position P applies the whole filter bank once.

    The weight is [C_out, C_in / groups, R, S] ([C_in, C_out / groups, R, S] if transposed), so the
    product of its sizes is the last four factors in both cases.  Positions are those of the output;
    of a transposed convolution, those of the input.  Padding counts as if it were data.
    """
    return 2 * batch * positions * weight.elements


def _forward(op: OpView, x: TensorView, weight: TensorView, transposed: bool) -> Cost:
    out = op.outputs[0]
    positions = math.prod((x if transposed else out).shape[2:])
    batch = x.shape[0]
    epilogue = sum(op.tensor(name) is not None for name in ("bias", "z"))
    epilogue += "relu" in op.target.rsplit(".", 1)[0]
    columns, inner = _sides(op, weight, transposed)
    return (Cost.of(convolution=convolution_flop(batch, positions, weight),
                    precision=product_precision(x, weight), rows=batch * positions,
                    columns=columns, inner=inner, widths=widths(x, weight))
            + (vector(op, epilogue * out.elements) if epilogue else Cost()) + op.streamed())


def _sides(op: OpView, weight: TensorView, transposed: bool) -> tuple[int, int]:
    """N and K of one group's product: output channels, and the values that each channel sums."""
    groups = max(int(op.attribute("groups", 1)), 1)
    first, second, window = weight.shape[0], weight.shape[1], math.prod(weight.shape[2:])
    if transposed:
        return second * window, first // groups
    return first // groups, second * window


@builtin(
    "aten.convolution", "aten._convolution", "aten.convolution_overrideable",
    "aten.cudnn_convolution", "aten.miopen_convolution", "aten.mkldnn_convolution",
    "aten._slow_conv2d_forward", "aten.thnn_conv2d", "aten.slow_conv3d", "aten.slow_conv3d_forward",
    "aten.slow_conv_dilated2d", "aten.slow_conv_dilated3d",
    "aten._conv_depthwise2d", "aten.conv_depthwise3d", "aten.miopen_depthwise_convolution",
    "aten.cudnn_convolution_relu", "aten.cudnn_convolution_add_relu",
    "aten.conv1d", "aten.conv2d", "aten.conv3d",
    kind="conv")
def convolution(op: OpView) -> Cost:
    """y[N, C_out, P] = x[N, C_in, Q] * w[C_out, C_in / groups, R S] + bias: see `convolution_flop`.

    As a matrix product it has N P rows.  The bias is one vector add per output.
    """
    x, weight = op.needed("input", "self"), op.needed("weight")
    return _forward(op, x, weight, bool(op.attribute("transposed", False)))


@builtin("aten.cudnn_convolution_transpose", "aten.miopen_convolution_transpose",
         "aten.slow_conv_transpose2d", "aten.slow_conv_transpose3d",
         "aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d", kind="conv")
def convolution_transpose(op: OpView) -> Cost:
    """y[N, C_out, P] from x[N, C_in, Q] and w[C_in, C_out / groups, R S]: Q positions."""
    return _forward(op, op.needed("input", "self"), op.needed("weight"), True)


@builtin("aten.convolution_backward", "aten.convolution_backward_overrideable", kind="conv")
def convolution_backward(op: OpView) -> Cost:
    """Gradients of x, w and bias, as far as `output_mask` asks for them.

    Each of the first two does the multiplications of the forward once more, with other roles:
    dx has N P rows per weight tile (P: positions of the forward, see `convolution_flop`), dw has
    C_out rows per group.  The bias gradient adds N P values per channel.
    """
    grad, x, weight = op.needed("grad_output"), op.needed("input"), op.needed("weight")
    wants_x, wants_weight, wants_bias = op.attribute("output_mask", (True, True, True))
    transposed = bool(op.attribute("transposed", False))
    positions = math.prod((x if transposed else grad).shape[2:])
    batch = x.shape[0]
    flop = convolution_flop(batch, positions, weight)
    precision = product_precision(grad, x, weight)
    cost = Cost()
    columns, inner = _sides(op, weight, transposed)
    if wants_x:
        cost += Cost.of(convolution=flop, precision=precision, rows=batch * positions,
                        columns=inner, inner=columns, widths=widths(grad, weight))
    if wants_weight:
        cost += Cost.of(convolution=flop, precision=precision, rows=columns,
                        columns=inner, inner=batch * positions, widths=widths(grad, x))
    if wants_bias:
        cost += vector(op, grad.elements - grad.shape[1])
    # A kernel for each of the three, and each reads the gradient.
    for wanted, other in ((wants_x, weight), (wants_weight, x), (wants_bias, None)):
        cost += op.read_all((grad, other)) if wanted else Cost()
    return cost + op.write_all(op.outputs)


@builtin("aten._convolution_double_backward", kind="conv")
def convolution_double_backward(op: OpView) -> Cost:
    """Gradients of the three results of `convolution_backward`, each a forward's products.

    dy: w with the gradient of dx, and x with that of dw.  dx: dy with that of dw.  dw: dy with
    that of dx.
    """
    grad, x, weight = op.needed("gO"), op.needed("self"), op.needed("weight")
    dx, dw = op.tensor("ggI") is not None, op.tensor("ggW") is not None
    transposed = bool(op.attribute("transposed", False))
    positions = math.prod((x if transposed else grad).shape[2:])
    wants_grad, wants_x, wants_weight = op.attribute("output_mask", (True, True, True))
    times = wants_grad * (dx + dw) + (wants_x and dw) + (wants_weight and dx)
    flop = times * convolution_flop(x.shape[0], positions, weight)
    adds = (wants_grad and dx and dw) + (wants_grad and op.tensor("ggb") is not None)
    return (Cost.of(convolution=flop, precision=product_precision(grad, x, weight),
                    rows=x.shape[0] * positions)
            + vector(op, adds * grad.elements) + op.streamed())
