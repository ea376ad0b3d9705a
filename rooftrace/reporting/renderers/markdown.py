"""A view as a GitHub-flavoured page; here, and nowhere else, text is escaped for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from rooftrace.reporting.renderers.units import fenced, inline
from rooftrace.reporting.renderers.view import Column, Image, Note, Part, Section, Table, View

_BOLD = ("strong", "bad")
_SHOWN = (".png", ".svg")
"""Endings of figures that a page can show, the best first."""
MOST_COLUMNS = 9
"""Columns of a table; a wider one is cut into several."""


def as_page(view: View, figures: Collection[str] = ()) -> str:
    """The page; `figures` are the names of the files that it may show."""
    lines: list[str] = []
    if view.title:
        lines += ["#" * view.level + f" {inline(view.title)}"]
    made = [(part, _section(part, view.level + 1, figures)) for part in view.sections]
    anchors = _anchors(view)
    for place, (section, text) in enumerate(made):
        if section.contents:
            after = [shown for shown, its_text in made[place + 1 :] if its_text and shown.title]
            text = _contents(section.title, after, anchors, view.level + 1)
        lines += text
    kept = (line if line.endswith(".  ") else line.rstrip() for line in lines)
    return "\n".join(kept).lstrip("\n") + "\n"


def _section(section: Section, level: int, figures: Collection[str]) -> list[str]:
    """Its title and parts, a blank line before each; nothing of a section without parts."""
    lines: list[str] = []
    listing = False
    for part in section.parts:
        bullet = isinstance(part, Note) and (part.bullet > 0 or part.number > 0)
        text = list(_part(part, level, figures))
        if text:
            lines += text if bullet and listing else ["", *text]
            listing = bullet
    title = ["", f"{'#' * level} {inline(section.title)}"] if section.title and lines else []
    return [*title, *lines]


def _contents(
    title: str, sections: Sequence[Section], anchors: dict[int, str], level: int
) -> list[str]:
    """A list of links to these sections; nothing for none."""
    if not sections:
        return []
    links = [f"- [{_linked(section.title)}](#{anchors[id(section)]})" for section in sections]
    return ["", f"{'#' * level} {inline(title)}", "", *links]


def _linked(title: str) -> str:
    """A title as the text of a link: characters that would end it are escaped."""
    return re.sub(r"(?<!\\)([\[\]])", r"\\\1", inline(title))


def _anchors(view: View) -> dict[int, str]:
    """The anchor of each section by its identity, as GitHub names headings: repeated names get
    "-1", "-2" ... appended."""
    anchors: dict[int, str] = {}
    names: Counter[str] = Counter()

    def named(title: str) -> str:
        name = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        names[name] += 1
        return f"{name}-{names[name] - 1}" if names[name] > 1 else name

    def visit(section: Section) -> None:
        if section.title:
            anchors[id(section)] = named(section.title)
        for part in section.parts:
            if isinstance(part, Section) and (part.parts or part.contents):
                visit(part)

    if view.title:
        named(view.title)
    for section in view.sections:
        if section.parts or section.contents:
            visit(section)
    return anchors


def _part(part: Part, level: int, figures: Collection[str]) -> Iterator[str]:
    if isinstance(part, Section):
        yield from _section(part, level + 1, figures)[1:]
    elif part.on == "screen":
        return
    elif isinstance(part, Table):
        yield from _table(part)
    elif isinstance(part, Image):
        file = part.file(_SHOWN, figures)
        if file is not None:
            yield f"![{part.caption}]({file})"
    elif isinstance(part, Note) and part.code:
        yield from fenced(part.text, part.code)
    elif isinstance(part, Note):
        text = "\n".join(map(inline, part.text_lines))
        text = f"**{text}**" if part.mark in _BOLD else text
        if part.bullet:
            text = f"{'  ' * (part.bullet - 1)}- {text}"
        elif part.number:
            text = f"{part.number}. {text}"
        yield from text.split("\n")


def _table(table: Table) -> list[str]:
    columns = [column for column in table.columns if column.shown_on("page")]
    if not table.rows:
        return []
    lines: list[str] = []
    for some in _pieces(columns, table.leading, table.sets):
        rows = [[_cell(column, row) for column in some] for row in table.rows]
        left = [column.is_left("page") for column in some]
        piece = pipes([c.name("page") for c in some], rows, left, padded=table.padded)
        lines += ["", *piece] if lines else piece
    return lines


def _pieces(columns: Sequence[Column], leading: int, sets: int) -> Iterator[Sequence[Column]]:
    """All columns, or as many pieces of them as keep within MOST_COLUMNS, about equally wide."""
    if len(columns) <= MOST_COLUMNS:
        yield columns
        return
    leading = min(leading, MOST_COLUMNS - 1)
    sets = sets if sets <= MOST_COLUMNS - leading else 1
    head, rest = columns[:leading], columns[leading:]
    most = (MOST_COLUMNS - leading) // sets * sets
    count = -(-len(rest) // most)
    each = -(-len(rest) // (count * sets)) * sets
    for start in range(0, len(rest), each):
        yield [*head, *rest[start : start + each]]


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
