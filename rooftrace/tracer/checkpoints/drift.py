"""How far the values of one tensor are from those of another, slice by slice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rooftrace.tracer.checkpoints.records import Drift
from rooftrace.tracer.weightfiles.slices import as_bytes, as_doubles


class Special(NamedTuple):
    """How many values are not finite."""

    nans: int = 0
    infs: int = 0

    def with_(self, values: Tensor) -> Special:
        """These and those among a slice of doubles."""
        return Special(self.nans + int(values.isnan().sum()), self.infs + int(values.isinf().sum()))


class _Sums:
    """Sums over the slices that were added so far."""

    def __init__(self) -> None:
        self.equal = True
        self.before = self.after = self.difference = self.product = self.largest = 0.0
        self.before_special = self.after_special = Special()
        self.left_out = 0

    def add(self, before: Tensor, after: Tensor) -> None:
        """Add a slice of each side."""
        alike = before.dtype == after.dtype and torch.equal(as_bytes(before), as_bytes(after))
        self.equal &= alike
        x = as_doubles(before)
        y = x if alike else as_doubles(after)
        if not math.isfinite(float(x.sum()) + float(y.sum())):
            x, y = self._finite(x, y)
        squares = float(torch.dot(x, x))
        self.before += squares
        if alike:
            self.after += squares
            self.product += squares
        elif x.numel():
            self.after += float(torch.dot(y, y))
            self.product += float(torch.dot(x, y))
            difference = y - x
            self.difference += float(torch.dot(difference, difference))
            self.largest = max(self.largest, float(difference.abs_().max()))

    def _finite(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The elements that are finite on both sides; the others are counted."""
        self.before_special = self.before_special.with_(x)
        self.after_special = self.after_special.with_(y)
        both = x.isfinite() & y.isfinite()
        self.left_out += both.numel() - int(both.sum())
        return x[both], y[both]

    def drift(self) -> Drift:
        """The drift over all slices."""
        lengths = math.sqrt(self.before) * math.sqrt(self.after)
        return Drift(
            equal=self.equal,
            norm_before=math.sqrt(self.before),
            norm_after=math.sqrt(self.after),
            norm_difference=math.sqrt(self.difference),
            cosine=min(1.0, max(-1.0, self.product / lengths)) if lengths else None,
            largest=self.largest,
            left_out=self.left_out,
        )


def drift_of(
    before: Iterable[Tensor], after: Iterable[Tensor]
) -> tuple[Drift, tuple[Special, Special]]:
    """The drift between two tensors, and what of each is not finite.

    Their slices begin and end at the same elements.
    """
    sums = _Sums()
    with torch.no_grad():
        for one_side, other_side in zip(before, after, strict=True):
            sums.add(one_side, other_side)
    return sums.drift(), (sums.before_special, sums.after_special)


def special_in(slices: Iterable[Tensor]) -> Special:
    """How many values of a tensor are not finite."""
    special = Special()
    for part in slices:
        values = as_doubles(part)
        if not math.isfinite(float(values.sum())):
            special = special.with_(values)
    return special


def same_bytes(before: Iterable[Tensor], after: Iterable[Tensor]) -> bool:
    """Whether two tensors consist of the same bytes, read up to the first that differ."""
    pairs = zip(before, after, strict=True)
    return all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in pairs)
