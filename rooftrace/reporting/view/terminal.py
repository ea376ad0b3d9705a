"""A view on a screen, in colours where the terminal has them.

Here, and nowhere else, characters that are not seen get visible escapes.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import visible
from rooftrace.reporting.view.grids import Grid
from rooftrace.reporting.view.model import Column, Note, Section, Table, View

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

STYLES: Mapping[str, str] = {
    "": "",
    "plain": "",
    "strong": "bold",
    "bad": "red",
    "worse": "red",
    "worst": "bold red",
    "warn": "yellow",
    "good": "green",
    "faint": "dim",
    "name": "cyan",
    "compute": "green",
    "hbm": "blue",
    "network": "magenta",
    "launch": "yellow",
}
"""Marks of cells and notes; regimes are marks of their own."""


def as_screen(view: View) -> RenderableType:
    """What rich prints.  Sections stand by their places, with blank lines between the places."""
    _rich_imported()
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = []
    place: int | None = None
    for section in sorted(view.sections, key=lambda section: section.place):
        shown = list(_parts(section))
        if not shown:
            continue
        if place is not None and section.place != place:
            parts.append(Text())
        place = section.place
        parts += shown
    return Group(*parts)


@functools.cache
def _rich_imported() -> None:
    """Import rich; the random number that it draws as it is imported is given back."""
    state = random.getstate()
    importlib.import_module("rich.style")
    random.setstate(state)


def _parts(section: Section) -> Iterator[RenderableType]:
    from rich.text import Text

    for part in section.parts:
        if isinstance(part, Section):
            yield from _parts(part)
        elif isinstance(part, Note) and part.on != "page":
            style = STYLES[part.mark]
            text = visible(part.text, lines=part.lines or bool(part.code))
            yield (
                Text.assemble((visible(part.label), "bold"), (text, style))
                if part.label
                else Text(text, style)
            )
        elif isinstance(part, Table) and part.on != "page" and part.rows:
            yield _grid(part)


def _grid(table: Table) -> Grid:
    columns = [column for column in table.columns if column.stands("screen")]
    rows: list[Sequence[Text]] = []
    group = None
    for row in table.rows:
        if table.group is not None and (name := table.group(row)) != group:
            group = name
            rows.append(_heading(name, len(columns)))
        cells = [_cell(column, row) for column in columns]
        if group is not None:
            cells[0].pad_left(2)
        rows.append(cells)
    return Grid(tuple(columns), tuple(map(tuple, rows)))


def _heading(name: str, width: int) -> list[Text]:
    from rich.text import Text

    return [Text(visible(name), style="bold"), *(Text() for _ in range(width - 1))]


def _cell(column: Column, row: object) -> Text:
    from rich.text import Text

    text, mark = column.written(row, page=False)
    return Text(visible(text), style=STYLES[mark])
