"""A table that leaves out its least important columns where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftrace._escapes import visible
from rooftrace.reporting.view.words import short_module

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from rooftrace.reporting.view.model import Column

LEAST = 16  # letters that a flexible or folded cell keeps before another column is dropped


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
                elif column.clipped:
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
        """What each column that is cut gets of the room: what it needs, then the first what it
        wants."""
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
    if column.flexible or column.folded:
        return LEAST
    return column.clipped or None
