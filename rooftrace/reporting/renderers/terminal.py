"""A view on a screen, in colours where the terminal has them; unseen characters are escaped."""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace._escapes import visible
from rooftrace.reporting.renderers.view import Column, Note, Section, Table, View
from rooftrace.reporting.renderers.words import short_module

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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
"""Marks of cells and notes; a regime is its mark."""


def as_screen(view: View) -> RenderableType:
    """A renderable for rich.  Sections go by their places, with blank lines between places."""
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
    from rich.text import Text

    columns = [column for column in table.columns if column.shown_on("screen")]
    rows: list[Sequence[Text]] = []
    group = None
    for row in table.rows:
        if table.group is not None and (name := table.group(row)) != group:
            group = name
            rows.append([Text(visible(name), style="bold"), *(Text() for _ in columns[1:])])
        cells = [_cell(column, row) for column in columns]
        if group is not None:
            cells[0].pad_left(2)
        rows.append(cells)
    return Grid(tuple(columns), tuple(map(tuple, rows)))


def _cell(column: Column, row: object) -> Text:
    from rich.text import Text

    text, mark = column.written(row, page=False)
    return Text(visible(text), style=STYLES[mark])


# -- grids -----------------------------------------------------------------------------------------

LEAST = 16  # letters that a flexible or folded cell keeps before another column is dropped


@dataclass(frozen=True)
class Grid:
    """A table for rich that drops its least important columns on a narrow terminal."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Text, ...], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        kept, rooms = self._fit(options.max_width)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for position in kept:
            column = self.columns[position]
            table.add_column(
                Text(visible(column.name("screen"))),  # a plain str would be markup
                justify="left" if column.is_left("screen") else "right",
                no_wrap=not column.folded,
                overflow="fold" if column.folded else "ellipsis",
                max_width=rooms[position] if column.folded else None,
            )
        for row in self.rows:
            cells = []
            for position in kept:
                cell, column = row[position], self.columns[position]
                if column.flexible:
                    cell = Text(short_module(cell.plain, rooms[position]), style=cell.style)
                elif column.clipped and not column.folded:
                    cell = cell.copy()
                    cell.truncate(rooms[position], overflow="ellipsis")
                cells.append(cell)
            table.add_row(*cells)
        yield table

    def _fit(self, width: int) -> tuple[list[int], dict[int, int]]:
        """Positions of the columns that fit into `width`, and the widths of those that are cut."""
        widths = [
            max([len(visible(column.name("screen"))), *(row[i].cell_len for row in self.rows)])
            for i, column in enumerate(self.columns)
        ]
        kept = list(range(len(self.columns)))
        while True:
            cut = {i: least for i in kept if (least := _least(self.columns[i])) is not None}
            fixed = sum(widths[i] for i in kept if i not in cut) + len(kept) - 1
            needed = {i: min(widths[i], least) for i, least in cut.items()}
            droppable = [i for i in kept if self.columns[i].drop]
            if fixed + sum(needed.values()) <= width or not droppable:
                return kept, self._shared(max(width - fixed, 4), widths, needed)
            least = max(self.columns[i].drop for i in droppable)
            kept = [i for i in kept if self.columns[i].drop != least]

    @staticmethod
    def _shared(room: int, widths: Sequence[int], needed: dict[int, int]) -> dict[int, int]:
        """The room of each column that is cut: its need; more for the first that want it."""
        left = room - sum(needed.values())
        shared = {}
        for i, least in needed.items():
            more = min(max(left, 0), widths[i] - least)
            shared[i], left = least + more, left - more
        if left < 0 and shared:  # not even that fits: the last gives way
            last = max(shared)
            shared[last] = max(4, shared[last] + left)
        return shared


def _least(column: Column) -> int | None:
    """How narrow a column may be made; None where it may not."""
    return column.clipped or (LEAST if column.flexible or column.folded else None)
