"""How a kernel loads rows, and on which engine its products run: numbers beside its FLOP and bytes.

A thread loads 16 bytes at once, where rows begin at multiples of that.  Elsewhere kernels load
smaller pieces: products cannot use the copies that feed a matrix engine best, and softmax over more
than 1,024 elements reads each row several times, where it would have kept it in shared memory.
Sources: alignment of operands in cuBLAS ("Tensor Core Usage", cuBLAS documentation), the 16 bytes
of TMA and cp.async (CUDA C++ Programming Guide), the conditions of `host_softmax` in SoftMax.cu of
ATen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import MATRIX, Work
from rooftrace.costmodels.knobs.classes import UNITS
from rooftrace.hardware.precisions import compute_family, precision

if TYPE_CHECKING:
    import numpy as np

    Amount = np.ndarray[Any, np.dtype[np.float64]] | float

ACCESS = 16
"""Bytes that a thread loads at once."""
LONG = 1024
"""Softmax keeps rows of at most so many elements in registers, wherever they begin."""


def unit_of(engine: str, name: str) -> int:
    """The place in UNITS of an engine that computes in this precision."""
    return UNITS.index(f"{engine} {compute_family(name)}")


def misaligned(work: Work, sizes: Mapping[str, Any]) -> Amount:
    """1 where rows in memory begin at no multiple of `ACCESS` bytes, and that slows the kernel.

    sizes: "M", "N" and "K" of the work, numbers or arrays of one length; those that are in
    `work.lined` are needed.  A mean that is no whole number counts as aligned.
    """
    odd: Any = 0.0
    width = min(work.widths or (float(precision(work.precision).bits / 8),))
    least = 1 if work.operation in MATRIX else LONG
    for name in work.lined:
        size = sizes[name]
        rest = size * width % ACCESS
        odd = odd + (size > least) * (size % 1 == 0) * (rest != 0)
    if isinstance(odd, float | int):
        return float(odd > 0)
    flags: Amount = (odd > 0).astype(float)
    return flags
