"""A view as HTML for a page; here, and nowhere else, its text is escaped for one.

It has what a Markdown page has, and the raw value of each number, by which tables are sorted.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rooftrace._escapes import visible
from rooftrace.reporting.view import runs
from rooftrace.reporting.view.model import Column, Image, Note, Part, Section, Table, View

_DASHES = re.compile(r"[^a-z0-9]+")
_STRONG = ("strong", "bad")


@dataclass(frozen=True, slots=True)
class Hypertext:
    """The body of a page, and its headings for a list of contents."""

    body: str
    headings: tuple[tuple[str, str], ...]  # id, text


def as_hypertext(view: View, figures: Mapping[str, str] | None = None) -> Hypertext:
    """The sections of a view.  figures: the HTML of images, by the names of their files."""
    writer = _Writer(figures or {})
    body = "\n".join(writer.section(section, 2) for section in view.sections)
    return Hypertext(body, tuple(writer.headings))


def escaped(text: str) -> str:
    """Text that is no HTML, whatever it says; characters that are not seen are visible escapes."""
    return html.escape(visible(text), quote=True)


def inline(text: str) -> str:
    """One line of text, with the code spans and the emphasis of builders."""
    return "".join(
        f"{_TAGS[mark][0]}{html.escape(part, quote=True)}{_TAGS[mark][1]}"
        for mark, part in runs(text)
    )


_TAGS = {"code": ("<code>", "</code>"), "strong": ("<strong>", "</strong>"), "": ("", "")}


class _Writer:
    """Writes sections, and takes down their headings."""

    def __init__(self, figures: Mapping[str, str]) -> None:
        self._figures = figures
        self._ids: set[str] = set()
        self.headings: list[tuple[str, str]] = []

    def section(self, section: Section, level: int) -> str:
        """A section under its title; "" for one without parts."""
        place = len(self.headings)
        parts = [text for part in section.parts if (text := self._part(part, level))]
        body = "\n".join(_listed(parts))
        if not body:
            return ""
        if not section.title:
            return body
        name = self._id(section.title)
        if level == 2:
            self.headings.insert(place, (name, visible(section.title)))
        title = f"<h{level}>{inline(section.title)}</h{level}>"
        return f'<section id="{name}">\n{title}\n{body}\n</section>'

    def _id(self, title: str) -> str:
        name = plain = _DASHES.sub("-", title.lower()).strip("-") or "section"
        number = 1
        while name in self._ids:
            number += 1
            name = f"{plain}-{number}"
        self._ids.add(name)
        return name

    def _part(self, part: Part, level: int) -> str:
        if isinstance(part, Section):
            return self.section(part, min(level + 1, 6))
        if part.on == "screen":
            return ""
        if isinstance(part, Table):
            return _table(part) if part.rows else ""
        if isinstance(part, Image):
            return self._figures.get(part.name, "")
        return _note(part)


def _listed(parts: list[str]) -> Iterator[str]:
    """Parts with a list around items that follow each other; numbered ones have their own."""
    inside = ""
    for part in parts:
        kind = ("ol" if part.startswith("<li value") else "ul") if part.startswith("<li") else ""
        if kind != inside:
            yield f"{f'</{inside}>' if inside else ''}{f'<{kind}>' if kind else ''}"
        inside = kind
        yield part
    if inside:
        yield f"</{inside}>"


def _note(note: Note) -> str:
    if note.code == "mermaid":  # a page draws its own tree; the source stays at hand
        source = html.escape(visible(note.text, lines=True))
        return f"<details><summary>Mermaid</summary><pre><code>{source}</code></pre></details>"
    if note.code:
        return f"<pre><code>{html.escape(visible(note.text, lines=True))}</code></pre>"
    lines = note.text.split("\n") if note.lines else [note.text]
    text = "<br>".join(map(inline, lines))
    text = f"<strong>{text}</strong>" if note.mark in _STRONG else text
    mark = f' class="{note.mark}"' if note.mark else ""
    tag = "li" if note.bullet or note.number else "p"
    number = f' value="{note.number}"' if note.number else ""
    return f"<{tag}{number}{mark}>{text}</{tag}>"


def _table(table: Table) -> str:
    columns = [column for column in table.columns if column.stands("page")]
    head = "".join(
        f'<th scope="col"{_side(column)}>{inline(column.name("page"))}</th>' for column in columns
    )
    rows = "\n".join(
        f"<tr>{''.join(_cell(column, row) for column in columns)}</tr>" for row in table.rows
    )
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>'
        "\n</table></div>"
    )


def _side(column: Column) -> str:
    return "" if column.is_left("page") else ' class="number"'


def _cell(column: Column, row: object) -> str:
    text, mark = column.written(row, page=True)
    value = column.value(row)
    classes = " ".join(filter(None, ["" if column.is_left("page") else "number", mark]))
    named = f' class="{classes}"' if classes else ""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    raw = f' data-value="{value!r}"' if number else ""
    return f"<td{named}{raw}>{inline(text)}</td>"
