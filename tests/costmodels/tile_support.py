"""The share of its rate that one product reaches: `tile_shares` of arrays of length 1."""

import numpy as np

from rooftrace.costmodels.kernels.tiles import SIZES, MatrixEngine, tile_shares
from rooftrace.hardware.chipfile import load_chip

RATE = load_chip("h100-sxm").peak("matrix", "bf16")


def tile_efficiency(
    shape: tuple[int, int, int],
    on: MatrixEngine,
    rate: float = RATE,
    products: int = 1,
    widths: tuple[float, float] = (2, 2),
) -> float:
    """shape: M, N, K.  widths: bytes of a stored element of A and of B.  rate: FLOP/s."""
    numbers = (*shape, products, *widths, 1)
    sizes = {name: np.array([float(n)]) for name, n in zip(SIZES, numbers, strict=True)}
    return float(tile_shares(sizes, np.array([rate]), on)[0])
