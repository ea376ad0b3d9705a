"""A table that leaves out its least important columns where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftrace.reporting.words import short_module

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

LEAST_FLEXIBLE = 16  # columns that a flexible cell keeps before another column is dropped


@dataclass(frozen=True, slots=True)
class Column:
    """drop: 0 stays always; columns of the highest number go first, all at once, so that no half of
    a sum is shown.  flexible: cut from the left to fit."""

    head: str
    right: bool = True
    drop: int = 0
    flexible: bool = False


@dataclass(frozen=True)
class Grid:
    """Rows of cells, one space between columns, no lines; a rich renderable."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Text, ...], ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        kept, room = self._fit(options.max_width)
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
        for position in kept:
            column = self.columns[position]
            table.add_column(
                column.head,
                justify="right" if column.right else "left",
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in self.rows:
            cells = []
            for position in kept:
                cell = row[position]
                if self.columns[position].flexible:
                    cell = Text(short_module(cell.plain, room), style=cell.style)
                cells.append(cell)
            table.add_row(*cells)
        yield table

    def _fit(self, width: int) -> tuple[list[int], int]:
        """Positions of the columns that fit into `width`, and what is left for the flexible one."""
        widths = [
            max([len(column.head), *(row[i].cell_len for row in self.rows)])
            for i, column in enumerate(self.columns)
        ]
        kept = list(range(len(self.columns)))
        while True:
            fixed = sum(widths[i] for i in kept if not self.columns[i].flexible) + len(kept) - 1
            needed = [min(widths[i], LEAST_FLEXIBLE) for i in kept if self.columns[i].flexible]
            droppable = [i for i in kept if self.columns[i].drop]
            if fixed + sum(needed) <= width or not droppable:
                return kept, max(width - fixed, 4)
            least = max(self.columns[i].drop for i in droppable)
            kept = [i for i in kept if self.columns[i].drop != least]


def grid(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> Grid:
    """A Grid of plain or styled cells."""
    from rich.text import Text

    return Grid(
        tuple(columns),
        tuple(
            tuple(cell if isinstance(cell, Text) else Text(cell) for cell in row) for row in rows
        ),
    )
