"""Seconds of fused attention kernels, the libraries that run them, and their rows in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.kernels.engines import PARTIAL, TILED, engine_of, matrix_engine, p_norm
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.kernels.numbers import AttentionKnobs
from rooftrace.costmodels.ops import AttentionSizes
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import precision

if TYPE_CHECKING:
    import numpy as np

    from rooftrace._amounts import Amount, Array
    from rooftrace.costmodels.kernels.works import KernelAmounts

    Flags = np.ndarray[Any, np.dtype[np.bool_]]

# -- fused attention -------------------------------------------------------------------------------
# A flash attention kernel gives each block some rows of the score matrix, and walks over their
# keys.
#   rows     are padded to tiles; the heads of a group share a tile where the kernel packs them,
#   keys     are padded to steps; a causal block ends at its last row, so that blocks differ,
#   a step   takes its two products and its exponentials; a block takes a start and its steps,
#   blocks   fill the SMs, and the last ones to end leave some idle; few blocks are split along
#            their keys where that is faster, and the partial results combined by one more kernel,
#   memory   streams key and value while blocks compute; query and output of the first and the last
#            blocks go through it apart, those of all where a block has its SM to itself.
# Sizes of tiles are those of FlashAttention 2 and 3 (Dao, "FlashAttention-2", 2023; Shah et al.,
# "FlashAttention-3", 2024; https://github.com/Dao-AILab/flash-attention) and of the
# memory-efficient kernel that PyTorch has for masks of numbers (Rabe and Staats, 2021;
# mem_eff_attention in ATen).
#
# Not here: backward, steps that shrink for wide heads in bf16, tiles of 192 rows for prompts with
# heads of 64, sorting of requests, power.

EXPONENTIALS = 16
"""Per SM and clock, sm_80 and sm_90: CUDA C++ Programming Guide, arithmetic throughput."""
MOST_SPLITS = 32
"""Parts of one row's keys: vLLM's default for CUDA graphs."""
_WIDE = 2
"""Bytes of an element of query and output."""
_WIDTHS = 32
"""Heads are padded to a multiple of this."""
_WIDE_ENGINE = 1500
"""FLOP of bf16 per SM and clock of data-center GPUs of any vendor; GeForce cards have 512."""
_FEW = 0.8
"""FlashAttention 2 may split keys where blocks are fewer than this share of the SMs.  What fits one
of its smaller tiles may run on that kernel, too."""


# -- kernels and chips -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Tiles of a kernel.

    Where one block does not fill an SM, several share it in the order of the grid, so that one
    computes while another loads.
    """

    rows: int  # of a block: queries, times heads that share a tile
    keys: int  # of a step
    packs: float  # up to how many queries the heads of a group share tiles
    splits: bool  # whether keys of any block may be split, else only where heads share a tile
    alone: bool  # whether one block fills an SM, stays there and takes the longest work first
    vector: float  # instructions of a lane per score that do not hide behind exponential, products


FLASH2 = AttentionKernel(rows=128, keys=128, packs=1, splits=False, alone=False, vector=8)
SPLIT2 = AttentionKernel(rows=64, keys=128, packs=1, splits=True, alone=False, vector=8)
PAGED2 = AttentionKernel(rows=64, keys=128, packs=1, splits=False, alone=False, vector=8)
FLASH3 = AttentionKernel(rows=128, keys=128, packs=inf, splits=True, alone=True, vector=0)
EFFICIENT = AttentionKernel(rows=64, keys=64, packs=0, splits=False, alone=False, vector=75)
"""FlashAttention 2 as it is, with few blocks, and with a paged cache; 3 as servers call it (with
offsets, heads always share tiles: `should_pack_gqa` in its hopper/heuristics.h); memory-efficient.
Sources of `vector`: see AMPERE and GEFORCE."""
FLASHINFER = AttentionKernel(rows=64, keys=128, packs=inf, splits=True, alone=False, vector=8)
TRITON = AttentionKernel(rows=16, keys=32, packs=inf, splits=True, alone=False, vector=8)
"""flashinfer and vLLM's Triton backend: the heads of a group share a tile, keys are split."""
AOTRITON = AttentionKernel(rows=128, keys=64, packs=0, splits=False, alone=False, vector=25)
ROCM_PAGED = AttentionKernel(rows=16, keys=256, packs=inf, splits=True, alone=False, vector=8)
"""On AMD's GPUs: attn_fwd of AOTriton, which PyTorch has; and paged_attention_ll4mi of inference
engines, which cuts keys into parts of 256.  Their prompts take FlashAttention 2 (Composable
Kernel), with the tiles of FLASH2."""
LIBRARIES = ("flash2", "flash3", "cudnn", "flashinfer", "triton", "aotriton", "rocm")
"""Whose kernels these are; a case's `library` is a place here."""
IDEAL = AttentionKnobs()


@dataclass(frozen=True, slots=True)
class AttentionEngine:
    """A chip as attention sees it: SMs, and their rates per second."""

    units: int  # SMs
    rate: float  # FLOP of bf16
    clocks: float  # of all SMs together
    lanes: float  # fp32 instructions of all SMs together
    memory: float  # bytes
    warp_groups: bool = False  # runs FlashAttention 3, or the kernels of later chips
    wide: bool = False  # matrix engines as wide as those of data-center GPUs


def attention_engine(chip: Chip) -> AttentionEngine | None:
    """The chip as attention sees it; None without a matrix engine, SM count or clock."""
    engine = matrix_engine(chip)
    if engine is None or chip.clock is None or not chip.has_peak("matrix", "bf16"):
        return None
    rate, clocks = chip.peak("matrix", "bf16"), engine.units * chip.clock.value
    of = Knobs.generation(chip)
    return AttentionEngine(
        engine.units,
        rate,
        clocks,
        chip.peak("vector", "fp32") / 2,
        engine.memory,
        warp_groups=of in ("hopper", "blackwell"),
        wide=of not in (None, "ada") or rate / clocks >= _WIDE_ENGINE,
    )


# -- blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """The blocks of a kernel: arrays by case."""

    count: Array  # blocks of the kernel
    tiles: Array  # tiles of rows over one key and value head
    mean: Array  # keys that a block walks over, padded to steps
    longest: Array  # keys of the longest block
    split: Array  # parts of a row's keys


def attention_blocks(
    sizes: Mapping[str, Array], units: int, kernel: AttentionKernel, most: Array | int = MOST_SPLITS
) -> AttentionBlocks:
    """The blocks that `kernel` makes of each case (sizes as in `attention_seconds`).

    most: into how many parts it may split keys; [splits, 1] for arrays of [splits, cases].
    """
    import numpy as np

    short, long = (_walked(part, kernel) for part in _alike(sizes))
    uneven = long.batch > 0
    count = short.count + long.count
    mean = np.where(uneven, (short.count * short.mean + long.count * long.mean) / count, short.mean)
    steps = np.where(uneven, np.maximum(short.steps, long.steps), short.steps)
    can = (np.maximum(short.packed, long.packed) > 1) | kernel.splits
    split = np.where(can, np.clip(np.minimum(units // count, steps), 1, most), 1.0)
    longest = np.ceil(steps / split) * kernel.keys
    tiles = np.where(uneven, np.maximum(short.tiles, long.tiles), short.tiles)
    return AttentionBlocks(count * split, tiles, np.minimum(mean / split, longest), longest, split)


def _alike(sizes: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """The sizes of all requests but the long ones, then of those: none where all are alike."""
    import numpy as np

    batch = sizes["batch"]
    long = sizes.get("long", np.zeros(len(batch)))
    names = ("queries", "keys", "visible")
    most = {name: np.where(long > 0, sizes.get(f"long_{name}", 0.0), sizes[name]) for name in names}
    rest = {
        name: sizes[name] + (sizes[name] - most[name]) * long / (batch - long) for name in names
    }
    yield {**sizes, **rest, "batch": batch - long}
    yield {**sizes, **most, "batch": long}


@dataclass(frozen=True, slots=True)
class _Walked:
    """The blocks of requests of one size, before any are split: arrays by case."""

    batch: Array
    packed: Array  # heads that share a tile of rows
    tiles: Array
    count: Array
    mean: Array  # keys that a block walks over
    steps: Array  # of the longest block


def _walked(sizes: Mapping[str, Array], kernel: AttentionKernel) -> _Walked:
    import numpy as np

    queries, packed = sizes["queries"], _packed(sizes, kernel)
    tiles = np.ceil(queries * packed / kernel.rows)
    count = sizes["batch"] * sizes["heads"] / packed * tiles
    span = kernel.rows / packed
    # A block ends at its last row: it walks over a row's keys, half its rows more, half a step.
    # Of a window it begins at its first row: half its rows more for all that have left keys behind.
    padded, most = np.ceil(sizes["keys"] / kernel.keys) * kernel.keys, _most_seen(sizes)
    leaving = np.clip((sizes["keys"] - most) / queries, 0.0, 1.0)
    ends = (tiles * span - queries) / 2 + (span - 1) / 2 * (1 + leaving)
    more = ends + np.maximum(kernel.keys - span, 0) / 2
    mean = np.clip(sizes["visible"] / queries + more, kernel.keys, padded)
    steps = np.ceil(np.minimum(most + span - 1, sizes["keys"]) / kernel.keys)
    return _Walked(sizes["batch"], packed, tiles, count, mean, steps)


def _packed(sizes: Mapping[str, Array], kernel: AttentionKernel) -> Array:
    """Number of heads that share a tile of rows."""
    import numpy as np

    return np.where(sizes["queries"] <= kernel.packs, sizes["heads"] / sizes["kv_heads"], 1.0)


def _tiles_by_rows(sizes: Mapping[str, Array], kernel: AttentionKernel) -> Array:
    """All tiles of rows; of a tile that rows of a request fill in part after others, that part."""
    import numpy as np

    packed = _packed(sizes, kernel)
    tiles: Array = np.maximum(1.0, sizes["queries"] * packed / kernel.rows)
    return tiles * sizes["batch"] * sizes["heads"] / packed


def _most_seen(sizes: Mapping[str, Array]) -> Array:
    """Keys that the last row sees, if each sees those before it and itself, up to a window.

    S rows over L keys see S (L - S) + S (S + 1) / 2 pairs without a window; one of L - k hides
    k (k + 1) / 2 of them, where k < S; a narrower one leaves all rows the same.  Of more pairs than
    without a window some lie ahead: then a row may see all keys.
    """
    import numpy as np

    rows, keys = sizes["queries"], sizes["keys"]
    hidden = rows * (keys - rows) + rows * (rows + 1) / 2 - sizes["visible"]
    window = keys - (np.sqrt(1 + 8 * np.maximum(hidden, 0)) - 1) / 2
    same = hidden >= rows * (rows - 1) / 2
    most = np.where(same, sizes["visible"] / rows, window)
    return np.where((hidden <= 0) | (keys < rows), keys, most)


# -- seconds ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionSeconds:
    """Seconds of attention: arrays by case."""

    compute: Array  # until the last block ends
    memory: Array  # of all bytes
    device: Array  # of the kernel, and of those that only it needs


def attention_seconds(
    sizes: Mapping[str, Array],
    on: AttentionEngine,
    knobs: AttentionKnobs = IDEAL,
    compute: float = 1.0,
    memory: float = 1.0,
    overlap: float = inf,
) -> AttentionSeconds:
    """Seconds of attention for each case, without a launch.

    sizes: arrays of one length.  batch, queries (of one request), keys, visible ((query, key) pairs
    of one head that are computed), heads, kv_heads, width (of query and key), value_width, size and
    kv_size (bytes of a multiplied element, and of one of key and value), rate (FLOP/s of the
    products), bytes (through HBM), masked (a mask of numbers: no flash kernel takes one), paged (a
    cache in pages), library (of LIBRARIES; without it the newest flash kernel of the chip), long
    (how many requests have long_queries, long_keys and long_visible, while the others are alike).
    compute, memory, overlap: those of `Knobs`.
    """
    import numpy as np

    result = AttentionSeconds(*(np.full(len(sizes["batch"]), inf) for _ in range(3)))
    for kernel, may in _kernels(sizes, on):
        cases = {name: values[may] for name, values in sizes.items()}
        most = attention_blocks(cases, on.units, kernel).split.max()
        blocks = attention_blocks(cases, on.units, kernel, np.arange(1, most + 1)[:, None])
        step = _step(cases, on, kernel, knobs) / compute
        walk = _walk(blocks, step, on.units, kernel, knobs.start)
        bandwidth = on.memory * memory * knobs.stream
        stream = np.minimum(_cache_bytes(cases), cases["bytes"]) / bandwidth
        moved = (cases["bytes"] + _partial_bytes(cases, blocks)) / bandwidth
        blocks_by_rows = _tiles_by_rows(cases, kernel) * blocks.split
        waves = 1.0 if kernel.alone else np.maximum(1.0, blocks_by_rows / on.units)
        apart = (moved - stream) / waves
        inside = p_norm(overlap, walk, moved - apart)
        copies = _copies(cases, kernel) * knobs.prepare
        paging = cases["paged"] * (cases["batch"] * knobs.request + copies)
        combine = (blocks.split > 1) * knobs.combine
        device = inside + apart + paging + combine
        best = device.argmin(axis=0), np.arange(device.shape[1])
        faster = device[best] < result.device[may]
        rows = np.flatnonzero(may)[faster]
        for name, seconds in (("compute", walk), ("memory", moved), ("device", device)):
            getattr(result, name)[rows] = seconds[best][faster]
    return result


def _kernels(
    sizes: Mapping[str, Array], on: AttentionEngine
) -> Iterator[tuple[AttentionKernel, Flags]]:
    """The kernels that may run, and which of the cases each can take; the fastest one does."""
    import numpy as np

    masked, paged = sizes["masked"] > 0, sizes["paged"] > 0
    newest = np.full(len(masked), LIBRARIES.index("flash3" if on.warp_groups else "flash2"))
    library = sizes.get("library", newest)
    flash2 = ~masked & (library == LIBRARIES.index("flash2"))
    rocm = library == LIBRARIES.index("rocm")
    masked = masked & (library < LIBRARIES.index("aotriton"))
    blocks = attention_blocks(sizes, on.units, PAGED2)
    few = (blocks.count < _FEW * on.units) | (blocks.tiles == 1)
    third = (library == LIBRARIES.index("flash3")) | (library == LIBRARIES.index("cudnn"))
    chosen = {
        EFFICIENT: masked,
        FLASH3: ~masked & third,
        PAGED2: flash2 & paged,
        SPLIT2: flash2 & ~paged & few,
        FLASH2: (flash2 & ~paged) | (rocm & (sizes["queries"] > 1)),
        FLASHINFER: ~masked & (library == LIBRARIES.index("flashinfer")),
        TRITON: ~masked & (library == LIBRARIES.index("triton")),
        AOTRITON: library == LIBRARIES.index("aotriton"),
        ROCM_PAGED: rocm & (sizes["queries"] <= 1),
    }
    yield from ((kernel, rows) for kernel, rows in chosen.items() if rows.any())


def _step(
    sizes: Mapping[str, Array], on: AttentionEngine, kernel: AttentionKernel, knobs: AttentionKnobs
) -> Array:
    """Seconds of arithmetic per key in one block."""
    import numpy as np

    width = sum(np.ceil(sizes[name] / _WIDTHS) * _WIDTHS for name in ("width", "value_width"))
    flop = 2 * kernel.rows * width * on.units
    convert = np.where(sizes["size"] < _WIDE, knobs.convert * width / (2 * 128) / on.rate, 0.0)
    scores = kernel.rows * on.units * (1 / (EXPONENTIALS * on.clocks) + kernel.vector / on.lanes)
    step: Array = flop * (1 / sizes["rate"] + convert) / knobs.products + scores
    return step


def _walk(
    blocks: AttentionBlocks, step: Array, units: int, kernel: AttentionKernel, start: float
) -> Array:
    """Seconds until the last block ends: even shares, and a tail while some SMs are idle."""
    import numpy as np

    mean, longest = start + blocks.mean * step, start + blocks.longest * step
    tail = longest - mean if kernel.alone else longest / 2
    even = blocks.count / units
    return np.maximum(even * mean + np.minimum(even, 1.0) * tail, longest)


def _cache_bytes(sizes: Mapping[str, Array]) -> Array:
    """Bytes of key and value, which stream while blocks compute."""
    width = sizes["width"] + sizes["value_width"]
    return sizes["batch"] * sizes["keys"] * sizes["kv_heads"] * width * sizes["kv_size"]


def _partial_bytes(sizes: Mapping[str, Array], blocks: AttentionBlocks) -> Array:
    """Partial results of splits, and the fp8 copy of queries for a cache in fp8."""
    import numpy as np

    rows = sizes["batch"] * sizes["queries"] * sizes["heads"]
    partial = np.where(blocks.split > 1, blocks.split * PARTIAL, 0.0) * sizes["value_width"]
    copy = sizes["paged"] * np.where(sizes["size"] < _WIDE, 2 * sizes["size"], 0.0)
    return rows * (partial + copy * sizes["width"])


def _copies(sizes: Mapping[str, Array], kernel: AttentionKernel) -> Flags:
    """Whether queries are copied: to fp8, or into groups (a view for one request or one head)."""
    narrow: Flags = sizes["size"] < _WIDE
    if kernel.packs > 1:
        return narrow
    grouped = (_packed(sizes, kernel) > 1) & (sizes["kv_heads"] > 1) & (sizes["batch"] > 1)
    return narrow | grouped


# -- attention rows --------------------------------------------------------------------------------
# `AttentionSizes` of a kernel's work are columns of a table of kernels, zero in the rows of other
# kernels.  Rows whose products run on the matrix engine of a chip with an SM count take the seconds
# of `attention_seconds`; backward and all else keep the shares of their class.

# -- which library's kernel runs -------------------------------------------------------------------
# An execution names the library (`ExecutionModel.attention_kernels`).  Two names depend on the
# chip: "sdpa" is the flash kernel of `scaled_dot_product_attention`, FlashAttention 2 on every GPU;
# "vllm" is FlashAttention 3 where the chip has the instructions for it (FlashAttention 2
# elsewhere).

SDPA = "sdpa"
"""The library whose kernel PyTorch's `scaled_dot_product_attention` runs."""
WIDE = ("flash2", "flashinfer", "triton")
"""Libraries that multiply in half precision: entries of an fp8 cache are converted first."""
HOPPER = AttentionKnobs(
    products=1.0, convert=0.65, stream=0.91,
    start=1.6e-6, combine=1.5e-6, prepare=1.3e-6, request=1.3e-8,
)  # fmt: skip
"""FlashAttention 3 in vLLM 0.24 on H100 and H200, by benchmarks/accuracy/attention.py on published
measurements (aiconfigurator's performance database, Apache-2.0).  The two GPUs' fits agree within
an eighth, `request` and `combine` within a third.  `products` stays at the datasheet's rate; left
free it is 1.1, with 0.78 for `convert`.  `stream` is over the 0.91 that copies reach there."""
AMPERE = AttentionKnobs(
    products=0.9, stream=0.82, start=1.3e-6, combine=7.1e-6, prepare=6.9e-6, request=6e-9
)
"""FlashAttention 2 in vLLM 0.14 on A100, from the same source; fp8 caches were not measured.
`products` and the instructions of its kernel stand for each other there, since all heads are of one
width.  Both are over the sustained rates of A100 in `Knobs.typical` (1.12 and 0.85): of the
datasheet they are 1.0 and 0.7."""
GEFORCE = replace(AMPERE, products=1.0, stream=0.7)
"""FlashAttention 2 on other GPUs: with products at their full rate the growth of published step
times of eva and eva02 (timm, RTX 3090 and 4090) over image sizes is met within 1 %.  What the
kernel for masks of numbers takes (`EFFICIENT.vector`) is from that of tiny_vit: 60 on RTX 4090, 110
on RTX 3090."""
OLD_INSTRUCTIONS = replace(HOPPER, products=0.62, convert=0.0, start=1.3e-6, combine=3e-6)
"""FlashAttention 2 on Hopper.  It uses the matrix instructions of sm_80, which reach 0.62 of the
rate there (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
Microbenchmarking", 2024).  The rest is that of the same chips."""
FLASHINFER_RATES = replace(GEFORCE, products=0.76, stream=0.82, combine=3e-6, prepare=1.7e-6)
TRITON_RATES = replace(
    GEFORCE, products=0.28, stream=0.86, start=5.9e-7, combine=7.2e-7, prepare=0.0
)
"""Kernels of flashinfer and of vLLM's Triton backend, both with fp8 caches on L40S: from the same
source, over the 0.74 that L40S sustains of its matrix rate."""

ROCM_RATES = AttentionKnobs(stream=0.65, start=1.5e-6, combine=5e-6)
"""Paged attention on MI300X: 36 calls in a step of decode of Qwen3-8B under SGLang (32 requests,
32,785 keys; trace of TraceLens, MIT).  `start` is a guess near that of other GPUs, and no prompt
was measured."""
AOTRITON_RATES = replace(ROCM_RATES, start=1.5e-5)
"""attn_fwd on MI300X: 40 calls in steps of ViT, BERT and Qwen1.5 (traces of TraceLens, MIT), with
141, 197 and 559 keys and heads of 64.  So is the number of its instructions (`vector`)."""


def library_on(name: str, chip: Chip) -> str:
    """The library, one of LIBRARIES, that a name stands for on a chip."""
    on = attention_engine(chip)
    hopper = on is not None and on.warp_groups
    if name == "vllm":
        name = "flash3"
    if chip.vendor == "AMD":
        name = {SDPA: "aotriton", "flash3": "rocm", "cudnn": "rocm"}.get(name, name)
    if name == SDPA or (name in ("flash3", "cudnn") and not hopper):
        return "flash2"
    return name


def attention_knobs(
    numbers: AttentionKnobs | str, chip: Chip, library: str = SDPA
) -> AttentionKnobs:
    """The numbers themselves; for "usual", those of the library's kernels on such chips.

    library: one of ATTENTION_LIBRARIES.
    """
    if isinstance(numbers, AttentionKnobs):
        return numbers
    on, library = attention_engine(chip), library_on(library, chip)
    if library in ("aotriton", "rocm"):
        return AOTRITON_RATES if library == "aotriton" else ROCM_RATES
    if library in ("flashinfer", "triton"):
        return FLASHINFER_RATES if library == "flashinfer" else TRITON_RATES
    if on is not None and on.warp_groups:
        return OLD_INSTRUCTIONS if library == "flash2" else HOPPER
    return AMPERE if on is not None and on.wide else GEFORCE


# -- rows ------------------------------------------------------------------------------------------

_SIZES = tuple(AttentionSizes.__struct_fields__)
COLUMNS = ("kernels", *_SIZES, "size", "rate", "library")
"""kernels: attention kernels in one of the row's (0: none).  size: bytes of an element that is
multiplied.  rate: FLOP/s of the products, 0 where they do not run on the matrix engine in half
precision or less.  library: the place in LIBRARIES of whose kernel it is."""
_WIDEST = 2
"""Bytes of the widest element that modelled kernels multiply."""


def products_of(engine: str, name: str, chip: Chip, library: str) -> tuple[float, float, float]:
    """The columns size, rate and library of products of this precision on this engine."""
    library = library_on(library, chip)
    size = float(precision(name).bits / 8)
    if library in WIDE and size < _WIDEST and chip.has_peak(engine, "bf16"):
        name, size = "bf16", float(_WIDEST)
    rate = chip.peak(engine, name) if engine == "matrix" and size <= _WIDEST else 0.0
    return size, rate, LIBRARIES.index(library)


def columns_of(kernels: KernelAmounts, chip: Chip, execution: ExecutionModel) -> dict[str, Array]:
    """The columns of kernels: those of the largest attention of each row."""
    import numpy as np

    columns = {name: np.zeros(len(kernels)) for name in COLUMNS}
    most = np.zeros(len(kernels))
    for work in kernels.attention:
        assert work.attention is not None
        sizes, at = work.attention, work.row
        engine = engine_of(work.key, chip, execution)
        size, rate, library = products_of(*engine, chip, execution.attention_kernels)
        each: Any = AttentionSizes(**sizes).flop  # type: ignore[arg-type]
        count = np.maximum(1.0, np.rint(work.flop / np.maximum(each, 1)))
        equal = (work.flop == most[at]) & (sizes["keys"] > columns["keys"][at]) & (work.flop > 0)
        larger = (work.flop > most[at]) | equal
        numbers = {**sizes, "kernels": count, "size": size, "rate": rate, "library": library}
        for name, column in columns.items():
            column[at] = np.where(larger, numbers.get(name, 0.0), column[at])
        most[at] = np.where(larger, work.flop, most[at])
    return {f"attention {name}": column for name, column in columns.items()}


def backward_shares(data: Mapping[str, Array], chip: Chip) -> Amount:
    """Shares of the rate of the class, by row, that backward kernels reach: those of instructions.

    FlashAttention 2 uses the matrix instructions of sm_80 in backward as in forward.
    """
    on = attention_engine(chip)
    if on is None or not on.warp_groups:
        return 1.0
    import numpy as np

    flash2 = data["attention library"] == LIBRARIES.index("flash2")
    old = (data["attention backward"] > 0) & flash2
    return np.where(old, OLD_INSTRUCTIONS.products / HOPPER.products, 1.0)


def attention_seconds_of(
    data: Mapping[str, Array], bytes_: Array, chip: Chip, knobs: Knobs
) -> tuple[Array, AttentionSeconds] | None:
    """The rows of a table that are priced by blocks, with their seconds; None without such rows.

    bytes_: through HBM, by row.
    """
    import numpy as np

    on = attention_engine(chip)
    rows: Any = np.flatnonzero((data["attention rate"] > 0) & (data["attention backward"] == 0))
    if on is None or not len(rows):
        return None
    sizes = {name: data[f"attention {name}"][rows] for name in COLUMNS}
    kernels = sizes["kernels"]
    sizes["bytes"] = bytes_[rows] / kernels
    seconds = AttentionSeconds(*(np.zeros(len(rows)) for _ in range(3)))
    for place, library in enumerate(LIBRARIES):
        numbers = attention_knobs(knobs.attention, chip, library)
        chosen = np.flatnonzero(sizes["library"] == place)
        for part in np.split(chosen, range(TILED, len(chosen), TILED)):
            cases = {name: column[part] for name, column in sizes.items()}
            if len(part):
                single = attention_seconds(
                    cases, on, numbers, knobs.compute, knobs.memory, knobs.overlap
                )
                for name in ("compute", "memory", "device"):
                    getattr(seconds, name)[part] = kernels[part] * getattr(single, name)
    return rows, seconds
