"""Seconds of a fused attention kernel over a cache: its blocks, its bytes, its companions.

A flash attention kernel gives each block some rows of the score matrix, and walks over their keys.
  rows     are whole tiles; the heads of a group share a tile where the kernel packs them,
  keys     are whole steps; a causal block ends at its last row, so that blocks differ in length,
  a step   takes its two products and its exponentials; a block takes a start beside its steps,
  blocks   fill the SMs, and the last ones to end leave some idle; few blocks are split along their
           keys, and the partial results combined by one more kernel,
  memory   streams key and value while blocks compute; query, output and partial results go
           through it apart, and a kernel before stores the new entries of the cache.
Sizes of tiles are those of FlashAttention 2 (with a paged cache) and 3: Dao, "FlashAttention-2",
2023; Shah et al., "FlashAttention-3", 2024; https://github.com/Dao-AILab/flash-attention.

Not here: sliding windows (a block's longest walk is taken to be over all keys), steps that shrink
for wide heads in bf16, tiles of 192 rows for prompts with heads of 64, sorting of requests, power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace.hardware.chip import Chip

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Flags = np.ndarray[Any, np.dtype[np.bool_]]

EXPONENTIALS = 16
"""Per SM and clock, sm_80 and sm_90: CUDA C++ Programming Guide, arithmetic throughput."""
MOST_SPLITS = 32
"""Parts of one row's keys: vLLM's default for CUDA graphs."""
_PARTIAL = 4 + 4
"""Bytes of an fp32 partial result, written and read again."""
_WIDE = 2
"""Bytes of an element of query and output."""


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """How a kernel cuts its work.

    rows: queries, times heads that share a tile, of a block.  keys: of a step.  packs: the heads of
    a group share tiles for any number of queries; otherwise for one query only, and then queries
    and outputs of several requests are copied into that order and back.  ordered: blocks stay on
    their SM and take the longest work first; otherwise the order is that of the grid.
    """

    rows: int
    keys: int
    packs: bool
    ordered: bool


FLASH2 = AttentionKernel(rows=64, keys=128, packs=False, ordered=False)
FLASH3 = AttentionKernel(rows=128, keys=128, packs=True, ordered=True)


@dataclass(frozen=True, slots=True)
class AttentionEngine:
    """A chip as attention sees it: SMs, and what they do in a second.

    rate, narrow_rate: FLOP of bf16 and of fp8.  clocks: of all SMs together.  memory: bytes.
    """

    units: int
    rate: float
    narrow_rate: float
    clocks: float
    memory: float


def attention_engine(chip: Chip) -> AttentionEngine | None:
    """None where the chip's SM count or clock is not known.  Without fp8, products are of bf16."""
    if chip.sm_count is None or chip.clock is None or chip.kind != "gpu":
        return None
    if not chip.has_peak("matrix", "bf16"):
        return None
    units, rate = int(chip.sm_count.value), chip.peak("matrix", "bf16")
    narrow = chip.peak("matrix", "fp8") if chip.has_peak("matrix", "fp8") else rate
    clocks = units * chip.clock.value
    return AttentionEngine(units, rate, narrow, clocks, chip.memory_bandwidth.value)


@dataclass(frozen=True, slots=True)
class AttentionKnobs:
    """What measurements tell.

    compute: share of the matrix rate inside a step, beside exponentials counted in full: it is high
    where a kernel hides some of them.  convert: what an fp8 step takes beside its products, as a
    share of those in bf16, at a head width of 128; steps of wider heads hold fewer keys, so the
    share grows with the width.  memory: share of the bandwidth.  store: bytes that an SM moves in a
    clock while new entries go to the pages of a cache.  In seconds, launch: of the kernel and what
    plans it.  start: of a block.  prepare: of the kernels that copy queries, to fp8 or by groups.
    request: of one more request.  combine: of the kernel that adds up splits.
    """

    compute: float = 1.0
    convert: float = 0.0
    memory: float = 1.0
    store: float = float("inf")
    launch: float = 0.0
    start: float = 0.0
    prepare: float = 0.0
    request: float = 0.0
    combine: float = 0.0


IDEAL = AttentionKnobs()
HOPPER = AttentionKnobs(
    compute=1.0, convert=0.65, memory=0.83, store=3.8,
    launch=8.7e-6, start=1.6e-6, prepare=1.3e-6, request=1.3e-8, combine=1.5e-6,
)  # fmt: skip
"""FlashAttention 3 in vLLM 0.24 on H100 and H200, by benchmarks/accuracy/attention.py on published
measurements (aiconfigurator's performance database, Apache-2.0).  The two GPUs' fits agree within
an eighth, `request` and `combine` within a third."""
AMPERE = AttentionKnobs(
    compute=0.68, memory=0.73, store=9.2,
    launch=8.9e-6, start=0.44e-6, prepare=7.3e-6, request=1.2e-8, combine=7.1e-6,
)  # fmt: skip
"""FlashAttention 2 in vLLM 0.14 on A100, from the same source; fp8 caches were not measured."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Arrays by case.  count: blocks of the kernel.  tiles: of rows over one key and value head.
    mean, longest: keys that a block walks over, in whole steps.  split: parts of a row's keys."""

    count: Array
    tiles: Array
    mean: Array
    longest: Array
    split: Array


def attention_blocks(sizes: Mapping[str, Array], units: int, kernel: AttentionKernel) -> Blocks:
    """The blocks that `kernel` makes of each case (sizes as in `attention_seconds`)."""
    import numpy as np

    queries, packed = sizes["queries"], _packed(sizes, kernel)
    tiles = np.ceil(queries * packed / kernel.rows)
    count = sizes["batch"] * sizes["heads"] / packed * tiles
    steps = np.ceil(sizes["keys"] / kernel.keys)
    whole = steps * kernel.keys
    # A block ends at its last row: it walks over what a row sees, half its rows more, half a step.
    span = kernel.rows / packed
    more = (tiles * span - queries) / 2 + (span - 1) / 2 + np.maximum(kernel.keys - span, 0) / 2
    mean = np.clip(sizes["visible"] / queries + more, kernel.keys, whole)
    can = (packed > 1) | kernel.packs
    split = np.where(can, np.clip(np.minimum(units // count, steps), 1, MOST_SPLITS), 1.0)
    longest = np.ceil(steps / split) * kernel.keys
    return Blocks(count * split, tiles, np.minimum(mean / split, longest), longest, split)


def _packed(sizes: Mapping[str, Array], kernel: AttentionKernel) -> Array:
    """Heads that share a tile of rows."""
    import numpy as np

    group = sizes["heads"] / sizes["kv_heads"]
    return group if kernel.packs else np.where(sizes["queries"] == 1, group, 1.0)


def attention_seconds(
    sizes: Mapping[str, Array],
    on: AttentionEngine,
    kernel: AttentionKernel = FLASH3,
    knobs: AttentionKnobs = IDEAL,
) -> Array:
    """Seconds of attention for each case.

    sizes: arrays of one length.  batch, queries (of one request), keys, visible ((query, key) pairs
    of one head that the mask lets through), heads, kv_heads, width (of query and key), value_width,
    kv_size (bytes of an element of the cache; below 2 the products are of fp8), stored (new entries
    that the call writes to a request's cache; 0 where another op does that).
    """
    import numpy as np

    blocks = attention_blocks(sizes, on.units, kernel)
    memory = on.memory * knobs.memory
    walk = _walk(blocks, _step(sizes, on, kernel, knobs), on.units, kernel, knobs.start)
    inside = np.maximum(walk, _cache_bytes(sizes) / memory)
    apart = _apart_bytes(sizes, blocks) / memory
    store = _stored_bytes(sizes) / min(memory, on.clocks * knobs.store)
    copy = _copies(sizes, kernel) * knobs.prepare
    combine = (blocks.split > 1) * knobs.combine
    return knobs.launch + sizes["batch"] * knobs.request + copy + store + inside + apart + combine


def _step(
    sizes: Mapping[str, Array], on: AttentionEngine, kernel: AttentionKernel, knobs: AttentionKnobs
) -> Array:
    """Seconds of arithmetic that one key takes a block."""
    import numpy as np

    width = sizes["width"] + sizes["value_width"]
    products = 2 * kernel.rows * width * on.units / on.rate
    narrow = on.rate / on.narrow_rate + knobs.convert * width / (2 * 128)
    exponentials = kernel.rows * on.units / (EXPONENTIALS * on.clocks)
    return products * np.where(_is_narrow(sizes), narrow, 1.0) / knobs.compute + exponentials


def _walk(blocks: Blocks, step: Array, units: int, kernel: AttentionKernel, start: float) -> Array:
    """Seconds until the last block ends: even shares, and a tail while some SMs are idle."""
    import numpy as np

    mean, longest = start + blocks.mean * step, start + blocks.longest * step
    tail = longest - mean if kernel.ordered else longest / 2
    even = blocks.count / units
    return np.maximum(even * mean + np.minimum(even, 1.0) * tail, longest)


def _cache_bytes(sizes: Mapping[str, Array]) -> Array:
    width = sizes["width"] + sizes["value_width"]
    return sizes["batch"] * sizes["keys"] * sizes["kv_heads"] * width * sizes["kv_size"]


def _apart_bytes(sizes: Mapping[str, Array], blocks: Blocks) -> Array:
    """Query, its fp8 copy, output, and partial results."""
    import numpy as np

    copy = np.where(_is_narrow(sizes), 2 * sizes["kv_size"], 0.0)
    partial = np.where(blocks.split > 1, blocks.split * _PARTIAL, 0.0)
    row = (_WIDE + copy) * sizes["width"] + (_WIDE + partial) * sizes["value_width"]
    return sizes["batch"] * sizes["queries"] * sizes["heads"] * row


def _stored_bytes(sizes: Mapping[str, Array]) -> Array:
    """New keys and values: read, and written in the cache's format."""
    width = sizes["width"] + sizes["value_width"]
    entries = sizes["batch"] * sizes["stored"] * sizes["kv_heads"] * width
    return entries * (_WIDE + sizes["kv_size"])


def _is_narrow(sizes: Mapping[str, Array]) -> Flags:
    return sizes["kv_size"] < _WIDE


def _copies(sizes: Mapping[str, Array], kernel: AttentionKernel) -> Flags:
    """Whether queries are copied: to fp8, or into groups (a view for one request or one head)."""
    if kernel.packs:
        return _is_narrow(sizes)
    grouped = (_packed(sizes, kernel) > 1) & (sizes["kv_heads"] > 1) & (sizes["batch"] > 1)
    return _is_narrow(sizes) | grouped
