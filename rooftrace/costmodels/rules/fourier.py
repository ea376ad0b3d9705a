"""Fast Fourier transforms: 5 N log2 N flop (van Loan 1992; the convention of fftw.org/speed)."""

from __future__ import annotations

import math

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.opviews import OpView
from rooftrace.costmodels.registry import builtin
from rooftrace.costmodels.rules.common import axes, extent, vector


def fft_flop(transforms: int, n: int) -> int:
    """`transforms` complex transforms of n points."""
    return round(transforms * 5 * n * math.log2(n)) if n > 1 else 0


@builtin("aten._fft_c2c")
def fft(op: OpView) -> Cost:
    """Complex to complex over all of `dim` together: elements / n transforms of n points.

    One pass over memory: what a transform that fits on chip needs.
    """
    x = op.needed("self")
    n = extent(x.shape, axes(op, x.dim))
    return vector(op, fft_flop(x.elements // n if n else 0, n)) + op.streamed()


@builtin("aten._fft_r2c", "aten._fft_c2r")
def real_fft(op: OpView) -> Cost:
    """Real on one side: half of the complex transform of the real side's size."""
    real = op.outputs[0] if "c2r" in op.target else op.needed("self")
    n = extent(real.shape, axes(op, real.dim))
    return vector(op, fft_flop(real.elements // n if n else 0, n) // 2) + op.streamed()
