"""Effects over a full factorial grid beside loops over its cells, and what must hold of them."""

from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from rooftrace.errors import RequestError
from rooftrace.studies.sensitivity import factorial, grid_of

pytestmark = pytest.mark.quick

SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
NUMBERS = st.floats(-1e6, 1e6, allow_subnormal=False)
RESPONSES = SHAPES.flatmap(lambda shape: arrays(np.float64, shape, elements=NUMBERS))


def levels_of(shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"f{axis}": tuple(range(10, 10 + size)) for axis, size in enumerate(shape)}


def mean_of(response: np.ndarray, fixed: dict[int, int]) -> float:
    """The mean of the cells with these levels, one after another."""
    cells = [
        response[place]
        for place in itertools.product(*map(range, response.shape))
        if all(place[axis] == level for axis, level in fixed.items())
    ]
    return math.fsum(cells) / len(cells)


@given(RESPONSES)
@settings(max_examples=60)
@pytest.mark.slow
def test_effects_are_those_of_a_loop_over_all_cells(response: np.ndarray) -> None:
    result = factorial(levels_of(response.shape), response)
    places = list(itertools.product(*map(range, response.shape)))
    grand = mean_of(response, {})
    size = max(1.0, float(np.abs(response).max()))
    total = math.fsum((response[place] - grand) ** 2 for place in places)
    close = {"rel": 1e-9, "abs": 1e-9 * size**2 * len(places)}
    assert result.sum_of_squares == pytest.approx(total, **close)
    for axis in range(response.ndim):
        effect = result.of(f"f{axis}")
        # Each cell, with its level's deviation from the grand mean.
        squares = math.fsum((mean_of(response, {axis: place[axis]}) - grand) ** 2
                            for place in places)  # fmt: skip
        assert effect.sum_of_squares == pytest.approx(squares, **close)
        for level in range(response.shape[axis]):
            cells = [response[place] for place in places if place[axis] == level]
            assert effect.medians[level] == pytest.approx(statistics.median(cells))
            assert effect.means[level] == pytest.approx(mean_of(response, {axis: level}), abs=1e-6)
    for pair in result.interactions:
        a, b = (int(name[1:]) for name in pair.factors)
        squares = math.fsum(
            (
                mean_of(response, {a: place[a], b: place[b]})
                - mean_of(response, {a: place[a]})
                - mean_of(response, {b: place[b]})
                + grand
            )
            ** 2
            for place in places
        )
        assert pair.sum_of_squares == pytest.approx(squares, **close)


@given(arrays(np.float64, (3, 4), elements=NUMBERS))
def test_of_two_factors_the_sums_of_squares_add_up_to_the_total(response: np.ndarray) -> None:
    result = factorial(levels_of((3, 4)), response)
    parts = [*result.main, *result.interactions]
    squares = sum(part.sum_of_squares for part in parts)
    close = 1e-9 * max(1.0, float(np.abs(response).max())) ** 2
    assert squares == pytest.approx(result.sum_of_squares, rel=1e-9, abs=close)
    assert sum(part.degrees for part in parts) == 3 * 4 - 1
    assert result.share_left == pytest.approx(0, abs=1e-9)


@given(*(st.lists(st.floats(1, 100), min_size=n, max_size=n) for n in (2, 3, 4)))
def test_what_adds_up_has_no_interactions_and_what_multiplies_none_in_logarithms(
    a: list[float], b: list[float], c: list[float]
) -> None:
    one, two, three = np.array(a)[:, None, None], np.array(b)[None, :, None], np.array(c)
    levels = levels_of((2, 3, 4))
    for response in (one + two + three, np.log(one * two * three)):
        result = factorial(levels, response)
        small = 1e-20 * response.size * float(np.abs(response).max()) ** 2
        assert all(pair.sum_of_squares <= max(small, 1e-20) for pair in result.interactions)
        if result.sum_of_squares > 1e-6:
            assert sum(effect.share for effect in result.main) == pytest.approx(1)


def test_the_grid_of_the_textbook() -> None:
    """Montgomery, example 5.1: life of batteries by material and temperature, four of each: sums
    of squares of means are a fourth of the published ones."""
    totals = np.array([[539, 229, 230], [623, 479, 198], [576, 583, 342]])
    result = factorial({"material": (1, 2, 3), "temperature": (15, 70, 125)}, totals / 4)
    squares = {effect.factor: 4 * effect.sum_of_squares for effect in result.main}
    assert squares == pytest.approx({"material": 10683.72, "temperature": 39118.72}, abs=0.01)
    (pair,) = result.interactions
    assert 4 * pair.sum_of_squares == pytest.approx(9613.78, abs=0.01)
    assert [effect.factor for effect in result.main] == ["temperature", "material"]


def test_the_spread_is_that_of_medians_and_low_and_high_name_their_levels() -> None:
    result = factorial({"k": ("few", "many"), "batch": (1, 2, 4)}, [[1, 2, 9], [3, 4, 50]])
    effect = result.of("k")
    assert effect.medians == (2, 4)
    assert effect.spread == 4 / 2 - 1
    assert effect.low == ("few", 4) and effect.high == ("many", 19)
    assert factorial({"k": (1, 2)}, [-1, 1]).of("k").spread is None  # a ratio of what?


def test_a_response_that_never_changes_has_no_effects() -> None:
    result = factorial({"a": (1, 2), "b": (1, 2, 3)}, np.full((2, 3), 0.1))
    assert [effect.share for effect in result.main] == [0, 0]
    assert result.share_left == 0


def test_rows_are_ranked_and_name_pairs() -> None:
    rows = factorial({"a": (1, 2), "b": (1, 2)}, [[0, 0], [10, 11]]).to_rows()
    assert [row["factors"] for row in rows] == ["a", "b", "a x b"]
    assert rows[0]["high_level"] == 2 and rows[2]["low"] is None
    assert sum(row["share"] for row in rows) == pytest.approx(1)


def test_a_table_in_any_order_is_the_same_grid() -> None:
    rows = [{"b": b, "t": str(10 * a + b), "a": a} for b in (5, 7) for a in (3, 1, 2)]
    levels, response = grid_of(rows[::-1], ("a", "b"), "t")
    assert levels == {"a": [2, 1, 3], "b": [7, 5]}
    assert response.tolist() == [[27, 25], [17, 15], [37, 35]]


@pytest.mark.parametrize(
    ("levels", "response", "told"),
    [
        ({}, 1.0, "expected the levels of each factor by its name"),
        ({"a": "xy"}, [1, 2], "levels['a']='xy': expected a sequence"),
        ({"a": ()}, [], "at least one level"),
        ({"a": (1, 1)}, [1, 2], "stands there twice"),
        ({"a": (1, 2)}, [1, 2, 3], "has the shape (3,), and the levels of a make (2,)"),
        ({"a": (1, 2)}, [1, math.nan], "response at a=2 is nan: expected a finite number"),
        ({"a": (1, 2)}, ["x", 2], "expected numbers"),
        ({"a": (1, 2)}, [1e200, 2], "too large to be squared"),
    ],
)
def test_what_is_no_grid_is_told(levels: dict, response: list, told: str) -> None:
    with pytest.raises(RequestError) as error:
        factorial(levels, response)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"a": 1}], "row 0 has no 't': its columns are a"),
        ([{"a": 1, "t": 1}, {"a": 1, "t": 2}], "row 1: a=1 stands there twice"),
        ([{"a": 1, "t": "fast"}], "row 0: t='fast': expected a number"),
        ([], "0 rows"),
    ],
)
def test_a_table_that_is_no_grid_is_told(rows: list, told: str) -> None:
    with pytest.raises(RequestError) as error:
        grid_of(rows, ("a",), "t")
    assert told in str(error.value)


def test_a_missing_combination_is_named() -> None:
    rows = [{"a": a, "b": b, "t": 1} for a in (1, 2) for b in (3, 4) if (a, b) != (2, 3)]
    with pytest.raises(RequestError, match="a=2, b=3 is missing"):
        grid_of(rows, ("a", "b"), "t")


def test_an_unknown_factor_is_told() -> None:
    with pytest.raises(RequestError, match="factor 'b': expected one of a"):
        factorial({"a": (1, 2)}, [1, 2]).of("b")
