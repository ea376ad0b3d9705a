"""Tables that stay short: rows that differ in sizes stand in one, with the range of each number."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from rooftrace.reporting.view import model as view

_WHOLE = 12
"""Tables of so many rows are not folded."""
_MOST = 20
"""Rows of a folded table, beside one of each kind for all others."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Folding:
    """How the rows of one table are folded; each has a `kind`, and what was `called`.

    columns: of the table, which has a row of several as a mapping by their keys.  name: the sizes
    of a row; those that differ in numbers only are of one class.  seconds: of all that a row
    stands for.  own: cells of several rows that are no range, by key.  few: so many rows of a class
    stand alone; more stand in so many `parts`.
    """

    columns: Sequence[view.Column]
    name: tuple[str, Callable[[Any], str]]  # the key of its column, and its text
    seconds: Callable[[Any], float]
    own: Mapping[str, Callable[[Sequence[Any]], Any]]
    few: int
    parts: int

    def of(self, rows: Sequence[Any]) -> list[Any]:
        """The rows, or fewer that stand for them."""
        if len(rows) <= _WHOLE:
            return list(rows)
        classes: dict[Any, list[Any]] = {}
        for row in rows:
            name = _NUMBER.sub("#", self.name[1](row))
            classes.setdefault((row.kind, row.called, name), []).append(row)
        lines = [part for rows in classes.values() for part in self._parts(rows, len(classes))]
        lines.sort(key=lambda line: -sum(map(self.seconds, line)))
        others: dict[str, list[Any]] = {}
        for line in lines[_MOST:]:
            others.setdefault(line[0].kind, []).extend(line)
        places = {id(row): place for place, row in enumerate(rows)}
        kept = sorted(lines[:_MOST], key=lambda line: places[id(line[0])])
        return [
            *(line[0] if len(line) == 1 else self._row(line) for line in kept),
            *(self._row(line, f"{len(line)} others") for line in others.values()),
        ]

    def _parts(self, rows: Sequence[Any], classes: int) -> list[list[Any]]:
        parts = max(min(self.parts, _MOST // classes), 1)
        size = 1 if len(rows) <= self.few else ceil(len(rows) / parts)
        return [list(rows[i : i + size]) for i in range(0, len(rows), size)]

    def _row(self, rows: Sequence[Any], name: str = "") -> dict[str, Any]:
        key, text = self.name
        cells = {column.key: self._cell(column, rows) for column in self.columns}
        return {**cells, key: name or _ranged([text(row) for row in rows])}

    def _cell(self, column: view.Column, rows: Sequence[Any]) -> Any:
        if column.key in self.own:
            return self.own[column.key](rows)
        values = [value for value in map(column.read, rows) if value is not None]
        if any(isinstance(value, str) for value in values):
            words = [word for word, _ in Counter(values).most_common()]
            return ", ".join(words if len(words) < 3 else (words[0], f"{len(words) - 1} more"))
        ends = (min(values), max(values)) if values else (None, None)
        return span(*(column.unit.written(value, page=False) for value in ends))


def span(low: str, high: str) -> str:
    """The text of a range: "1..128", "827.0..875.0 us"; one of two texts if they are equal."""
    if low.partition(" ")[2] == high.partition(" ")[2]:
        low = low.partition(" ")[0] if low != high else low
    return low if low == high else f"{low}..{high}"


def _ranged(texts: Sequence[str]) -> str:
    """Texts that differ in numbers only, as one: "G([1, 1..128])"."""
    numbers = [[int(n) for n in _NUMBER.findall(text)] for text in texts]
    words = _NUMBER.split(texts[0])
    spans = (span(str(min(c)), str(max(c))) for c in zip(*numbers, strict=True))
    return words[0] + "".join(a + b for a, b in zip(spans, words[1:], strict=True))
