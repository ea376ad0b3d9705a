"""From a table with a row for each combination of levels to the levels and an array."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rooftrace.costmodels.factorial.effects import Array, FactorialError


def grid_of(
    rows: Iterable[Mapping[str, Any]], factors: Sequence[str], response: str
) -> tuple[dict[str, list[Hashable]], Array]:
    """Levels and response, as `factorial` takes them, of rows in any order.

    rows: mappings with a value for each factor and for the response, for example of
    `csv.DictReader` or `frame.to_dict("records")`.  Levels are in the order in which they first
    appear.
    Raises FactorialError for a row without such a column, and where a combination of levels is
    missing or stands there twice.
    """
    cells: dict[tuple[int, ...], float] = {}
    levels: dict[str, dict[Hashable, int]] = {name: {} for name in factors}
    for number, row in enumerate(rows):
        for name in (*factors, response):
            if name not in row:
                raise FactorialError(
                    f"row {number} has no {name!r}: its columns are {', '.join(map(str, row))}"
                )
        key = tuple(seen.setdefault(row[name], len(seen)) for name, seen in levels.items())
        if key in cells:
            raise FactorialError(
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
        raise FactorialError(
            f"{len(cells)} rows, and the levels of {', '.join(factors)} make {result.size} "
            f"combinations: {_named(levels, missing) or 'all of them'} is missing"
        )
    return {name: list(seen) for name, seen in levels.items()}, result


def _number(value: Any, row: int, response: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise FactorialError(f"row {row}: {response}={value!r:.60}: expected a number") from None


def _named(levels: Mapping[str, Mapping[Hashable, int]], key: tuple[Any, ...]) -> str:
    """A combination of levels in words."""
    return ", ".join(
        f"{name}={list(seen)[place]}"
        for (name, seen), place in zip(levels.items(), key, strict=False)
    )
