"""Kernels that an op launches beside its own where nothing is fused: what they move.

It knows those of convolutions.  What rules count is one kernel for each op.
"""

from __future__ import annotations

import math

from rooftrace.costmodels.costs import Access, Cost
from rooftrace.costmodels.registry import find_rule
from rooftrace.costmodels.traffic import layouts
from rooftrace.tracer.arguments import Ref
from rooftrace.tracer.graph import Op, OpGraph

WRITTEN_OUT = 5
"""With channels first, cuDNN takes depthwise convolutions of windows up to this; PyTorch's own
kernel, for wider ones, adds the bias itself."""


def beside(op: Op, graph: OpGraph) -> Cost:
    """What the kernel moves that adds the bias to a convolution's result: it is read and written.

    cuDNN's convolution has no bias; PyTorch adds it in place (ATen, `Convolution.cpp`: after the
    backends Cudnn and CudnnTranspose stands `output.add_(reshape_bias(...))`).  A compiler joins it
    to what follows.
    """
    rule = find_rule(op.target)
    biased = isinstance(op.arguments.get("bias"), Ref) and "grad_output" not in op.arguments
    shape = layouts.weight_shape(op, graph)
    if rule is None or rule.kind != "conv" or not biased or shape is None:
        return Cost()
    image, out = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
    depthwise = op.arguments.get("groups", 1) > 1 and shape[1] == 1
    if depthwise and max(shape[2:]) > WRITTEN_OUT and not layouts.has_channels_last(image):
        return Cost()
    if math.prod(out.shape) == 0:
        return Cost()
    return Cost({}, {Access(out.storage, write): out.nbytes for write in (False, True)})
