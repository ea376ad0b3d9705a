"""Tiles of products: how many FLOP, bytes and walks each takes, and the fastest of each product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace.costmodels.kernels.engines import LEAST, precision_on, stored_widths
from rooftrace.costmodels.kernels.numbers import ProductKnobs, Tiling
from rooftrace.costmodels.ops import Work
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import precision

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array, Places

    Flags = np.ndarray[Any, np.dtype[np.bool_]]

# -- tiles of products -----------------------------------------------------------------------------
# A kernel cuts C[M, N] = A[M, K] B[K, N] into tiles; each is one block's work on one SM, so
#   tiles:    M and N are padded to the tile's sizes (tile quantisation),
#   waves:    the last one leaves SMs idle unless the tiles fill it (wave quantisation),
#   feeding   a tile takes (a + b) K elements from L2 for 2 a b K flop: small tiles are slow; the
#             bytes are those of the stored elements, which may be narrower than the multiplied,
#   walking   over K takes a while however little is multiplied: a block has few loads in flight,
#   splitting K over s blocks fills waves and shortens walks; s partial results go through HBM.
# As a library does, this picks the fastest tile and split from a few usual ones.
# See NVIDIA, "Matrix Multiplication Background User's Guide", on tile and wave quantization.

TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (64, 16), (16, 64), (16, 16),
)  # fmt: skip
"""Rows and columns of C that one block computes."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Blocks that share one tile's K."""
CHOICES = len(TILES) * len(SPLITS)
FEED = 64
"""Bytes that an SM takes from L2 in a clock (one port; microbenchmarks of V100 to H100 agree)."""
_DEPTH = 32
"""K goes through a tile in steps of this; parts of a split are multiples of them, the last ones may
have none: a split that suits a longer K is open to a shorter one, as if K were padded."""
VECTOR_STEPS = 1 / 16
"""Filling a tile takes a time: steps of the matrix engine, of which the vector engine of a
data-center GPU does a sixteenth meanwhile (A100: 312 and 19.5 TFLOP/s)."""
_HALF = 2.0
"""Bytes of a number of half precision.  A matrix engine fills its pipeline with bytes: in half the
steps of K for TF32, in twice as many for fp8.  cuBLAS's usual tiles have as many stages of 32 steps
in fp16 (`s16816gemm_f16_128x128_32x5`) as of 16 steps in TF32 (`s1688gemm_128x128_16x5`)."""
VECTOR_TILE = 128 * 64
"""Numbers of C in the smallest tile of products on a vector engine: a thread of smaller ones has
too few in registers for what it loads.  C that is narrower has narrower tiles."""
VECTOR_PART = 1024
"""Of K, in a part of a split on a vector engine.  Both suit ViT and BEiT in fp32 at batch 1 to 16
(transformers docs, A100) best, of areas of 4,096 to 16,384 and parts of 0 to 1,024; steps of six
language models (NeuSight, A100) agree."""
PARTIAL = 4 + 4
"""Bytes of an fp32 partial result, written and read again."""


@dataclass(frozen=True, slots=True)
class MatrixEngine:
    """A matrix engine as tiles see it."""

    units: int  # SMs
    cache: float  # byte/s from L2
    memory: float  # byte/s from HBM


def matrix_engine(chip: Chip) -> MatrixEngine | None:
    """The matrix engine of a chip; None where its SM count or clock is unknown."""
    if chip.sm_count is None or chip.clock is None or chip.kind != "gpu":
        return None
    units = int(chip.sm_count.value)
    cache = FEED * units * chip.clock.value
    return MatrixEngine(units, cache, chip.memory_bandwidth.value)


IDEAL = Tiling()
TILED = 2048
"""Products, or attention kernels, that are timed at once, each in all tiles or splits."""


@dataclass(frozen=True, slots=True)
class OwnSeconds:
    """Seconds of kernels with a time model of their own: arrays by case."""

    compute: Array  # of padded work, until the last wave ends
    memory: Array  # of all bytes
    device: Array  # of the kernel, and of those that only it needs

    @classmethod
    def by_place(cls, places: Array, price: Callable[[int, Array], OwnSeconds]) -> OwnSeconds:
        """Cases of one place are priced at once, `TILED` at most.  price: of a place, and cases."""
        made = cls(*(np.zeros(len(places)) for _ in range(3)))
        for place in np.unique(places):
            chosen: Any = np.flatnonzero(places == place)
            for part in np.split(chosen, range(TILED, len(chosen), TILED)):
                single = price(int(place), part)
                for name in ("compute", "memory", "device"):
                    getattr(made, name)[part] = getattr(single, name)
        return made


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one kernel of each row; `device` is its total, without a launch.

    choice: the tile and split of each row's product (see `TileUse.of`), -1 where it has none or
    is not timed by tiles.  untiled: `device` if every tile and every wave were full, and fed at
    once.  busy: seconds that its matrix engines would be busy at their full rate.  paced: those of
    `device` that grow as the clock falls.
    """

    compute: Array
    memory: Array
    device: Array
    choice: Places
    untiled: Array
    busy: Amount = 0.0
    paced: Amount = 0.0

    def where(self, chosen: Flags, others: KernelSeconds) -> KernelSeconds:
        """These seconds; of chosen rows those of others."""
        pairs = ((getattr(self, f.name), getattr(others, f.name)) for f in fields(self))
        return KernelSeconds(*(np.where(chosen, theirs, ours) for ours, theirs in pairs))

    def after(self, rounding: Array) -> KernelSeconds:
        """The seconds with those of kernels that round activations before."""
        memory, device, untiled = (
            each + rounding for each in (self.memory, self.device, self.untiled)
        )
        return replace(self, memory=memory, device=device, untiled=untiled)

    def held(self, clock: Amount) -> KernelSeconds:
        """The seconds at this share of the clock."""
        more = self.paced * (1 / np.asarray(clock) - 1)
        device, untiled = self.device + more, self.untiled + more
        return replace(self, device=device, untiled=untiled, busy=0.0, paced=0.0)

    def at_pace(self, pace: float) -> KernelSeconds:
        """The seconds of kernels that are all so many times as fast."""
        seconds = ("compute", "memory", "device", "untiled", "busy", "paced")
        return replace(self, **{name: getattr(self, name) / pace for name in seconds})


SIZES = ("rows", "columns", "inner", "products", "width_a", "width_b", "padded")
"""The sizes of products that `tile_terms` reads."""


def product_sizes(
    work: Work, shape: tuple[Amount, Amount, Amount], flop: Amount, padded: Amount, chip: Chip
) -> dict[str, Amount]:
    """SIZES of products of this shape (M, N, K) of `flop` together; padded: see `Running`.

    Activations stay wide on a chip without an engine for what they would be rounded to.
    """
    width_a, width_b = stored_widths(work)
    if precision(work.precision).computes:
        width_a = max(width_a, float(precision(precision_on(chip, work.precision)).bits / 8))

    each = np.maximum(2 * math.prod(shape), 1.0)
    products = np.maximum(1.0, np.rint(flop / each))
    numbers = (*shape, products, width_a, width_b, padded)
    return dict(zip(SIZES, numbers, strict=True))


@dataclass(frozen=True, slots=True)
class TileTerms:
    """Amounts of every tile and split for some products: arrays [products, tiles x splits].

    Those that no tile changes are [products, 1] where there is one split.
    """

    flop: Array  # of full waves; infinite for tiles that a library does not take
    feed: Array  # bytes from L2
    spill: Array  # bytes of partial results through HBM
    walk: Array  # bytes that L2 could send while a block walks over its part of K
    split: np.ndarray[Any, np.dtype[np.bool_]]  # whether K is split
    least: Array  # [products, 1]: the least FLOP of a tile whose K is split
    partial: Array  # [products, 1]: bytes of one part's results, through HBM

    @property
    def bound(self) -> TileTerms:
        """One choice for each product, of which no tile with a split K has less of anything."""
        feed = self.feed.min(axis=1, keepdims=True)
        walk, split = np.zeros_like(feed), np.ones_like(feed, dtype=bool)
        return replace(
            self, flop=self.least, feed=feed, spill=SPLITS[1] * self.partial, walk=walk, split=split
        )


def tile_terms(
    sizes: Mapping[str, Array],
    units: int,
    tiling: Tiling = IDEAL,
    kernels: Iterable[tuple[ProductKnobs, Any]] = (),
    usual: bool = False,
    splits: Sequence[int] = SPLITS,
) -> TileTerms:
    """Every tile and split for products C[rows, columns] = A[rows, inner] B[inner, columns].

    sizes: arrays of one length by SIZES: products of one kernel, widths in bytes of a stored
    element, padded 1 where a tile is computed in full, as on a matrix engine; 0 on the vector
    engine, where matrix-vector kernels skip rows and columns that C lacks.  Padding is never
    loaded.  units: SMs.  kernels: of libraries, with flags of their products.  usual: whether a
    vector engine has cuBLAS's tiles (`VECTOR_TILE`), in full, or any.  splits: the first of SPLITS.
    """
    a, b, split = *_choices(), np.array(splits, dtype=float)[:, None]  # [tiles, 1, 1] twice
    rows, columns, inner, products, width_a, width_b, padded = (sizes[name] for name in SIZES)
    is_split, loaded_a, loaded_b = split > 1, np.minimum(a, rows), np.minimum(b, columns)
    on_vector = usual & (padded == 0) & (np.minimum(rows, columns) >= LEAST)
    depth = np.maximum(np.ceil(inner / (split * _DEPTH)) * _DEPTH, on_vector * VECTOR_PART)
    depth = np.where(is_split, depth, inner)
    done = np.where((padded > 0) | on_vector, a * b, loaded_a * loaded_b)
    busy, prologue = np.full(len(rows), tiling.busy), np.full(len(rows), tiling.prologue)
    common, (share, fed, cluster) = np.zeros(len(rows)), np.ones((3, len(rows)))
    refused = []
    for kernel, runs in kernels:
        busy[runs] = tiling.busy if kernel.busy is None else kernel.busy
        prologue[runs] = tiling.prologue if kernel.prologue is None else kernel.prologue
        common[runs] = kernel.common
        fed[runs] = (kernel.feed or tiling.feed) / tiling.feed
        taken = ~is_split | (not kernel.whole)
        if kernel.tiles:
            high, wide, own, share[runs], cluster[runs] = _ruled(kernel, rows[runs], columns[runs])
            prologue[runs] = np.where(np.isnan(own), prologue[runs], own)
            taken = taken & (a == high) & ((b == wide) | (wide == 0))
        refused.append((runs, ~taken))
    if on_vector.any():
        refused.append((on_vector, ~_suits_vectors(a, b, rows, columns)[:, :, on_vector]))
    wide = np.maximum(width_a, width_b)
    prologue *= _HALF / np.where(padded > 0, wide, np.minimum(_HALF, wide) / VECTOR_STEPS)
    walk = LEAST * (width_a + width_b) * depth * units / busy
    # From here on arrays hold every tile with every split: few passes over them.
    high = np.ceil(rows / (a * cluster)) * cluster if (cluster > 1).any() else np.ceil(rows / a)
    tiles = high * np.ceil(columns / b) * products
    blocks = tiles * split / units
    flop = np.ceil(blocks) * (depth / share + (1 - common) * prologue)
    if common.any():
        flop += blocks * common * prologue
    flop *= 2 * units * done
    for runs, others in refused:
        flop[:, :, runs] = np.where(others, np.inf, flop[:, :, runs])
    feed = tiles * (loaded_a * width_a + loaded_b * width_b) * inner / fed
    partial = rows * columns * products * PARTIAL
    spill = np.where(is_split, split * partial, 0.0)
    # Tiles compute all of C, and each part of K has a prologue.
    least = 2 * rows * columns * products * (inner / share + SPLITS[1] * prologue)
    each = {"flop": flop, "feed": feed, "spill": spill, "walk": walk, "split": is_split}
    every = {name: _flat(term, flop.shape) for name, term in each.items()}
    return TileTerms(**every, least=least[:, None], partial=partial[:, None])


def _suits_vectors(a: Array, b: Array, rows: Array, columns: Array) -> Any:
    """Whether cuBLAS has a tile for products of a vector engine, or C is narrower than tiles."""
    narrow = ((a < 64) & (rows <= a)) | ((b < 64) & (columns <= b))
    return narrow | (a * b >= VECTOR_TILE)


def _flat(term: Any, shape: tuple[int, ...]) -> Any:
    """Amounts [tiles, splits, products] as [products, tiles x splits], or [products, 1] where no
    tile changes them and there is one split."""
    least = shape if shape[1] > 1 else (1, 1, shape[2])
    term = np.broadcast_to(term, np.broadcast_shapes(term.shape, least))
    return term.reshape(term.shape[0] * term.shape[1], shape[2]).T


def _ruled(kernel: ProductKnobs, rows: Array, columns: Array) -> Array:
    """Rows, columns, prologue (NaN: the library's), share, cluster of each product's tile."""
    fits = [(rows <= rule.most_rows) & (columns <= rule.most_columns) for rule in kernel.tiles]
    fits[-1] = np.ones(len(rows), dtype=bool)
    table = [(r.rows, r.columns, r.prologue, r.share, r.cluster) for r in kernel.tiles]
    ruled: Array = np.array(table, dtype=float)[np.argmax(fits, axis=0)].T
    return ruled


@cache
def _choices() -> tuple[Array, Array]:
    a, b = np.array(TILES, dtype=float).T[:, :, None, None]
    return a, b


def fastest(
    count: int,
    terms: Callable[[Places, Sequence[int]], TileTerms],
    price: Callable[[Places, TileTerms], Array],
) -> Array:
    """The numbers of the fastest tile and split of each of `count` products.

    terms: of some products, with the first of SPLITS.  price: numbers [k, products] of the fastest
    of these, their seconds first.  Splits are timed only where their bound is under the seconds
    without one.
    """
    numbers = []
    for part in np.split(np.arange(count), range(TILED, count, TILED)):
        whole = terms(part, SPLITS[:1])
        best = price(part, whole)
        split = price(part, whole.bound)[0] <= best[0]
        if split.any():
            best[:, split] = price(part[split], terms(part[split], SPLITS))
        numbers.append(best)
    result: Array = np.concatenate(numbers, axis=1)
    return result


def tile_shares(sizes: Mapping[str, Array], rate: Array, on: MatrixEngine) -> Array:
    """Share of the rate that the best tile leaves each product, in (0, 1]; no size may be 0.

    sizes: those of `tile_terms`.  rate: FLOP/s for each product.
    """

    def terms(part: Places, splits: Sequence[int]) -> TileTerms:
        return tile_terms({name: sizes[name][part] for name in SIZES}, on.units, splits=splits)

    def price(part: Places, terms: TileTerms) -> Array:
        seconds: Array = _at_peaks(terms, rate[part], on).min(axis=1)[None]
        return seconds

    seconds = fastest(len(rate), terms, price)[0]
    rows, columns, inner, products = (sizes[name] for name in SIZES[:4])
    useful = 2.0 * rows * columns * inner * products / rate
    shares: Array = np.minimum(1.0, useful / seconds)
    return shares


def tile_seconds(sizes: Mapping[str, Array], rate: Array, on: MatrixEngine) -> Array:
    """Seconds [products, tiles x splits] of every tile and split, at the datasheet's rates."""
    return _at_peaks(tile_terms(sizes, on.units), rate, on)


def _at_peaks(terms: TileTerms, rate: Array, on: MatrixEngine) -> Array:
    work = np.maximum(terms.flop / rate[:, None], terms.feed / on.cache)
    seconds: Array = work + terms.spill / on.memory
    return seconds


@dataclass(frozen=True, slots=True)
class TileUse:
    """How one product C[M, N] of a kernel is cut into tiles, and the shares that it fills."""

    rows: int
    columns: int
    split: int  # parts of K
    tile_efficiency: float  # the share of its tiles' FLOP that the product needs
    wave_efficiency: float  # the share of the SMs that has a block, over all waves

    @staticmethod
    def of(place: int, sizes: Mapping[str, Array], units: int) -> TileUse:
        """The use of the tile and split at this place among those of `tile_terms`.

        place: a column of its arrays: tile by tile, each in all splits.  sizes: those of
        `tile_terms` for one product.  units: SMs.
        """
        tile, number = divmod(place, len(SPLITS))
        (a, b), split = TILES[tile], SPLITS[number]
        rows, columns, _, products, _, _, padded = (float(sizes[name][0]) for name in SIZES)
        tiles = math.ceil(rows / a) * math.ceil(columns / b)
        high, wide = (a, b) if padded else (min(a, rows), min(b, columns))
        waves = tiles * products * split / units
        filled = min(1.0, rows * columns / (tiles * high * wide))
        return TileUse(a, b, split, filled, waves / math.ceil(waves))


def p_norm(p: float, *terms: Array) -> Array:
    """(a^p + b^p + ...)^(1/p); their maximum where p is infinite."""
    if p == float("inf"):
        largest: Array = np.maximum.reduce(np.broadcast_arrays(*terms))
        return largest
    total: Array = sum((np.asarray(term) ** p for term in terms), start=np.zeros(()))
    root: Array = total ** (1 / p)
    return root
