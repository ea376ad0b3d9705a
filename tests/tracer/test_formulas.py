"""Formulas of whole numbers beside Python's own arithmetic, and draws beside counting them out."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rooftrace.graph.formulas import (
    Fitter,
    Formula,
    FormulaError,
    Guard,
    RecordForm,
    StructureError,
    Track,
    expected,
    polynomials,
)
from rooftrace.hardware.units import format_capacity, format_flops

SIZES = st.integers(1, 1 << 40)
SMALL = st.integers(-50, 50)
FACTORS = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.fractions(-100, 100, max_denominator=12),
    max_size=5,
)


def summed(factors: dict[Any, Fraction], x: int, y: int) -> Fraction:
    """The value of a polynomial, term by term."""
    total = Fraction(0)
    for (first, second), factor in factors.items():
        for _ in range(first):
            factor *= x
        for _ in range(second):
            factor *= y
        total += factor
    return total


@given(FACTORS, SIZES, SIZES)
def test_a_formula_is_its_sum_exactly_or_an_error(
    factors: dict[Any, Fraction], x: int, y: int
) -> None:
    formula, expected = Formula.of(factors), summed(factors, x, y)
    columns = [np.array([x]), np.array([y])]
    if expected.denominator == 1:
        assert formula.at((x, y)) == expected
        assert int(formula.over(columns)[0]) == expected
    else:
        with pytest.raises(FormulaError, match="no whole number"):
            formula.at((x, y))
        with pytest.raises(FormulaError, match="no whole number"):
            formula.over(columns)


@given(FACTORS, FACTORS, st.integers(1, 99), st.integers(1, 99))
def test_sums_products_and_slopes(
    mine: dict[Any, Fraction], theirs: dict[Any, Fraction], x: int, y: int
) -> None:
    first, second = Formula.of(mine), Formula.of(theirs)
    assert value(first + second, x, y) == summed(mine, x, y) + summed(theirs, x, y)
    assert value(first * second, x, y) == summed(mine, x, y) * summed(theirs, x, y)
    slope = sum(
        (f * a * x ** (a - 1) * y**b for (a, b), f in mine.items() if a), Fraction(0)
    )  # d/dx of each term
    assert value(first.derivative(0), x, y) == slope


def value(formula: Formula, x: int, y: int) -> Fraction:
    return summed({(*p, 0, 0)[:2]: f for p, f in formula.coefficients().items()}, x, y)


def test_what_a_formula_looks_like() -> None:
    formula = Formula.of({(1, 1): Fraction(4096), (1,): Fraction(-1, 2), (): Fraction(3)})
    assert formula.written(["batch", "kv"]) == "4,096 batch kv - 1/2 batch + 3"
    assert Formula().written([]) == "0"


# -- fitting ---------------------------------------------------------------------------------------


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 1), st.integers(0, 2)),
        st.fractions(-9, 9, max_denominator=4),
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_a_polynomial_is_recovered_wherever_it_is_asked_for(
    factors: dict[Any, Fraction], draw: Any
) -> None:
    scale = 4 * 3 * 2  # all values are whole
    whole = {powers: factor * scale for powers, factor in factors.items()}
    samples = [(draw.randint(1, 40), draw.randint(1, 40)) for _ in range(14)]
    samples = list(dict.fromkeys(samples))
    values = [int(summed(whole, *sample)) for sample in samples]
    fitted = Fitter(samples).fit(values)
    if fitted is None:  # too few different samples for so many terms
        assert len(samples) < 8 + 2 or len({s[1] for s in samples}) < 5
        return
    assert [fitted.at(sample) for sample in samples] == values
    if len({s[0] for s in samples}) > 4 and len({s[1] for s in samples}) > 4:
        assert fitted.at((1000, 77)) == summed(whole, 1000, 77)


@pytest.mark.parametrize(
    "law",
    [lambda x: 2**x, lambda x: -(-x // 8) * 8, lambda x: 10**6 // x, lambda x: x if x < 9 else 9],
)
def test_what_is_no_polynomial_is_refused(law: Callable[[int], int]) -> None:
    samples = [(x,) for x in range(1, 18, 2)]
    assert Fitter(samples).fit([law(x) for (x,) in samples]) is None


@given(st.lists(SMALL, min_size=2, max_size=6))
def test_points_alone_prove_no_curve(values: list[int]) -> None:
    """There is a curve through any points; it stands only if samples are left over that agree."""
    samples = [(x,) for x in range(1, len(values) + 1)]
    fitted = Fitter(samples).fit(values)
    if fitted is not None:
        most = max((sum(term.powers) for term in fitted.terms), default=0)
        assert (
            len(set(values)) == 1
            or values == [x for (x,) in samples]
            or len(samples) >= most + 1 + (2 if most > 1 else 1)
        )


def test_a_few_samples_beside_many_alike_prove_no_term() -> None:
    """As many samples beside the others as terms that only they give: any numbers would fit."""
    samples = [(2, 12278), (2, 512), (4, 12273), (2, 9392), (4, 9399), (3, 9396), (2, 9385)]
    fitter = Fitter([*samples, (2, 9398)])
    rows = {2: 23_551, 3: 28_415, 4: 32_702}  # that an embedding reads: words may be equal
    assert fitter.fit([rows[batch] for batch, _ in fitter.samples]) is None
    size = fitter.fit([64 * batch * kv + 5 for batch, kv in fitter.samples])
    assert size is not None and size.at((7, 1000)) == 64 * 7 * 1000 + 5


# -- draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize(("chosen", "classes"), [(1, 3), (2, 4), (3, 3), (1, 5)])
def test_expected_classes_are_the_mean_over_all_draws(rows: int, chosen: int, classes: int) -> None:
    choices = list(itertools.combinations(range(classes), chosen))
    reached = [len(set(itertools.chain(*draw))) for draw in itertools.product(choices, repeat=rows)]
    mean = sum(reached) / len(reached)
    assert polynomials.expected_distinct(rows, chosen, classes) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
@pytest.mark.parametrize(("own", "classes"), [(0, 3), (1, 3), (3, 4), (3, 3), (2, 5)])
def test_expected_rows_are_the_mean_over_all_draws(rows: int, own: int, classes: int) -> None:
    draws = list(itertools.product(range(classes), repeat=rows))
    reached = [len({min(number, own) for number in draw}) for draw in draws]  # the rest share `own`
    mean = sum(reached) / len(reached)
    assert polynomials.expected_rows(rows, own, classes) == pytest.approx(mean, rel=1e-12)


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 40))
def test_balanced_draws_deal_classes_like_cards(rows: int, chosen: int, classes: int) -> None:
    chosen = min(chosen, classes)
    dealt = [0] * classes
    for number in range(rows * chosen):
        dealt[number % classes] += 1
    assert polynomials.balanced_distinct(rows, chosen, classes) == sum(n > 0 for n in dealt)
    assert polynomials.balanced_largest(rows, chosen, classes) == max(dealt)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 40))
def test_a_draw_fits_into_its_rows_and_classes(rows: int, chosen: int, classes: int) -> None:
    chosen = min(chosen, classes)
    reached = polynomials.drawn_distinct(rows, chosen, classes)
    assert chosen <= reached <= min(rows * chosen, classes)
    assert polynomials.largest_draw(rows, chosen, classes) * reached >= rows * chosen


# -- tracked numbers -------------------------------------------------------------------------------

OPERATORS = [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne]


@given(st.data())
@settings(max_examples=200)
def test_a_tracked_number_is_the_same_anywhere(data: st.DataObject) -> None:
    """What arithmetic leads to at some sizes, its expression gives at others."""
    steps = data.draw(
        st.lists(
            st.tuples(st.sampled_from(OPERATORS), st.integers(1, 9), st.booleans(), st.booleans()),
            min_size=1,
            max_size=6,
        )
    )

    def computed(x: Any, y: Any) -> Any:
        total = x
        for operate, number, turned, other in steps:
            operand = y if other else number
            total = operate(operand, total) if turned else operate(total, operand)
        return total

    places = st.tuples(st.integers(1, 30), st.integers(1, 30))
    here, there = data.draw(places), data.draw(places)
    track = Track()
    try:
        plain = computed(*here)
        expected = computed(*there)
    except ZeroDivisionError:
        return
    tracked = computed(*(track.number(n, Formula.symbol(i)) for i, n in enumerate(here)))
    assert int(tracked) == plain
    if hasattr(tracked, "expression"):
        columns = [np.array([number]) for number in there]
        assert int(tracked.expression.over(columns)[0]) == expected
    else:  # nothing depends on the sizes
        assert plain == expected


@given(
    st.sampled_from(COMPARISONS),
    st.integers(1, 30),
    st.one_of(st.integers(-5, 35), st.floats(-5, 35), st.just(float("inf"))),
    st.booleans(),
    st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_a_guard_holds_where_the_comparison_comes_out_the_same(
    compare: Callable[[Any, Any], bool], here: int, limit: float, turned: bool, others: list[int]
) -> None:
    turned = turned and isinstance(limit, int)  # a float asks itself first
    track = Track()
    number = track.number(here, Formula.symbol(0))

    def outcome(x: Any) -> bool:
        return compare(limit, x) if turned else compare(x, limit)

    assert outcome(number) == outcome(here)
    for other in others:
        same = all(bool(g.holds([np.array([other])])[0]) for g in track.guards)
        assert same == (outcome(other) == outcome(here))


@given(st.data(), st.integers(2, 24), st.integers(1, 24), st.sampled_from([None, 3]))
def test_a_form_of_tracked_numbers_gives_the_record_elsewhere(
    data: st.DataObject, classes: int, chosen: int, alone: int | None
) -> None:
    """Rows of experts, bytes of a table that tokens reach, pairs below a diagonal: as rules do."""
    chosen = min(chosen, classes)

    def record(batch: Any, kv: Any) -> tuple[Any, ...]:
        function, some = ("distinct", chosen) if alone is None else ("rows", alone)
        reached = min(expected(function, batch * 3, some, classes), classes)
        touched = round(classes * 96 * reached / classes)
        each = batch * 3 / max(reached, 1)
        pairs = batch * (kv * (kv + 1) // 2)
        tiles = -(-(2 * batch * (kv + 1) ** 2) // (kv + 1))
        return touched, 960 + touched, {"each": each, "share": batch / 8}, pairs, tiles, (kv + 1, 7)

    places = st.tuples(st.integers(1, 40), st.integers(1, 40))
    here, track = data.draw(places), Track()
    made = record(*(track.number(n, Formula.symbol(i)) for i, n in enumerate(here)))
    form = RecordForm.of_tracked(("batch", "kv"), made, here)
    assert form.template == record(*here) == form.at(here)
    for there in data.draw(st.lists(places, min_size=1, max_size=6)):
        columns = [np.array([number]) for number in there]
        if all(guard.holds(columns)[0] for guard in track.guards):
            assert form.at(there) == record(*there)


def test_an_expression_that_no_slot_has_is_no_form() -> None:
    number = Track().number(40, Formula.symbol(0))
    with pytest.raises(StructureError, match="tiles: no formula is"):
        RecordForm.of_tracked(("batch",), {"tiles": number // 16}, (40,))


@pytest.mark.parametrize("limit", [float("inf"), float("-inf"), float("nan")])
def test_what_is_infinite_or_none_decides_nothing(limit: float) -> None:
    track = Track()
    for number in (track.number(3, Formula.symbol(0)), track.number(3, Formula.symbol(0)) / 2):
        plain = float(number)
        for compare in COMPARISONS:
            assert compare(number, limit) == compare(plain, limit)
        for operate in (operator.add, operator.mul, operator.truediv):
            assert repr(operate(number, limit)) == repr(operate(plain, limit))
    assert not track.guards


def test_a_truth_value_is_a_comparison_with_zero() -> None:
    track = Track()
    number = track.number(3, Formula.symbol(0)) - 3
    assert not number
    assert list(track.guards) == [Guard("==", number.expression, True)]  # type: ignore[attr-defined]


def test_numbers_beyond_64_bits_stay_exact() -> None:
    formula = Formula.of({(4,): Fraction(3), (): Fraction(1)})
    sizes: Sequence[int] = [1, 131_072, 1 << 20]
    told = formula.over([np.array(sizes)])
    assert [int(number) for number in told] == [3 * x**4 + 1 for x in sizes]


def test_what_a_number_is_written_as_decides_nothing() -> None:
    """A note on a plan that says "999.9 GFLOP" is no other plan than one that says "1.00 TFLOP"."""
    track = Track()
    number = track.number(999_900_000_000, Formula.symbol(0))
    assert format_flops(number) == "999.9 GFLOP" and not track.guards
    assert format_capacity(number) == format_capacity(999_900_000_000) and not track.guards
