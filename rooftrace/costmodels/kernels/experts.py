"""Seconds of the products of routed experts in the kernels of inference engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.kernels.engines import LEAST, engine_of, stored_widths
from rooftrace.costmodels.kernels.intervals import StepCell
from rooftrace.costmodels.kernels.knobs import CLASSES, Knobs
from rooftrace.costmodels.kernels.tiles import MatrixEngine, OwnSeconds, matrix_engine, p_norm
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array
    from rooftrace.costmodels.kernels.works import KernelAmounts

# -- products of experts ---------------------------------------------------------------------------
# One kernel multiplies the rows of all experts, each with the weights of its expert.
#   tiles    hold rows of one expert: those of every expert are padded to the rows of a tile,
#   waves    of fewer tiles than SMs leave some idle; small tiles reach less of the rate,
#   memory   streams the weights of experts that have rows, while tiles compute,
#   walking  over K takes a while however little is multiplied: a tile has few loads in flight,
#   rows     are gathered, written and passed on; that does not overlap with the products,
#   starting is ordering rows by expert, and filling the first tiles.
# Kernels take the tile that suits the rows of an expert, as their tables of sizes do: those of
# Triton in vLLM and SGLang (`fused_moe`), CUTLASS grouped products in TensorRT-LLM, Marlin.
#
# Not here: columns that fill no tile, split K, what imbalance does between processes (see
# `Disturbances.expert_imbalance`), tables of sizes that lack a shape.

TILE_COLUMNS = 128
"""Columns of such a tile: as many as the tables of sizes have most often."""
_VECTOR = 16
"""Triton loads rows in vectors only if their length is a multiple of so many elements: it knows of
integers whether they are (`tt.divisibility`)."""


@dataclass(frozen=True, slots=True)
class ExpertKernel:
    """Fitted constants of one library's kernel in one format, on one generation of chips.

    Rates are shares of the datasheet's, as a kernel alone reaches them.
    """

    products: float = 1.0  # share of the matrix rate in full tiles
    half: float = 0.0  # rows of a tile that reaches half of that
    stream: float = 1.0  # share of the bandwidth for weights
    rows: float = 1.0  # share of the bandwidth of L2 for rows, which does not overlap
    fill: float = 1.0  # rows of a tile over those of an expert
    most: float = 128  # rows of the largest tile
    prologue: float = 0.0  # steps of K that filling and draining a tile takes
    start: float = 0.0  # seconds of a product
    odd: float = 1.0  # how often as long products take whose K is no multiple of `_VECTOR`


IDEAL = ExpertKernel()


def expert_tiles(rows: Array, experts: Array, tile: Amount) -> Array:
    """Tiles of `tile` rows for experts that have `rows` each on average.

    Rows of routed experts differ about as widely as exponential numbers do, of which
    1 / (1 - exp(-tile / rows)) tiles are expected; those of one expert alone are known.
    """
    with np.errstate(divide="ignore", over="ignore"):
        spread = -1 / np.expm1(-tile / rows)
    return experts * (spread + (np.ceil(rows / tile) - spread) / np.maximum(experts, 1))


def expert_seconds(
    sizes: Mapping[str, Array],
    on: MatrixEngine,
    kernel: ExpertKernel = IDEAL,
    compute: float = 1.0,
    memory: Amount = 1.0,
    overlap: float = inf,
) -> OwnSeconds:
    """Seconds of C_e[rows, columns] = A_e[rows, inner] B_e[inner, columns] for experts e.

    sizes: arrays of one length.  rows (of an expert that has some, on average), columns, inner,
    products (experts that have rows), width_b (bytes of a stored weight), bytes (through HBM), rate
    (FLOP/s of the matrix engine).  compute, memory: factors on the shares of `kernel`.  overlap:
    that of `Knobs`.
    """
    rows, columns, inner, experts = (
        sizes[name] for name in ("rows", "columns", "inner", "products")
    )
    weights = np.minimum(experts * columns * inner * sizes["width_b"], sizes["bytes"])
    stream = weights / (on.memory * memory * kernel.stream)
    passed = (sizes["bytes"] - weights) / (memory * min(on.cache * kernel.rows, on.memory))
    tile = np.clip(kernel.fill * rows, LEAST, kernel.most)
    blocks = expert_tiles(rows, experts, tile) * np.ceil(columns / TILE_COLUMNS)
    flop = (
        2
        * tile
        * np.minimum(columns, TILE_COLUMNS)
        * (inner + kernel.prologue)
        * np.maximum(blocks, on.units)
    )
    work = flop / (sizes["rate"] * compute * kernel.products * tile / (tile + kernel.half))
    odd = np.where(inner % _VECTOR > 0, kernel.odd, 1.0)
    device = kernel.start + odd * p_norm(overlap, work, stream) + passed
    return OwnSeconds(work, stream + passed, device)


# -- whose kernel runs -----------------------------------------------------------------------------
# An execution names the library (`ExecutionModel.library`).  Products of "torch", and those on GPUs
# of other vendors than NVIDIA, have the shares of their class, "grouped mm", in `Knobs`.

_TABLE = (
    # kernel, format, generation: fill, most, products, half, prologue, stream, rows, start, odd
    ("vllm triton", "half", "hopper", 5, 128, 0.63, 0, 120, 0.88, 0.19, 8.4, 6),
    ("vllm triton", "fp8", "hopper", 5, 128, 0.75, 0, 630, 0.85, 0.2, 7.4, 8),
    ("vllm triton", "fp8 blocks", "hopper", 5, 128, 0.97, 160, 100, 0.95, 0.094, 9.3, 8),
    ("vllm triton", "half", "blackwell", 5, 128, 0.45, 0, 120, 0.76, 0.087, 8.4, 6),
    ("sglang triton", "half", "hopper", 18, 128, 0.54, 61, 0, 0.87, 0.17, 1.8, 6),
    ("sglang triton", "half", "blackwell", 18, 128, 0.29, 0, 0, 0.75, 0.078, 9.3, 6),
    ("sglang triton", "fp8 blocks", "hopper", 18, 128, 1, 39, 810, 0.88, 0.29, 5, 8),
    ("sglang triton", "fp8 blocks", "blackwell", 18, 128, 1, 330, 530, 0.95, 0.11, 2.7, 8),
    ("widening", "int4", "hopper", 18, 64, 0.12, 0, 0, 0.28, 0.15, 24, 2),
    ("marlin", "int4", "hopper", 2, 128, 0.36, 0, 0, 0.57, 0.069, 0.93, 1),
    ("marlin", "int4", "blackwell", 2, 128, 0.17, 0, 0, 0.49, 0.085, 4.6, 1),
    ("marlin", "int4", "ampere", 2, 128, 0.58, 0, 0, 0.57, 0.069, 0.93, 1),
    ("matmul_ogs", "int4", "hopper", 6, 128, 0.87, 10, 100, 0.59, 0.05, 30, 1),
    ("cutlass", "half", "hopper", 3, 128, 0.78, 0, 280, 0.88, 0.29, 6.4, 1),
    ("cutlass", "half", "blackwell", 3, 128, 1, 0, 1200, 0.86, 0.5, 7.1, 1),
    ("cutlass", "fp8", "hopper", 3, 128, 0.99, 0, 1400, 0.85, 0.31, 7.6, 1),
    ("cutlass", "fp8", "blackwell", 3, 128, 1, 0, 2800, 0.84, 0.54, 8.3, 1),
    ("cutlass", "fp8 blocks", "hopper", 3, 128, 1, 0, 2000, 0.79, 0.032, 3.5, 1),
    ("cutlass", "fp4", "blackwell", 3, 128, 0.54, 0, 4000, 0.6, 0.46, 11, 1),
    ("trtllm-gen", "fp8", "blackwell", 5, 128, 0.98, 0, 4000, 0.92, 0.83, 12, 1),
    ("trtllm-gen", "int4", "blackwell", 5, 128, 0.44, 0, 0, 0.18, 0.012, 22, 1),
    ("trtllm-gen", "fp4", "blackwell", 5, 128, 0.42, 0, 980, 0.89, 0.61, 4.5, 1),
    ("cutedsl", "fp4", "blackwell", 1, 128, 1, 0, 4000, 0.6, 0.11, 1.8, 1),
)  # fmt: skip
_FILLED, _START = ("fill", "most", "products", "half", "prologue", "stream", "rows"), 1e-6
EXPERT_KERNELS: Mapping[tuple[str, str, str], ExpertKernel] = {
    (kernel, form, generation): ExpertKernel(
        **dict(zip(_FILLED, numbers, strict=True)), start=start * _START, odd=odd
    )
    for kernel, form, generation, *numbers, start, odd in _TABLE
}
"""By kernel, format and generation.  From layers of experts of the aiconfigurator performance
database (Apache-2.0) by benchmarks/accuracy/moe.py: "vllm triton" and "widening" (int4 in Triton)
from vLLM 0.19 on H100 and H200; "sglang triton" and "marlin" from SGLang 0.5.9 on H200, 0.5.10 on
B200; "cutlass" from TensorRT-LLM 1.3.0rc10 on H200 and B200; "matmul_ogs" (mxfp4 in Triton) from
both engines on H200, where `start` holds half of the kernels that order rows; "trtllm-gen" from
TensorRT-LLM and "cutedsl" from SGLang on B200.  `fill`, `most` and `odd` were chosen by kernel, the
others fitted by row of this table.  Guesses: Triton in vLLM on Blackwell loses against Hopper what
it loses in SGLang; Marlin uses the instructions of sm_80, which reach 0.62 of the rate of Hopper
(Luo et al., 2024) and all of that of A100."""
_PLACES = tuple(EXPERT_KERNELS)
_TRITON = ("half", "fp8", "fp8 blocks")


def kernel_of(library: str, chip: Chip, form: str, widened: bool = False) -> str:
    """The kernel that a library runs for experts in a format; "" where it has none of these.

    library: one of `fusion.LIBRARIES`.  form: half, fp8, fp8 blocks (scales of 128 x 128), fp4, or
    int4 (weights alone are narrow).  widened: whether fp8 products have weights of four bits, as of
    MXFP4 checkpoints on Blackwell; vLLM has TensorRT-LLM's kernel by FlashInfer
    (trtllm_fp4_block_scale_moe).  In NVFP4 TensorRT-LLM itself has CUTLASS's kernels, too, which
    InferenceMAX's scripts choose (moe_config) where attention is data-parallel: not followed here.
    """
    if library == "torch":
        return ""
    newer = StepCell.generation_of(chip) == "blackwell"
    if form == "fp8" and widened and newer and library in ("trtllm", "vllm"):
        return "trtllm-gen"
    if library == "sglang" and newer and form in ("fp8", "fp8 blocks", "fp4"):
        return "trtllm-gen"  # flashinfer_trtllm, its default there (server_args.py)
    if library == "trtllm":
        if form == "int4":
            return "trtllm-gen" if newer else "matmul_ogs"
        return "trtllm-gen" if newer and form == "fp4" else "cutlass"
    if form in _TRITON:
        return f"{library} triton"
    if form == "int4":
        return "marlin"
    return "trtllm-gen" if library == "vllm" else "cutedsl"


def kernel_on(chip: Chip, kernel: str, form: str) -> int:
    """The column `experts` of a kernel in a format on a chip: 1 + its place in EXPERT_KERNELS.

    What was not measured takes the numbers of the nearest: of another generation, or in half
    precision.
    """
    mine = StepCell.generation_of(chip)
    newer = chip.has_peak("matrix", "fp4")
    generations = (mine, *(("blackwell", "hopper") if newer else ("ampere", "hopper", "blackwell")))
    forms = (form, *_TRITON[:0:-1], "half", "fp4", "int4")
    for key in ((kernel, f, g) for f in forms for g in generations):
        if key in EXPERT_KERNELS:
            return 1 + _PLACES.index(key)
    raise ValueError(f"kernel {kernel!r:.60}: expected one of {sorted({k for k, _, _ in _PLACES})}")


COLUMNS = ("experts", "experts rate")
"""The kernel (see `kernel_on`), 0 in rows that are no products of experts; FLOP/s of its engine."""


def columns_of(kernels: KernelAmounts, chip: Chip, execution: ExecutionModel) -> dict[str, Array]:
    """The columns of kernels: those of the product of each row, where an engine runs experts."""
    place, rate = np.zeros(len(kernels)), np.zeros(len(kernels))
    grouped = kernels.kind == CLASSES.index("grouped mm")
    modelled = chip.vendor == "NVIDIA" and matrix_engine(chip) is not None
    if execution.library == "torch" or not modelled or not grouped.any():
        return dict(zip(COLUMNS, (place, rate), strict=True))
    for work in kernels.works:
        engine, name = engine_of(work.key, chip, execution)
        if work.key.operation != "matmul" or work.shape is None or engine != "matrix":
            continue
        form = StepCell.precision_of(name)
        widened = stored_widths(work.key)[1] < 1
        if form == "half" and widened:
            form = "int4"
        kernel = kernel_of(execution.library, chip, form, widened)
        if form in (*_TRITON, "fp4", "int4"):
            here = grouped[work.row]
            place[work.row] = np.where(here, kernel_on(chip, kernel, form), place[work.row])
            rate[work.row] = np.where(here, chip.peak(engine, name), rate[work.row])
    return dict(zip(COLUMNS, (place, rate), strict=True))


def expert_seconds_of(
    data: Mapping[str, Array], bytes_: Array, chip: Chip, knobs: Knobs
) -> tuple[Array, OwnSeconds] | None:
    """The rows of a table that are products of experts, with their seconds; None without any.

    bytes_: through HBM, by row, as many as take its time.
    """
    on = matrix_engine(chip)
    rows: Any = np.flatnonzero((data["experts"] > 0) & (data["flop"] > 0))
    if on is None or not len(rows):
        return None
    usual = Knobs.typical(chip, compiled=False, sustained=False)
    compute, memory = knobs.compute / usual.compute, knobs.memory / usual.memory
    names = ("rows", "columns", "inner", "products", "width_b", "bytes")
    sizes = {name: data[name][rows] for name in names} | {"rate": data["experts rate"][rows]}
    faster = memory * sizes["bytes"] / np.maximum(bytes_[rows], 1)

    def price(place: int, at: Array) -> OwnSeconds:
        cases = {name: column[at] for name, column in sizes.items()}
        kernel = EXPERT_KERNELS[_PLACES[place - 1]]
        return expert_seconds(cases, on, kernel, compute, faster[at], knobs.overlap)

    return rows, OwnSeconds.by_place(data["experts"][rows], price)
