"""From the values of a number at some sizes to its formula, exactly or not at all.

The coefficients solve a linear system over the rationals.  There are more samples than terms: a
formula stands only if it gives those samples too that are not needed to solve for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import prod

from rooftrace.tracer.formulas.polynomials import Formula, Powers

SPARE = 2
"""Samples beyond the number of terms that a formula has to give, too."""
_DEGREE = 3
"""The highest power of a symbol."""

_Row = list[Fraction]


class Fitter:
    """Finds the formulas of numbers that were seen at the same samples.

    samples: the values of the symbols at each.  Of all formulas that fit, the one of the fewest
    terms is taken: few symbols before many, low powers before high ones.
    """

    def __init__(self, samples: Sequence[Sequence[int]], spare: int = SPARE) -> None:
        self.samples = [tuple(sample) for sample in samples]
        self._spare = spare
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
        most = [min(_DEGREE, len(set(column)) - 1) for column in self._columns]
        degrees = product(*(range(degree + 1) for degree in most))
        sized = sorted(degrees, key=lambda d: (prod(n + 1 for n in d), max(d, default=0), d))
        for each in sized:
            if prod(degree + 1 for degree in each) <= len(self.samples) - self._spare:
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
        self.rows = [[_monomial(sample, powers) for powers in basis] for sample in samples]
        self.chosen = _independent(self.rows)
        self.inverse: list[_Row] | None = None
        if len(self.chosen) == len(basis):
            self.inverse = _inverse([self.rows[i] for i in self.chosen])

    def solved(self, values: Sequence[int]) -> Formula | None:
        """The formula with these values at the samples; None if this basis has none."""
        if self.inverse is None:
            return None
        known = [values[i] for i in self.chosen]
        factors = [sum((a * v for a, v in zip(row, known, strict=True)), Fraction(0))
                   for row in self.inverse]  # fmt: skip
        for row, value in zip(self.rows, values, strict=True):
            if sum(f * n for f, n in zip(factors, row, strict=True)) != value:
                return None
        return Formula.of(dict(zip(self.basis, factors, strict=True)))


def _monomial(sample: Sequence[int], powers: Powers) -> int:
    return prod(number**power for number, power in zip(sample, powers, strict=True))


def _independent(rows: Sequence[Sequence[int]]) -> list[int]:
    """The first rows that are linearly independent of those before them."""
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
