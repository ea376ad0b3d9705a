"""A table that leaves out its least important columns where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftrace.reporting.text.words import short_module

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

LEAST_FLEXIBLE = 16  # columns that a flexible cell keeps before another column is dropped


@dataclass(frozen=True, slots=True)
class Column:
    """drop: 0 stays always; columns of the highest number go first, all at once, so that no half of
    a sum is shown.  flexible: cut from the left to fit.  clipped: cut from the right to fit, down
    to so many characters; 0 is never cut."""

    head: str
    right: bool = True
    drop: int = 0
    flexible: bool = False
    clipped: int = 0

    @property
    def least(self) -> int | None:
        """How far it may be cut; None where it may not."""
        if self.flexible:
            return LEAST_FLEXIBLE
        return self.clipped or None


@dataclass(frozen=True)
class Grid:
    """Rows of cells, one space between columns, no lines; a rich renderable."""

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
                column.head,
                justify="right" if column.right else "left",
                no_wrap=True,
                overflow="ellipsis",
            )
        for row in self.rows:
            cells = []
            for position in kept:
                cell, column = row[position], self.columns[position]
                if column.flexible:
                    cell = Text(short_module(cell.plain, rooms[position]), style=cell.style)
                elif column.clipped:
                    cell = cell.copy()
                    cell.truncate(rooms[position], overflow="ellipsis")
                cells.append(cell)
            table.add_row(*cells)
        yield table

    def _fit(self, width: int) -> tuple[list[int], dict[int, int]]:
        """Positions of the columns that fit into `width`, and the widths of those that are cut."""
        widths = [
            max([len(column.head), *(row[i].cell_len for row in self.rows)])
            for i, column in enumerate(self.columns)
        ]
        kept = list(range(len(self.columns)))
        while True:
            cut = {i: least for i in kept if (least := self.columns[i].least) is not None}
            fixed = sum(widths[i] for i in kept if i not in cut) + len(kept) - 1
            needed = {i: min(widths[i], least) for i, least in cut.items()}
            droppable = [i for i in kept if self.columns[i].drop]
            if fixed + sum(needed.values()) <= width or not droppable:
                return kept, self._shared(max(width - fixed, 4), widths, needed)
            least = max(self.columns[i].drop for i in droppable)
            kept = [i for i in kept if self.columns[i].drop != least]

    @staticmethod
    def _shared(room: int, widths: Sequence[int], needed: dict[int, int]) -> dict[int, int]:
        """What each column that is cut gets of the room: what it needs, then the first what it
        wants."""
        left = room - sum(needed.values())
        found = {}
        for i, least in needed.items():
            more = min(max(left, 0), widths[i] - least)
            found[i], left = least + more, left - more
        if left < 0 and found:  # not even that fits: the last gives way
            last = max(found)
            found[last] = max(4, found[last] + left)
        return found


def grid(columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> Grid:
    """A Grid of plain or styled cells."""
    from rich.text import Text

    return Grid(
        tuple(columns),
        tuple(
            tuple(cell if isinstance(cell, Text) else Text(cell) for cell in row) for row in rows
        ),
    )
