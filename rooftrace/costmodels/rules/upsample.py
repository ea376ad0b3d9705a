"""Resampling of images: nearest, linear, cubic, by a grid; and their gradients.

A value from k taps is k products with weights and k - 1 adds; weights depend on the row and the
column only, and positions are index work: neither is counted.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.costs import Cost, Work
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import vector, vector_precision

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
