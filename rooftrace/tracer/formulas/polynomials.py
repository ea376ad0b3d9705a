"""Polynomials with rational coefficients whose values are whole numbers.

A formula says one number of a graph, such as the rows of a tensor, by the sizes of the call.  Its
symbols have places instead of names: the sizes first, then numbers that named functions give.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[Any]]

Powers = tuple[int, ...]
"""The power of each symbol in a term; symbols behind the last one have power 0."""
_SAFE = 1 << 62
"""Numbers up to this are added up in 64 bits."""


class FormulaError(ValueError):
    """A formula that gives no whole number at the sizes it was asked for."""


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
    def of(coefficients: Mapping[Powers, Fraction]) -> Formula:
        """The formula with these coefficients, by the powers of their terms."""
        known = {_trimmed(powers): value for powers, value in coefficients.items() if value}
        divisor = math.lcm(*(value.denominator for value in known.values()))
        terms = (Term(int(value * divisor), powers) for powers, value in sorted(known.items()))
        return Formula(tuple(terms), divisor)

    @property
    def is_constant(self) -> bool:
        """Whether no symbol changes it."""
        return all(not term.powers for term in self.terms)

    @property
    def symbols(self) -> frozenset[int]:
        """The places of the symbols that it depends on."""
        return frozenset(i for term in self.terms for i, p in enumerate(term.powers) if p)

    def coefficients(self) -> dict[Powers, Fraction]:
        """The coefficients by the powers of their terms."""
        return {term.powers: Fraction(term.coefficient, self.divisor) for term in self.terms}

    def at(self, numbers: Sequence[int]) -> int:
        """The whole number at these values of the symbols.

        Raises FormulaError where it is none: the formula does not hold there.
        """
        total: int = sum(term.coefficient * _product(numbers, term.powers) for term in self.terms)
        whole, rest = divmod(total, self.divisor)
        if rest:
            raise FormulaError(f"{self}: no whole number at {', '.join(map(str, numbers))}")
        return whole

    def over(self, columns: Sequence[Array], rounded: bool = False) -> Array:
        """The numbers at many points: columns holds an integer array for each symbol.

        They are exact, also beyond 64 bits (then as an array of Python's integers).  Raises
        FormulaError where one is no whole number; rounded: it is rounded down instead.
        """
        import numpy as np

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

    def written(self, names: Sequence[str]) -> str:
        """The formula with these names of its symbols: "4096 batch kv + 2 batch"."""
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
            text = " ".join(filter(None, [shown, *symbols]))
            sign = "-" if factor < 0 else "+"
            parts.append(text if number == 0 and factor > 0 else f"{sign} {text}")
        return " ".join(parts)

    def __add__(self, other: Formula) -> Formula:
        return Formula.total([(1, self), (1, other)])

    def __mul__(self, other: Formula) -> Formula:
        product: dict[Powers, Fraction] = {}
        for mine, factor in self.coefficients().items():
            for theirs, amount in other.coefficients().items():
                powers = _sum_of(mine, theirs)
                product[powers] = product.get(powers, Fraction(0)) + factor * amount
        return Formula.of(product)

    @staticmethod
    def total(parts: Iterable[tuple[int | Fraction, Formula]]) -> Formula:
        """The sum of formulas, each taken so many times."""
        sums: dict[Powers, Fraction] = {}
        for times, formula in parts:
            for powers, factor in formula.coefficients().items():
                sums[powers] = sums.get(powers, Fraction(0)) + times * factor
        return Formula.of(sums)

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


def _sum_of(mine: Powers, theirs: Powers) -> Powers:
    length = max(len(mine), len(theirs))
    padded = ((*p, *(0,) * (length - len(p))) for p in (mine, theirs))
    return tuple(a + b for a, b in zip(*padded, strict=True))


def _product(numbers: Sequence[Any], powers: Powers) -> Any:
    return math.prod(numbers[i] ** power for i, power in enumerate(powers) if power)


def _largest(column: Array) -> int:
    return max(abs(int(column.min())), abs(int(column.max()))) if len(column) else 0


def _shown(number: Fraction) -> str:
    return f"{number.numerator:,}" + (f"/{number.denominator:,}" if number.denominator != 1 else "")
