"""A view as a GitHub-flavoured page; here, and nowhere else, text is escaped for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from rooftrace.reporting.view.escaping import fenced, inline
from rooftrace.reporting.view.model import Column, Image, Note, Part, Section, Table, View

_BOLD = ("strong", "bad")


def as_page(view: View, figures: Collection[str] = ()) -> str:
    """The page; `figures` are the names of the files that it may show."""
    lines: list[str] = []
    if view.title:
        lines += ["#" * view.level + f" {inline(view.title)}"]
    for section in view.sections:
        lines += _section(section, view.level + 1, figures)
    kept = (line if line.endswith(".  ") else line.rstrip() for line in lines)
    return "\n".join(kept).lstrip("\n") + "\n"


def _section(section: Section, level: int, figures: Collection[str]) -> list[str]:
    """Its title and parts, a blank line before each; nothing of a section without parts."""
    lines: list[str] = []
    listing = False
    for part in section.parts:
        bullet = isinstance(part, Note) and part.bullet > 0
        text = list(_part(part, level, figures))
        if text:
            lines += text if bullet and listing else ["", *text]
            listing = bullet
    title = ["", f"{'#' * level} {inline(section.title)}"] if section.title and lines else []
    return [*title, *lines]


def _part(part: Part, level: int, figures: Collection[str]) -> Iterator[str]:
    if isinstance(part, Section):
        yield from _section(part, level + 1, figures)[1:]
    elif part.on == "screen":
        return
    elif isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, Image):
        if part.name in figures:
            yield f"![{part.about or part.name.removesuffix('.png')}]({part.name})"
    elif isinstance(part, Note) and part.code:
        yield from fenced(part.text, part.code)
    elif isinstance(part, Note):
        lines = part.text.split("\n") if part.lines else [part.text]
        text = "\n".join(map(inline, lines))
        text = f"**{text}**" if part.mark in _BOLD else text
        if part.bullet:
            text = f"{'  ' * (part.bullet - 1)}- {text}"
        yield from text.split("\n")


def _table(table: Table) -> list[str]:
    columns = [column for column in table.columns if column.stands("page")]
    if not table.rows:
        return []
    rows = [[_cell(column, row) for column in columns] for row in table.rows]
    left = [column.is_left("page") for column in columns]
    return pipes([c.name("page") for c in columns], rows, left, padded=table.padded)


def _cell(column: Column, row: object) -> str:
    text, mark = column.written(row, page=True)
    return f"**{text}**" if mark in _BOLD and text else text


def pipes(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[bool],
    *,
    padded: bool = True,
) -> list[str]:
    """A pipe table; `padded` so that its source reads as a table too."""
    cells = [[inline(cell, cell=True) for cell in row] for row in (head, *rows)]
    if not padded:
        rule = "|".join("---" if flush else "---:" for flush in left)
        text = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in cells]
        return [text[0], f"|{rule}|", *text[1:]]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = [
        [
            cell.ljust(width) if flush else cell.rjust(width)
            for cell, width, flush in zip(row, widths, left, strict=True)
        ]
        for row in cells
    ]
    marks = [
        "-" * width if flush else "-" * (width - 1) + ":"
        for width, flush in zip(widths, left, strict=True)
    ]
    return [f"| {' | '.join(row)} |" for row in (lines[0], marks, *lines[1:])]
