"""The largest batch whose peak memory fits: a search that asks for the peak at some batch sizes.

Peak memory is nearly a straight line in the batch, but not quite: another op may be at the peak,
another algorithm may run.  So the line only says where to look, and the answer is tried: it fits,
and one more does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftrace._plain import Plain

MOST = 65536
"""Batches beyond this are not looked for."""


@dataclass(frozen=True, slots=True)
class LargestBatch(Plain):
    """The largest batch that fits into `capacity` bytes."""

    batch: int  # 0 where not even one sample fits
    peak: int  # bytes at that batch, of one sample where none fits
    weights: int  # bytes of weights, which come with any batch
    capacity: float
    open_ended: bool = False  # whether a larger one may fit, which was not looked for

    KEYS = "batch peak weights_fit open_ended"

    @property
    def weights_fit(self) -> bool:
        """Whether the weights alone are within the capacity."""
        return self.weights <= self.capacity


def largest(peak_of: Callable[[int], int], capacity: float, most: int = MOST) -> tuple[int, bool]:
    """The largest batch up to `most` with ``peak_of(batch) <= capacity``, and whether it is `most`.

    The peak must not fall as the batch grows.  Four peaks are asked for where it is a straight
    line, else some more: between a batch that fits and one that does not, first along the line
    between them, then in the middle.
    """
    if peak_of(1) > capacity:
        return 0, False
    low, before, high = min(2, most), 1, None
    if peak_of(low) > capacity:
        return 1, False
    by_line = True
    while low < most and (high is None or high - low > 1):
        other = before if high is None else high
        slope = (peak_of(other) - peak_of(low)) / (other - low) if other != low else 0.0
        if high is not None and not by_line:
            guess = (low + high) // 2
        elif slope > 0:
            guess = low + int((capacity - peak_of(low)) / slope)
        else:
            guess = 4 * low
        guess = max(low + 1, min(guess, most if high is None else high - 1))
        if peak_of(guess) <= capacity:
            before, low = low, guess
        else:
            by_line, high = not by_line if high is not None else True, guess
    return low, high is None
