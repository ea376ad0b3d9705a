"""Classes of kernels: those of one class reach similar shares of a chip's peaks.

A group's class is that of its heaviest op: a convolution with its epilogue is a convolution.
Measured efficiencies differ between the classes.  An op's rule or its cost says which class it is
in (`Rule.kind_of`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.kernels.engines import ACCESS
from rooftrace.costmodels.knobs.classes import CLASSES, LAST
from rooftrace.costmodels.pricing import op_cost
from rooftrace.costmodels.registry import find_rule
from rooftrace.costmodels.traffic import layouts
from rooftrace.hardware.precisions import precision
from rooftrace.tracer.graph import Op, OpGraph

LARGE_WINDOW = 5
"""With channels first, depthwise convolutions with a wider window run on slower kernels: PyTorch's
own are written out for 1, 3 and 5 (`DepthwiseConv2d.cu`), cuDNN's are used up to 5
(`check_cudnn_depthwise_workload_with_filter`)."""
LARGE_WINDOW_LAST = 7
"""With channels last cuDNN has such kernels up to this; wider windows go to one for any groups
(`conv2d_grouped_direct_kernel`), which is several times slower."""


def op_class(op: Op, graph: OpGraph, channels_last: bool = False, cost: Cost | None = None) -> str:
    """The class of one op: the kind of its rule or cost, and "elementwise" without a rule.

    The class of a convolution also depends on its sizes.

    channels_last: whether a compiler lays all images out so.  cost: what the op costs, where that
    is known already.
    """
    rule = find_rule(op.target)
    if rule is None:
        return "elementwise"
    kind = rule.kind or rule.kind_of(op_cost(graph, op) if cost is None else cost)
    return _convolution(op, graph, channels_last) if kind == "conv" else kind


def group_class(
    graph: OpGraph,
    ops: Sequence[int],
    channels_last: bool = False,
    costs: Sequence[Cost] | None = None,
) -> str:
    """The class of a kernel group: the heaviest class of its ops.  costs: of all ops."""
    return min(
        (op_class(graph.ops[i], graph, channels_last, costs[i] if costs else None) for i in ops),
        key=CLASSES.index,
    )


def _convolution(op: Op, graph: OpGraph, channels_last: bool) -> str:
    shape = layouts.weight_shape(op, graph)
    if shape is None:
        return "conv"
    groups, window = op.arguments.get("groups", 1), shape[2:]
    image = graph.values[op.inputs[0]]
    stored_last = layouts.has_channels_last(image)
    last, ending = channels_last or stored_last, LAST if stored_last else ""
    if groups > 1:
        alone = shape[1] == 1 or shape[0] == groups
        back = " backward" if "grad_output" in op.arguments else ""
        if not alone:
            return f"grouped conv{back or ending}"
        if last and max(window) > LARGE_WINDOW_LAST:
            return "depthwise conv, general"
        if last:
            return "depthwise conv"
        large = max(window) > LARGE_WINDOW
        return "depthwise conv, large" if large else f"depthwise conv{back}"
    if all(size == 1 for size in window):
        return f"conv 1x1{ending}"
    if len(window) == 3:
        return "conv 3d"
    # Adjacent channels that are no whole number of such loads are loaded in smaller pieces.
    whole = ACCESS * 8 // precision(image.dtype).bits
    odd = shape[0] % whole or (shape[1] % whole and shape[1] > whole)
    return "conv, odd channels" if last and odd else f"conv{ending}"
