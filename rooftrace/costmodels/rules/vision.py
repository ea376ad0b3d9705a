"""Detection ops of torchvision: boxes, regions of interest, deformable convolution."""

from __future__ import annotations

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import product_precision, vector


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
