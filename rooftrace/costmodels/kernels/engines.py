"""Kernel classes, chip engines for each kind of work, and the share of an engine that is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np, smaller
from rooftrace.costmodels.fusion import LIBRARIES, ExecutionModel, traffic
from rooftrace.costmodels.kernels.knobs import (
    BACK,
    CLASSES,
    FEW,
    FILTERS,
    LAST,
    NATIVE,
    ODD,
    UNITS,
    library_products,
)  # fmt: skip
from rooftrace.costmodels.kernels.places import stored_last
from rooftrace.costmodels.ops import MATRIX, Cost, Work, find_rule, op_cost
from rooftrace.graph import Op, OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError
from rooftrace.hardware.precisions import compute_family, precision
from rooftrace.hardware.units import format_traffic

if TYPE_CHECKING:
    from rooftrace._amounts import Amount

# -- classes ---------------------------------------------------------------------------------------
# Kernels of one class reach similar shares of a chip's peaks.  A group's class is that of its
# heaviest op: a convolution with its epilogue is a convolution.

LARGE_WINDOW_LAST = 7
"""With channels last cuDNN has such kernels up to this; wider windows, and groups of one channel
that make several, go to one for any groups (`conv2d_grouped_direct_kernel`), which is several times
slower.  That of several is told by compiled steps of fastvit on RTX 4090: 11 to 14 ms more than
such kernels explain, by how wide their three downsamplings are, not how many layers follow."""


def op_class(op: Op, graph: OpGraph, channels_last: bool = False, cost: Cost | None = None) -> str:
    """The class of one op: the kind of its rule or cost, and "elementwise" without a rule.

    The class of a convolution also depends on its sizes.  channels_last: whether a compiler lays
    all images out so.  cost: of the op, if it is at hand.
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
    shape = traffic.weight_shape(op, graph)
    if shape is None:
        return "conv"
    groups, window = op.arguments.get("groups", 1), shape[2:]
    image, lies_last = graph.values[op.inputs[0]], stored_last(op, graph)
    back = BACK if "grad_output" in op.arguments else ""
    # A compiler lays out images of two dimensions alone (`convolution` of Inductor's lowerings).
    last = lies_last or (channels_last and len(window) == 2)
    ending = LAST if lies_last else back
    if groups > 1:
        alone = shape[1] == 1 or shape[0] == groups
        if not alone:
            return f"grouped conv{back or ending}"
        general = max(window) > LARGE_WINDOW_LAST or shape[0] != groups
        if last and (general or (back and image.dtype == "fp32")):
            return "depthwise conv backward" if back else "depthwise conv, general"
        if last:
            return f"depthwise conv{back}{LAST}"
        return NATIVE if traffic.is_depthwise_native(op, graph) else f"depthwise conv{back}"
    load = ACCESS * 8 // precision(image.dtype).bits
    if all(size == 1 for size in window):
        positions = math.prod(image.shape[2:])
        odd_rows = not last and positions > 1 and positions % load
        return f"conv 1x1{ODD if odd_rows else ''}{ending}"
    # Adjacent channels that are no multiple of such a load are loaded in smaller pieces.
    if shape[1] < load:
        return f"conv{FEW}{back or ending}"
    if back and image.dtype == "fp32" and not op.arguments.get("output_mask", (True,))[0]:
        return f"conv{FILTERS}{BACK}"
    if len(window) == 3:
        return "conv 3d"
    odd = shape[0] % load or (shape[1] % load and shape[1] > load)
    return "conv, odd channels" if last and odd else f"conv{ending}"


# -- engines ---------------------------------------------------------------------------------------
# Which engine of a chip runs which work, how rows are loaded, and how much of a matrix engine a
# product can use.

STREAMING = ("vector", "fp32")
"""The engine and precision of a product that streams one matrix past a few vectors."""
LEAST = 16
"""Rows, and columns, of C in the smallest tile; a matrix instruction has about as many."""
WAIT = 280e-9
"""Seconds that a thread of a GPU waits for a load.  Steps of efficientformerv2 on RTX 3090 and
4090, most of whose time is upsampling, take 250 to 300 ns for each value of a thread."""


def reached(rows: Any, inner: Any, chip: Chip) -> Any:
    """FLOP/s of latency-bound threads; inf where the thread count is unknown.

    rows, inner: of vector work (see `Work`), numbers or arrays.
    """
    if rows is None or inner is None or chip.kind != "gpu":
        return math.inf
    return rows * inner / WAIT


def engine_of(work: Work, chip: Chip, execution: ExecutionModel) -> tuple[str, str]:
    """The (engine, precision) that runs this work.

    fp32 matmul runs on the vector engine and fp32 convolution on TF32, as torch's defaults are on a
    chip that has TF32; `tf32` sends matmul there too.  Complex products run as those of their
    parts.  fp64 products use the matrix engine where the chip has an fp64 rate for it.  Products of
    quantised weights that round their activations run on that engine where the chip has it, else
    they widen the weights (see `hardware.precisions`).
    """
    if work.operation == "vector":
        return "vector", work.precision
    name = precision_on(chip, work.precision)
    family = compute_family(name)
    if family == "fp32":
        wants_tf32 = work.operation == "convolution" or execution.tf32
        if wants_tf32 and chip.has_peak("matrix", "tf32"):
            return "matrix", "tf32"
        return "vector", "fp32"
    if family == "fp64" and not chip.has_peak("matrix", "fp64"):
        return "vector", "fp64"
    return "matrix", name


def precision_on(chip: Chip, name: str) -> str:
    """The precision in which a chip computes such products: bf16_afp8 in fp8, or bf16 without."""
    stored = precision(name)
    if not stored.computes:
        return name
    return stored.computes if chip.has_peak("matrix", stored.computes) else stored.element


def product_engine(work: Work, chip: Chip, execution: ExecutionModel) -> tuple[str, str]:
    """The (engine, precision) of a product: that of `engine_of` but for small ones on GPUs.

    A product of fewer rows or columns than a matrix instruction has streams one matrix past a few
    vectors.  It runs on the vector engine where that is faster than mostly empty instructions.
    """
    engine = engine_of(work, chip, execution)
    return STREAMING if streams(work, work.shape, engine, chip) else engine


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """How products run on their engines: numbers, or arrays where that differs by their sizes.

    rate: FLOP/s at the peak.  padded: 1 where a tile is computed in full, as on a matrix engine,
    else 0.  unit: the index in UNITS of the engine and the precision that it computes in.
    """

    rate: Any
    padded: Any
    unit: Any


def running(
    work: Work, shape: tuple[Any, Any, Any] | None, chip: Chip, execution: ExecutionModel
) -> Running:
    """The engines of products by `product_engine`, and of other work by `engine_of`.

    shape: M, N, K, numbers or arrays; None if unknown.
    """
    engine = engine_of(work, chip, execution)
    numbers = chip.peak(*engine), float(engine[0] == "matrix"), unit_of(*engine)
    streamed = streams(work, shape, engine, chip)
    if not np.any(streamed):
        return Running(*numbers)
    others = chip.peak(*STREAMING), 0.0, unit_of(*STREAMING)
    pairs = zip(others, numbers, strict=True)
    return Running(*(np.where(streamed, there, here) for there, here in pairs))


def unit_of(engine: str, name: str) -> int:
    """The index in UNITS of an engine that computes in this precision."""
    return UNITS.index(f"{engine} {compute_family(name)}")


def streams(
    work: Work, shape: tuple[Any, Any, Any] | None, engine: tuple[str, str], chip: Chip
) -> Any:
    """Whether a product that this engine runs streams one matrix past a few vectors instead.

    shape: M, N, K of the product, numbers or arrays; None if unknown.

    r vectors take as long as on the vector engine where its rate / r is the matrix engine's rate /
    LEAST: an instruction holds LEAST rows or more.
    """
    if engine[0] == "vector" or work.operation != "matmul" or shape is None:
        return False
    if chip.kind != "gpu" or not chip.has_peak(*STREAMING):
        return False
    below = min(float(LEAST), LEAST * chip.peak(*STREAMING) / chip.peak(*engine))
    few = smaller(*shape[:2])
    return (few > 0) & (few < below)


def stored_widths(work: Work) -> tuple[float, float]:
    """Bytes of an element of A and of B of a product, as they are stored."""
    computed = float(precision(work.precision).bits / 8)
    return work.widths or (computed, computed)


def link_bandwidth(moved: float, chip: Chip) -> float:
    """Byte/s of the chip's link.  Raises MissingPeakError if `moved` bytes need one it lacks."""
    if moved and not chip.links:
        raise MissingPeakError(
            f"{chip.name} has no link, and the step moves {format_traffic(moved)} over one: "
            "add a [[link]] to its TOML file"
        )
    return max((link.bandwidth.value for link in chip.links), default=math.inf)


# -- kernels of libraries --------------------------------------------------------------------------
# Inference engines multiply narrow formats by kernels of their CUTLASS, DeepGEMM, TensorRT-LLM or
# Marlin, not by those of cuBLAS, and round activations that come wider by a kernel before.

FORMATS = ("fp8", "fp8_block", "fp4", "narrow")
"""fp8: a scale for each tensor, row or column (int8 too); fp8_block: scales along K; fp4: with
block scales; narrow: weights alone, which are widened for the product."""
KERNELS = ("", *(f"{name} {library}" for name in FORMATS for library in (*LIBRARIES,)[1:]))
"""Names of `library_products`; "" stands for the kernels of PyTorch."""
_INSTEAD = {
    "vllm": ("vllm", "trtllm"),
    "sglang": ("sglang", "vllm", "trtllm"),
    "trtllm": ("trtllm", "vllm"),
}
"""Libraries whose numbers stand for those of another that was not measured."""


ROUNDS_BEFORE = ("trtllm",)
"""Libraries whose norms, activations and attention write fp8 where the scale is known, and fp4
(`RESIDUAL_RMS_NORM_QUANT_FP8` and `_NVFP4`, and the `out_scale` of attention, in TensorRT-LLM)."""


def product_format(work: Work, chip: Chip) -> str:
    """The format of a product, one of FORMATS; "" where both operands are plain floats."""
    if work.operation != "matmul" or chip.kind != "gpu":
        return ""
    stored = precision(work.precision)
    family = compute_family(precision_on(chip, work.precision))
    if family == "fp4":
        return family
    if family in ("fp8", "int8"):
        return "fp8_block" if stored.blocked else "fp8"
    return "narrow" if min(stored_widths(work)) <= 1 else ""


def library_kernel(work: Work, chip: Chip, library: str) -> tuple[int, bool]:
    """The place in KERNELS of what runs a product, and whether a kernel rounds activations first.

    library: `ExecutionModel.library`.
    """
    form = product_format(work, chip) if library in _INSTEAD else ""
    measured = library_products(chip) if form else {}
    names = [f"{form} {each}" for each in _INSTEAD.get(library, ())]
    name = next((name for name in names if name in measured), "")
    stored = precision(work.precision)
    rounds = bool(name and stored.computes and chip.has_peak("matrix", stored.computes))
    before = library in ROUNDS_BEFORE and (stored.static or form == "fp4")
    return KERNELS.index(name), rounds and not before


# -- how rows are loaded ---------------------------------------------------------------------------
# A thread loads 16 bytes at once, where rows begin at multiples of that.  Elsewhere kernels load
# smaller pieces: products cannot use the copies that feed a matrix engine best, and softmax over
# more than 9,216 elements reads each row three times, where it would have kept it in shared memory
# (before PyTorch 2.7 over more than 1,024, which is not told apart).  Sources: alignment of
# operands in cuBLAS ("Tensor Core Usage", cuBLAS documentation), the 16 bytes of TMA and cp.async
# (CUDA C++ Programming Guide), the conditions of `host_softmax` in SoftMax.cu of ATen.

ACCESS, WORD = 16, 4
"""Bytes that a thread loads at once, and those of its registers: rows of 2-byte elements of which
some begin inside a register are loaded by kernels with the instructions of sm_75 (cutlass_75)."""
LONG = 9216
"""Softmax keeps rows of at most so many elements in registers, wherever they begin."""


def misaligned(work: Work, sizes: Mapping[str, Any], access: int = ACCESS) -> Amount:
    """1 where rows in memory begin at no multiple of `access` bytes, and that slows the kernel.

    sizes: "M", "N" and "K" of the work (those in `work.lined`), numbers or arrays of one length.
    A fractional mean counts as aligned.
    """
    odd: Any = 0.0
    width = min(work.widths or (float(precision(work.precision).bits / 8),))
    least = 1 if work.operation in MATRIX else LONG
    for name in work.lined:
        size = sizes[name]
        rest = size * width % access
        odd = odd + (size > least) * (size % 1 == 0) * (rest != 0)
    flags: Amount = 1.0 * (odd > 0)
    return flags
