"""Exact slopes of the totals of a plan by one size: rational numbers, from derivatives of formulas.

Where a named function stands in a formula, its derivative is analytic, of real numbers: d/dT of
V (1 - (1 - c/V)^T) is -V ln(1 - c/V) (1 - c/V)^T.  Functions that round have the derivative of what
they round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rooftrace.costmodels.planforms.kernelforms import Amount, Traffic
from rooftrace.costmodels.planforms.planform import PlanForm
from rooftrace.tracer.formulas import Formula
from rooftrace.tracer.graphforms import slots

Real = Fraction | float
Numbers = Sequence[int]


@dataclass(frozen=True, slots=True)
class Slope:
    """The elasticity of a total by a size: d ln(total) / d ln(size).

    exact: the same as a rational number; None where a named function stands in the formula, or
    where it was found by finite steps.  functions: the names of those functions.  finite: no
    formula in this size is proven around it.
    """

    value: float
    exact: Fraction | None = None
    functions: tuple[str, ...] = ()
    finite: bool = False


@dataclass(frozen=True, slots=True)
class Dual:
    """A number and its derivative by one size; functions: what is in it beside polynomials."""

    value: Real
    slope: Real
    functions: frozenset[str] = frozenset()

    def __add__(self, other: Dual) -> Dual:
        functions = self.functions | other.functions
        return Dual(self.value + other.value, self.slope + other.slope, functions)

    def __mul__(self, other: Dual) -> Dual:
        functions = self.functions | other.functions
        slope = self.slope * other.value + self.value * other.slope
        return Dual(self.value * other.value, slope, functions)

    def elasticity(self, size: int) -> Slope:
        """Relative to both."""
        if not self.value:
            return Slope(0.0, Fraction(0))
        share: Any = size * self.slope / self.value
        exact = share if isinstance(share, Fraction) else None
        return Slope(float(share), exact, tuple(sorted(self.functions)))


ZERO = Dual(Fraction(0), Fraction(0))


def flops_slope(plan: PlanForm, numbers: Numbers, place: int) -> Slope:
    """Elasticity of the FLOPs of a plan by the size at `place`, at these sizes."""
    pairs = (
        (kernel.times, work.flop)
        for kernel in plan.kernels
        for work in kernel.works
        if work.key.is_dense
    )
    return _summed(pairs, numbers, place)


def bytes_slope(plan: PlanForm, numbers: Numbers, place: int) -> Slope:
    """Elasticity of the bytes through HBM; whole bytes are not rounded to."""
    pairs = (
        (kernel.times, item)
        for kernel in plan.kernels
        for item in kernel.traffic
        if item.access.wire == "hbm"
    )
    return _summed(pairs, numbers, place)


def peak_slope(plan: PlanForm, numbers: Numbers, place: int) -> Slope:
    """Elasticity of the bytes at the fullest moment of a step.

    Where several moments are equally full: that of the moment that fills fastest as the size grows.
    """
    duals = [
        dual_of(plan.amount(("alive", number), alive), numbers, place)
        for number, alive in enumerate(plan.template.alive)
    ]
    fullest = max(duals, key=lambda dual: (dual.value, dual.slope), default=ZERO)
    return fullest.elasticity(numbers[place])


def known_slope(plan: PlanForm, place: int) -> bool:
    """Whether the formulas of a plan were fitted at several values of this size."""
    return len({numbers[place] for numbers in plan.form.samples}) > 1


def _summed(
    parts: Iterable[tuple[Amount, Amount | Traffic]], numbers: Numbers, place: int
) -> Slope:
    total = ZERO
    for times, item in parts:
        total = total + dual_of(times, numbers, place) * dual_of(item, numbers, place)
    return total.elasticity(numbers[place])


def dual_of(item: Amount | Traffic, numbers: Numbers, place: int) -> Dual:
    """An amount of a plan with its derivative by the size at `place`."""
    if isinstance(item, Traffic):
        # as it is written: 0.7 is 7/10, not the nearest binary fraction
        factor = Fraction(repr(float(item.access.factor)))
        return Dual(factor, Fraction(0)) * dual_of(item.amount, numbers, place)
    if item.constant is not None:
        return Dual(Fraction(repr(item.constant)), Fraction(0))
    own = _of_formula(item.formula, numbers, place)
    if item.draw is None:
        return own
    drawn = _of_draw(item.draw, numbers, place)
    if item.kind == slots.REACHED:
        return drawn
    if item.kind == slots.TOUCHED:
        return own * drawn
    least = drawn if drawn.value >= 1 else Dual(Fraction(1), Fraction(0))
    inverse = Dual(1 / least.value, -least.slope / least.value**2, least.functions)
    return own * inverse


def _of_formula(formula: Formula, numbers: Numbers, place: int) -> Dual:
    return Dual(_at(formula, numbers), _at(formula.derivative(place), numbers))


def _at(formula: Formula, numbers: Numbers) -> Fraction:
    """The rational number of a formula; a derivative need not be whole."""
    return sum(
        (
            factor * math.prod(numbers[i] ** power for i, power in enumerate(powers) if power)
            for powers, factor in formula.coefficients().items()
        ),
        Fraction(0),
    )


# -- named functions -------------------------------------------------------------------------------


def _of_draw(draw: slots.Draw, numbers: Numbers, place: int) -> Dual:
    parts = [_of_formula(part, numbers, place) for part in (draw.rows, draw.chosen, draw.classes)]
    rows, chosen, classes = (float(part.value) for part in parts)
    value = float(draw.at(tuple(numbers)))
    slopes = SLOPES[draw.function](rows, chosen, classes)
    slope = sum(float(part.slope) * each for part, each in zip(parts, slopes, strict=True))
    return Dual(value, slope, frozenset({draw.function}))


Slopes = tuple[float, float, float]


def _distinct(rows: float, chosen: float, classes: float) -> Slopes:
    """Slopes of V (1 - (1 - c/V)^T) by T, c and V."""
    if chosen >= classes:
        return 0.0, 0.0, 1.0
    if rows <= 0:
        return 0.0, 0.0, 0.0
    left = 1 - chosen / classes
    before = left ** (rows - 1)
    by_rows = -classes * math.log(left) * left**rows
    return by_rows, rows * before, 1 - left**rows - rows * chosen / classes * before


def _largest(rows: float, chosen: float, classes: float) -> Slopes:
    """Slopes of T c / distinct(T, c, V)."""
    reached = classes if chosen >= classes else classes * (1 - (1 - chosen / classes) ** rows)
    if reached <= 0:
        return 0.0, 0.0, 0.0
    by_rows, by_chosen, by_classes = _distinct(rows, chosen, classes)
    whole = rows * chosen / reached
    return (
        (chosen - whole * by_rows) / reached,
        (rows - whole * by_chosen) / reached,
        -whole * by_classes / reached,
    )


def _balanced(rows: float, chosen: float, classes: float) -> Slopes:
    """Slopes of the smaller of T c and V."""
    return (chosen, rows, 0.0) if rows * chosen < classes else (0.0, 0.0, 1.0)


def _balanced_largest(rows: float, chosen: float, classes: float) -> Slopes:
    """Slopes of T c / V."""
    return chosen / classes, rows / classes, -rows * chosen / classes**2


def _rows(rows: float, own: float, classes: float) -> Slopes:
    """Slopes of a (1 - (1 - 1/V)^T) + 1 - (a/V)^T by T, a and V."""
    if own >= classes:
        return _distinct(rows, 1, classes)
    if rows <= 0 or own <= 0:
        return 0.0, 0.0, 0.0
    part = own / classes
    by_rows, _, by_classes = _distinct(rows, 1, classes)
    by_own = 1 - (1 - 1 / classes) ** rows - rows / classes * part ** (rows - 1)
    return part * by_rows - math.log(part) * part**rows, by_own, part * (by_classes - by_own)


SLOPES = {
    "distinct": _distinct,
    "drawn": _distinct,
    "largest": _largest,
    "balanced": _balanced,
    "balanced largest": _balanced_largest,
    "rows": _rows,
}
"""By the names of functions in formulas; slopes by rows, chosen and classes."""
