"""How far steps were from their predictions, and the intervals that hold a stated share of them.

A residual is log(measured / predicted) of a step that no fit had seen, in standard deviations of
that step (`Knobs.spread` and those of classes, by its time).  Intervals are conformal: their ends
are order statistics of such residuals, with the correction for how many there are, so that they
hold their share whatever the distribution is, as long as the next model is drawn like the others
(Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005).  Models of one family
are alike, so a family counts as one and its members share its weight (Lee, Barber and Willett,
"Distribution-free inference with hierarchical data", 2023).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

LEVEL = 0.9
"""The share of steps that an interval holds, where nothing else is asked for."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
"""The shares that files have ends for; between them ends are interpolated."""
NO_FIT, ONE_FACTOR, FITTED = "no fit", "one factor", "fitted"
USES = (NO_FIT, ONE_FACTOR, FITTED)
"""What was fitted to the chip that a step runs on: nothing, one factor on all, more than that."""
FEW = 10
"""Below so many families an interval is a guess made wider, and says so."""
_PRIOR_WEIGHT = 4.0
"""Families that the usual spread counts for beside those that were measured."""


class ResidualsError(ValueError):
    """Ends of intervals that contradict each other, or a share of steps that has none."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """The ends of intervals at each of some levels, and what they come from."""

    levels: tuple[float, ...]  # shares of steps, rising
    low: tuple[float, ...]  # of each level, in standard deviations; at most 0
    high: tuple[float, ...]  # at least 0
    spread: float = 0.0  # the standard deviation of a step: `Knobs.spread` in this use
    count: int = 0  # steps
    groups: int = 0  # families of models that were left out together
    of: str = ""  # which steps

    def __post_init__(self) -> None:
        sizes = {len(self.levels), len(self.low), len(self.high)}
        if sizes != {len(self.levels)} or not self.levels:
            raise ResidualsError(
                "levels, low and high: expected as many ends as levels, and one level"
            )
        for name, values, least, most in (
            ("levels", self.levels, 0.0, 1.0),
            ("low", self.low, -_FARTHEST, 0.0),
            ("high", self.high, 0.0, _FARTHEST),
        ):
            if not all(least <= value <= most for value in values):
                raise ResidualsError(
                    f"{name}={values!r:.60}: expected numbers of {least:g} to {most:g}"
                )
            if list(values) != sorted(values, reverse=name == "low"):
                raise ResidualsError(
                    f"{name}={values!r:.60}: expected wider ends for higher levels"
                )
        if not 0 <= self.spread <= _FARTHEST or self.count < 0 or self.groups < 0:
            raise ResidualsError(
                f"spread={self.spread!r}, count={self.count!r}, groups={self.groups!r}: "
                "expected numbers of at least 0"
            )

    @property
    def few(self) -> bool:
        """Whether they are too few for an interval that holds what it says."""
        return self.groups < FEW

    @property
    def told(self) -> str:
        """How many steps they are of, and what that means for an interval."""
        steps = f"{self.count:,} steps of {self.groups:,} families that no fit had seen"
        return f"{steps}: so few that it is made wider" if self.few else steps

    def ends(self, level: float = LEVEL) -> tuple[float, float]:
        """Where an interval for this share of steps ends, in standard deviations.

        Raises ResidualsError outside of the levels that there are.
        """
        _check_level(level, self.levels)
        return _between(level, self.levels, self.low), _between(level, self.levels, self.high)

    @staticmethod
    def of_steps(
        values: Sequence[float], groups: Sequence[str], usual: float = 1.0, of: str = ""
    ) -> Residuals:
        """Those of left-out steps.

        values: log(measured / predicted) over the standard deviation of each step.  groups: the
        family of each.  usual: the standard deviation of such values as far as anybody knows, for
        where there are few.
        """
        sizes = Counter(groups)
        weights = [1 / (len(sizes) * sizes[group]) for group in groups]
        ends = [_ends(level, values, weights, len(sizes), usual) for level in LEVELS]
        low, high = ([_rounded(end[side]) for end in ends] for side in (0, 1))
        for number in range(1, len(LEVELS)):  # a rule for fewer families may be the narrower one
            low[number] = min(low[number], low[number - 1])
            high[number] = max(high[number], high[number - 1])
        return Residuals(
            levels=LEVELS, low=tuple(low), high=tuple(high), count=len(values),
            groups=len(sizes), of=of,
        )  # fmt: skip


_FARTHEST = 1000.0
"""Standard deviations, and standard deviations of logarithms, beyond which nothing is said."""


def normal_ends(level: float = LEVEL) -> tuple[float, float]:
    """Ends in standard deviations of a normal distribution: for knobs that have no residuals."""
    _check_level(level, LEVELS)
    end = NormalDist().inv_cdf((1 + level) / 2)
    return -end, end


def _check_level(level: float, known: Sequence[float]) -> None:
    number = isinstance(level, (int, float)) and not isinstance(level, bool)
    if not number or not known[0] <= level <= known[-1]:
        raise ResidualsError(
            f"level={level!r:.60}: expected a share of steps from {known[0]:g} to {known[-1]:g}"
        )


def _between(level: float, levels: Sequence[float], ends: Sequence[float]) -> float:
    """An end between those of two levels, by -log(1 - level), in which tails are about straight."""
    for (before, first), (after, second) in pairwise(zip(levels, ends, strict=True)):
        if before <= level <= after:
            whole = math.log((1 - before) / (1 - after))
            return first + (second - first) * math.log((1 - before) / (1 - level)) / whole
    return ends[0]  # there is one level only


# -- order statistics ------------------------------------------------------------------------------


def _ends(
    level: float, values: Sequence[float], weights: Sequence[float], groups: int, usual: float
) -> tuple[float, float]:
    """The ends of one level: at each side by its own quantile, where there are enough families.

    With fewer they are of the sizes of residuals, with yet fewer of a wide distribution.
    """
    correction = (groups + 1) / groups if groups else math.inf
    side = (1 + level) / 2
    if side * correction <= 1:
        low = _quantile([-value for value in values], weights, side * correction)
        return min(0.0, -low), max(0.0, _quantile(values, weights, side * correction))
    if level * correction <= 1:
        size = _quantile([abs(value) for value in values], weights, level * correction)
        return -size, size
    size = _wide(side, values, weights, groups, usual)
    return -size, size


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The value that so large a share of the weight does not pass, between two of `values`."""
    total, before = 0.0, None
    for value, weight in sorted(zip(values, weights, strict=True)):
        if total + weight >= share - 1e-9:
            part = min(1.0, max(0.0, (share - total) / weight))
            return value if before is None else before + part * (value - before)
        total, before = total + weight, value
    return max(values)


def _wide(
    side: float, values: Sequence[float], weights: Sequence[float], groups: int, usual: float
) -> float:
    """Half of an interval from few residuals and the usual spread: a quantile of Student's t."""
    squares = sum(weight * value**2 for value, weight in zip(values, weights, strict=True))
    freedom = _PRIOR_WEIGHT + groups
    scale = math.sqrt((_PRIOR_WEIGHT * usual**2 + groups * squares) / freedom)
    # A predicted value is off by its own deviation, and by that of the mean of those known.
    return student(side, freedom) * scale * math.sqrt(1 + 1 / freedom)


def student(share: float, freedom: float) -> float:
    """The quantile of Student's t by Hill's expansion (Communications of the ACM 13, 1970)."""
    z = NormalDist().inv_cdf(share)
    return z * (
        1
        + (z**2 + 1) / (4 * freedom)
        + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)
        + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * freedom**3)
    )


def _rounded(value: float) -> float:
    """An end as files have it: four digits, never nearer than it is."""
    if not value:
        return 0.0
    digits = 3 - math.floor(math.log10(abs(value)))
    step = 10.0**-digits
    return math.copysign(
        min(_FARTHEST, round(math.ceil(abs(value) / step - 1e-9) * step, digits)), value
    )
