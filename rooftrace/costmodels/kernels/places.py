"""Instructions of eager PyTorch's elementwise kernels and depthwise convolutions.

All numbers are of threads: an SM issues an instruction for `seconds.ISSUED` threads in a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rooftrace.costmodels.fusion import traffic
from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import storage_bytes

# -- index arithmetic ------------------------------------------------------------------------------
# A kernel of PyTorch for elements in memory order moves 16 bytes per instruction.  Where operands
# are strided or broadcast it takes them apart one by one (`elementwise_kernel` in CUDALoops.cuh of
# ATen): for each element it divides the index by the size of each dimension, and multiplies the
# rest by the strides of each operand (`OffsetCalculator`), over the dimensions that TensorIterator
# cannot join.  A tensor of one element on the device is such an operand.  Where operands differ in
# precision, each is loaded and stored by a switch over its type (`fetch_and_cast` and
# `cast_and_store` in DynamicCast.h).  Joining inputs that lie in another order than the result
# divides without a prepared reciprocal (`CatArrIndexToOffset` in Shape.cu).  That keeps an SM
# busier than the bytes keep HBM.

INDEX_ELEMENT, INDEX_THREAD, INDEX_DIVISION = 56, 40, 3
"""Instructions that an SM issues for one element of a strided kernel; for each thread, which has 4
elements, or 2 where those of the result have 4 bytes or more (`unroll_factor` in CUDALoops.cuh);
and for each dimension of an element, beside one for each operand there: add of a row and of a
tensor of one element, and clones of transposed heads, a slice and expanded heads, in bf16 and fp32
on H200, torch 2.11, 2026-11-27 (10 kernels, each within 11 %)."""
INDEX_CAST = (36, 28)
"""Instructions for an element of a kernel that casts as it loads, and for each operand: bf16 to
fp32, and bf16 + fp32, of 67 M elements on H200, torch 2.11, 2026-11-27."""
LINE = 128
"""Bytes of a line of L1, of which an SM looks one up in a clock, in which it issues an instruction
for 128 threads: a load whose threads lie on lines of their own takes as long as 128 instructions of
each.  A transposed matrix on H200 (67 M elements, bf16 and fp32) says 138."""
WARP = 32
INDEX_JOINED = (45, 30)
"""Instructions for an element of inputs that are joined, and for each dimension but the first: one
kernel of Qwen1.5-0.5B on H100, and of the same on MI300X (traces of TraceLens)."""


def index_work(op: Op, graph: OpGraph) -> int:
    """Instructions of the threads of an op's eager kernel for the places of its elements."""
    rule = find_rule(op.target)
    if rule is None or rule.fusion != "pointwise" or len(op.outputs) != 1:
        return 0
    if rule.kind not in (None, "copy", "cast") or "._foreach_" in op.target:
        return 0
    out = graph.values[op.outputs[0]]
    inputs = [graph.values[i] for i in op.inputs]
    order = sorted(range(len(out.shape)), key=lambda d: out.stride[d])
    if "places" in rule.traits:
        inputs = [t for t in inputs if len(t.shape) == len(order)]
        if all(_joined(t.shape, [t.stride], order) == [(t.elements, (1,))] for t in inputs):
            return 0
        each, per = INDEX_JOINED
        return out.elements * (each + per * (len(order) - 1))
    strides = [out.stride, *(_broadcast(t, out.shape) for t in inputs)]
    known = [each for each in strides if each is not None]
    dims = _joined(out.shape, known, order)
    if len(known) < len(strides):
        return 0
    casts = len(strides) if op.name.startswith("aten.") and _casts(rule.kind, inputs, out) else 0
    each, per = INDEX_CAST
    if len(dims) < 2 and all(set(steps) == {1} for _, steps in dims):
        return out.elements * (each + per * casts) if casts else 0
    each = each_strided(out, len(strides), len(dims)) + per * casts
    return out.elements * (each + _lines(dims, [out, *inputs]))


def each_strided(out: Tensor, operands: int, dims: int) -> int:
    """Instructions for an element of a strided kernel that goes through so many dimensions."""
    unrolled = 2 if storage_bytes(out.dtype, 1) >= 4 else 4
    return INDEX_ELEMENT + INDEX_THREAD // unrolled + (INDEX_DIVISION + operands) * dims


def _casts(kind: str | None, inputs: Sequence[Tensor], out: Tensor) -> bool:
    """Whether an elementwise kernel has operands of other precisions than it computes in.

    Copies that round to 16 or 8 bits have kernels of their own (`direct_copy_kernel_cuda`).
    """
    if kind is None:
        return len({t.dtype for t in inputs} - {"bool"}) > 1
    narrow = {"fp32": ("bf16", "fp16"), "bf16": (), "fp16": ()}
    return any(
        t.dtype != out.dtype
        and (t.dtype not in narrow or out.dtype not in narrow[t.dtype])
        and not (t.dtype in narrow and out.dtype.startswith("fp8"))
        for t in inputs
    )


def _lines(dims: Sequence[tuple[int, tuple[int, ...]]], operands: Sequence[Tensor]) -> int:
    """Instructions that threads could issue while lines of L1 are looked up for one element, of
    operands whose neighbours lie apart; 0 of others."""
    (size, steps), (_, outer) = dims[0], dims[1] if len(dims) > 1 else (1, (LINE,) * len(operands))
    lines = 0
    for step, next_step, tensor in zip(steps, outer, operands, strict=True):
        width = storage_bytes(tensor.dtype, 1)
        if step > 1:
            rows = max(size * LINE // WARP, next_step * width) if size < WARP else LINE
            lines += min(LINE, step * width, rows)
    return lines


def _broadcast(value: Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The strides of a tensor over a wider shape; None where it does not broadcast to that."""
    missing = len(shape) - len(value.shape)
    if missing < 0 or any(
        size not in (1, whole) for size, whole in zip(value.shape, shape[missing:], strict=True)
    ):
        return None
    steps = zip(value.shape, value.stride, strict=True)
    return (0,) * missing + tuple(0 if size == 1 else step for size, step in steps)


def _joined(
    shape: Sequence[int], strides: Sequence[Sequence[int]], order: Iterable[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Dimensions that operands are gone through by, as sizes with a stride for each operand.

    order: from the innermost on.  A dimension joins the one inside where all operands lie on.
    """
    dims: list[tuple[int, tuple[int, ...]]] = []
    for d in order:
        steps = tuple(each[d] for each in strides)
        if shape[d] == 1:
            continue
        if dims and all(
            dims[-1][0] * inner == step for inner, step in zip(dims[-1][1], steps, strict=True)
        ):
            dims[-1] = (dims[-1][0] * shape[d], dims[-1][1])
        else:
            dims.append((shape[d], steps))
    return dims


# -- copies of convolutions ------------------------------------------------------------------------
# cuDNN computes most convolutions with channels last.  Where they come first, nchwToNhwcKernel
# copies the operands before, and nhwcToNchwKernel the result behind.

TURNED, TURNED_TILE = 32, 32
"""Instructions for each value that they copy, and the channels and positions of the tiles that they
copy by: grids and times of 158 such kernels in bf16 and fp32 on H100 and H200, cuDNN 9.19,
2026-11-27 (benchmarks/kernels), which take the root of the squares of issuing and of moving."""


def stored_last(op: Op, graph: OpGraph) -> bool:
    """Whether a convolution, or its gradient, runs with channels last: its image or filters lie so
    (`cudnn_conv_suggest_memory_format` in ConvUtils.h), and more than one position of them."""
    operands = (op.arguments.get(name) for name in ("input", "self", "weight"))
    values = [graph.values[x.id] for x in operands if isinstance(x, Ref)]
    return any(traffic.has_channels_last(value) and value.stride[-1] > 1 for value in values)


def turned_values(op: Op, graph: OpGraph, tile: int) -> int:
    """Values that a convolution copies into another layout, in full tiles; 0 of other ops.

    Images and filters of one position lie alike either way.
    """
    rule = find_rule(op.target)
    if rule is None or rule.kind != "conv" or stored_last(op, graph):
        return 0
    image, filters, *_ = op.arguments.get("output_mask", (True, True))
    unread = {"input": not filters, "weight": not image}
    reads = [x.id for n, x in op.arguments.items() if isinstance(x, Ref) and not unread.get(n)]
    tensors = [graph.values[i].shape for i in (*reads, *op.outputs)]
    return sum(
        n * -(-channels // tile) * tile * -(-math.prod(space) // tile) * tile
        for n, channels, *space in (shape for shape in tensors if len(shape) > 2)
        if math.prod(space) > 1
    )


# -- depthwise convolutions ------------------------------------------------------------------------
# A thread of PyTorch's own kernels makes one value of the result, or of the image's gradient, tap
# by tap; a block sums the gradient of one tap of a channel, a warp for each image
# (DepthwiseConv2d.cu).  What takes time is instructions, not products or bytes.  All numbers are
# clocks of one of an SM's 128 lanes: 46 calls on H200, torch 2.11, 2026-11-27 (benchmarks/kernels).

DEPTHWISE = (270, 67, 9.2)
"""For a value of the result, for each row of the window, and for each tap."""
DEPTHWISE_UNROLLED = (173, 0, 16)
"""The same with square windows of 1, 3 and 5, for which the kernel is unrolled."""
DEPTHWISE_IMAGE = (195, 56, 18)
"""The same of the gradient of the image."""
DEPTHWISE_FILTERS = (48, 2100)
"""Of the gradient of the filters, for each tap: for 32 positions of a warp each, and its rest."""


def depthwise_work(op: Op, graph: OpGraph) -> int:
    """Clocks of lanes that PyTorch's own kernels of a depthwise convolution take; 0 without one."""
    shape = traffic.weight_shape(op, graph)
    if shape is None or not traffic.is_depthwise_native(op, graph):
        return 0
    window = shape[2:]
    sizes = (1, math.prod(window[:-1]), math.prod(window))

    def each(clocks: Sequence[float]) -> float:
        return sum(number * size for number, size in zip(clocks, sizes, strict=True))

    if "grad_output" not in op.arguments:
        unrolled = window in ((1, 1), (3, 3), (5, 5))
        return round(
            graph.values[op.outputs[0]].elements
            * each(DEPTHWISE_UNROLLED if unrolled else DEPTHWISE)
        )
    grad, image = (graph.values[op.arguments[name].id] for name in ("grad_output", "input"))
    wants_image, wants_filters, *_ = op.arguments.get("output_mask", (True, True))
    warps = -(-math.prod(grad.shape[2:]) // WARP)
    clocks, rest = DEPTHWISE_FILTERS
    filters = grad.shape[0] * math.prod(shape) * (clocks * WARP * warps + rest)
    work = image.elements * each(DEPTHWISE_IMAGE) if wants_image else 0.0
    return round(work + (filters if wants_filters else 0.0))
