"""Main effects and interactions over a full factorial grid, given as an array or as table rows.

Sums of squares are those of the analysis of variance of a factorial design without replication
(Montgomery, Design and Analysis of Experiments, chapters 5 and 14): nothing is fitted, and no test
of significance is made, because computed results have no error.  Knows no model and no chip.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rooftrace.errors import RequestError, one_of

Array = NDArray[np.float64]


LARGEST = 1e140
"""Above it, squares of cells do not add up in double precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MainEffect:
    """The effect of one factor on the response, averaged over all others.

    levels, means, medians and deviations have one entry for each level, in the caller's order.
    means: mean response over the cells of a level.  deviations: means less the grand mean, so that
    they add up to 0.  sum_of_squares: cells of a level times the squared deviations, added up.
    share: of the total sum of squares.  degrees: levels less one.
    """

    factor: str
    levels: tuple[Hashable, ...]
    means: tuple[float, ...]
    medians: tuple[float, ...]
    deviations: tuple[float, ...]
    sum_of_squares: float
    share: float
    degrees: int

    @property
    def low(self) -> tuple[Hashable, float]:
        """The level with the least mean, and that mean."""
        return min(zip(self.levels, self.means, strict=True), key=lambda level: level[1])

    @property
    def high(self) -> tuple[Hashable, float]:
        """The level with the largest mean, and that mean."""
        return max(zip(self.levels, self.means, strict=True), key=lambda level: level[1])

    @property
    def spread(self) -> float | None:
        """Largest over least median, less one: 0.5 where the response grows by half.

        None where a median is not above 0, and the ratio means nothing.
        """
        least = min(self.medians)
        return max(self.medians) / least - 1 if least > 0 else None


@dataclass(frozen=True, slots=True)
class Interaction:
    """The effect of two factors together beyond the sum of their main effects.

    deviations[i, j]: the mean of the cells at level i of the first and j of the second, less both
    main deviations and the grand mean; rows and columns add up to 0.  sum_of_squares: cells of a
    pair of levels times the squared deviations, added up.  share: of the total.
    """

    factors: tuple[str, str]
    deviations: Array
    sum_of_squares: float
    share: float
    degrees: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Interaction) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.factors, self.deviations.tobytes(), self.sum_of_squares


@dataclass(frozen=True, slots=True)
class Factorial:
    """The effects of a grid; `main` and `interactions` are ranked, the largest share first.

    share_left: share of the sum of squares in interactions of three factors and more.
    """

    mean: float
    sum_of_squares: float
    main: tuple[MainEffect, ...]
    interactions: tuple[Interaction, ...]
    share_left: float

    def of(self, factor: str) -> MainEffect:
        """The main effect of a factor.  Raises RequestError for a name that is none."""
        for effect in self.main:
            if effect.factor == factor:
                return effect
        every = (effect.factor for effect in self.main)
        raise RequestError(f"factor {factor!r:.60}: {one_of(factor, every)}")

    def to_rows(self) -> list[dict[str, Any]]:
        """A row for each effect, ranked, as a CSV file takes them.

        Columns: factors, degrees, sum_of_squares, share; of main effects spread, low, high and
        their levels.
        """
        rows: list[dict[str, Any]] = []
        for effect in self.main:
            (low_level, low), (high_level, high) = effect.low, effect.high
            rows.append(
                {**_row(effect.factor, effect), "spread": effect.spread, "low": low,
                 "low_level": low_level, "high": high, "high_level": high_level}
            )  # fmt: skip
        empty = dict.fromkeys(("spread", "low", "low_level", "high", "high_level"))
        rows += [{**_row(" x ".join(pair.factors), pair), **empty} for pair in self.interactions]
        return rows


def _row(factors: str, effect: MainEffect | Interaction) -> dict[str, Any]:
    return {
        "factors": factors,
        "degrees": effect.degrees,
        "sum_of_squares": effect.sum_of_squares,
        "share": effect.share,
    }


def factorial(levels: Mapping[str, Sequence[Hashable]], response: ArrayLike) -> Factorial:
    """Main effects of all factors, and interactions of all pairs.

    levels: the levels of each factor, by its name.  response: shape (levels of the first factor,
    levels of the second, ...), in any unit; sums of squares have its square.  For an effect in
    factors rather than in sums, pass the logarithm of the response: factors that multiply then have
    no interactions.  A response that is equal in all cells has shares of 0.
    Raises RequestError for levels and a response that do not fit each other.
    """
    cells = _cells(levels, response)
    mean = float(cells.mean())
    centred = cells - mean
    total = float((centred**2).sum())
    # Of rounding alone: the mean is good to some 1e-16 of the largest cell.
    if total <= cells.size * (1e-14 * float(np.abs(cells).max())) ** 2:
        total = 0.0
    means = {
        axes: centred.mean(axis=tuple(set(range(cells.ndim)) - set(axes)))
        for count in (1, 2)
        for axes in itertools.combinations(range(cells.ndim), count)
    }
    names = list(levels)
    main = [
        _main_effect(name, tuple(levels[name]), cells, axis, means[axis,], total)
        for axis, name in enumerate(names)
    ]
    pairs = []
    for first, second in itertools.combinations(range(cells.ndim), 2):
        apart = means[first,][:, None] + means[second,][None, :]
        deviations = means[first, second] - apart
        squares = _squares(deviations, cells.size, total)
        rows, columns = deviations.shape
        pairs.append(
            Interaction(
                (names[first], names[second]), deviations, squares, _share(squares, total),
                (rows - 1) * (columns - 1),
            )
        )  # fmt: skip
    explained = sum(effect.share for effect in main) + sum(pair.share for pair in pairs)
    return Factorial(
        mean,
        total,
        tuple(sorted(main, key=lambda effect: -effect.sum_of_squares)),
        tuple(sorted(pairs, key=lambda pair: -pair.sum_of_squares)),
        max(0.0, 1 - explained) if total else 0.0,
    )


def _main_effect(
    name: str, levels: tuple[Hashable, ...], cells: Array, axis: int, means: Array, total: float
) -> MainEffect:
    rows = np.moveaxis(cells, axis, 0).reshape(len(levels), -1)
    squares = _squares(means, cells.size, total)
    return MainEffect(
        factor=name,
        levels=levels,
        means=tuple(rows.mean(axis=1).tolist()),
        medians=tuple(np.median(rows, axis=1).tolist()),
        deviations=tuple(means.tolist()),
        sum_of_squares=squares,
        share=_share(squares, total),
        degrees=len(levels) - 1,
    )


def _squares(deviations: Array, cells: int, total: float) -> float:
    """The sum of squares of deviations that each stand for equally many of the cells."""
    return float((deviations**2).sum()) * (cells / deviations.size) if total else 0.0


def _share(squares: float, total: float) -> float:
    return squares / total if total else 0.0


def _cells(levels: Mapping[str, Sequence[Hashable]], response: ArrayLike) -> Array:
    """The response as an array.  Raises RequestError where it is no grid of the levels."""
    if not isinstance(levels, Mapping) or not levels:
        raise RequestError(
            f"levels={levels!r:.60}: expected the levels of each factor by its name, "
            "for example {'batch': (1, 8)}"
        )
    for name, values in levels.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise RequestError(
                f"levels[{name!r}]={values!r:.60}: expected a sequence of at least one level"
            )
        if len(set(values)) != len(values):
            raise RequestError(f"levels[{name!r}]={values!r:.60}: a level stands there twice")
    try:
        cells = np.asarray(response, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RequestError(f"response={response!r:.60}: expected numbers ({error})") from None
    shape = tuple(len(values) for values in levels.values())
    if cells.shape != shape:
        raise RequestError(
            f"the response has the shape {cells.shape}, and the levels of {', '.join(levels)} make "
            f"{shape}: each combination of levels has one number"
        )
    if not np.isfinite(cells).all():
        at = tuple(int(i) for i in np.argwhere(~np.isfinite(cells))[0])
        named = ", ".join(f"{n}={v[i]!r}" for (n, v), i in zip(levels.items(), at, strict=True))
        raise RequestError(
            f"response at {named} is {cells[at]}: expected a finite number; leave out a level "
            "without a result"
        )
    if float(np.abs(cells).max()) > LARGEST:
        raise RequestError("the response is too large to be squared: pass it in a larger unit")
    return cells


# -- tables ----------------------------------------------------------------------------------------
# From a table with a row for each combination of levels to the levels and an array.


def grid_of(
    rows: Iterable[Mapping[str, Any]], factors: Sequence[str], response: str
) -> tuple[dict[str, list[Hashable]], Array]:
    """Levels and response, as `factorial` takes them, of rows in any order.

    rows: mappings with a value for each factor and for the response, for example of
    `csv.DictReader` or `frame.to_dict("records")`.  Levels are in the order in which they first
    appear.
    Raises RequestError for a row without such a column, and where a combination of levels is
    missing or stands there twice.
    """
    cells: dict[tuple[int, ...], float] = {}
    levels: dict[str, dict[Hashable, int]] = {name: {} for name in factors}
    for number, row in enumerate(rows):
        for name in (*factors, response):
            if name not in row:
                raise RequestError(
                    f"row {number} has no {name!r}: its columns are {', '.join(map(str, row))}"
                )
        key = tuple(seen.setdefault(row[name], len(seen)) for name, seen in levels.items())
        if key in cells:
            raise RequestError(
                f"row {number}: {_named(levels, key)} stands there twice; "
                "a further column tells the rows apart: make it a factor, or choose rows"
            )
        cells[key] = _number(row[response], number, response)
    shape = tuple(len(seen) for seen in levels.values())
    result = np.full(shape, np.nan)
    for key, value in cells.items():
        result[key] = value
    if len(cells) != result.size or not cells:
        missing = next((place for place in np.ndindex(*shape) if place not in cells), ())
        raise RequestError(
            f"{len(cells)} rows, and the levels of {', '.join(factors)} make {result.size} "
            f"combinations: {_named(levels, missing) or 'all of them'} is missing"
        )
    return {name: list(seen) for name, seen in levels.items()}, result


def _number(value: Any, row: int, response: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RequestError(f"row {row}: {response}={value!r:.60}: expected a number") from None


def _named(levels: Mapping[str, Mapping[Hashable, int]], key: tuple[Any, ...]) -> str:
    """A combination of levels in words."""
    return ", ".join(
        f"{name}={list(seen)[place]}"
        for (name, seen), place in zip(levels.items(), key, strict=False)
    )
