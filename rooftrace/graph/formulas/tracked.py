"""Integers that remember how they follow from sizes, and the comparisons that they decided.

Code that prices a graph branches on sizes: a tensor is small, two kernels go over equally many
elements.  Run on tracked numbers, it leaves behind the conditions under which it would go the same
way again; a formula that was found on one way holds where all of them hold.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from rooftrace._amounts import np
from rooftrace.graph.formulas.polynomials import Formula

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


class Operation(NamedTuple):
    """An expression that is no polynomial: the floor of a quotient, its rest, or made of such."""

    kind: str  # a key of _OPERATORS
    first: Expression
    second: Expression

    def over(self, columns: Sequence[Array]) -> Array:
        """The numbers at many points."""
        result: Array = _OPERATORS[self.kind](self.first.over(columns), self.second.over(columns))
        return result

    @property
    def symbols(self) -> frozenset[int]:
        """The indices of the symbols that it depends on."""
        return self.first.symbols | self.second.symbols


Expression = Formula | Operation


class Guard(NamedTuple):
    """A comparison that code has made: whether a number was below 0, or 0."""

    relation: str  # "<" or "=="
    number: Expression
    outcome: bool

    def holds(self, columns: Sequence[Array]) -> Array:
        """At which points it comes out the same."""
        number = self.number.over(columns)
        result: Array = ((number < 0) if self.relation == "<" else (number == 0)) == self.outcome
        return result


class Track:
    """Makes tracked numbers, and keeps the guards of all their comparisons, each once."""

    def __init__(self) -> None:
        self.guards: dict[Guard, None] = {}
        self.on = True

    def number(self, value: int, expression: Expression) -> int:
        """A tracked number; a plain one where no size changes it."""
        if isinstance(expression, Formula) and expression.is_constant:
            return value
        return Tracked(value, expression, self)

    def decide(self, relation: str, number: Expression, outcome: bool) -> bool:
        """Keep a guard, and return its outcome."""
        if self.on and not (isinstance(number, Formula) and number.is_constant):
            self.guards[Guard(relation, number, outcome)] = None
        return outcome


class Tracked(int):
    """An int that knows its expression.

    Its hash is not that of the plain number, so that no table of plain numbers takes it for one.
    """

    expression: Expression
    track: Track

    def __new__(cls, value: int, expression: Expression, track: Track) -> Tracked:
        made = super().__new__(cls, value)
        made.expression, made.track = expression, track
        return made

    def __hash__(self) -> int:
        return hash((id(self.track), int(self), self.expression))

    def __deepcopy__(self, memo: Any) -> Tracked:
        return self

    def __bool__(self) -> bool:
        return not self.track.decide("==", self.expression, int(self) == 0)

    def __neg__(self) -> int:
        return self * -1

    def __abs__(self) -> int:
        return self if self >= 0 else -self


def _expression(number: Any) -> Expression:
    return number.expression if type(number) is Tracked else _constant(int(number))


_constant = lru_cache(maxsize=1 << 12)(Formula.constant)


@lru_cache(maxsize=1 << 16)
def _combined(kind: str, first: Expression, second: Expression) -> Expression:
    if isinstance(first, Formula) and isinstance(second, Formula):
        if kind == "*":
            return first * second
        return Formula.total([(1, first), (1 if kind == "+" else -1, second)])
    return Operation(kind, first, second)


@lru_cache(maxsize=1 << 16)
def _divided(kind: str, above: Expression, below: Expression) -> Expression:
    """The floor of a quotient, or its rest; exact where every term can be divided."""
    if isinstance(above, Formula) and isinstance(below, Formula) and below.is_constant:
        (term,) = below.terms or (None,)
        if term is not None and below.divisor == above.divisor == 1:
            number = term.coefficient
            if all(part.coefficient % number == 0 for part in above.terms):
                if kind == "%":
                    return Formula()
                parts = above.coefficients().items()
                return Formula.of({powers: value / number for powers, value in parts})
    if isinstance(above, Formula) and isinstance(below, Formula) and len(below.terms) == 1:
        quotient = _by_term(above, below)
        if quotient is not None:
            return Formula() if kind == "%" else quotient
    return Operation(kind, above, below)


def _by_term(above: Formula, below: Formula) -> Formula | None:
    """A formula divided by one of a single term, if that leaves integer powers and coefficients."""
    ((powers, factor),) = below.coefficients().items()
    parts = {}
    for others, value in above.coefficients().items():
        length = max(len(others), len(powers))
        pairs = zip(
            (*others, *(0,) * (length - len(others))),
            (*powers, *(0,) * (length - len(powers))),
            strict=True,
        )
        left = tuple(a - b for a, b in pairs)
        if min(left, default=0) < 0 or (value / factor).denominator != 1:
            return None
        parts[left] = value / factor
    return Formula.of(parts)


def _arithmetic(name: str, kind: str) -> None:
    """Give `Tracked` an operator and its reflection."""
    plain = _OPERATORS[kind]
    rule = _divided if kind in ("//", "%") else _combined

    def operate(self: Tracked, other: Any, turned: bool = False) -> Any:
        if type(other) is not Tracked and type(other) is not int and type(other) is not bool:
            return NotImplemented
        first, second = (other, self) if turned else (self, other)
        value = plain(int(first), int(second))
        return self.track.number(value, rule(kind, _expression(first), _expression(second)))

    def reflected(self: Tracked, other: Any) -> Any:
        return operate(self, other, turned=True)

    setattr(Tracked, f"__{name}__", operate)
    setattr(Tracked, f"__r{name}__", reflected)


def _comparison(name: str, plain: Callable[[Any, Any], bool], swapped: bool, negated: bool) -> None:
    """Give `Tracked` an ordering, recorded as "first - second is below 0"."""

    def compare(self: Tracked, other: Any) -> Any:
        if isinstance(other, float):
            if not math.isfinite(other):
                return plain(int(self), other)
            other = math.floor(other) if swapped else math.ceil(other)
        if not isinstance(other, int):
            return NotImplemented
        first, second = (other, self) if swapped else (self, other)
        number = _combined("-", _expression(first), _expression(second))
        below = self.track.decide("<", number, int(first) < int(second))
        return below != negated

    setattr(Tracked, f"__{name}__", compare)


def _equality(name: str, negated: bool) -> None:
    def compare(self: Tracked, other: Any) -> Any:
        if isinstance(other, float) and not other.is_integer():
            return negated
        if not isinstance(other, (int, float)):
            return NotImplemented
        number = _combined("-", _expression(self), _expression(other))
        return self.track.decide("==", number, int(self) == int(other)) != negated

    setattr(Tracked, f"__{name}__", compare)


for _kind, _plain in _OPERATORS.items():
    _arithmetic(_plain.__name__, _kind)
_comparison("lt", operator.lt, swapped=False, negated=False)
_comparison("gt", operator.gt, swapped=True, negated=False)
_comparison("ge", operator.ge, swapped=False, negated=True)
_comparison("le", operator.le, swapped=True, negated=True)
_equality("eq", negated=False)
_equality("ne", negated=True)
