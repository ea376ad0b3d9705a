"""The length at which attention takes longer than the MLP: an exact search over whole sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimating import Estimate

ATTENTION = ("attention",)
MLP = ("dense", "moe")
"""Families of products outside of attention: dense layers and experts; the head is neither."""


@dataclass(frozen=True)
class FamilyTimes:
    """Seconds of a step at one size: of attention, of the MLP, of all."""

    size: int
    attention: float
    mlp: float
    step: float


@dataclass(frozen=True, eq=False, kw_only=True)
class PassingAnswer(Plain, Shown):
    """Where attention passes the MLP as a size grows.

    before, after: the last size at which the MLP takes at least as long, and the first at which
    attention takes longer; None where there is no such size within `looked`.
    """

    title: str
    chip: str
    name: str  # of the size
    at: dict[str, int]  # the other sizes
    looked: tuple[int, int]
    before: FamilyTimes | None
    after: FamilyTimes | None
    rests: tuple[str, ...]

    KEYS = "title chip name **at looked before after rests_on=rests"

    def __repr__(self) -> str:
        where = f"{self.name} {self.after.size:,}" if self.after else "nowhere"
        return short(self, f"{self.title} on {self.chip}: {where}")


def times_of(result: Estimate, size: int) -> FamilyTimes:
    """Seconds on the device by family."""
    seconds = {family: part.t_device for family, part in result.by_family().items()}
    return FamilyTimes(
        size,
        sum(seconds.get(family, 0.0) for family in ATTENTION),
        sum(seconds.get(family, 0.0) for family in MLP),
        result.t_est,
    )


def passing(
    shares: Callable[[int], FamilyTimes], low: int, high: int
) -> tuple[FamilyTimes | None, FamilyTimes | None]:
    """The sizes around which attention passes the MLP, by bisection between low and high."""
    first, last = shares(low), shares(high)
    if first.attention > first.mlp:
        return None, first
    if last.attention <= last.mlp:
        return last, None
    while last.size - first.size > 1:
        middle = shares((first.size + last.size) // 2)
        if middle.attention > middle.mlp:
            last = middle
        else:
            first = middle
    return first, last
