"""What the values of a tensor are, in a few numbers; knows no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

from rooftrace._plain import Plain

BINS = 50
"""Of a histogram, between the smallest and the largest finite value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStatistics(Plain):
    """What the values of a tensor are.  Mean, deviation and range are of the finite ones.

    The real and the imaginary part of a complex number count as two values.
    """

    count: int  # of finite values
    mean: float  # nan where there is no value
    squares: float  # the sum of (value - mean)^2
    min: float
    max: float
    zeros: int = 0
    nans: int = 0
    infs: int = 0
    histogram: tuple[int, ...] = ()  # values in BINS equal steps from min to max

    KEYS = "mean std min max count zeros nans infs histogram"

    @property
    def std(self) -> float:
        """The standard deviation as torch.std gives it, over count - 1; nan below two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.nan

    def with_(self, other: WeightStatistics) -> WeightStatistics:
        """The statistics of both sets of values together, without a histogram."""
        count = self.count + other.count
        if not (self.count and other.count):
            mean = self.mean if self.count else other.mean
            squares = self.squares + other.squares
        else:
            step = other.mean - self.mean
            mean = self.mean + step * other.count / count
            between = step * step * self.count * other.count / count
            squares = self.squares + other.squares + between
        return WeightStatistics(
            count=count,
            mean=mean,
            squares=squares,
            min=min(_finite(self.min, other.min), default=math.nan),
            max=max(_finite(self.max, other.max), default=math.nan),
            zeros=self.zeros + other.zeros,
            nans=self.nans + other.nans,
            infs=self.infs + other.infs,
        )


NO_VALUES = WeightStatistics(count=0, mean=math.nan, squares=0.0, min=math.nan, max=math.nan)


def _finite(*values: float) -> Iterator[float]:
    return (value for value in values if not math.isnan(value))


def merged(parts: Iterable[WeightStatistics]) -> WeightStatistics:
    """The statistics of all values of these parts."""
    return reduce(WeightStatistics.with_, parts, NO_VALUES)
