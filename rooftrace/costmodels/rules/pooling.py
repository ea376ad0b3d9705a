"""Pooling: max, average, adaptive and fractional, forward and backward.

Windows count whole: cells of padding are counted as if they were data.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView, TensorView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import vector


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
