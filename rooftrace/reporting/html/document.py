"""HTML of a result: a notebook cell, and a page in one file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from rooftrace._escapes import to_html, to_json, visible
from rooftrace._outputs import MARK
from rooftrace.reporting.figures import style
from rooftrace.reporting.renderers import runs
from rooftrace.reporting.renderers.view import Column, Image, Note, Part, Section, Table, View
from rooftrace.reporting.renderers.words import short_module

if TYPE_CHECKING:
    from rooftrace.reporting.sections import Results


# -- cells -----------------------------------------------------------------------------------------
# A cell of a notebook has the parts, columns and units of a screen.

MOST_ROWS = 40
"""Rows of a table in a cell; a sentence counts the others."""
LONGEST = 60
"""Letters of a cell of a table; its tooltip has the full text."""
MOST_TEXT = 2000
"""Letters of a sentence."""
_COLOURS: Mapping[str, str] = {
    "bad": "#d1495b",
    "worse": "#d1495b",
    "worst": "#d1495b",
    "warn": "#b7791f",
    "good": "#2f9e6e",
    "faint": "#808890",
    "name": "#1c93a8",
    "compute": "#2f9e6e",
    "hbm": "#3d7fd6",
    "network": "#b05fb8",
    "launch": "#b7791f",
}
"""By mark: tones that are readable on white and on a dark page."""
_BOLD = ("strong", "worst")
_TEXT = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px;line-height:1.5"
_TABLE = "border-collapse:collapse;margin:6px 0;border:none;font-size:12px"
_WRAPPED = "white-space:pre-wrap;min-width:40ch;max-width:80ch"
_CELL = (
    "padding:1px 12px 1px 0;border:none;background:transparent;white-space:pre;vertical-align:top"
)


def as_cell(view: View, figure: str = "") -> str:
    """The HTML of a view.  figure: HTML below it, as an image of `figures.inline`."""
    blocks: list[str] = []
    place: int | None = None
    for section in sorted(view.sections, key=lambda section: section.place):
        parts = list(_parts(section))
        gap = place is not None and section.place != place and parts
        blocks += ['<div style="height:6px"></div>', *parts] if gap else parts
        place = section.place if parts else place
    return f'<div style="{_TEXT}">{"".join(blocks)}{figure}</div>'


def _parts(section: Section) -> Iterator[str]:
    for part in section.parts:
        if isinstance(part, Section):
            yield from _parts(part)
        elif isinstance(part, Note) and part.on != "page":
            yield _note(part)
        elif isinstance(part, Table) and part.on != "page" and part.rows:
            yield _table(part)


def _note(note: Note) -> str:
    text = visible(note.text, lines=note.lines or bool(note.code))
    text = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."
    label = f"<b>{to_html(note.label)}</b>" if note.label else ""
    style = f"white-space:pre-wrap;{_style(note.mark)}"
    return f'<div style="{style}">{label}{to_html(text, lines=True)}</div>'


def _style(mark: str) -> str:
    colour = f"color:{_COLOURS[mark]};" if mark in _COLOURS else ""
    return colour + ("font-weight:bold;" if mark in _BOLD else "")


def _table(table: Table) -> str:
    columns = [column for column in table.columns if column.shown_on("screen")]
    head = "".join(
        f'<th style="{_CELL};{_side(column)};opacity:.65;font-weight:normal">'
        f"{to_html(column.name('screen'))}</th>"
        for column in columns
    )
    lines, group = [f"<thead><tr>{head}</tr></thead><tbody>"], None
    for row in table.rows[:MOST_ROWS]:
        if table.group is not None and (name := table.group(row)) != group:
            group = name
            lines.append(
                f'<tr><td colspan="{len(columns)}" style="{_CELL};text-align:left">'
                f"<b>{to_html(name)}</b></td></tr>"
            )
        lines.append(f"<tr>{''.join(_cell(column, row) for column in columns)}</tr>")
    left = len(table.rows) - MOST_ROWS
    more = f"<div>{left:,} more rows</div>" if left > 0 else ""
    return f'<table style="{_TABLE}">{"".join(lines)}</tbody></table>{more}'


def _side(column: Column) -> str:
    return f"text-align:{'left' if column.is_left('screen') else 'right'}"


def _cell(column: Column, row: object) -> str:
    text, mark = column.written(row, page=False)
    text = visible(text)
    shown, hover, style = text[:MOST_TEXT], "", f"{_CELL};{_side(column)};{_style(mark)}"
    if len(text) > LONGEST and column.folded:
        style = f"{style};{_WRAPPED}"
    elif len(text) > LONGEST:
        cut = f"{text[: LONGEST - 1]}…"
        shown = short_module(text, LONGEST) if column.flexible else cut
        hover = f' title="{to_html(text[:MOST_TEXT], lines=True)}"'
    return f'<td style="{style}"{hover}>{to_html(shown, lines=True)}</td>'


# -- document --------------------------------------------------------------------------------------
# A page of HTML in one file that needs no network and opens from disk.  The result is plain HTML in
# it, so that it is read, searched and printed without a script.  A script sorts tables and, for a
# report, draws the explorer.  A policy in the file lets no other script run and loads nothing.

_EXPLORER = """<div id="explorer">
<noscript><p>What can be explored needs JavaScript; all tables stand below.</p></noscript>
</div>"""


def report_page(results: Results) -> str:
    """The page of a report, with the data for its script."""
    from rooftrace.reporting.html.contents import contents
    from rooftrace.reporting.sections import report_view

    plain = report_view(results, "page")
    explore = Section(title="Explore", parts=[Image("explorer")])
    sections = (explore, *(part for part in plain.sections if not part.contents))
    data = to_json(contents(results)).decode().replace("<", "\\u003c")  # so that it ends no element
    island = f'<script type="application/json" id="contents">{data}</script>'
    written = as_hypertext(replace(plain, sections=sections), {"explorer": _EXPLORER})
    return _page(plain.title, replace(written, body=f"{written.body}\n{island}"))


def result_page(view: View, pictures: Mapping[str, bytes] | None = None) -> str:
    """The page of any other result, with tables that can be sorted and filtered.

    pictures: PNGs by the names of the images that show them.
    """
    figures = {name: _picture(name, png) for name, png in (pictures or {}).items()}
    return _page(view.title or "rooftrace", as_hypertext(view, figures))


def _picture(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<img alt="{to_html(name)}" style="max-width:100%" src="data:image/png;base64,{data}"/>'


def _page(name: str, written: Hypertext) -> str:
    script, styles = _part("page.js"), _part("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    title = to_html(name)
    links = [f'<li><a href="#{place}">{to_html(text)}</a></li>' for place, text in written.headings]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="generator" content="{MARK}">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{styles}\n{_tones()}</style>\n</head>\n<body>\n"
        f'<header><h1>{title}</h1><div id="theme"></div></header>\n'
        f'<nav class="contents" aria-label="contents"><ul>{"".join(links)}</ul></nav>\n'
        f"<main>\n{written.body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


@cache
def _part(name: str) -> str:
    """A data file of this package."""
    return files("rooftrace.reporting.html").joinpath(name).read_text(encoding="utf-8")


@cache
def _tones() -> str:
    """The colours of families, limits and kinds of bytes, as variables and classes."""
    lines = []
    tones = {"family": style.FAMILIES, "limit": style.REGIMES, "kind": style.KINDS}
    for group, colours in tones.items():
        for name, colour in colours.items():
            label = f"{group}-{name.replace(' ', '-')}"
            lines.append(
                f":root{{--{label}:light-dark({colour},{style.on_dark(colour)})}}\n"
                f".{label}{{--tone:var(--{label})}}"
            )
    lines.append(".swatch,.limits span{background:var(--tone,#999)}")
    return "\n".join(lines) + "\n"


# -- body ------------------------------------------------------------------------------------------
# A page has the parts of a Markdown page, and the raw value of each number, for sorting.


_DASHES = re.compile(r"[^a-z0-9]+")
_STRONG = ("strong", "bad")


@dataclass(frozen=True, slots=True)
class Hypertext:
    """The body of a page, and its headings for a list of contents."""

    body: str
    headings: tuple[tuple[str, str], ...]  # id, text


def as_hypertext(view: View, figures: Mapping[str, str] | None = None) -> Hypertext:
    """The sections of a view.  figures: the HTML of images, by the names of their files."""
    writer = _HtmlWriter(figures or {})
    body = "\n".join(writer.section(section, 2) for section in view.sections)
    return Hypertext(body, tuple(writer.headings))


def inline(text: str, space: str = " ") -> str:
    """One line of text, with the code spans and the emphasis of builders.  space: before units."""
    made = []
    for mark, part in runs(text):
        kept = part if mark == "code" else _BEFORE_UNIT.sub(space, part)
        made.append(f"{_TAGS[mark][0]}{html.escape(kept, quote=True)}{_TAGS[mark][1]}")
    return "".join(made)


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:[kKMGTPE]?(?:i?B|FLOP)|[KMGTPE]|[num]?s|[a-z]+/s)\b)")
"""The space between a number and its unit; no line of a sentence ends there."""
_TAGS = {"code": ("<code>", "</code>"), "strong": ("<strong>", "</strong>"), "": ("", "")}


class _HtmlWriter:
    """Writes sections, and collects their headings."""

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
            return _page_table(part) if part.rows else ""
        if isinstance(part, Image):
            return self._figures.get(part.name, "")
        return _page_note(part)


def _listed(parts: list[str]) -> Iterator[str]:
    """Parts with a list around successive items, numbered or not."""
    inside = ""
    for part in parts:
        kind = ("ol" if part.startswith("<li value") else "ul") if part.startswith("<li") else ""
        if kind != inside:
            yield f"{f'</{inside}>' if inside else ''}{f'<{kind}>' if kind else ''}"
        inside = kind
        yield part
    if inside:
        yield f"</{inside}>"


def _page_note(note: Note) -> str:
    if note.code:
        code = f"<pre><code>{to_html(note.text, lines=True)}</code></pre>"
        mermaid = note.code == "mermaid"  # a page draws the tree; the source is folded away
        return f"<details><summary>Mermaid</summary>{code}</details>" if mermaid else code
    text = "<br>".join(inline(line, "\u00a0") for line in note.text_lines)
    text = f"<strong>{text}</strong>" if note.mark in _STRONG else text
    mark = f' class="{note.mark}"' if note.mark else ""
    tag = "li" if note.bullet or note.number else "p"
    number = f' value="{note.number}"' if note.number else ""
    return f"<{tag}{number}{mark}>{text}</{tag}>"


def _page_table(table: Table) -> str:
    columns = [column for column in table.columns if column.shown_on("page")]
    head = "".join(
        f'<th scope="col"{_page_side(column)}>{inline(column.name("page"))}</th>'
        for column in columns
    )
    axes = f' data-axes="{table.axes}"' if table.axes else ""
    rows = "\n".join(
        f"<tr>{''.join(_page_cell(column, row) for column in columns)}</tr>" for row in table.rows
    )
    return (
        f'<div class="table"><table{axes}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}'
        "\n</tbody>\n</table></div>"
    )


def _page_side(column: Column) -> str:
    return "" if column.is_left("page") else ' class="number"'


def _page_cell(column: Column, row: object) -> str:
    text, mark = column.written(row, page=True)
    value = column.value(row)
    classes = " ".join(filter(None, ["" if column.is_left("page") else "number", mark]))
    named = f' class="{classes}"' if classes else ""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    raw = f' data-value="{value!r}"' if number else ""
    return f"<td{named}{raw}>{inline(text)}</td>"
