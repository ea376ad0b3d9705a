"""How much of a matrix engine a product can use: whole tiles, in whole waves, fed by the cache.

A kernel cuts C[M, N] = A[M, K] B[K, N] into tiles; each is one block's work on one SM, so
  tiles   are whole: M and N are padded to the tile's sizes (quantisation of tiles),
  waves   are whole: the last one leaves SMs idle unless the tiles fill it (quantisation of waves),
  feeding a tile takes (a + b) K elements from L2 for 2 a b K flop: small tiles are slow,
  splitting K over s blocks fills waves, and sends s partial results through HBM.
A library picks the tile and the split that suit the product; so does this, from a few usual ones.
See NVIDIA, "Matrix Multiplication Background User's Guide", sections on tile and wave quantization.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rooftrace.hardware.chip import Chip

TILES = (
    (256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64),
    (128, 32), (32, 128), (64, 32), (32, 64), (64, 16), (16, 64), (16, 16),
)  # fmt: skip
"""Rows and columns of C that one block computes."""
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Blocks that share one tile's K."""
FEED = 64
"""Bytes that an SM takes from L2 in a clock (one port; microbenchmarks of V100 to H100 agree)."""
_DEPTH = 32
"""K goes through a tile in steps of this; a split is a whole number of them."""
_PARTIAL = 4 + 4
"""Bytes of an fp32 partial result, written and read again."""


@dataclass(frozen=True, slots=True)
class MatrixEngine:
    """A matrix engine as tiles see it.

    units: SMs.  feed: FLOP at peak rate in the time of one byte from L2.  spill: the same for one
    byte from HBM.
    """

    units: int
    feed: float
    spill: float


def matrix_engine(chip: Chip, rate: float) -> MatrixEngine | None:
    """The engine behind a peak of `rate` FLOP/s; None where the chip's SM count is not known."""
    if chip.sm_count is None or chip.clock is None or chip.kind != "gpu":
        return None
    units = int(chip.sm_count.value)
    cache = FEED * units * chip.clock.value
    return MatrixEngine(units, rate / cache, rate / chip.memory_bandwidth.value)


@lru_cache(maxsize=65536)
def tile_efficiency(
    rows: int, columns: int, inner: int, products: int, size: float, on: MatrixEngine
) -> float:
    """Share of the peak that the best tile leaves, in (0, 1].

    C[rows, columns] = A[rows, inner] B[inner, columns], `products` of them in one kernel, of
    elements of `size` bytes.
    """
    useful = rows * columns * inner * products
    best = float("inf")
    for a, b in TILES:
        tiles = -(-rows // a) * -(-columns // b) * products
        slow = max(1.0, on.feed * (a + b) * size / (2 * a * b))
        for split in SPLITS:
            if split > 1 and split * _DEPTH > inner:
                break
            depth = -(-inner // (split * _DEPTH)) * _DEPTH if split > 1 else inner
            waves = -(-tiles * split // on.units)
            flop = waves * on.units * a * b * depth * slow
            if split > 1:
                flop += split * rows * columns * products * _PARTIAL * on.spill / 2
            best = min(best, flop)
    return min(1.0, useful / best) if useful else 1.0
