"""Columns of a table as LaTeX: their heads with units, their cells, and the width of each."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rooftrace.reporting.latex.aligning import aligned
from rooftrace.reporting.latex.escaping import latex, plain, width_of
from rooftrace.reporting.view.model import Cell, Column, Table

_BOLD = ("strong", "bad")
LETTER = 4.3
"""Points of a letter of \\footnotesize, figures and typewriter."""
GAP = 8.0
"""Points between two columns: twice \\tabcolsep."""
_WRAPPED = 22
"""Letters beyond which the lines of a column of words may break."""
_NARROW = 14
"""Letters that such a column keeps where the table else would be cut in two."""


@dataclass(frozen=True, slots=True)
class Set:
    """A column as it is set: width in letters; `wraps` where its lines may break."""

    head: tuple[str, ...]  # lines
    cells: tuple[str, ...]
    widths: tuple[int, ...]  # letters of each cell
    width: int
    left: bool
    wraps: bool

    def points(self, wrapped: int) -> float:
        """Points that it takes, where lines that may break have so many letters at most."""
        return (min(self.width, wrapped) if self.wraps else self.width) * LETTER + GAP

    def lines(self, row: int) -> int:
        """How many lines a cell takes."""
        return max(1, -(-self.widths[row] // max(self.width, 1)))


def columns_of(table: Table) -> list[Set]:
    """The columns of a table that stand on a page."""
    return [_set(column, table.rows) for column in table.columns if column.stands("page")]


def _set(column: Column, rows: Sequence[object]) -> Set:
    written = [column.written(row, page=True) for row in rows]
    texts = [text for text, _ in written]
    left = column.is_left("page")
    in_unit = None if left else aligned(texts, _symbol(column, rows))
    unit = in_unit.unit if in_unit else ""
    if in_unit is None:
        cells = [latex(text) for text in texts]
    else:
        texts = [text + "0" * lacks + "." * (lacks > 0) for text, lacks in in_unit.cells]
        cells = [_number(text, lacks) for text, lacks in in_unit.cells]
    widths = tuple(map(width_of, texts))
    marked = (mark in _BOLD and bool(text) for text, mark in written)
    shown = tuple(
        rf"\textbf{{{cell}}}" if bold else cell for cell, bold in zip(cells, marked, strict=True)
    )
    body = max(widths, default=0)
    head = _head(column.name("page"), unit, body)
    wraps = left and body > _WRAPPED
    width = max([body, *(len(line) for line in head[1])])
    return Set(head[0], shown, widths, width, left, wraps)


def _symbol(column: Column, rows: Sequence[object]) -> str:
    """What the numbers of a column are as they are stored."""
    values = (column.read(row) for row in rows)
    units = {v.unit.symbol for v in values if isinstance(v, Cell) and v.unit is not None}
    return next(iter(units)) if len(units) == 1 else column.unit.symbol


def _number(text: str, lacks: int) -> str:
    missing = ("" if "." in text else ".") + "0" * lacks
    return plain(text) + (rf"\phantom{{{missing}}}" if lacks else "")


def _head(name: str, unit: str, body: int) -> tuple[tuple[str, ...], list[str]]:
    """The lines of a head with the unit of its numbers, and about what they look like."""
    bare = "".join(c for c in unit if c.isalnum() or c in "/%")
    if unit and bare.endswith(name) and name.isupper():  # FLOP in GFLOP
        name = ""
    lines = textwrap.wrap(name, max(body, 8, *map(len, name.split()), 0)) or ([""] * (not unit))
    shown = [latex(line) for line in lines]
    if unit:
        text, look = (f"({unit})", f"({bare})") if name else (unit, bare)
        if lines and len(lines[-1]) + 1 + len(look) <= max(body, *map(len, lines)):
            shown[-1], lines[-1] = f"{shown[-1]} {text}", f"{lines[-1]} {look}"
        else:
            shown, lines = [*shown, text], [*lines, look]
    return tuple(shown), lines


def pieces(columns: Sequence[Set], table: Table, width: float) -> list[list[Set]]:
    """The columns, cut into pieces that are at most so many points wide.

    Each begins with the leading columns of the table; columns that belong together stay together
    where they fit.  Pieces are about equally wide.
    """
    if _points(columns, _NARROW) <= width:
        return [fitted(columns, width)]
    leading, rest = columns[: table.leading], columns[table.leading :]
    groups = [rest[i : i + table.sets] for i in range(0, len(rest), table.sets)]
    room = width - _points(leading)
    if any(_points(group) > room for group in groups):
        groups = [[column] for column in rest]
    made = _cut(groups, room)
    for share in range(1, 10):  # as many pieces, the widest as narrow as they get
        even = _cut(groups, room * share / 10)
        if len(even) == len(made):
            made = even
            break
    return [fitted([*leading, *piece], width) for piece in made]


def _cut(groups: Sequence[Sequence[Set]], room: float) -> list[list[Set]]:
    made: list[list[Set]] = [[]]
    for group in groups:
        if made[-1] and _points([*made[-1], *group]) > room:
            made.append([])
        made[-1] += group
    return made


def _points(columns: Sequence[Set], wrapped: int = _WRAPPED) -> float:
    return sum(column.points(wrapped) for column in columns)


def fitted(columns: Sequence[Set], width: float) -> list[Set]:
    """The columns with what room is left shared among those whose lines break."""
    wrapped = _WRAPPED if _points(columns) <= width else _NARROW
    room = width - _points(columns, wrapped)
    made = []
    for column in columns:
        if not column.wraps:
            made.append(column)
            continue
        least = column.points(wrapped)
        wants = max(0.0, column.width * LETTER + GAP - least)
        more = min(wants, max(room, 0.0))
        room -= more
        letters = int((least + more - GAP) / LETTER)
        made.append(replace(column, width=max(letters, 1), wraps=more < wants))
    return made
