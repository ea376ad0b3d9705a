"""Elasticities of a step by sizes, chip facts and knobs, ranked, and exact slopes of totals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.errors import RequestError, hint
from rooftrace.graph.formulas import Formula, leaves, polynomials
from rooftrace.studies.forms.kernelforms import Amount, Traffic, bytes_of, flops_of
from rooftrace.studies.forms.planform import PlanForm

QUANTITIES = ("flops", "bytes", "peak_memory")
"""Totals with exact elasticities by sizes."""


@dataclass(frozen=True, slots=True)
class FiniteStep:
    """A change of a number, and times and bytes after it over those before.

    change: in words, "+1", "x1.1".  value: the number after it.  t_est, t_bound, bytes: ratios;
    None where there is no such step, for the reason in `note`.
    """

    change: str
    value: float
    t_est: float | None = None
    t_bound: float | None = None
    bytes: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elasticity:
    """Elasticity of a step by one number: d ln(cost) / d ln(number).

    name: "batch", "chip.memory_bandwidth", "knobs.share.mm.compute".  kind: "size", "chip" or
    "knob".  value: of the number, in SI units (`unit`).  flops, bytes, peak_memory: exact by sizes;
    None where the number is not in them.  t_est, t_bound: of the smallest change in both
    directions, or of the smallest step that there is; None where no step could be made.
    note: why nothing changes, where nothing does.
    """

    name: str
    kind: str
    value: float
    unit: str
    flops: Slope | None = None
    bytes: Slope | None = None
    peak_memory: Slope | None = None
    t_est: float | None = None
    t_bound: float | None = None
    steps: tuple[FiniteStep, ...] = ()
    note: str = ""

    @property
    def effect(self) -> float:
        """The rank of a row: the absolute elasticity of the expected time."""
        return abs(self.t_est or 0.0)

    @property
    def is_zero(self) -> bool:
        """Whether no step changes any time, FLOPs or bytes."""
        ratios = [step.t_est for step in self.steps] + [step.t_bound for step in self.steps]
        slopes = (self.flops, self.bytes, self.peak_memory)
        return all(ratio in (None, 1.0) for ratio in ratios) and not any(
            slope and slope.value for slope in slopes
        )

    @property
    def cliff(self) -> float:
        """Relative growth of the time by one more of this size; 0 of other numbers."""
        jumps = [step.t_est - 1 for step in self.steps if step.change == "+1" and step.t_est]
        return jumps[0] if jumps and self.kind == "size" else 0.0

    def step(self, change: str) -> FiniteStep | None:
        """The step of a change; None where there is none."""
        return next((step for step in self.steps if step.change == change), None)

    def to_row(self) -> dict[str, Any]:
        """A row of a CSV file: elasticities, and ratios of t_est by change."""
        names = ("name", "kind", "value", "unit", "t_est", "t_bound")
        row: dict[str, Any] = {name: getattr(self, name) for name in names}
        for name in QUANTITIES:
            slope: Slope | None = getattr(self, name)
            row[name] = None if slope is None else slope.value
            row[f"{name}_exact"] = str(slope.exact) if slope and slope.exact is not None else ""
        for change in CHANGES:
            step = self.step(change)
            row[f"t_est {change}"] = None if step is None else step.t_est
        return {**row, "note": self.note}


CHANGES = ("+1", "-1 %", "+1 %", "x1.1", "x2", "x0.5")
"""All changes: of sizes and counts +1 in place of 1 %."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Elasticities(Plain, Shown):
    """Elasticities of a step by its sizes, facts of a chip and knobs; rows are ranked.

    sizes: where.  flops: FLOP; bytes: through HBM; peak_memory: byte; t_est, t_bound: seconds.
    """

    title: str
    phase: str
    sizes: Mapping[str, int]
    chip: str
    execution: str
    knobs: str  # title; "" for peaks
    flops: int
    bytes: int
    peak_memory: int
    t_est: float
    t_bound: float
    rows: tuple[Elasticity, ...]

    KEYS = "title phase chip execution knobs flops bytes peak_memory t_est t_bound sizes rows"

    def __repr__(self) -> str:
        first = ", ".join(f"{row.name} {row.t_est or 0:+.2f}" for row in self.rows[:3])
        return short(self, f"{self.title}, {self.phase} on {self.chip}: {first}")

    def of(self, name: str) -> Elasticity:
        """The row of a number.  Raises RequestError for a name that is none."""
        for row in self.rows:
            if row.name == name:
                return row
        names = [row.name for row in self.rows]
        raise RequestError(f"{name!r}: no number has this name{hint(name, names)}")

    def kind(self, kind: str) -> Iterator[Elasticity]:
        """The rows of sizes, of chip facts, or of knobs."""
        return (row for row in self.rows if row.kind == kind)

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each number, ranked, as a CSV file takes them."""
        return [row.to_row() for row in self.rows]


# -- slopes ----------------------------------------------------------------------------------------
# Rational numbers, from derivatives of formulas.  The derivative of a named function in a formula
# is analytic, of real numbers: d/dT of V (1 - (1 - c/V)^T) is -V ln(1 - c/V) (1 - c/V)^T.
# Functions that round have the derivative of their argument.

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
    """A number and its derivative by one size; functions: in it, other than polynomials."""

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
    return _summed(flops_of(plan.kernels), numbers, place)


def bytes_slope(plan: PlanForm, numbers: Numbers, place: int) -> Slope:
    """Elasticity of the bytes through HBM, not rounded to integers."""
    return _summed(bytes_of(plan.kernels), numbers, place)


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


def has_slope(plan: PlanForm, place: int) -> bool:
    """Whether it is known how the numbers of a plan follow from this size: by one plan of tracked
    numbers, or by plans at several values of it."""
    samples = plan.form.samples
    return bool(plan.form.slots) if len(samples) == 1 else len({n[place] for n in samples}) > 1


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
    plain = _of_formula(item.formula, numbers, place)
    if item.draw is None:
        return plain
    drawn = _of_draw(item.draw, numbers, place)
    if item.kind == leaves.REACHED:
        return drawn
    if item.kind == leaves.TOUCHED:
        return plain * drawn
    least = drawn if drawn.value >= 1 else Dual(Fraction(1), Fraction(0))
    inverse = Dual(1 / least.value, -least.slope / least.value**2, least.functions)
    return plain * inverse


def _of_formula(formula: Formula, numbers: Numbers, place: int) -> Dual:
    return Dual(_at(formula, numbers), _at(formula.derivative(place), numbers))


def _at(formula: Formula, numbers: Numbers) -> Fraction:
    """The rational number of a formula; a derivative need not be an integer."""
    return sum(
        (
            factor * math.prod(numbers[i] ** power for i, power in enumerate(powers) if power)
            for powers, factor in formula.coefficients().items()
        ),
        Fraction(0),
    )


# -- named functions -------------------------------------------------------------------------------


def _of_draw(draw: leaves.Draw, numbers: Numbers, place: int) -> Dual:
    if draw.is_constant:
        return Dual(Fraction(draw.at(())), Fraction(0))
    parts = [_of_formula(part, numbers, place) for part in draw.parts]
    rows, chosen, classes, _ = (float(part.value) for part in parts)
    value = float(draw.at(tuple(numbers)))
    name, _, exponent = draw.function.partition(" skewed:")
    skew = float(exponent or 0)
    of = _by_steps(rows, chosen, classes, skew) if skew else SLOPES[name](rows, chosen, classes)
    slopes = (*of, 1.0)
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
    ratio = rows * chosen / reached
    return (
        (chosen - ratio * by_rows) / reached,
        (rows - ratio * by_chosen) / reached,
        -ratio * by_classes / reached,
    )


def _balanced(rows: float, chosen: float, classes: float) -> Slopes:
    """Slopes of the smaller of T c and V."""
    return (chosen, rows, 0.0) if rows * chosen < classes else (0.0, 0.0, 1.0)


def _balanced_largest(rows: float, chosen: float, classes: float) -> Slopes:
    """Slopes of T c / V."""
    return chosen / classes, rows / classes, -rows * chosen / classes**2


def _rows(rows: float, chosen: float, classes: float) -> Slopes:
    """Slopes of a (1 - (1 - 1/V)^T) + 1 - (a/V)^T by T, a and V."""
    if chosen >= classes:
        return _distinct(rows, 1, classes)
    if rows <= 0 or chosen <= 0:
        return 0.0, 0.0, 0.0
    part = chosen / classes
    by_rows, _, by_classes = _distinct(rows, 1, classes)
    by_own = 1 - (1 - 1 / classes) ** rows - rows / classes * part ** (rows - 1)
    return part * by_rows - math.log(part) * part**rows, by_own, part * (by_classes - by_own)


def _by_steps(rows: float, chosen: float, classes: float, exponent: float) -> Slopes:
    """Slopes of the classes that skewed choices reach: differences over a step to each side."""
    t, c, v = map(round, (rows, chosen, classes))

    def reached(*step: int) -> float:
        sizes = (t + step[0], c + step[1], v + step[2])
        return polynomials.SKEWED["distinct"](*sizes, exponent)

    return (
        (reached(1, 0, 0) - reached(-1, 0, 0)) / 2,
        (reached(0, 1, 0) - reached(0, -1, 0)) / 2,
        (reached(0, 0, 1) - reached(0, 0, -1)) / 2,
    )


SLOPES = {
    "distinct": _distinct,
    "drawn": _distinct,
    "largest": _largest,
    "balanced": _balanced,
    "balanced largest": _balanced_largest,
    "rows": _rows,
}
"""By the names of functions in formulas; slopes by rows, chosen and classes."""
