"""The first of many commits that breaks a condition, by trying few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where a condition begins to hold, by the numbers of commits; -1 is the one before them."""

    good: int  # the last commit at which it is known not to hold
    bad: int  # the first commit at which it is known to hold
    untold: tuple[int, ...] = ()  # between the two: commits that cannot be tried


def first_bad(count: int, holds: Callable[[int], bool | None]) -> Crossing:
    """Search `count` commits, of which the last holds a condition, and what is before does not.

    holds: None for a commit that cannot be tried; others are then tried in its place.  Where the
    history crosses the condition several times, one of the crossings is returned.
    """
    good, bad = -1, count - 1
    untold: set[int] = set()
    skips = 0  # one after the other
    while left := [i for i in range(good + 1, bad) if i not in untold]:
        number = left[int(_spread(skips) * len(left))]
        told = holds(number)
        if told is None:
            untold.add(number)
            skips += 1
            continue
        skips = 0
        good, bad = (good, number) if told else (number, bad)
    return Crossing(good, bad, tuple(sorted(i for i in untold if good < i < bad)))


def _spread(number: int) -> float:
    """1/2, 1/4, 3/4, 1/8, 5/8 ...: places that leave a run of commits that do not build."""
    value, step = 0.0, 0.5
    number += 1
    while number:
        value += step * (number & 1)
        number >>= 1
        step /= 2
    return value
