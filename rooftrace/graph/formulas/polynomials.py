"""Formulas for numbers of a graph: polynomials, named functions, and exact fitting to samples.

A formula says one number of a graph, such as the rows of a tensor, by the sizes of the call.  Its
symbols have indices instead of names: the sizes first, then numbers that named functions give.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from rooftrace._amounts import np

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


# -- polynomials -----------------------------------------------------------------------------------
# Polynomials with rational coefficients whose values are integers.

Powers = tuple[int, ...]
"""The power of each symbol in a term; symbols behind the last one have power 0."""
_SAFE = 1 << 62
"""Numbers up to this are added up in 64 bits."""


class FormulaError(ValueError):
    """A formula that gives no integer at these sizes."""


class Term(Struct, frozen=True, array_like=True):
    """A coefficient times a product of powers of symbols."""

    coefficient: int
    powers: Powers = ()


class Formula(Struct, frozen=True):
    """The sum of its terms, divided by `divisor`."""

    terms: tuple[Term, ...] = ()
    divisor: int = 1

    @staticmethod
    def constant(number: int) -> Formula:
        """The formula of a number that no size changes."""
        return Formula((Term(number),) if number else ())

    @staticmethod
    def symbol(place: int) -> Formula:
        """The formula of one symbol alone."""
        return Formula((Term(1, (*(0,) * place, 1)),))

    @staticmethod
    def of(coefficients: Mapping[Powers, int | Fraction]) -> Formula:
        """The formula with these coefficients, by the powers of their terms."""
        nonzero = {_trimmed(powers): value for powers, value in coefficients.items() if value}
        divisor = math.lcm(*(value.denominator for value in nonzero.values()))
        terms = (Term(int(value * divisor), powers) for powers, value in sorted(nonzero.items()))
        return Formula(tuple(terms), divisor)

    @property
    def is_constant(self) -> bool:
        """Whether no symbol changes it."""
        return not self.terms or (len(self.terms) == 1 and not self.terms[0].powers)

    @property
    def symbols(self) -> frozenset[int]:
        """The indices of the symbols that it depends on."""
        return frozenset(i for term in self.terms for i, p in enumerate(term.powers) if p)

    def coefficients(self) -> dict[Powers, Fraction]:
        """The coefficients by the powers of their terms."""
        return {term.powers: Fraction(term.coefficient, self.divisor) for term in self.terms}

    def at(self, numbers: Sequence[int]) -> int:
        """The integer at these values of the symbols.

        Raises FormulaError where it is none: the formula does not hold there.
        """
        total: int = sum(term.coefficient * _product(numbers, term.powers) for term in self.terms)
        quotient, rest = divmod(total, self.divisor)
        if rest:
            raise FormulaError(f"{self}: no whole number at {', '.join(map(str, numbers))}")
        return quotient

    def over(self, columns: Sequence[Array], rounded: bool = False) -> Array:
        """The numbers at many points: columns holds an integer array for each symbol.

        They are exact, also beyond 64 bits (then as an array of Python's integers).  Raises
        FormulaError where one is no integer; rounded: it is rounded down instead.
        """
        most = sum(
            abs(term.coefficient) * _product([_largest(c) for c in columns], term.powers)
            for term in self.terms
        )
        exact: Any = np.int64 if most < _SAFE else object
        count = max((len(column) for column in columns), default=1)
        total = np.zeros(count, dtype=exact)
        for term in self.terms:
            product: Any = term.coefficient
            for column, power in zip(columns, term.powers, strict=False):
                if power:
                    product = product * column.astype(exact) ** power
            total = total + product
        if self.divisor == 1:
            return total
        if not rounded and (total % self.divisor != 0).any():
            raise FormulaError(f"{self}: no whole number at some of {count:,} points")
        return total // self.divisor

    def written(self, names: Sequence[str], times: str = " ") -> str:
        """The formula with these names of its symbols: "4096 batch kv + 2 batch".

        times: between two factors.
        """
        if not self.terms:
            return "0"
        parts = []
        ordered = sorted(self.terms, key=lambda term: (-sum(term.powers), term.powers[::-1]))
        for number, term in enumerate(ordered):
            factor = Fraction(term.coefficient, self.divisor)
            symbols = [
                names[i] + (f"^{power}" if power > 1 else "")
                for i, power in enumerate(term.powers)
                if power
            ]
            shown = "" if abs(factor) == 1 and symbols else _shown(abs(factor))
            text = times.join(filter(None, [shown, *symbols]))
            sign = "-" if factor < 0 else "+"
            parts.append(text if number == 0 and factor > 0 else f"{sign} {text}")
        return " ".join(parts)

    def __add__(self, other: Formula) -> Formula:
        return Formula.total([(1, self), (1, other)])

    def __mul__(self, other: Formula) -> Formula:
        product: dict[Powers, int | Fraction] = {}
        for mine, factor in self._numbers():
            for theirs, amount in other._numbers():
                length = max(len(mine), len(theirs))
                padded = ((*p, *(0,) * (length - len(p))) for p in (mine, theirs))
                powers = tuple(a + b for a, b in zip(*padded, strict=True))
                product[powers] = product.get(powers, 0) + factor * amount
        return Formula.of(product)

    @staticmethod
    def total(parts: Iterable[tuple[int | Fraction, Formula]]) -> Formula:
        """The sum of formulas, each taken so many times."""
        sums: dict[Powers, int | Fraction] = {}
        for times, formula in parts:
            for powers, factor in formula._numbers():
                sums[powers] = sums.get(powers, 0) + times * factor
        return Formula.of(sums)

    def _numbers(self) -> Iterator[tuple[Powers, int | Fraction]]:
        """The coefficients, integers where all are: these add up in a tenth of the time."""
        for term in self.terms:
            whole = self.divisor == 1
            yield (
                term.powers,
                term.coefficient if whole else Fraction(term.coefficient, self.divisor),
            )

    def derivative(self, place: int) -> Formula:
        """The derivative by one symbol."""
        slopes: dict[Powers, Fraction] = {}
        for powers, factor in self.coefficients().items():
            if len(powers) > place and powers[place]:
                lower = (*powers[:place], powers[place] - 1, *powers[place + 1 :])
                slopes[_trimmed(lower)] = factor * powers[place]
        return Formula.of(slopes)

    def __str__(self) -> str:
        most = max((len(term.powers) for term in self.terms), default=0)
        return self.written([f"x{place}" for place in range(most)])


def _trimmed(powers: Powers) -> Powers:
    while powers and not powers[-1]:
        powers = powers[:-1]
    return powers


def _product(numbers: Sequence[Any], powers: Powers) -> Any:
    return math.prod(numbers[i] ** power for i, power in enumerate(powers) if power)


def _largest(column: Array) -> int:
    return max(abs(int(column.min())), abs(int(column.max()))) if len(column) else 0


def _shown(number: Fraction) -> str:
    return f"{number.numerator:,}" + (f"/{number.denominator:,}" if number.denominator != 1 else "")


# -- functions -------------------------------------------------------------------------------------
# Functions that have a name because no polynomial is right: classes that draws reach, on average.


def expected_distinct(rows: int, chosen: int, classes: int, exponent: float = 0.0) -> float:
    """The expected number of `classes` that at least one of `rows` rows chooses.

    Each row chooses `chosen` different classes, independently of the others; all equally likely, so
    that all miss a class with (1 - chosen / classes)^rows, or skewed by an exponent.
    """
    if rows <= 0 or chosen <= 0:
        return 0.0
    if chosen >= classes:
        return float(classes)
    if exponent:
        return expected_reached(rows, skewed_shares(exponent, chosen, classes))
    return snapped(-classes * math.expm1(rows * math.log1p(-chosen / classes)))


def expected_rows(rows: int, single: int, classes: int) -> float:
    """The expected number of different rows that `rows` draws among `classes` reach.

    `single` of the classes have a row each, and all others share one.
    """
    if single >= classes or rows <= 0:
        return expected_distinct(rows, 1, classes)
    alone = expected_distinct(rows, 1, classes) * single / classes
    return snapped(alone + 1 - (single / classes) ** rows)


def snapped(number: float) -> float:
    """The nearest integer where a number differs from it by rounding alone."""
    nearest = round(number)
    return float(nearest) if abs(number - nearest) <= 1e-9 * max(1, nearest) else number


def drawn_distinct(rows: int, chosen: int, classes: int, exponent: float = 0.0) -> int:
    """Number of classes of a draw that is made to reach the expected number, rounded."""
    expected = expected_distinct(rows, chosen, classes, exponent)
    return min(max(round(expected), min(chosen, classes)), rows * chosen)


def largest_draw(rows: int, chosen: int, classes: int) -> int:
    """Rows of the most chosen class in that draw: all classes have equal ones.

    The last ones have one less where they cannot be equal.
    """
    reached = drawn_distinct(rows, chosen, classes)
    return -(-rows * chosen // reached) if reached else 0


def balanced_distinct(rows: int, chosen: int, classes: int) -> int:
    """Number of classes reached if all are chosen equally often."""
    return min(rows * chosen, classes)


def balanced_largest(rows: int, chosen: int, classes: int) -> int:
    """Most rows of a class if all are chosen equally often."""
    return -(-rows * chosen // classes)


Function = Callable[[int, int, int], float]
FUNCTIONS: Mapping[str, Function] = {
    "distinct": expected_distinct,
    "drawn": drawn_distinct,
    "largest": largest_draw,
    "balanced": balanced_distinct,
    "balanced largest": balanced_largest,
    "rows": expected_rows,
}
"""By their names in formulas; all take rows, chosen, classes, but "rows" rows, single, classes."""
SKEWED: Mapping[str, Callable[[int, int, int, float], float]] = {
    "distinct": expected_distinct,
    "drawn": drawn_distinct,
}
"""Those that may have a policy behind their names, as "distinct skewed:1"."""


RATIO = "ratio"
"""The function of a number that no size changes: rows over classes."""


def function_of(name: str) -> Function:
    """The function of a name in a formula."""
    name, _, exponent = name.partition(" skewed:")
    if name == RATIO:
        return lambda rows, chosen, classes: rows / classes
    if not exponent:
        return FUNCTIONS[name]
    return lambda rows, chosen, classes: SKEWED[name](rows, chosen, classes, float(exponent))


# -- skewed choices --------------------------------------------------------------------------------

_STEP = 0.05
_LEAST, _MOST = -39.0, 3.7
"""The integral over log t: from where 1e-17 of the likeliest has arrived, to where 1e-17 of the
least likely has not."""
_MOST_SIZE = 1 << 14
"""The most classes times choices for which shares of a skewed choice are integrated."""
_AT_ONCE = 1 << 22
"""Numbers in memory at once while integrating."""


@functools.cache
def skewed_shares(exponent: float, k: int, classes: int) -> Array:
    """The shares of classes with weights w = 1, 2 ** -exponent, 3 ** -exponent ...

    A row draws one class after the other in proportion to w, without repetition (Plackett
    and Luce).  Equally: it takes the k largest of log w plus independent Gumbel noise, which is how
    a top-k of noisy scores chooses (Yellott 1977; Kool, van Hoof and Welling 2019).  Equally again:
    each class arrives at a time of rate w, and the first k are taken (Efraimidis and Spirakis
    2006); so its share is the integral of w exp(-w t), times the chance that fewer than k others
    arrive before t.  With too many classes times choices, all that arrive before a fixed time by
    which k are expected are taken instead.
    """
    weights = np.arange(1, classes + 1, dtype=np.float64) ** -exponent
    if k == 1:
        weights /= weights.sum()
        return weights
    if classes * k > _MOST_SIZE:
        return _until_k(weights, k)
    end = _MOST + exponent * math.log(classes)
    times = np.exp(np.arange(_LEAST, end + _STEP, _STEP))
    step = max(1, _AT_ONCE // (classes * k))
    parts = (_arriving(weights, times[i : i + step], k) for i in range(0, len(times), step))
    shares: Array = np.minimum(sum(parts) * _STEP, 1)
    return shares


def _arriving(weights: Array, times: Array, k: int) -> Array:
    """The sum over times of t w exp(-w t) P(fewer than k others before t), for each class."""
    waits = weights[:, None] * times
    here, gone = -np.expm1(-waits), np.exp(-waits)
    first = np.zeros((len(times), k))
    first[:, 0] = 1  # of no class, none has arrived
    before, state = [], first
    for arrived, waiting in zip(here, gone, strict=True):
        before.append(state)
        state = _with_one_more(state, arrived, waiting)
    chances, state = [first[:, 0]] * len(weights), first
    for place in range(len(weights) - 1, -1, -1):
        fewer = state.cumsum(1)[:, ::-1]  # of the classes behind: at most k - 1, k - 2 ... 0
        chances[place] = (before[place] * fewer).sum(1)
        state = _with_one_more(state, here[place], gone[place])
    total: Array = (waits * gone * np.stack(chances)).sum(1)
    return total


def _with_one_more(state: Array, arrived: Array, waiting: Array) -> Array:
    """The chances that 0 ... k - 1 have arrived, with another class."""
    after = state * waiting[:, None]
    after[:, 1:] += state[:, :-1] * arrived[:, None]
    return after


def _until_k(weights: Array, k: int) -> Array:
    """1 - exp(-w t), with the time t at which they sum to k."""
    low, high = _LEAST, -math.log(float(weights.min())) + _MOST + math.log(len(weights))
    for _ in range(200):
        middle = (low + high) / 2
        if float(-np.expm1(-weights * math.exp(middle)).sum()) < k:
            low = middle
        else:
            high = middle
    shares: Array = -np.expm1(-weights * math.exp(high))
    return shares


def expected_reached(rows: int, shares: Array) -> float:
    """The expected number of classes that some row chooses, each class with its own share."""
    with np.errstate(divide="ignore"):
        missed = np.exp(rows * np.log1p(-np.clip(shares, 0, 1)))  # log1p(-1) is -inf: never
    return snapped(float((1 - missed).sum()))


# -- fitting ---------------------------------------------------------------------------------------
# From the values of a number at some sizes to its formula, exactly or not at all.
#
# The coefficients solve a linear system over the rationals.  There are more samples than terms: a
# formula stands only if it also gives the samples that are not needed to solve for it.

SPARE = 1
"""Samples beyond the number of terms that a formula has to give, too; one more of a curve."""
_DEGREE = 3
"""The highest power of a symbol."""

_Row = list[Fraction]


class Fitter:
    """Finds the formulas of numbers that were seen at the same samples.

    samples: the values of the symbols at each.  Of all formulas that fit, the one of the fewest
    terms is taken: few symbols before many, low powers before high ones.  A symbol with n different
    values has powers up to n - 2, or 1, so that a curve through its points proves nothing.
    """

    def __init__(self, samples: Sequence[Sequence[int]]) -> None:
        self.samples = [tuple(sample) for sample in samples]
        self._columns = list(zip(*self.samples, strict=True))
        self._known: dict[tuple[int, ...], Formula | None] = {}
        self._bases = list(self._ladder())
        self._solvers: dict[int, _Solver] = {}

    def fit(self, values: Sequence[int]) -> Formula | None:
        """The formula that gives these values, one at each sample; None if there is none."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._fitted(key)
        return self._known[key]

    def _ladder(self) -> Iterator[tuple[Powers, ...]]:
        """The terms of each kind of formula that the samples can prove, few terms first."""
        counts = [len(set(column)) for column in self._columns]
        most = [min(_DEGREE, max(count - 2, min(count - 1, 1))) for count in counts]
        degrees = product(*(range(degree + 1) for degree in most))
        sized = sorted(degrees, key=lambda d: (prod(n + 1 for n in d), max(d, default=0), d))
        for each in sized:
            spare = SPARE + (max(each, default=0) > 1)
            if prod(degree + 1 for degree in each) <= len(self.samples) - spare:
                yield tuple(product(*(range(degree + 1) for degree in each)))

    def _fitted(self, values: tuple[int, ...]) -> Formula | None:
        if len(set(values)) == 1:
            return Formula.constant(values[0])
        if values in self._columns:
            return Formula.symbol(self._columns.index(values))
        for number, basis in enumerate(self._bases):
            if number not in self._solvers:
                self._solvers[number] = _Solver(self.samples, basis)
            formula = self._solvers[number].solved(values)
            if formula is not None:
                return formula
        return None


class _Solver:
    """Solves for the coefficients of one basis."""

    def __init__(self, samples: Sequence[tuple[int, ...]], basis: Sequence[Powers]) -> None:
        self.basis = basis
        self.rows = [[_product(sample, powers) for powers in basis] for sample in samples]
        self.chosen = _independent(self.rows)
        self.inverse: list[_Row] | None = None
        if len(self.chosen) == len(basis):
            inverse = _inverse([self.rows[i] for i in self.chosen])
            # A chosen row of which no other row has a part fits any value.
            others = [row for i, row in enumerate(self.rows) if i not in self.chosen]
            shared = [any(_dot(row, part) for row in others) for part in zip(*inverse, strict=True)]
            self.inverse = inverse if all(shared) else None

    def solved(self, values: Sequence[int]) -> Formula | None:
        """The formula with these values at the samples; None if this basis has none."""
        if self.inverse is None:
            return None
        solved = [values[i] for i in self.chosen]
        factors = [_dot(row, solved) for row in self.inverse]
        for row, value in zip(self.rows, values, strict=True):
            if _dot(factors, row) != value:
                return None
        return Formula.of(dict(zip(self.basis, factors, strict=True)))


def _dot(first: Iterable[Any], second: Iterable[Any]) -> Fraction:
    return sum((a * b for a, b in zip(first, second, strict=True)), Fraction(0))


def _independent(rows: Sequence[Sequence[int]]) -> list[int]:
    """The rows that are linearly independent of earlier ones."""
    chosen: list[int] = []
    reduced: list[tuple[int, _Row]] = []  # each with the place of its first number
    for number, numbers in enumerate(rows):
        row = [Fraction(value) for value in numbers]
        for pivot, other in reduced:
            if row[pivot]:
                row = [a - row[pivot] * b for a, b in zip(row, other, strict=True)]
        place = next((i for i, value in enumerate(row) if value), None)
        if place is not None:
            reduced.append((place, [value / row[place] for value in row]))
            chosen.append(number)
    return chosen


def _inverse(matrix: Sequence[Sequence[int]]) -> list[_Row]:
    """The inverse of a square matrix that has one."""
    size = len(matrix)
    rows = [
        [*map(Fraction, row), *(Fraction(int(i == j)) for j in range(size))]
        for i, row in enumerate(matrix)
    ]
    for column in range(size):
        pivot = next(i for i in range(column, size) if rows[i][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        lead = rows[column][column]
        rows[column] = [value / lead for value in rows[column]]
        for i in range(size):
            factor = rows[i][column]
            if i != column and factor:
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[size:] for row in rows]
