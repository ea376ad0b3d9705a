"""Rules of image ops: convolution, pooling, resampling, and the detection ops of torchvision."""

from __future__ import annotations

import math

from rooftrace.costmodels.ops import Cost, OpView, TensorView, Work, builtin
from rooftrace.costmodels.rules.common import product_precision, vector, vector_precision, widths

# -- convolutions ----------------------------------------------------------------------------------
# Convolutions, forward and backward.  FLOPs as in torch.utils.flop_counter, with one exception.
#
# The exception is the weight gradient of a grouped convolution: that counter multiplies all input
# with all output channels, which is `groups` times too much (torch 2.13, `conv_backward_flop`).
# Winograd and FFT algorithms do fewer multiplications; which one runs is the library's choice, not
# counted.


def convolution_flop(batch: int, positions: int, weight: TensorView) -> int:
    """2 N P C_out (C_in / groups) R S: every position P applies all filters once.

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
    columns, channels = _sides(op, weight, transposed)
    window = math.prod(weight.shape[2:])
    return (Cost.of(convolution=convolution_flop(batch, positions, weight),
                    precision=product_precision(x, weight), rows=batch * positions,
                    columns=columns, inner=channels * window, widths=widths(x, weight))
            + (vector(op, epilogue * out.elements) if epilogue else Cost()) + op.streamed())


def _sides(op: OpView, weight: TensorView, transposed: bool) -> tuple[int, int]:
    """Channels of one group that come out, and that go in."""
    sides = weight.shape[0] // max(int(op.attribute("groups", 1)), 1), weight.shape[1]
    return sides[::-1] if transposed else sides


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
    dx has N P rows (P: positions of the forward, see `convolution_flop`) and C_in columns, dw has
    C_out rows per group and C_in R S columns, as those of implicit products (CUTLASS, "Implicit
    GEMM convolution").  The bias gradient adds N P values per channel.
    """
    grad, x, weight = op.needed("grad_output"), op.needed("input"), op.needed("weight")
    wants_x, wants_weight, wants_bias = op.attribute("output_mask", (True, True, True))
    transposed = bool(op.attribute("transposed", False))
    positions = math.prod((x if transposed else grad).shape[2:])
    batch = x.shape[0]
    flop = convolution_flop(batch, positions, weight)
    precision = product_precision(grad, x, weight)
    cost = Cost()
    columns, channels = _sides(op, weight, transposed)
    window = math.prod(weight.shape[2:])
    if wants_x:
        cost += Cost.of(convolution=flop, precision=precision, rows=batch * positions,
                        columns=channels, inner=columns * window, widths=widths(grad, weight))
    if wants_weight:
        cost += Cost.of(convolution=flop, precision=precision, rows=columns,
                        columns=channels * window, inner=batch * positions, widths=widths(grad, x))
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


# -- pooling ---------------------------------------------------------------------------------------
# Pooling: max, average, adaptive and fractional, forward and backward.
#
# Windows count in full: cells of padding are counted as if they were data.

def _window(op: OpView, rank: int) -> int:
    """Cells in a window; one number stands for all dimensions."""
    size = op.attribute("kernel_size")
    sizes: tuple[int, ...] = size if isinstance(size, tuple) else (size,)
    return math.prod(sizes * rank if len(sizes) == 1 else sizes)


def _rank(op: OpView) -> int:
    """Spatial dimensions, from the digit in the op's name."""
    return int(next(c for c in op.target if c in "123"))


@builtin("aten.max_pool2d_with_indices", "aten.max_pool3d_with_indices", "aten.max_pool1d",
         "aten.max_pool2d", "aten.max_pool3d", "aten.max_pool1d_with_indices",
         "aten.fractional_max_pool2d", "aten.fractional_max_pool3d", "aten.mkldnn_max_pool2d",
         fusion="gather", kind="pooling")
def max_pool(op: OpView) -> Cost:
    """k cells per output: k - 1 comparisons.  Overlapping windows read from cache."""
    k = _window(op, _rank(op))
    return vector(op, (k - 1) * op.outputs[0].elements) + op.streamed()


@builtin("aten.max_pool2d_with_indices_backward", "aten.max_pool3d_with_indices_backward",
         "aten.adaptive_max_pool2d_backward", "aten.adaptive_max_pool3d_backward",
         "aten.fractional_max_pool2d_backward", "aten.fractional_max_pool3d_backward",
         kind="pooling")
def max_pool_backward(op: OpView) -> Cost:
    """Every incoming value added where its maximum was; the forward's input only says the shape."""
    grad = op.needed("grad_output")
    return vector(op, grad.elements) + op.reading("grad_output", "indices")


@builtin("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", fusion="gather", kind="pooling")
def avg_pool(op: OpView) -> Cost:
    """k cells per output: k - 1 adds and a division."""
    k = _window(op, _rank(op))
    return vector(op, k * op.outputs[0].elements) + op.streamed()


@builtin("aten.avg_pool2d_backward", "aten.avg_pool3d_backward", kind="pooling")
def avg_pool_backward(op: OpView) -> Cost:
    """Every incoming value divided by k and added to its k cells."""
    k, grad = _window(op, _rank(op)), op.needed("grad_output")
    return vector(op, (k + 1) * grad.elements) + op.reading("grad_output")


def adaptive_cells(inputs: int, outputs: int) -> int:
    """Cells in all windows along a dimension: window i is floor(i n / m) to ceil((i + 1) n / m)."""
    return sum(-(-(i + 1) * inputs // outputs) - i * inputs // outputs for i in range(outputs))


def _cells(large: TensorView, small: TensorView, rank: int) -> int:
    """Cells in all windows of an adaptive pooling from `large` to `small`."""
    channels = math.prod(small.shape[:-rank])
    pairs = zip(large.shape[-rank:], small.shape[-rank:], strict=True)
    return channels * math.prod(adaptive_cells(n, m) for n, m in pairs)


@builtin("aten._adaptive_avg_pool2d", "aten._adaptive_avg_pool3d", "aten.adaptive_avg_pool1d",
         "aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d", "aten.mkldnn_adaptive_avg_pool2d",
         fusion="gather", kind="pooling")
def adaptive_avg_pool(op: OpView) -> Cost:
    """Windows of k cells, k varying: k - 1 adds and a division each."""
    x, out = op.needed("self"), op.outputs[0]
    return vector(op, _cells(x, out, _rank(op))) + op.streamed()


@builtin("aten._adaptive_avg_pool2d_backward", "aten._adaptive_avg_pool3d_backward", kind="pooling")
def adaptive_avg_pool_backward(op: OpView) -> Cost:
    """Every incoming value divided by its k and added to its k cells."""
    grad = op.needed("grad_output")
    cells = _cells(op.outputs[0], grad, _rank(op))
    return vector(op, cells + grad.elements) + op.reading("grad_output")


@builtin("aten.adaptive_max_pool1d", "aten.adaptive_max_pool2d", "aten.adaptive_max_pool3d",
         fusion="gather", kind="pooling")
def adaptive_max_pool(op: OpView) -> Cost:
    """Windows of k cells, k varying: k - 1 comparisons each."""
    x, out = op.needed("self"), op.outputs[0]
    return vector(op, _cells(x, out, _rank(op)) - out.elements) + op.streamed()


@builtin("aten.max_unpool2d", "aten.max_unpool3d", kind="pooling")
def max_unpool(op: OpView) -> Cost:
    """Zeros everywhere, then every value to its index."""
    out, x = op.outputs[0], op.needed("self")
    return op.streamed() + op.write(out, min(x.nbytes, out.nbytes))


# -- upsample --------------------------------------------------------------------------------------
# Resampling of images: nearest, linear, cubic, by a grid; and their gradients.
#
# A value from k taps is k products with weights and k - 1 adds; weights depend on the row and the
# column only, and positions are index work: neither is counted.

TAPS: dict[str, int] = {
    "upsample_linear1d": 2, "upsample_bilinear2d": 4, "upsample_trilinear3d": 8,
    "upsample_bicubic2d": 16,
}
NEAREST: tuple[str, ...] = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
)


@builtin(*(f"aten.{name}" for name in NEAREST), fusion="pointwise", kind="upsample")
def nearest(op: OpView) -> Cost:
    """A copy: input read once, output written."""
    return op.streamed()


@builtin(*(f"aten.{name}_backward" for name in NEAREST), kind="upsample")
def nearest_backward(op: OpView) -> Cost:
    """Every output pixel that came from a pixel is added up: one add per value beyond the first."""
    grad, out = op.needed("grad_output"), op.outputs[0]
    return vector(op, max(grad.elements - out.elements, 0)) + op.streamed()


@builtin(*(f"aten.{name}" for name in TAPS), fusion="gather", kind="upsample")
def interpolate(op: OpView) -> Cost:
    """k taps per output: 2 k - 1 flop.

    With channels first, PyTorch's kernel has a thread for each position of the output, which goes
    through all images and channels one after the other (ATen, `UpSampleBilinear2d.cu` and its
    neighbours for linear, cubic and trilinear); with channels last one for each value.
    """
    k, out = TAPS[op.target.split(".")[1]], op.outputs[0]
    flop, positions = (2 * k - 1) * out.elements, math.prod(out.shape[2:])
    last = op.inputs[0].dim == 4 and op.inputs[0].stride[1] == 1 and op.inputs[0].shape[1] > 1
    if last or flop == 0:
        return vector(op, flop) + op.streamed()
    work = Work("vector", vector_precision(op), positions, inner=2 * k - 1)
    return Cost({work: flop}) + op.streamed()


@builtin(*(f"aten.{name}_backward" for name in TAPS), kind="upsample")
def interpolate_backward(op: OpView) -> Cost:
    """Zeros, then every incoming value times its k weights added to k pixels: 2 k flop."""
    k = TAPS[op.target.split(".")[1].removesuffix("_backward")]
    grad, out = op.needed("grad_output"), op.outputs[0]
    return vector(op, 2 * k * grad.elements) + op.streamed() + op.write(out)


ANTIALIASED = {"_upsample_bilinear2d_aa": 1, "_upsample_bicubic2d_aa": 2,
               "_upsample_lanczos2d_aa": 3}
"""Half the support of the filter, in pixels of the coarser image."""


def _antialiased_taps(op: OpView, name: str) -> int:
    """Taps per value: the support grows with the factor by which the image shrinks."""
    forward = not op.target.split(".")[1].endswith("_backward")
    large = op.inputs[0] if forward else op.outputs[0]
    small = op.outputs[0] if forward else op.inputs[0]
    factors = [max(n / m, 1.0) for n, m in zip(large.shape[-2:], small.shape[-2:], strict=True)]
    return math.prod(math.ceil(2 * ANTIALIASED[name] * f) for f in factors)


@builtin(*(f"aten.{name}" for name in ANTIALIASED), kind="upsample")
def antialiased(op: OpView) -> Cost:
    """k taps per output: 2 k - 1 flop.  The filter widens when the image shrinks."""
    k = _antialiased_taps(op, op.target.split(".")[1])
    return vector(op, (2 * k - 1) * op.outputs[0].elements) + op.streamed()


@builtin(*(f"aten.{name}_backward" for name in ANTIALIASED), kind="upsample")
def antialiased_backward(op: OpView) -> Cost:
    """Zeros, then every incoming value times its k weights added to k pixels: 2 k flop."""
    k = _antialiased_taps(op, op.target.split(".")[1].removesuffix("_backward"))
    grad, out = op.needed("grad_output"), op.outputs[0]
    return vector(op, 2 * k * grad.elements) + op.streamed() + op.write(out)


GRID_TAPS = {0: 2, 1: 1, 2: 4}
"""Taps per dimension by torch's `interpolation_mode`: bilinear, nearest, bicubic."""


def _grid(op: OpView) -> tuple[int, int, int]:
    """(positions, taps, dimensions) of a grid sample."""
    grid = op.needed("grid")
    dims = grid.shape[-1]
    return grid.elements // dims, GRID_TAPS[op.attribute("interpolation_mode", 0)] ** dims, dims


@builtin("aten.grid_sampler_2d", "aten.grid_sampler_3d", "aten.cudnn_grid_sampler",
         "aten.grid_sampler", fusion="gather", kind="upsample")
def grid_sample(op: OpView) -> Cost:
    """Per position its weights (3 flop per coordinate, 3 per tap), then 2 k - 1 per channel."""
    positions, k, dims = _grid(op)
    flop = positions * (3 * dims + 3 * k) + (2 * k - 1) * op.outputs[0].elements
    return vector(op, flop) + op.streamed()


@builtin("aten.grid_sampler_2d_backward", "aten.grid_sampler_3d_backward",
         "aten.cudnn_grid_sampler_backward", kind="upsample")
def grid_sample_backward(op: OpView) -> Cost:
    """Weights again; per channel 2 k for the image, and 2 k per dimension for the grid."""
    positions, k, dims = _grid(op)
    grad = op.needed("grad_output")
    flop = positions * (3 * dims + 3 * k) + 2 * k * (1 + dims) * grad.elements
    return vector(op, flop) + op.streamed()


@builtin("aten.affine_grid_generator")
def affine_grid(op: OpView) -> Cost:
    """grid = theta [x, y, 1]: a product and an add for each of d + 1 terms, d coordinates."""
    out = op.outputs[0]
    return vector(op, 2 * (out.shape[-1] + 1) * out.elements) + op.streamed()


@builtin("aten.affine_grid_generator_backward")
def affine_grid_backward(op: OpView) -> Cost:
    """dtheta: a product and an add for each of d + 1 terms, summed over positions."""
    grad = op.inputs[0]
    return vector(op, 2 * (grad.shape[-1] + 1) * grad.elements) + op.reading("grad")


# -- vision ----------------------------------------------------------------------------------------
# Detection ops of torchvision: boxes, regions of interest, deformable convolution.

@builtin("torchvision.nms")
def nms(op: OpView) -> Cost:
    """Every pair of n boxes compared: intersection over union is 13 flop.

    Four comparisons for the corners, two differences clamped at 0 (4), a product, two sums of areas
    less the intersection (2), a division, a comparison.  Areas are made once per box (3).
    """
    n = op.needed("dets").shape[0]
    return vector(op, 13 * (n * (n - 1) // 2) + 3 * n) + op.streamed()


def _samples(op: OpView) -> int:
    """Bilinear samples per output cell; the adaptive choice (ratio <= 0) is taken as 2 x 2."""
    ratio = int(op.attribute("sampling_ratio", 2))
    return (ratio if ratio > 0 else 2) ** 2


@builtin("torchvision.roi_align")
def roi_align(op: OpView) -> Cost:
    """Per output cell a mean of bilinear samples: 7 flop each, as in `upsample`, and an add."""
    return vector(op, 8 * _samples(op) * op.outputs[0].elements) + op.streamed()


@builtin("torchvision._roi_align_backward")
def roi_align_backward(op: OpView) -> Cost:
    """Zeros, then every incoming value to four pixels per sample: 8 flop and a division each."""
    grad, out = op.needed("grad"), op.outputs[0]
    return (vector(op, 9 * _samples(op) * grad.elements) + op.reading("grad", "rois")
            + op.write(out))


@builtin("torchvision.roi_pool", "torchvision.ps_roi_align", "torchvision.ps_roi_pool",
         kind="pooling")
def roi_pool(op: OpView) -> Cost:
    """Regions of data-dependent size: counted as if every input value were looked at once."""
    return vector(op, op.inputs[0].elements) + op.streamed()


@builtin("torchvision.deform_conv2d", kind="conv")
def deform_conv2d(op: OpView) -> Cost:
    """Bilinear samples (7 flop, and a product with a mask) at every tap, then the convolution.

    2 N P C_out C_in / groups R S flop of convolution at P = H_out W_out positions.
    """
    x, weight, out = op.needed("input"), op.needed("weight"), op.outputs[0]
    positions = out.shape[0] * out.shape[-2] * out.shape[-1]
    taps = positions * x.shape[1] * weight.shape[-2] * weight.shape[-1]
    return (Cost.of(convolution=2 * positions * weight.elements,
                    precision=product_precision(x, weight), rows=positions)
            + vector(op, 8 * taps + out.elements) + op.streamed())
