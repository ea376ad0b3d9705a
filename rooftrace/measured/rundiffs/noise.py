"""How far a difference of two means may come from noise, by the spread over the measured steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rooftrace.measured.rundiffs.rundiff import MeasuredChange
from rooftrace.measured.rundiffs.sides import middle_of

_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Quantile 97.5 % of Student's t for 1 to 10 degrees of freedom."""
_MEDIAN = math.sqrt(math.pi / 2)
"""The standard error of a median over that of a mean, for normal values."""


def change_of(
    before: Sequence[float], after: Sequence[float], how: tuple[str, str] = ("mean", "mean")
) -> MeasuredChange:
    """A figure of the measured steps before and after; how: mean or median of each."""
    return MeasuredChange(
        before=middle_of(before, how[0]),
        after=middle_of(after, how[1]),
        noise=noise_of(before, after, how),
    )


def standard_error(values: Sequence[float], how: str = "mean") -> float | None:
    """The standard error of the mean or the median; None for a single value."""
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    return error * _MEDIAN if how == "median" else error


def noise_of(
    before: Sequence[float], after: Sequence[float], how: tuple[str, str] = ("mean", "mean")
) -> float | None:
    """Half the width of the 95 % interval of the difference; None where a side has one value.

    Degrees of freedom by Welch and Satterthwaite.
    """
    errors = [standard_error(v, h) for v, h in zip((before, after), how, strict=True)]
    if errors[0] is None or errors[1] is None:
        return None
    a, b = errors[0] ** 2, errors[1] ** 2
    if a + b == 0:
        return 0.0
    free = (a + b) ** 2 / (a**2 / (len(before) - 1) + b**2 / (len(after) - 1))
    return _quantile(free) * math.sqrt(a + b)


def _quantile(free: float) -> float:
    """Quantile 97.5 % of Student's t; for few degrees of freedom the next smaller whole number."""
    if free < len(_T):
        return _T[max(1, int(free)) - 1]
    return 1.96 + 2.7 / free
