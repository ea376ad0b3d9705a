"""A view in a cell of a notebook: HTML; here, and nowhere else, text is escaped for it.

It shows what a screen shows: the same parts, names of columns and units.  Long tables are cut.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from rooftrace._escapes import visible
from rooftrace.reporting.view.model import Column, Note, Section, Table, View
from rooftrace.reporting.view.words import short_module

MOST_ROWS = 40
"""Rows of a table in a cell; a sentence says how many more there are."""
LONGEST = 60
"""Letters of a cell of a table; the whole text stands in its tooltip."""
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
"""By mark: tones that can be read on white and on a dark page."""
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


def escaped(text: str) -> str:
    """Text that is no HTML, whatever it says; characters that are not seen are visible escapes."""
    return html.escape(visible(text, lines=True), quote=True)


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
    label = f"<b>{escaped(visible(note.label))}</b>" if note.label else ""
    return f'<div style="white-space:pre-wrap;{_style(note.mark)}">{label}{escaped(text)}</div>'


def _style(mark: str) -> str:
    colour = f"color:{_COLOURS[mark]};" if mark in _COLOURS else ""
    return colour + ("font-weight:bold;" if mark in _BOLD else "")


def _table(table: Table) -> str:
    columns = [column for column in table.columns if column.stands("screen")]
    head = "".join(
        f'<th style="{_CELL};{_side(column)};opacity:.65;font-weight:normal">'
        f"{escaped(visible(column.name('screen')))}</th>"
        for column in columns
    )
    lines, group = [f"<thead><tr>{head}</tr></thead><tbody>"], None
    for row in table.rows[:MOST_ROWS]:
        if table.group is not None and (name := table.group(row)) != group:
            group = name
            lines.append(
                f'<tr><td colspan="{len(columns)}" style="{_CELL};text-align:left">'
                f"<b>{escaped(visible(name))}</b></td></tr>"
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
        hover = f' title="{escaped(text[:MOST_TEXT])}"'
    return f'<td style="{style}"{hover}>{escaped(shown)}</td>'
