"""How much of a matrix engine a product can use: whole tiles, in whole waves, fed by the cache.

A kernel cuts C[M, N] = A[M, K] B[K, N] into tiles; each is one block's work on one SM, so
  tiles   are whole: M and N are padded to the tile's sizes (quantisation of tiles),
  waves   are whole: the last one leaves SMs idle unless the tiles fill it (quantisation of waves),
  feeding a tile takes (a + b) K elements from L2 for 2 a b K flop: small tiles are slow; the bytes
          are those of what is stored, which may be narrower than what is multiplied,
  walking over K takes a while however little is multiplied: a block has few loads on their way,
  splitting K over s blocks fills waves and shortens walks; s partial results go through HBM.
A library picks the tile and the split that suit the product; so does this, from a few usual ones.
See NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantization.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.knobs.numbers import Tiling
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (64, 16), (16, 64), (16, 16),
)  # fmt: skip
"""Rows and columns of C that one block computes."""
LEAST = 16
"""Rows, and columns, of C in the smallest of them; a matrix instruction has about as many."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Blocks that share one tile's K."""
FEED = 64
"""Bytes that an SM takes from L2 in a clock (one port; microbenchmarks of V100 to H100 agree)."""
_DEPTH = 32
"""K goes through a tile in steps of this; parts of a split are whole numbers of them, the last ones
may have none: a split that suits a longer K is open to a shorter one, as if K were padded."""
VECTOR_STEPS = 1 / 16
"""Filling a tile takes a time: steps of the matrix engine, of which the vector engine of a
data-center GPU does a sixteenth meanwhile (A100: 312 and 19.5 TFLOP/s)."""
_PARTIAL = 4 + 4
"""Bytes of an fp32 partial result, written and read again."""


@dataclass(frozen=True, slots=True)
class MatrixEngine:
    """A matrix engine as tiles see it."""

    units: int  # SMs
    rate: float  # FLOP/s
    cache: float  # byte/s from L2
    memory: float  # byte/s from HBM


def matrix_engine(chip: Chip, rate: float) -> MatrixEngine | None:
    """The engine behind a peak of `rate` FLOP/s; None where the chip's SM count is not known."""
    if chip.sm_count is None or chip.clock is None or chip.kind != "gpu":
        return None
    units = int(chip.sm_count.value)
    cache = FEED * units * chip.clock.value
    return MatrixEngine(units, rate, cache, chip.memory_bandwidth.value)


IDEAL = Tiling()
TILED = 1024
"""Products, or attention kernels, that are timed at once, each in all tiles or splits."""
SIZES = ("rows", "columns", "inner", "products", "width_a", "width_b", "whole")
"""What `tile_terms` asks of products."""


@dataclass(frozen=True, slots=True)
class TileTerms:
    """What every tile and split takes for some products: arrays [products, tiles x splits]."""

    flop: Array  # of whole waves; infinite for tiles that a library does not take
    feed: Array  # bytes from L2
    spill: Array  # bytes of partial results through HBM
    walk: Array  # bytes that HBM could move while a block walks over its part of K
    split: np.ndarray[Any, np.dtype[np.bool_]]  # whether K is split


def tile_terms(sizes: Mapping[str, Array], units: int, tiling: Tiling = IDEAL) -> TileTerms:
    """Every tile and split for products C[rows, columns] = A[rows, inner] B[inner, columns].

    sizes: arrays of one length: rows, columns, inner, products (in one kernel), width_a and width_b
    (bytes of a stored element of A and of B), whole (1 where a tile's arithmetic is done whole, as
    on a matrix engine; 0 where rows and columns that C lacks are left out, as in matrix-vector
    kernels of the vector engine).  What C lacks is never loaded.  units: SMs.
    """
    import numpy as np

    a, b, split = _choices()  # [tiles, 1, 1] twice, [splits, 1]
    rows, columns, inner, products, width_a, width_b, whole = (sizes[name] for name in SIZES)
    shape = (len(a), len(split), len(rows))
    is_split, depth = split > 1, np.ceil(inner / (split * _DEPTH)) * _DEPTH
    depth = np.where(is_split, depth, inner)
    loaded_a, loaded_b = np.minimum(a, rows), np.minimum(b, columns)
    done = np.where(whole > 0, a * b, loaded_a * loaded_b)
    tiles = np.ceil(rows / a) * np.ceil(columns / b) * products
    walk = LEAST * (width_a + width_b) * depth * units / tiling.busy
    # Only from here on do arrays hold every tile with every split: few passes over them.
    flop = np.ceil(tiles * split / units)
    flop *= 2 * units
    flop *= done
    flop *= depth + tiling.prologue * np.where(whole > 0, 1.0, VECTOR_STEPS)
    if tiling.pick == "rows":
        np.copyto(flop, np.inf, where=is_split | ~_by_rows(a, b, rows))
    feed = tiles * (loaded_a * width_a + loaded_b * width_b) * inner
    spill = np.where(is_split, split * rows * columns * products * _PARTIAL, 0.0)
    return TileTerms(
        *(
            np.broadcast_to(term, shape).reshape(len(a) * len(split), len(rows)).T
            for term in (flop, feed, spill, walk, is_split)
        )
    )


def _by_rows(a: Array, b: Array, rows: Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which tiles a library takes that looks at the rows of C alone: [tiles, 1, products].

    So do the fp8 kernels of CUTLASS in vLLM (csrc/quantization/cutlass_w8a8): 128 x 128 above 128
    rows, 64 x 128 above 64, 64 x 64 below, or as narrow as 16 with operands swapped.
    """
    import numpy as np

    small = np.minimum(a, b) <= 64
    chosen: np.ndarray[Any, np.dtype[np.bool_]] = np.where(
        rows > 128,
        (a == 128) & (b == 128),
        np.where(rows > 64, (a == 64) & (b == 128), small & (np.maximum(a, b) == 64)),
    )
    return chosen


@cache
def _choices() -> tuple[Array, Array, Array]:
    import numpy as np

    a, b = np.array(TILES, dtype=float).T[:, :, None, None]
    return a, b, np.array(SPLITS, dtype=float)[:, None]


@lru_cache(maxsize=65536)
def tile_efficiency(
    rows: float,
    columns: int,
    inner: float,
    products: int,
    widths: tuple[float, float],
    on: MatrixEngine,
    whole: bool = True,
) -> float:
    """Share of the peak that the best tile leaves, in (0, 1].

    widths: bytes of a stored element of A and of B.  whole: see `tile_terms`.
    A tile that L2 cannot feed in the time of its arithmetic takes the time of the feeding.
    """
    import numpy as np

    if 0 in (rows, columns, inner, products):
        return 1.0
    numbers = (rows, columns, inner, products, *widths, whole)
    arrays = {name: np.array([float(n)]) for name, n in zip(SIZES, numbers, strict=True)}
    return float(tile_shares(arrays, np.array([on.rate]), on)[0])


def tile_shares(sizes: Mapping[str, Array], rate: Array, on: MatrixEngine) -> Array:
    """Share of the rate that the best tile leaves each product, in (0, 1]; no size may be 0.

    sizes: those of `tile_terms`.  rate: FLOP/s for each product, in place of that of `on`.
    """
    import numpy as np

    cuts = [slice(at, at + TILED) for at in range(0, len(rate), TILED)]
    parts = [({name: sizes[name][cut] for name in SIZES}, rate[cut]) for cut in cuts]
    seconds = np.concatenate([_tile_seconds(*part, on).min(axis=1) for part in parts])
    rows, columns, inner, products = (sizes[name] for name in SIZES[:4])
    useful = 2.0 * rows * columns * inner * products / rate
    shares: Array = np.minimum(1.0, useful / seconds)
    return shares


def _tile_seconds(sizes: Mapping[str, Array], rate: Array, on: MatrixEngine) -> Array:
    """Seconds [products, tiles x splits] of every tile and split, at the datasheet's rates."""
    import numpy as np

    terms = tile_terms(sizes, on.units)
    work = np.maximum(terms.flop / rate[:, None], terms.feed / on.cache)
    seconds: Array = work + terms.spill / on.memory
    return seconds


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A tile of C[M, N] and into how many parts K is split, as a library would pick them."""

    rows: int
    columns: int
    split: int = 1

    @staticmethod
    def at(place: int) -> TileChoice:
        """The choice at this place among those of `tile_terms`: tile by tile, each in all splits.

        place: a column of its arrays.
        """
        tile, split = divmod(place, len(SPLITS))
        return TileChoice(*TILES[tile], SPLITS[split])

    @staticmethod
    def fastest(sizes: Mapping[str, Array], on: MatrixEngine) -> TileChoice:
        """What takes one product the least time at the datasheet's rates.

        sizes: those of `tile_terms`, arrays of length 1.
        """
        import numpy as np

        return TileChoice.at(int(_tile_seconds(sizes, np.array([on.rate]), on).argmin()))

    def filled(self, rows: float, columns: int, whole: bool) -> float:
        """The share of what its tiles compute that C[rows, columns] has, in (0, 1].

        whole: whether a tile computes the rows and columns that C lacks (see `tile_terms`).
        """
        tiles = math.ceil(rows / self.rows) * math.ceil(columns / self.columns)
        high = self.rows if whole else min(self.rows, rows)
        wide = self.columns if whole else min(self.columns, columns)
        return min(1.0, rows * columns / (tiles * high * wide))

    def waves(self, rows: float, columns: int, products: int, units: int) -> float:
        """How often the blocks of `products` such products fill all SMs; the last time in part."""
        tiles = math.ceil(rows / self.rows) * math.ceil(columns / self.columns)
        return tiles * products * self.split / units


def p_norm(p: float, *terms: Array) -> Array:
    """(a^p + b^p + ...)^(1/p); their maximum where p is infinite."""
    import numpy as np

    if p == float("inf"):
        largest: Array = np.maximum.reduce(np.broadcast_arrays(*terms))
        return largest
    total: Array = sum((np.asarray(term) ** p for term in terms), start=np.zeros(()))
    root: Array = total ** (1 / p)
    return root
