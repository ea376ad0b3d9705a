"""Numbers that remember how they follow from sizes, and the comparisons that they decided.

Code that prices a graph branches on sizes: a tensor is small, two kernels go over equally many
elements.  Run on tracked numbers, it leaves behind the conditions under which it would go the same
way again, and the expression of each number that it computes; both hold where all of them hold.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from rooftrace._amounts import np
from rooftrace.graph.formulas.leaves import EACH, PLAIN, REACHED, TOUCHED, Draw, Path, field_names
from rooftrace.graph.formulas.polynomials import RATIO, Formula, FormulaError, function_of

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
    Drawn = dict[Any, Array]  # numbers of draws at many points, by their operations


_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
_ROUND, _PAIR = "round", ","


class Operation(NamedTuple):
    """An expression that is no polynomial: a quotient, its floor or rest, what is made of such.

    kind: an operator; "round" of the first; or the function of a draw, of (rows, chosen) and
    (classes, beside).
    """

    kind: str
    first: Expression
    second: Expression

    @staticmethod
    def of_draw(draw: Draw) -> Operation:
        """The expression of the number that a draw reaches."""
        rows, chosen, classes, beside = draw.parts
        pair = Operation(_PAIR, rows, chosen), Operation(_PAIR, classes, beside)
        return Operation(draw.function, *pair)

    @property
    def draw(self) -> Draw | None:
        """The draw that reaches this number; None of other expressions."""
        if self.kind in _OPERATORS or self.kind in (_ROUND, _PAIR):
            return None
        some, others = (pair for pair in self[1:] if isinstance(pair, Operation))
        return Draw(self.kind, *some[1:], *others[1:])  # type: ignore[arg-type]

    def over(self, columns: Sequence[Array], drawn: Drawn | None = None) -> Array:
        """The numbers at many points.  drawn: those of draws there, which this call adds to."""
        drawn = {} if drawn is None else drawn
        draw = self.draw
        if draw is not None:
            if self not in drawn:
                drawn[self] = draw.over(columns)
            return drawn[self]
        first = _over(self.first, columns, drawn)
        if self.kind == _ROUND:
            return np.rint(first).astype(np.int64)
        result: Array = _OPERATORS[self.kind](first, _over(self.second, columns, drawn))
        return result

    @property
    def symbols(self) -> frozenset[int]:
        """The indices of the symbols that it depends on."""
        return self.first.symbols | self.second.symbols

    @property
    def is_constant(self) -> bool:
        """Whether no symbol changes it."""
        return not self.symbols


Expression = Formula | Operation


def _over(number: Expression, columns: Sequence[Array], drawn: Drawn | None) -> Array:
    return number.over(columns, drawn) if isinstance(number, Operation) else number.over(columns)


class Guard(NamedTuple):
    """A comparison that code has made: whether a number was below 0, or 0."""

    relation: str  # "<" or "=="
    number: Expression
    outcome: bool

    def holds(self, columns: Sequence[Array], drawn: Drawn | None = None) -> Array:
        """At which points it comes out the same.  drawn: as `Operation.over` takes it."""
        number = _over(self.number, columns, drawn)
        result: Array = ((number < 0) if self.relation == "<" else (number == 0)) == self.outcome
        return result


class Track:
    """Makes tracked numbers, and keeps the guards of all their comparisons, each once."""

    def __init__(self) -> None:
        self.guards: dict[Guard, None] = {}
        self.on = True

    def number(self, value: float, expression: Expression) -> Any:
        """A tracked number; a plain one where no size changes it."""
        if expression.is_constant:
            return value
        kind = TrackedFloat if isinstance(value, float) else Tracked
        return kind(value, expression, self)

    def decide(self, relation: str, number: Expression, outcome: bool) -> bool:
        """Keep a guard, and return its outcome."""
        if self.on and not number.is_constant:
            self.guards[Guard(relation, number, outcome)] = None
        return outcome


class _Remembers:
    """The parts of tracked integers and tracked fractions alike: an expression, and the track.

    Their hash is not that of the plain number, so that no table of plain numbers takes them for
    one.
    """

    expression: Expression
    track: Track

    def __new__(cls, value: float, expression: Expression, track: Track) -> Any:
        made = super().__new__(cls, value)  # type: ignore[call-arg]
        made.expression, made.track = expression, track
        return made

    def __hash__(self) -> int:
        return hash((id(self.track), plain(self), self.expression))

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __bool__(self) -> bool:
        return not self.track.decide("==", self.expression, plain(self) == 0)

    def __neg__(self: Any) -> Any:
        return self * -1

    def __abs__(self: Any) -> Any:
        return self if self >= 0 else -self


class Tracked(_Remembers, int):
    """An int that knows its expression."""

    def __pow__(self, power: Any, modulus: Any = None) -> Any:
        if type(power) is int and 0 < power < _MOST_POWER and modulus is None:
            return math.prod([self] * power)
        return pow(int(self), power, modulus)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __round__(self, digits: Any = None) -> Any:
        return round(int(self), digits) if digits is not None else self

    def __trunc__(self) -> Any:
        return self

    __pos__ = __floor__ = __ceil__ = __trunc__


class TrackedFloat(_Remembers, float):
    """A fraction that knows its expression: the classes that a draw reaches, a share of a size."""

    def is_integer(self) -> bool:
        """Nowhere: at other sizes it is a fraction."""
        return False

    def __round__(self, digits: Any = None) -> Any:
        if digits is not None:
            return round(float(self), digits)
        whole: Expression | None = _polynomial(self.expression)
        if not isinstance(whole, Formula) or not _is_whole(whole):
            whole = Operation(_ROUND, self.expression, _constant(0))
        return self.track.number(round(float(self)), whole)


_MOST_POWER = 8
"""Powers below it are products of tracked numbers."""


def plain(number: Any) -> Any:
    """A number without its expression."""
    return float(number) if isinstance(number, float) else int(number)


def _is_unbounded(number: Any) -> bool:
    """Whether a number is infinite, or none: no expression has it."""
    return isinstance(number, float) and not math.isfinite(number)


def tracked_in(record: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The tracked numbers of a nest of records, tuples and mappings, each with its path."""
    if isinstance(record, _Remembers):
        yield path, record
    elif isinstance(record, Mapping):
        for name, item in record.items():
            yield from tracked_in(item, (*path, name))
    elif isinstance(record, (tuple, list)):
        for place, item in enumerate(record):
            yield from tracked_in(item, (*path, place))
    else:
        kind: Any = type(record)
        for name in field_names(kind) or ():
            yield from tracked_in(getattr(record, name), (*path, name))


def expected(function: str, rows: int, chosen: int, classes: int) -> float:
    """Classes that a draw reaches, tracked where a number is; function: as `function_of` takes."""
    numbers = rows, chosen, classes
    reached = function_of(function)(*map(plain, numbers))
    track = next((n.track for n in numbers if isinstance(n, Tracked)), None)
    if track is None:
        return reached
    parts: Any = tuple(_expression(number) for number in numbers)
    if not all(isinstance(part, Formula) for part in parts):
        return reached
    made: float = track.number(float(reached), Operation.of_draw(Draw(function, *parts)))
    return made


def _expression(number: Any) -> Expression:
    if isinstance(number, _Remembers):
        return number.expression
    return _fraction(number) if isinstance(number, float) else _constant(int(number))


@lru_cache(maxsize=1 << 12)
def _fraction(number: float) -> Expression:
    above, below = number.as_integer_ratio()
    if below == 1:
        return _constant(above)
    return Operation("/", _constant(above), _constant(below))


_constant = lru_cache(maxsize=1 << 12)(Formula.constant)


@lru_cache(maxsize=1 << 16)
def _combined(kind: str, first: Expression, second: Expression) -> Expression:
    if isinstance(first, Formula) and isinstance(second, Formula) and kind != "/":
        if kind == "*":
            return first * second
        return Formula.total([(1, first), (1 if kind == "+" else -1, second)])
    neutral = _constant(0 if kind in "+-" else 1)
    if second == neutral:
        return first
    return second if first == neutral and kind in "+*" else Operation(kind, first, second)


@lru_cache(maxsize=1 << 16)
def _of_integers(kind: str, first: Expression, second: Expression) -> Expression:
    """A sum or product of integers; equal terms of a sum are one, so that it stays short."""
    made = _combined(kind, first, second)
    if isinstance(made, Formula) or kind == "*":
        return made
    formula, terms = _terms(first)
    beside, others = _terms(second)
    times = 1 if kind == "+" else -1
    for term, count in others.items():
        terms[term] = terms.get(term, 0) + times * count
    parts: list[Expression] = [Formula.total([(1, formula), (times, beside)])]
    parts += [_combined("*", term, _constant(n)) for term, n in terms.items() if n]
    return functools.reduce(functools.partial(_combined, "+"), parts)


def _terms(expression: Expression) -> tuple[Formula, dict[Operation, int]]:
    """The polynomial in a sum, and how often each other term is in it."""
    if isinstance(expression, Formula):
        return expression, {}
    first, second = expression.first, expression.second
    if expression.kind == "+":
        formula, terms = _terms(first)
        beside, others = _terms(second)
        return formula + beside, {**terms, **others}
    if expression.kind == "*" and isinstance(first, Operation) and isinstance(second, Formula):
        (number,) = second.terms if second.is_constant else (None,)
        if number is not None and second.divisor == 1:
            return Formula(), {first: number.coefficient}
    return Formula(), {expression: 1}


def _polynomial(expression: Expression) -> Formula | None:
    """An expression as a polynomial, with fractions as coefficients; None where it is none."""
    if isinstance(expression, Formula):
        return expression
    if expression.kind not in ("+", "-", "*", "/"):
        return None
    first, second = _polynomial(expression.first), _polynomial(expression.second)
    if first is None or second is None:
        return None
    if expression.kind == "/":
        return _quotient(first, second) if second.terms else None
    return _combined(expression.kind, first, second)  # type: ignore[return-value]


def _is_whole(formula: Formula) -> bool:
    """Whether a polynomial is an integer for all integers: for all their rests by its divisor."""
    places = sorted(formula.symbols)
    if formula.divisor == 1 or formula.divisor ** len(places) > _MOST_RESTS:
        return formula.divisor == 1
    for rests in itertools.product(range(formula.divisor), repeat=len(places)):
        numbers = dict(zip(places, rests, strict=True))
        try:
            formula.at([numbers.get(place, 0) for place in range(max(places, default=-1) + 1)])
        except FormulaError:
            return False
    return True


_MOST_RESTS = 1 << 12
"""Rests for which a polynomial with a divisor is tried."""


class SlotKind(NamedTuple):
    """An expression as a slot has it: its kind, as in `Varying`, its formula and its draw."""

    kind: str
    formula: Formula | None
    draw: Draw | None = None


def slot_of(expression: Expression) -> SlotKind | None:
    """An expression as one of the kinds of slots; None where it is none."""
    formula = _polynomial(expression)
    if formula is not None and _is_whole(formula):
        return SlotKind(PLAIN, formula)
    if isinstance(expression, Formula):
        return None
    if expression.draw is not None:
        return SlotKind(REACHED, None, expression.draw)
    if expression.kind == _ROUND:
        touched = _touched(expression.first)
        formula = touched.formula if touched is not None else None
        return touched if formula is not None and _is_whole(formula) else None
    if expression.kind == "+":
        pairs = (expression.first, expression.second), (expression.second, expression.first)
        return next(filter(None, (_beside(*pair) for pair in pairs)), None)
    if expression.kind == "/":
        rows, below = _polynomial(expression.first), expression.second
        if rows is not None and _is_whole(rows):
            draw = _drawn(below)
            if draw is not None and not (draw.is_constant and draw.at(()) < 1):
                return SlotKind(EACH, rows, draw)
    return None


def _drawn(expression: Expression) -> Draw | None:
    """The draw of an expression, or one of a number that no size changes; else None."""
    number = _polynomial(expression)
    if number is not None and number.is_constant and number.terms:
        above, below = number.coefficients()[()].as_integer_ratio()
        return Draw(RATIO, _constant(above), _constant(1), _constant(below))
    return expression.draw if isinstance(expression, Operation) else None


def _beside(expression: Expression, fixed: Expression) -> SlotKind | None:
    """A number that a draw touches, and a whole number of rows beside it."""
    inner = slot_of(expression)
    if inner is None or inner.draw is None or inner.kind == EACH or not isinstance(fixed, Formula):
        return None
    rows = fixed if inner.formula is None else _quotient(fixed, inner.formula)
    if rows is None or not _is_whole(rows):
        return None
    beside = Formula.total([(1, inner.draw.beside), (1, rows)])
    return inner._replace(draw=structs.replace(inner.draw, beside=beside))


def _touched(product: Expression) -> SlotKind | None:
    """A draw times the factors of a product."""
    reached = _drawn(product)
    if reached is not None or isinstance(product, Formula) or product.kind not in ("*", "/"):
        return SlotKind(TOUCHED, _constant(1), reached) if reached is not None else None
    for left, right in ((product.first, product.second), (product.second, product.first)):
        factor, inner = _polynomial(right), _touched(left)
        if factor is not None and inner is not None and inner.formula is not None:
            formula = _polynomial(Operation(product.kind, inner.formula, factor))
            return SlotKind(TOUCHED, formula, inner.draw) if formula is not None else None
        if product.kind == "/":
            break
    return None


@lru_cache(maxsize=1 << 16)
def _divided(kind: str, above: Expression, below: Expression) -> Expression:
    """The floor of a quotient, or its rest; a polynomial where the quotient is one."""
    if isinstance(above, Formula) and isinstance(below, Formula) and below.terms:
        quotient = _quotient(above, below)
        if quotient is not None and _is_whole(quotient):
            return Formula() if kind == "%" else quotient
    return Operation(kind, above, below)


def _quotient(above: Formula, below: Formula) -> Formula | None:
    """A polynomial divided by another one; None where there is a rest."""
    left, (first, *_) = above, _by_degree(below)
    terms: list[tuple[int, Formula]] = []
    while left.terms:
        powers, value = _by_degree(left)[0]
        length = max(len(powers), len(first[0]))
        pairs = zip(_padded(powers, length), _padded(first[0], length), strict=True)
        lower = tuple(a - b for a, b in pairs)
        if min(lower, default=0) < 0:
            return None
        term = Formula.of({lower: value / first[1]})
        terms.append((1, term))
        left = Formula.total([(1, left), (-1, term * below)])
    return Formula.total(terms)


def _by_degree(formula: Formula) -> list[tuple[tuple[int, ...], Fraction]]:
    """Powers and coefficients of the terms, the first in order of powers first."""
    most = max((len(term.powers) for term in formula.terms), default=0)
    pairs = formula.coefficients().items()
    return sorted(pairs, key=lambda pair: _padded(pair[0], most), reverse=True)


def _padded(powers: tuple[int, ...], length: int) -> tuple[int, ...]:
    return (*powers, *(0,) * (length - len(powers)))


def _arithmetic(name: str, kind: str) -> None:
    """Give tracked numbers an operator and its reflection."""
    apply = _OPERATORS[kind]
    rule = _divided if kind in ("//", "%") else _of_integers

    def operate(self: Any, other: Any, turned: bool = False) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        first, second = (other, self) if turned else (self, other)
        value = apply(plain(first), plain(second))
        if _is_unbounded(other):
            return value
        combined = rule
        if type(value) is float:
            if kind in ("//", "%") or _is_unbounded(value):
                return value
            combined = _combined
        return self.track.number(value, combined(kind, _expression(first), _expression(second)))

    def reflected(self: Any, other: Any) -> Any:
        return operate(self, other, turned=True)

    setattr(_Remembers, f"__{name}__", operate)
    setattr(_Remembers, f"__r{name}__", reflected)


def _comparison(name: str, apply: Callable[[Any, Any], bool], swapped: bool, negated: bool) -> None:
    """Give tracked numbers an ordering, recorded as "first - second is below 0"."""

    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        if not self.track.on or _is_unbounded(other):
            return apply(plain(self), plain(other))
        if type(other) is float and isinstance(self, int):
            other = math.floor(other) if swapped else math.ceil(other)
        first, second = (other, self) if swapped else (self, other)
        number = _combined("-", _expression(first), _expression(second))
        below = self.track.decide("<", number, plain(first) < plain(second))
        return below != negated

    setattr(_Remembers, f"__{name}__", compare)


def _equality(name: str, negated: bool) -> None:
    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        if _is_unbounded(other):
            return negated
        if type(other) is float and isinstance(self, int) and not other.is_integer():
            return negated
        number = _combined("-", _expression(self), _expression(other))
        return self.track.decide("==", number, plain(self) == plain(other)) != negated

    setattr(_Remembers, f"__{name}__", compare)


for _kind, _plain in _OPERATORS.items():
    _arithmetic(_plain.__name__.removeprefix("_"), _kind)
_comparison("lt", operator.lt, swapped=False, negated=False)
_comparison("gt", operator.gt, swapped=True, negated=False)
_comparison("ge", operator.ge, swapped=False, negated=True)
_comparison("le", operator.le, swapped=True, negated=True)
_equality("eq", negated=False)
_equality("ne", negated=True)
