"""Functions that have a name because no polynomial is right: what draws reach, on average."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


def expected_distinct(rows: int, chosen: int, classes: int) -> float:
    """The expected number of `classes` that at least one of `rows` rows chooses.

    Each row chooses `chosen` different classes, all equally likely, independently of the others; so
    a class is missed by all with (1 - chosen / classes)^rows.
    """
    if rows <= 0 or chosen <= 0:
        return 0.0
    if chosen >= classes:
        return float(classes)
    return snapped(-classes * math.expm1(rows * math.log1p(-chosen / classes)))


def expected_rows(rows: int, own: int, classes: int) -> float:
    """The expected number of different rows that `rows` draws among `classes` reach.

    `own` of the classes have a row each, and all others share one.
    """
    if own >= classes or rows <= 0:
        return expected_distinct(rows, 1, classes)
    alone = expected_distinct(rows, 1, classes) * own / classes
    return snapped(alone + 1 - (own / classes) ** rows)


def snapped(number: float) -> float:
    """A whole number where it differs from one by rounding alone."""
    whole = round(number)
    return float(whole) if abs(number - whole) <= 1e-9 * max(1, whole) else number


def drawn_distinct(rows: int, chosen: int, classes: int) -> int:
    """How many classes a draw reaches that is made to reach the expected number, rounded."""
    expected = expected_distinct(rows, chosen, classes)
    return min(max(round(expected), min(chosen, classes)), rows * chosen)


def largest_draw(rows: int, chosen: int, classes: int) -> int:
    """How many rows the class has that most rows choose, in that draw: all classes have equal ones.

    The last ones have one less where they cannot be equal.
    """
    reached = drawn_distinct(rows, chosen, classes)
    return -(-rows * chosen // reached) if reached else 0


def balanced_distinct(rows: int, chosen: int, classes: int) -> int:
    """How many classes are reached if all are chosen equally often."""
    return min(rows * chosen, classes)


def balanced_largest(rows: int, chosen: int, classes: int) -> int:
    """How many rows a class has at most if all are chosen equally often."""
    return -(-rows * chosen // classes)


FUNCTIONS: Mapping[str, Callable[[int, int, int], float]] = {
    "distinct": expected_distinct,
    "drawn": drawn_distinct,
    "largest": largest_draw,
    "balanced": balanced_distinct,
    "balanced largest": balanced_largest,
    "rows": expected_rows,
}
"""By their names in formulas; all take rows, chosen, classes, but "rows" rows, own, classes."""
