"""Instructions that eager PyTorch's kernels issue, where they take longer than bytes or FLOP.

All numbers are of threads: an SM issues an instruction for `seconds.ISSUED` threads in a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rooftrace.costmodels.fusion import BATCH_NORMS, Plan, is_batch_norm_native, release_of, traffic
from rooftrace.costmodels.kernels.knobs import NATIVE
from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import Op, OpGraph, Tensor
from rooftrace.hardware.precisions import storage_bytes


class Issued(NamedTuple):
    """The instructions of a kernel, and its waits for memory.

    instructions: of all its threads.  trips: how often a thread waits for memory before it goes on,
    in kernels of so few blocks that nothing else runs meanwhile.
    """

    instructions: int = 0
    trips: int = 0


NOTHING = Issued()


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


def group_issued(planned: Plan, number: int, kind: str) -> Issued:
    """Instructions and waits of a group; none of a kernel that a compiler writes, or an engine has.

    kind: its class; kernels of NATIVE have their `depthwise_work`, however they are run.
    """
    graph, ops = planned.graph, [planned.graph.ops[i] for i in planned.groups[number].ops]
    if kind == NATIVE:
        return Issued(sum(depthwise_work(op, graph) for op in ops))
    generated = planned.execution.fusion != "none" and number not in planned.eager
    if generated or len(ops) > 1:
        return NOTHING
    of_rows = _ROWS.get(ops[0].name)
    return Issued(index_work(ops[0], graph)) if of_rows is None else of_rows(ops[0], graph)


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
    each = _each_strided(out, len(strides), len(dims)) + per * casts
    return out.elements * (each + _lines(dims, [out, *inputs]))


def _each_strided(out: Tensor, operands: int, dims: int) -> int:
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


# -- rows ------------------------------------------------------------------------------------------
# A block of PyTorch's kernels takes one row.  Each thread adds up mean and variance of what it
# loads (Welford), a division for each element, and then all threads combine theirs, a division at
# every step.  All numbers are read off H200, torch 2.11, 2026-11-27 (benchmarks/kernels): 22 layer
# norms, 22 RMS norms, 60 group norms, 24 softmaxes.

LAYER_NORM = {2: (265, 40), 4: (340, 58)}
"""Instructions of each of the 128 threads that take a row (`vectorized_layer_norm_kernel` in
layer_norm_kernel.cu of ATen), and for each element, by the bytes of one.  Eager steps of timm's
models, whose norms run in fp32, say 340 of each thread on RTX 4090 (156 models), 280 on RTX 3090
(154)."""
RMS_NORM = {2: (136, 26), 4: (162, 40)}
"""The same without a mean."""
MOMENTS, MOMENTS_ELEMENT = 340, 46
"""Instructions of each of the threads that take a row, and for each element
(`RowwiseMomentsCUDAKernel`)."""
SCALED = 75
"""Instructions for an element of a norm whose mean is known (`LayerNormForwardCUDAKernel`)."""
SUMS, SUMS_ELEMENT = 117, 58
"""Instructions of each of the threads that take a channel of a sample, and for each element, of the
sums that gradients of a group norm need (`ComputeInternalGradientsCUDAKernel`)."""
CHANNEL_ELEMENT, GRADIENT_ELEMENT = 72, 190
"""Instructions for an element of a batch norm's mean and variance, and of its gradient, which goes
over all twice (`batch_norm_collect_statistics_kernel`, `batch_norm_backward_kernel` in
Normalization.cuh): steps of ResNet-50 in fp16."""
TRANSFORMED, TRANSFORMED_IMAGE = 75, 10_000
"""Instructions for an element of a batch norm's result, and for each channel of a sample
(`batch_norm_transform_input_kernel`)."""
_ALL_BATCH_NORMS = (
    *BATCH_NORMS, "aten._native_batch_norm_legit_no_training", "aten._batch_norm_no_update",
    "aten.native_batch_norm_backward", "aten.cudnn_batch_norm", "aten.cudnn_batch_norm_backward",
)  # fmt: skip
SOFTMAX = ((2048, 47), (9216, 105), (math.inf, 58))
"""Instructions for each element of a softmax over rows of up to so many.  A warp takes a row, or a
block keeps one in registers that it fills one by one, or in shared memory (`host_softmax` in
SoftMax.cu, `potential_register_count`): 24 calls on H200."""
THREADS = 512
"""Threads of a block that takes a row; rows of fewer elements have a warp
(`kCUDABlockReduceNumThreads`)."""
SAMPLES, SAMPLE_TRIPS = 128, 1.6
"""Up to so many samples a thread adds up the gradient of one channel's weight, sample by sample,
with so many trips to memory each (`GammaBetaBackwardCUDAKernel1`); a block does beyond."""


def _norm_rows(numbers: Mapping[int, tuple[int, int]]) -> Callable[[Op, OpGraph], Issued]:
    def issued(op: Op, graph: OpGraph) -> Issued:
        """Of a norm over rows, or of its second kernel where the mean is known."""
        out = graph.values[op.outputs[0]]
        if "mean" in op.arguments:
            return Issued(out.elements * SCALED)
        width = math.prod(op.arguments["normalized_shape"])
        rows = out.elements // width if width else 0
        row, each = numbers[4 if storage_bytes(out.dtype, 1) >= 4 else 2]
        return Issued(rows * 4 * WARP * row + out.elements * each)

    return issued


def _moments(op: Op, graph: OpGraph) -> Issued:
    """Of the mean and variance of rows.  Blocks of few rows wait for each load of their threads."""
    rows, whole = (graph.values[i].elements for i in (op.outputs[0], op.inputs[0]))
    if "channels" in op.arguments:
        trips = _channel_trips(graph.values[op.inputs[0]])
        return Issued(rows * THREADS * MOMENTS + whole * CHANNEL_ELEMENT, trips)
    width = whole // rows if rows else 0
    threads = _threads(width)
    instructions = rows * threads * MOMENTS + whole * MOMENTS_ELEMENT
    return Issued(instructions, -(-width // threads))


def _threads(width: int) -> int:
    """Threads of the block that takes a row of so many elements."""
    return THREADS if width >= THREADS else WARP


def _channel_trips(image: Tensor) -> int:
    """How often a thread of a channel's block loads: its threads take an image, or some at once."""
    samples, _, *space = image.shape
    size = math.prod(space)
    across = next((n for n in (32, 64, 128, 256) if size <= n), THREADS)
    return -(-samples // (THREADS // across)) * -(-size // across)


def _batch_norm(op: Op, graph: OpGraph) -> Issued:
    """Of the result where channels come first, or of the gradient.

    cuDNN's kernels have a block for each channel, too (`bn_fw_tr_1C11`, `bn_bw_1C11`).
    """
    image, native = graph.values[op.inputs[0]], is_batch_norm_native(op, graph)
    if len(image.shape) < 3 or traffic.has_channels_last(image):
        return NOTHING
    if "save_mean" in op.arguments:
        instructions = image.elements * GRADIENT_ELEMENT if native else 0
        return Issued(instructions, 2 * _channel_trips(image))
    if not native:
        return Issued(0, _channel_trips(image) if op.arguments.get("training") else 0)
    blocks = image.shape[0] * image.shape[1]
    return Issued(image.elements * TRANSFORMED + blocks * TRANSFORMED_IMAGE)


def _group_norm(op: Op, graph: OpGraph) -> Issued:
    """Of the result, or of the image's gradient, where the sums over groups are known."""
    if "mean" not in op.arguments:
        return NOTHING
    out = graph.values[op.outputs[0]]
    backward = "grad_out" in op.arguments
    return Issued(out.elements * _each_strided(out, 6 if backward else 4, 3 if backward else 2))


def _group_sums(op: Op, graph: OpGraph) -> Issued:
    """Of the sums over each channel of a sample that gradients of a group norm need."""
    image, sums = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
    rows = sums.elements // 2
    threads = _threads(image.elements // rows if rows else 0)
    return Issued(rows * threads * SUMS + image.elements * SUMS_ELEMENT)


def _group_weights(op: Op, graph: OpGraph) -> Issued:
    """Of the gradients of weight and bias by those sums."""
    samples = int(op.arguments["N"])
    return Issued(trips=round(SAMPLE_TRIPS * samples) if samples <= SAMPLES else 0)


def _softmax(op: Op, graph: OpGraph) -> Issued:
    """Of a softmax over rows that lie in memory."""
    out = graph.values[op.outputs[0]]
    dim, rank = op.arguments.get("dim", -1), len(out.shape)
    if not rank or dim % rank != rank - 1:
        return NOTHING
    release = release_of(graph)
    kernels = SOFTMAX if release is None or release.softmax_registers else SOFTMAX[::2]
    each = next(number for most, number in kernels if out.shape[-1] <= most)
    return Issued(out.elements * each)


_ROWS: Mapping[str, Callable[[Op, OpGraph], Issued]] = {
    "aten.native_layer_norm": _norm_rows(LAYER_NORM),
    "aten._fused_rms_norm": _norm_rows(RMS_NORM),
    "rooftrace.rms_norm": _norm_rows(RMS_NORM),
    "rooftrace.moments": _moments,
    "aten._softmax": _softmax,
    "aten._log_softmax": _softmax,
    **dict.fromkeys(_ALL_BATCH_NORMS, _batch_norm),
    "aten.native_group_norm": _group_norm,
    "aten.native_group_norm_backward": _group_norm,
    "rooftrace.group_sums": _group_sums,
    "rooftrace.group_weights": _group_weights,
}
