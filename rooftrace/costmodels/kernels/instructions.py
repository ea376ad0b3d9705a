"""Instructions that eager PyTorch's kernels issue, where they take longer than bytes or FLOP.

Norms, reductions, scans, lookups and kernels of images; those of elements are in `places`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rooftrace.costmodels.fusion import BATCH_NORMS, Plan, is_batch_norm_native, release_of, traffic
from rooftrace.costmodels.kernels.knobs import BACK, FEW, LAST, NATIVE
from rooftrace.costmodels.kernels.places import (
    TURNED_TILE,
    WARP,
    depthwise_work,
    each_strided,
    index_work,
    turned_values,
)
from rooftrace.graph import Op, OpGraph, Ref, Tensor
from rooftrace.hardware.precisions import storage_bytes


class Issued(NamedTuple):
    """The instructions of a kernel, and its waits for memory.

    instructions: of all its threads.  trips: how often a thread waits for memory before it goes on,
    in kernels of so few blocks that nothing else runs meanwhile.  after: how often the last blocks
    wait for the last cache, when all else is done.  turned: values that convolutions copy into
    another layout, see `turned_values`.
    """

    instructions: int = 0
    trips: int = 0
    after: int = 0
    turned: int = 0


NOTHING = Issued()


def group_issued(planned: Plan, number: int, kind: str) -> Issued:
    """Instructions and waits of a group; none of a kernel that a compiler writes, or an engine has.

    kind: its class; kernels of NATIVE have their `depthwise_work`, and convolutions their copies,
    however they are run.
    """
    graph, ops = planned.graph, [planned.graph.ops[i] for i in planned.groups[number].ops]
    if kind == NATIVE:
        return Issued(sum(depthwise_work(op, graph) for op in ops))
    if "conv" in kind:
        tile = 1 if FEW in kind and BACK not in kind else TURNED_TILE
        turned = 0 if kind.endswith(LAST) else sum(turned_values(op, graph, tile) for op in ops)
        return Issued(turned=turned)
    generated = planned.execution.fusion != "none" and number not in planned.eager
    if generated or len(ops) > 1:
        return NOTHING
    own = _OWN.get(ops[0].name) if ops[0].arguments and ops[0].outputs else None
    return Issued(index_work(ops[0], graph)) if own is None else own(ops[0], graph)


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
BATCH_NORM_LAST, GRADIENT_LAST = (105, 58), (65, 80)
"""The same where channels are adjacent: mean and variance, and the result; sums, and the gradient
(`batch_norm_*_channels_last_kernel`): 8 calls on H100, torch 2.11, 2026-11-27, as all below."""
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
    if traffic.has_channels_last(image) and native:
        forward, evaluated = BATCH_NORM_LAST, not op.arguments.get("training", True)
        each = (
            GRADIENT_LAST if "save_mean" in op.arguments else forward[1:] if evaluated else forward
        )
        return Issued(image.elements * sum(each))
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
    return Issued(out.elements * each_strided(out, 6 if backward else 4, 3 if backward else 2))


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
    if not rank:
        return NOTHING
    if dim % rank != rank - 1:
        return _columns_softmax(out.shape, dim % rank)
    release = release_of(graph)
    kernels = SOFTMAX if release is None or release.softmax_registers else SOFTMAX[::2]
    each = next(number for most, number in kernels if out.shape[-1] <= most)
    return Issued(out.elements * each)


# -- gradients of norms, sums, scans, lookups ------------------------------------------------------

NORM_GRADIENT = (170, 42)
"""Instructions of each of the 128 threads that take a row, and for each element, of the gradient of
what a norm over rows takes (`layer_norm_grad_input_kernel`)."""
WEIGHT_ROWS, WEIGHT_ELEMENT = 89, 58
"""Rows for which a trip to memory is made for gradients of a norm's weights: a block takes 32
columns, its threads a 32nd of the rows each, several at once
(`GammaBetaBackwardCUDAKernelTemplate`).  Of many narrow rows parts are summed first."""
MANY_ROWS, NARROW = 65536, 66 * WARP
"""`M > 64 * 1024 && N / kWarpSize < sm_count / 2` in layer_norm_kernel.cu, of 132 SMs."""
STRIDED_SUM = 58
"""Instructions for an element of a sum whose dimensions do not follow each other in memory."""
ROW_SUM, ROW_SEARCH = (2900, 0), (10_500, 38)
"""Instructions for each row, and each element, of a sum over rows; of a maximum or a variance."""
SUMMED, BLOCKS = 128, 2112
"""Threads of a block that sums columns, 4 each, and how many blocks are launched of 132 SMs, 16 on
each (`setReduceConfig` in Reduce.cuh).  The last to finish adds up what others left: `after`."""
SCANNED, SCAN_TRIPS, SOFTMAX_TRIPS = 150, 1, 3
"""Instructions for an element of a scan along rows (`tensor_kernel_scan_innermost_dim`); trips for
each row of one along columns, which a thread walks down (`..._outer_dim`), and of a softmax along
columns, which it walks down three times (`cunn_SpatialSoftMaxForward`)."""
LOOKED_UP = (20_000, 4096)
"""Instructions that others could issue while a block fetches an index and copies so many bytes of
its row (`vectorized_gather_kernel` in IndexKernelUtils.cu): 65,536 and 1,000,000 rows."""
ADDED = {"aten.index_add": ("source", 240), "aten.scatter_add": ("src", 127)}
"""Instructions for each element that is added to a place by an index (`indexFuncLargeIndex`,
`_scatter_gather_elementwise_kernel`)."""
EMBEDDED, SORTED, SORTED_FROM = 200, 600, 3072
"""Instructions for each element of gradients of an embedding's rows, and trips of the 26 kernels
that sort more indices than so many, one after the other (Embedding.cu)."""
TOP_SINGLE, TOP_MULTI = (85_000, 1300), ((337_000, 274), (580_000, 430))
"""Instructions for a row, and each of its elements, of the k largest by a block for each row, and
by several, of 2 bytes and of 4 (`sbtopk`, `mbtopk` in TensorTopK.cu); 16 bits in each pass."""
TOP_BLOCKS = (
    (20, 20_000), (40, 10_000), (80, 8000), (200, 5000), (800, 3000), (4000, 800), (math.inf, 400)
)  # fmt: skip
"""Up to so many rows have several blocks from so many elements on (`should_use_multiblock`)."""


def _norm_gradient(op: Op, graph: OpGraph) -> Issued:
    """Of the gradient of what a norm over rows takes, or of those of its weights."""
    x, mask = graph.values[op.inputs[1]], op.arguments.get("output_mask", (True,))
    width = math.prod(op.arguments["normalized_shape"])
    rows = x.elements // width if width else 0
    row, each = NORM_GRADIENT
    if mask[0]:
        return Issued(rows * 4 * WARP * row + x.elements * each)
    if rows > MANY_ROWS and width < NARROW:
        return Issued(x.elements * WEIGHT_ELEMENT)
    return Issued(trips=-(-rows // WEIGHT_ROWS))


def _reduced(numbers: tuple[int, int]) -> Callable[[Op, OpGraph], Issued]:
    def issued(op: Op, graph: OpGraph) -> Issued:
        """Of a reduction over some dimensions."""
        x, dims = graph.values[op.inputs[0]], op.arguments.get("dim")
        rank = len(x.shape)
        dims = range(rank) if dims in (None, ()) else (dims,) if isinstance(dims, int) else dims
        gone = {d % rank for d in dims} if rank else set()
        runs: list[list[int]] = []  # (whether reduced, elements), from the innermost on
        for d in sorted(range(rank), key=lambda d: x.stride[d]):
            if x.shape[d] == 1:
                continue
            if runs and runs[-1][0] == (d in gone):
                runs[-1][1] *= x.shape[d]
            else:
                runs.append([d in gone, x.shape[d]])
        if not x.elements or not any(reduced for reduced, _ in runs):
            return NOTHING
        if runs[0][0]:
            each_row, each = numbers
            rows = x.elements // runs[0][1]
            strided = sum(reduced for reduced, _ in runs) > 1
            each = each + STRIDED_SUM if strided else each
            return Issued(x.elements * each + (0 if strided else rows * each_row))
        return Issued(x.elements * numbers[1], after=_left_over(runs[0][1], runs[1][1]))

    return issued


def _left_over(columns: int, rows: int) -> int:
    """Trips of the last block of a sum over columns to what the others left."""
    across = next((n for n in (1, 2, 4, 8, 16) if columns < 8 * n), WARP)
    high = SUMMED // across
    each, blocks = -(-rows // high), -(-columns // (4 * across))
    if each < min(16 * high, 256):
        return 0
    parts = max(min(-(-BLOCKS // blocks), -(-each // 16)), -(-each // 256))
    return parts // high


def _scanned(op: Op, graph: OpGraph) -> Issued:
    """Of a running sum."""
    out, dim = graph.values[op.outputs[0]], op.arguments.get("dim", 0)
    rank = len(out.shape)
    if not rank or dim % rank == rank - 1:
        return Issued(out.elements * SCANNED)
    return Issued(trips=SCAN_TRIPS * out.shape[dim])


def _columns_softmax(shape: Sequence[int], dim: int) -> Issued:
    """Of a softmax over what does not lie in a row: a block takes up to 1,024 columns."""
    inner, threads = math.prod(shape[dim + 1 :]), 1
    if inner <= 64 <= shape[dim]:
        while 2 * threads * inner <= 1024 and 2 * threads <= shape[dim]:
            threads *= 2
    return Issued(trips=SOFTMAX_TRIPS * -(-shape[dim] // threads))


def _looked_up(op: Op, graph: OpGraph) -> Issued:
    """Of rows of a table by their indices, in whole vectors."""
    out, table = graph.values[op.outputs[0]], graph.values[op.inputs[0]]
    index = graph.values[op.inputs[-1]]
    if op.arguments.get("dim", 0) or len(op.inputs) != 2 or not index.elements:
        return NOTHING
    row = math.prod(table.shape[1:]) * storage_bytes(table.dtype, 1)
    if row % 16 or out.elements != index.elements * math.prod(table.shape[1:]):
        return NOTHING
    return Issued(index.elements * -(-row // LOOKED_UP[1]) * LOOKED_UP[0])


def _added(op: Op, graph: OpGraph) -> Issued:
    """Of elements that are added to places by an index."""
    name, each = ADDED[op.name.removesuffix("_")]
    source = op.arguments.get(name)
    return Issued(graph.values[source.id].elements * each if isinstance(source, Ref) else 0)


def _embedded(op: Op, graph: OpGraph) -> Issued:
    """Of the gradient of a table by those of the rows that were looked up."""
    rows = graph.values[op.inputs[0]]
    sorts = math.prod(rows.shape[:-1]) > SORTED_FROM
    return Issued(rows.elements * EMBEDDED if sorts else 0, after=SORTED if sorts else 0)


def _largest(op: Op, graph: OpGraph) -> Issued:
    """Of the k largest of each row."""
    x, dim = graph.values[op.inputs[0]], op.arguments.get("dim", -1)
    width = x.shape[dim] if x.shape else 1
    rows = x.elements // width if width else 0
    several = next(least for most, least in TOP_BLOCKS if rows <= most)
    wide = TOP_MULTI[storage_bytes(x.dtype, 1) >= 4]
    row, each = TOP_SINGLE if width < several else wide
    return Issued(rows * (row + width * each))


# -- images ----------------------------------------------------------------------------------------
# A thread makes one element; what takes time is its indices, and the addresses in its window.

Each = tuple[tuple[int, int], tuple[int, int]]
POOLED: Mapping[str, Each] = {
    "aten.max_pool2d_with_indices": ((214, 31), (232, 37)),
    "aten.avg_pool2d": ((355, 6), (760, 0)),
}
"""Instructions for each element of the result, and each of its window, with channels first and with
channels last (DilatedMaxPool2d.cu, AveragePool2d.cu): 48 calls."""
UNPOOLED: Mapping[str, Each] = {
    "aten.max_pool2d_with_indices_backward": ((297, 44), (92, 80)),
    "aten.avg_pool2d_backward": ((605, 0), (605, 0)),
}
"""The same for each element of the image, and each window that it is in: 36 calls."""
UPSAMPLED = {"aten.upsample_nearest2d": (70, 200), "aten.upsample_bilinear2d": (85, 285)}
"""Instructions for each element of the result (UpSampleNearest2d.cu, UpSampleBilinear2d.cu).  With
channels first a thread of the latter makes one place of all images, one trip after the other."""
NEAREST_GRADIENT: Each = ((135, 24), (269, 45))
"""For each element of the image, and of the result's gradient: a thread walks over its part."""
BILINEAR_GRADIENT, BILINEAR_LAST = {2: (250, 90), 4: (240, 18)}, 413
"""For each element of the result's gradient, by its bytes, and times the square of the factor: so
many lanes add to one address of the image at once.  In 16 bits they compare and swap, and only
those of a warp meet (`fastAtomicAdd`): 24 calls, factors of 2 to 64.  Channels that are last do not
meet."""
PLACED: Mapping[str, int] = {
    "aten._adaptive_avg_pool2d_backward": 970,
    "aten.constant_pad_nd": 121,
    "aten.roll": 158,
    "aten.glu": 110,
    "aten.triu": 80,
    "aten.tril": 80,
}
"""Instructions for each element of the result of kernels with arithmetic on places of their own."""


def _window(op: Op, name: str) -> int:
    """The elements of a window of two dimensions, which one number may stand for."""
    sizes = op.arguments.get(name) or op.arguments["kernel_size"]
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return math.prod(sizes * 2 if len(sizes) == 1 else sizes)


def _pooled(op: Op, graph: OpGraph) -> Issued:
    """Of what pooling gives."""
    out = graph.values[op.outputs[0]]
    each, tap = POOLED[op.name][traffic.has_channels_last(out)]
    return Issued(out.elements * (each + tap * _window(op, "kernel_size")))


def _unpooled(op: Op, graph: OpGraph) -> Issued:
    """Of the gradient of an image that was pooled."""
    out, steps = graph.values[op.outputs[0]], _window(op, "stride")
    each, tap = UNPOOLED[op.name][traffic.has_channels_last(out)]
    return Issued(out.elements * (each * steps + tap * _window(op, "kernel_size")) // steps)


def _upsampled(op: Op, graph: OpGraph) -> Issued:
    """Of an image that is made larger."""
    out = graph.values[op.outputs[0]]
    last = traffic.has_channels_last(out)
    walks = op.name == "aten.upsample_bilinear2d" and not last
    images = out.shape[0] * out.shape[1] if walks else 0
    return Issued(out.elements * UPSAMPLED[op.name][last], images)


def _upsample_gradient(op: Op, graph: OpGraph) -> Issued:
    """Of the gradient of an image that was made larger."""
    grad, image = graph.values[op.inputs[0]], graph.values[op.outputs[0]]
    last = traffic.has_channels_last(grad)
    if op.name == "aten.upsample_nearest2d_backward":
        own, each = NEAREST_GRADIENT[last]
        return Issued(image.elements * own + grad.elements * each)
    if last:
        return Issued(grad.elements * BILINEAR_LAST)
    wide = storage_bytes(grad.dtype, 1) >= 4
    lanes = -(-grad.shape[-1] // max(1, image.shape[-1]))
    each, squared = BILINEAR_GRADIENT[4 if wide else 2]
    return Issued(grad.elements * (each + squared * (lanes if wide else min(WARP, lanes)) ** 2))


def _placed(op: Op, graph: OpGraph) -> Issued:
    return Issued(graph.values[op.outputs[0]].elements * PLACED[op.name])


_OWN: Mapping[str, Callable[[Op, OpGraph], Issued]] = {
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
    "aten.native_layer_norm_backward": _norm_gradient,
    "aten._fused_rms_norm_backward": _norm_gradient,
    **dict.fromkeys(("aten.sum", "aten.mean", "aten.prod"), _reduced(ROW_SUM)),
    **dict.fromkeys(
        (
            "aten.amax",
            "aten.amin",
            "aten.max",
            "aten.min",
            "aten.argmax",
            "aten.argmin",
            "aten.var",
            "aten.std",
            "aten.var_mean",
        ),
        _reduced(ROW_SEARCH),
    ),
    "aten.cumsum": _scanned,
    "aten.cumprod": _scanned,
    **dict.fromkeys(("aten.embedding", "aten.index_select", "aten.index"), _looked_up),
    "aten.topk": _largest,
    **{f"{name}{end}": _added for name in ADDED for end in ("", "_")},
    "aten.embedding_dense_backward": _embedded,
    **dict.fromkeys(POOLED, _pooled),
    **dict.fromkeys(UNPOOLED, _unpooled),
    **dict.fromkeys(UPSAMPLED, _upsampled),
    "aten.upsample_nearest2d_backward": _upsample_gradient,
    "aten.upsample_bilinear2d_backward": _upsample_gradient,
    **dict.fromkeys(PLACED, _placed),
}
