"""Seconds of fused attention kernels from the sizes of their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace.costmodels.kernels.engines import LEAST
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.costmodels.kernels.numbers import AttentionKnobs
from rooftrace.costmodels.kernels.tiles import PARTIAL, OwnSeconds, matrix_engine, p_norm
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Array

    Flags = np.ndarray[Any, np.dtype[np.bool_]]

# -- fused attention -------------------------------------------------------------------------------
# A flash attention kernel gives each block some rows of the score matrix, and walks over their
# keys.
#   rows     are padded to tiles; the heads of a group share a tile where the kernel packs them,
#   keys     are padded to steps; a causal block ends at its last row, so that blocks differ,
#   a step   takes its two products and its exponentials; a block takes a start and its steps,
#   blocks   fill the SMs, and the last ones to end leave some idle; few blocks are split along
#            their keys where that is faster, and the partial results combined by one more kernel;
#            a plan made before (FlashAttention 3's scheduler metadata, FlashInfer, FlashMLA,
#            TensorRT-LLM) cuts keys where all SMs have equal shares, so that no wave is half empty,
#   memory   streams key and value while blocks compute; query and output of the first and the last
#            blocks go through it apart, those of all where a block has its SM to itself.
# Sizes of tiles are those of FlashAttention 2 and 3 (Dao, "FlashAttention-2", 2023; Shah et al.,
# "FlashAttention-3", 2024; https://github.com/Dao-AILab/flash-attention) and of the
# memory-efficient kernel that PyTorch has for masks of numbers (Rabe and Staats, 2021;
# mem_eff_attention in ATen).
#
# Latent attention (MLA) on the cache has one key and value head, whose value is part of the key; of
# decode that is the absorbed form: heads share tiles of 64 rows (fewer are padded).
#
# Not here: backward, sorting of requests, power.

ENDS = 30
"""Bytes of query and output of a block that an SM takes per clock, where no other block of the SM
computes meanwhile.  H100 and H200 (aiconfigurator, vLLM); half of what a port of the cache
gives."""
UNSORTED = 0.25
"""Share of the time of a request where its plan does not sort them: FlashAttention 3 sorts up to
992 (PREPARE_VARLEN_MAX_BATCHES_1CTA in its flash_api.cpp).  Steps of decode on H100, as above."""
EXPONENTIALS = 16
"""Per SM and clock, sm_80 and sm_90: CUDA C++ Programming Guide, arithmetic throughput."""
MOST_SPLITS = 128
"""Parts of one row's keys, as `num_splits_heuristic` of FlashAttention's flash_api.cpp has it."""
PART = 128
"""Keys of a part of a prompt in flashinfer, at least (`min_kv_chunk_size` of its scheduler.cuh)."""
WIDEN = 6.0
"""Instructions of a lane that widen an element of an fp8 cache, and put it where products want it:
rows of flashinfer on L40S, of which wide heads, with few rows, have most to widen.  Kernels that no
row has with such a cache are taken to hide it."""
WARPS = 4
"""Warps of a block: each widens the keys and values that it multiplies its rows with, all of them
but where rows are so few that warps share out the keys instead."""
WALKS = (*(n * 2**k for k in range(13) for n in (1, 1.5) if n * 2**k % 1 == 0), inf)
"""Steps that a part of a row's keys walks over at least: the fastest is taken."""
BLACKWELL = {"sm_100": EXPONENTIALS, "sm_103": 2 * EXPONENTIALS}
"""Data-center GPUs with trtllm-gen's kernels, and their exponentials (B300's are twice as many:
NVIDIA, "Inside NVIDIA Blackwell Ultra", 2025)."""
_WIDE = 2
"""Bytes of an element of query and output."""
_WIDEST_HEAD = 256
"""Heads that are no latents have at most so many elements in flash kernels."""
_NARROW_HEAD, _WIDE_HEAD = 64, 192
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
    splits: float  # up to how many queries keys are split; where heads share a tile in any case
    alone: bool  # whether one block fills an SM, stays there and takes the longest work first
    vector: float  # instructions of a lane per score that do not hide behind exponential, products
    balanced: bool = False  # a plan gives every SM an equal share of all keys of decode
    most: int = MOST_SPLITS  # parts of a row's keys
    sorts: float = inf  # requests that the plan sorts
    # Rows where at most so many queries and heads share a block, and then keys of a step, rising.
    few: tuple[tuple[int, int, int], ...] = ()
    wide: int = 0  # rows of heads of more than 192 elements; 0: as of others
    by_width: tuple[float, float] = (1.0, 1.0)  # factors on keys: heads of up to 64, above 128
    starts: tuple[float, float] = (1.0, 1.0)  # the same on the start of a block
    behind: float = 0.0  # share of a start that hides where other blocks of the SM compute
    # Faster or not, keys are cut: of one query up to so many blocks; of prompts up to so many of an
    # SM, where that is several.
    grid: int = 0
    fills: int = 1
    widens: float = 0.0  # instructions of a lane for an element of a cache in fp8
    hides: bool = False  # query and output of a block move while the next one computes
    feed: float = inf  # bytes of key and value that an SM takes per clock

    def tile(self, sizes: Mapping[str, Array]) -> tuple[Array, Array]:
        """Rows of a block, and keys of a step, by case."""
        width, queries = sizes["width"], sizes["queries"]
        rows = np.where(width > _WIDE_HEAD, self.wide or self.rows, self.rows)
        keys = np.full(len(rows), self.keys)
        for height, most, step in reversed(self.few):
            few = queries * _packed(sizes, self) <= most
            if most > height:  # several of them, for one query alone
                few = few & (queries <= 1)
            rows, keys = np.where(few, height, rows), np.where(few, step, keys)
        return rows, keys * _by_width(width, self.by_width)


FLASH2 = AttentionKernel(rows=128, keys=128, packs=1, splits=0, alone=False, vector=8)
SPLIT2 = AttentionKernel(
    rows=64, keys=128, packs=1, splits=inf, alone=False, vector=8, by_width=(2, 0.5)
)
PAGED2 = AttentionKernel(
    rows=64, keys=128, packs=1, splits=0, alone=False, vector=8, by_width=(2, 0.5)
)
FLASH3 = AttentionKernel(
    rows=128, keys=128, packs=inf, splits=inf, alone=True, vector=0, balanced=True,
    most=32, sorts=992,
)  # fmt: skip
CUDNN = replace(FLASH3, packs=1, splits=1)
EFFICIENT = AttentionKernel(rows=64, keys=64, packs=0, splits=0, alone=False, vector=75)
"""FlashAttention 2 as it is, with few blocks, and with a paged cache; 3 as servers call it (with
offsets, heads always share tiles: `should_pack_gqa` in its hopper/heuristics.h); cuDNN on Hopper,
which splits the keys of one query alone (16 of them over 16,384 keys: one kernel of 0.76 ms on
H200, torch 2.11, that four splits would take 0.2 for); memory-efficient.
Keys of a step are those of `run_mha_fwd_splitkv_dispatch`.  Sources of `vector`: see AMPERE and
GEFORCE."""
FLASHINFER = AttentionKernel(
    rows=128, keys=64, packs=inf, splits=inf, alone=False, vector=0, balanced=True,
    few=((16, 16, 128), (64, 64, 128)), wide=64, by_width=(1, 0.5), starts=(0.74, 1.26),
    behind=0.35, fills=2, widens=WIDEN,
)  # fmt: skip
TRITON = AttentionKernel(
    rows=16, keys=32, packs=inf, splits=1, alone=False, vector=8, behind=0.22, grid=128, most=16,
    widens=WIDEN,
)  # fmt: skip
"""flashinfer and vLLM's Triton backend: the heads of a group share a tile, keys are split.  Rows of
flashinfer's blocks are those of `FA2DetermineCtaTileQ`, keys what two blocks of an SM of L40S have
room for, and it cuts prompts into parts for two blocks of each SM, of which one starts while the
other computes (`behind`); narrow heads start sooner (`starts`, from the rows of L40S).  vLLM cuts
keys of one query into 16 where requests and key heads make 128 blocks at most
(triton_unified_attention.py)."""
TRTLLM = AttentionKernel(
    rows=128, keys=128, packs=1, splits=1, alone=True, vector=0, balanced=True,
    few=((16, 32, 128),), hides=True,
)  # fmt: skip
FLASHMLA = AttentionKernel(
    rows=64, keys=64, packs=inf, splits=inf, alone=True, vector=0, balanced=True, hides=True
)
TRTLLM_MLA = AttentionKernel(
    rows=128, keys=128, packs=inf, splits=inf, alone=True, vector=0, balanced=True,
    few=((16, 32, 128),), hides=True, feed=32,
)  # fmt: skip
"""TensorRT-LLM's kernels (trtllm-gen on Blackwell, which flashinfer has, too); FlashMLA; and
trtllm-gen on latents.  Where the heads of a query are few, they are the columns of its products in
place of the rows, so that tiles are small; `feed`: of 32 heads, which are two of them, on B200."""
AOTRITON = AttentionKernel(rows=128, keys=64, packs=0, splits=0, alone=False, vector=25)
ROCM_PAGED = AttentionKernel(rows=16, keys=256, packs=inf, splits=inf, alone=False, vector=8)
"""On AMD's GPUs: attn_fwd of AOTriton, which PyTorch has; and paged_attention_ll4mi of inference
engines, which cuts keys into parts of 256.  Their prompts take FlashAttention 2 (Composable
Kernel), with the tiles of FLASH2."""
LIBRARIES = (
    "flash2", "flash3", "cudnn", "flashinfer", "triton", "aotriton", "rocm",
    "trtllm", "flashmla", "flash3-mla", "trtllm-mla",
)  # fmt: skip
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
    family: str = ""  # of GPUs that run the same kernels: "hopper", "blackwell", "rocm"
    wide: bool = False  # matrix engines as wide as those of data-center GPUs
    exponentials: float = EXPONENTIALS  # per SM and clock


def attention_engine(chip: Chip) -> AttentionEngine | None:
    """The chip as attention sees it; None without a matrix engine, SM count or clock."""
    engine = matrix_engine(chip)
    if engine is None or chip.clock is None or not chip.has_peak("matrix", "bf16"):
        return None
    rate, clocks = chip.peak("matrix", "bf16"), engine.units * chip.clock.value
    of = Knobs.generation(chip)
    family = "blackwell" if chip.architecture in BLACKWELL else of if of == "hopper" else ""
    family = "rocm" if chip.vendor == "AMD" else family
    return AttentionEngine(
        engine.units,
        rate,
        clocks,
        chip.peak("vector", "fp32") / 2,
        engine.memory,
        family=family,
        wide=of not in (None, "ada") or rate / clocks >= _WIDE_ENGINE,
        exponentials=BLACKWELL.get(chip.architecture or "", EXPONENTIALS),
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
    cut: Flags  # whether one more kernel adds up parts


def attention_blocks(
    sizes: Mapping[str, Array], units: int, kernel: AttentionKernel, walk: Array | float = 1.0
) -> AttentionBlocks:
    """The blocks that `kernel` makes of each case (sizes as in `attention_seconds`).

    walk: steps that a part of a row's keys walks over at least; [walks, 1] for arrays of [walks,
    cases].
    """
    queries = sizes["queries"]
    short, long = (_walked(part, kernel) for part in _alike(sizes))
    uneven = long.batch > 0
    count = short.count + long.count
    mean = np.where(uneven, (short.count * short.mean + long.count * long.mean) / count, short.mean)
    steps = np.where(uneven, np.maximum(short.steps, long.steps), short.steps)
    can = (np.maximum(short.packed, long.packed) > 1) | (queries <= kernel.splits)
    few = (count <= kernel.grid) & (queries <= 1) if kernel.grid else count < _FEW * units
    free = np.where(few, kernel.most, 1)
    if kernel.balanced:
        free = np.where(queries > 1, kernel.fills * units // count, units / count)
    parts = np.where(can, np.clip(free, 1, kernel.most), 1.0)
    walk = np.minimum(np.maximum(walk, np.ceil(steps / parts - 1e-9)), steps)
    split, longest = steps / walk, walk * kernel.tile(sizes)[1]
    tiles = np.where(uneven, np.maximum(short.tiles, long.tiles), short.tiles)
    mean = np.minimum(mean / split, longest)
    cut = np.where(kernel.grid > 0, parts, split) > 1
    return AttentionBlocks(count * split, tiles, mean, longest, split, cut)


def _alike(sizes: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """The sizes of all requests but the long ones, then of those: none where all are alike."""
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
    queries, packed = sizes["queries"], _packed(sizes, kernel)
    rows, step = kernel.tile(sizes)
    tiles = np.ceil(queries * packed / rows)
    count = sizes["batch"] * sizes["heads"] / packed * tiles
    span = rows / packed
    # A block ends at its last row: it walks over a row's keys, half its rows more, half a step.
    # Of a window it begins at its first row: half its rows more for all that have left keys behind.
    padded, most = np.ceil(sizes["keys"] / step) * step, _most_seen(sizes)
    leaving = np.clip((sizes["keys"] - most) / queries, 0.0, 1.0)
    ends = (tiles * span - queries) / 2 + (span - 1) / 2 * (1 + leaving)
    more = ends + np.maximum(step - span, 0) / 2
    mean = np.clip(sizes["visible"] / queries + more, step, padded)
    steps = np.ceil(np.minimum(most + span - 1, sizes["keys"]) / step)
    return _Walked(sizes["batch"], packed, tiles, count, mean, steps)


def _packed(sizes: Mapping[str, Array], kernel: AttentionKernel) -> Array:
    """Number of heads that share a tile of rows."""
    return np.where(sizes["queries"] <= kernel.packs, sizes["heads"] / sizes["kv_heads"], 1.0)


def _by_width(width: Array, factors: tuple[float, float]) -> Array:
    """A factor for each head: the first up to 64, the second above 128, else 1."""
    narrow, wide = factors
    factor: Array = np.where(width <= _NARROW_HEAD, narrow, np.where(width > 128, wide, 1.0))
    return factor


def _tiles_by_rows(sizes: Mapping[str, Array], kernel: AttentionKernel) -> Array:
    """All tiles of rows; of a tile that rows of a request fill in part after others, that part."""
    packed = _packed(sizes, kernel)
    tiles: Array = np.maximum(1.0, sizes["queries"] * packed / kernel.tile(sizes)[0])
    return tiles * sizes["batch"] * sizes["heads"] / packed


def _most_seen(sizes: Mapping[str, Array]) -> Array:
    """Keys that the last row sees, if each sees those before it and itself, up to a window.

    S rows over L keys see S (L - S) + S (S + 1) / 2 pairs without a window; one of L - k hides
    k (k + 1) / 2 of them, where k < S; a narrower one leaves all rows the same.  Of more pairs than
    without a window some lie ahead: then a row may see all keys.
    """
    rows, keys = sizes["queries"], sizes["keys"]
    hidden = rows * (keys - rows) + rows * (rows + 1) / 2 - sizes["visible"]
    window = keys - (np.sqrt(1 + 8 * np.maximum(hidden, 0)) - 1) / 2
    same = hidden >= rows * (rows - 1) / 2
    most = np.where(same, sizes["visible"] / rows, window)
    return np.where((hidden <= 0) | (keys < rows), keys, most)


# -- seconds ---------------------------------------------------------------------------------------


def attention_seconds(
    sizes: Mapping[str, Array],
    on: AttentionEngine,
    knobs: AttentionKnobs = IDEAL,
    compute: float = 1.0,
    memory: float = 1.0,
    overlap: float = inf,
    cache: float = 1.0,
) -> OwnSeconds:
    """Seconds of attention for each case, without a launch.

    sizes: arrays of one length.  batch, queries (of one request), keys, visible ((query, key) pairs
    of one head that are computed), heads, kv_heads, width (of query and key), value_width, size and
    kv_size (bytes of a multiplied element, and of one of key and value), rate (FLOP/s of the
    products), bytes (through HBM), masked (a mask of numbers: no flash kernel takes one), paged (a
    cache in pages), library (of LIBRARIES; without it the newest flash kernel of the chip), long
    (how many requests have long_queries, long_keys and long_visible, while the others are alike).
    compute, memory, overlap, cache: those of `Knobs`.
    """
    result = OwnSeconds(*(np.full(len(sizes["batch"]), inf) for _ in range(3)))
    for kernel, may in _kernels(sizes, on):
        cases = {name: values[may] for name, values in sizes.items()}
        most = attention_blocks(cases, on.units, kernel).split.max()
        least = np.array(WALKS if most > 1 else WALKS[-1:])[:, None]
        if kernel.grid:
            least = least[:1]
        if kernel.fills > 1:
            least = np.where(cases["queries"] > 1, PART / kernel.tile(cases)[1], least)
        blocks = attention_blocks(cases, on.units, kernel, least)
        step = _step(cases, on, kernel, knobs) / compute
        stored = np.minimum(_cache_bytes(cases), cases["bytes"])
        ends = (cases["bytes"] - stored) / _tiles_by_rows(cases, kernel)
        ends *= kernel.alone * on.units / (ENDS * on.clocks * compute)
        start = knobs.start * _by_width(cases["width"], kernel.starts)
        walk = _walk(blocks, step, on.units, kernel, start + ends)
        bandwidth = on.memory * memory * knobs.stream
        stream = stored / bandwidth
        moved = (cases["bytes"] + _partial_bytes(cases, blocks) / cache) / bandwidth
        first = kernel.alone and not kernel.hides
        waves = 1.0 if first else np.maximum(1.0, _tiles_by_rows(cases, kernel) / on.units)
        apart = (moved - stream) / waves
        inside = p_norm(overlap, walk, moved - apart)
        copies = _copies(cases, kernel) * knobs.prepare
        each = np.where(cases["batch"] > kernel.sorts, UNSORTED, 1.0) * knobs.request
        paging = cases["paged"] * (cases["batch"] * each + copies)
        merged = cases["batch"] * cases["queries"] * cases["heads"] / on.units
        combine = blocks.cut * (knobs.combine + knobs.merge * merged)
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
    masked, paged = sizes["masked"] > 0, sizes["paged"] > 0
    newest = {"hopper": "flash3", "blackwell": "trtllm", "rocm": "rocm"}.get(on.family, "flash2")
    library = sizes.get("library", np.full(len(masked), LIBRARIES.index(newest)))
    amd = (library == LIBRARIES.index("aotriton")) | (library == LIBRARIES.index("rocm"))
    cudnns = library == LIBRARIES.index("cudnn")
    masked = masked & ~amd & ~cudnns  # those take a mask of numbers
    by = {name: ~masked & (library == place) for place, name in enumerate(LIBRARIES)}
    prompt = sizes["queries"] > 1
    blocks = attention_blocks(sizes, on.units, PAGED2)
    few = (blocks.count < _FEW * on.units) | (blocks.tiles == 1)
    cudnn = CUDNN if on.family == "hopper" else TRTLLM
    chosen = [
        (EFFICIENT, masked),
        (FLASH3, by["flash3"]),
        (cudnn, cudnns),
        (PAGED2, by["flash2"] & paged),
        (SPLIT2, by["flash2"] & ~paged & few),
        (FLASH2, (by["flash2"] & ~paged) | (by["rocm"] & prompt)),
        (FLASHINFER, by["flashinfer"]),
        (TRITON, by["triton"]),
        (AOTRITON, by["aotriton"]),
        (ROCM_PAGED, by["rocm"] & ~prompt),
        (TRTLLM, by["trtllm"]),
        (FLASHMLA, by["flashmla"] | by["flash3-mla"]),
        (TRTLLM_MLA, by["trtllm-mla"]),
    ]
    yield from ((kernel, rows) for kernel, rows in chosen if rows.any())


def _step(
    sizes: Mapping[str, Array], on: AttentionEngine, kernel: AttentionKernel, knobs: AttentionKnobs
) -> Array:
    """Seconds of arithmetic per key in one block."""
    width = sum(np.ceil(sizes[name] / _WIDTHS) * _WIDTHS for name in ("width", "value_width"))
    rows = kernel.tile(sizes)[0]
    flop = 2 * rows * width * on.units
    convert = np.where(sizes["size"] < _WIDE, knobs.convert * width / (2 * 128) / on.rate, 0.0)
    scores = 1 / (on.exponentials * on.clocks) + kernel.vector / on.lanes
    step = flop * (1 / sizes["rate"] + convert) / knobs.products + rows * on.units * scores
    each = _cache_bytes(sizes) / (sizes["batch"] * sizes["keys"] * sizes["kv_heads"])
    loads = np.where(rows > LEAST, WARPS, 1) * width * on.units
    step = step + np.where(sizes["kv_size"] < sizes["size"], kernel.widens * loads / on.lanes, 0)
    fed: Array = np.maximum(step, each * on.units / (kernel.feed * on.clocks))
    return fed


def _walk(
    blocks: AttentionBlocks, step: Array, units: int, kernel: AttentionKernel, start: Array
) -> Array:
    """Seconds until the last block ends: even shares, and a tail while some SMs are idle."""
    mean = start * (1 - kernel.behind) + blocks.mean * step
    longest = start + blocks.longest * step
    tail = longest - mean if kernel.alone or kernel.balanced else longest / 2
    even = blocks.count / units
    return np.maximum(even * mean + np.minimum(even, 1.0) * tail, longest)


def _cache_bytes(sizes: Mapping[str, Array]) -> Array:
    """Bytes of key and value, which stream while blocks compute; a latent is both."""
    width = sizes["width"] + np.where(is_latent(sizes), 0, sizes["value_width"])
    return sizes["batch"] * sizes["keys"] * sizes["kv_heads"] * width * sizes["kv_size"]


def is_latent(sizes: Mapping[str, Any]) -> Flags:
    """Whether values are parts of the keys, of one head: 512 of 576 in DeepSeek's models."""
    value = sizes["value_width"]
    latent: Flags = (value < sizes["width"]) & (value > _WIDEST_HEAD) & (sizes["kv_heads"] == 1)
    return latent


def _partial_bytes(sizes: Mapping[str, Array], blocks: AttentionBlocks) -> Array:
    """Partial results of splits, and the fp8 copy of queries for a cache in fp8."""
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
