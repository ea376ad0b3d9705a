"""Statistics and a histogram of the values of a tensor, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from rooftrace.tracer.inventory.values import BINS, NO_VALUES, WeightStatistics, merged
from rooftrace.tracer.weightfiles.slices import as_doubles


def statistics_of(slices: Callable[[], Iterable[Tensor]]) -> WeightStatistics:
    """The statistics of a tensor with a histogram.  slices: gives its values, twice."""
    total = merged(_of_slice(as_doubles(part)) for part in slices())
    histogram: tuple[int, ...] = ()
    if total.count and math.isfinite(total.max - total.min):
        counts = torch.zeros(BINS, dtype=torch.float64)
        for part in slices():
            counts += _binned(as_doubles(part), total.min, total.max)
        histogram = tuple(int(n) for n in counts.tolist())
    return replace(total, histogram=histogram)


def _of_slice(values: Tensor) -> WeightStatistics:
    finite, nans = values, 0
    size = values.numel()
    if not math.isfinite(float(values.sum())):
        nans = int(values.isnan().sum())
        finite = values[values.isfinite()]
    count = finite.numel()
    if not count:
        return replace(NO_VALUES, nans=nans, infs=size - nans)
    mean = float(finite.mean())
    return WeightStatistics(
        count=count,
        mean=mean,
        squares=float((finite - mean).square_().sum()),
        min=float(finite.min()),
        max=float(finite.max()),
        zeros=count - int(torch.count_nonzero(finite)),
        nans=nans,
        infs=size - count - nans,
    )


def _binned(values: Tensor, low: float, high: float) -> Tensor:
    if low == high:  # histc takes equal limits as: find them yourself
        counts = torch.zeros(BINS, dtype=torch.float64)
        counts[BINS // 2] = float((values == low).sum())
        return counts
    return torch.histc(values, BINS, low, high)
