"""What all views of a difference have: totals before and after, tables that a screen cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rooftrace.reporting.view import model as view, units
from rooftrace.tracer.changes import Change

LONGEST_NAME = 20
"""Letters of a name over a column."""


def heads(names: tuple[str, str]) -> tuple[str, str]:
    """The heads of two columns: two names, or before and after where one is too long for that."""
    if max(map(len, names)) > LONGEST_NAME or names[0] == names[1]:
        return "before", "after"
    return names


def delta(
    key: str, unit: units.Unit, head: str, *, marked: bool = False, **more: Any
) -> view.Column:
    """The column of the differences of one quantity of rows, by the name of their `Change`."""

    def read(row: Any) -> view.Cell:
        change = getattr(row, key)
        if change is None:
            return view.BLANK
        return view.Cell(change.delta, change.mark if marked else "")

    return view.Column(key, units.signed(unit), head, of=read, **more)


def totals(
    changes: Mapping[str, Change],
    units_of: Callable[[str], units.Unit],
    label: Callable[[str], str],
    names: tuple[str, str],
    more: Mapping[view.Column, Callable[[str], Any]] | None = None,
) -> view.Table:
    """Quantities before and after, one a line.  more: further columns, and their cells."""
    more = more or {}
    first, second = heads(names)
    columns = (
        view.Column("metric", units.TEXT, ""),
        view.Column("before", units.COUNT, first),
        view.Column("after", units.COUNT, second),
        view.Column("change", units.COUNT, "change"),
        view.Column("relative", units.WORDS, ""),
        *more,
    )
    rows = [
        {
            "metric": label(name),
            "before": view.Cell(change.before, unit=units_of(name)),
            "after": view.Cell(change.after, unit=units_of(name)),
            "change": view.Cell(change.delta, change.mark, unit=units.signed(units_of(name))),
            "relative": view.Cell(change.percent, change.mark),
            **{column.key: cell(name) for column, cell in more.items()},
        }
        for name, change in changes.items()
    ]
    return view.Table(columns=columns, rows=rows, padded=False)


def times(path: str, count: int) -> str:
    """ "layers.*.mlp x4": a module, or how many there are of a pattern."""
    return f"{path or '(root)'} x{count}" if count > 1 else path or "(root)"


def cut(columns: Sequence[view.Column], rows: Sequence[Any], most: int) -> list[view.Part]:
    """A table that a page has whole, and of which a screen has the first rows."""
    return [
        view.Table(columns=columns, rows=rows[:most], on="screen"),
        view.Table(columns=columns, rows=rows, padded=False, on="page"),
    ]


def left_out(count: int, of: str = "more") -> Iterator[view.Note]:
    """How many rows a screen does not show, where there are any."""
    if count > 0:
        yield view.Note(f"... and {count:,} {of} (--format json has all)", "faint", on="screen")


def labelled(label: str, text: str, mark: str = "", width: int = 12) -> Iterator[view.Note]:
    """A sentence behind a word: in a column of its own on a screen, an item of a list on a page."""
    yield view.Note(text, mark, on="screen", label=f"{label:<{width}}")
    yield view.Note(f"{label}: {text}", on="page", bullet=1)


def said(text: str, mark: str = "", bullet: int = 0) -> list[view.Note]:
    """Words on a screen, which are a sentence on a page; with a bullet, an item of a list."""
    indent = "  " if bullet else ""
    return [
        view.Note(f"{indent}{text}", mark, on="screen"),
        view.Note(f"{text[0].upper()}{text[1:]}.", on="page", bullet=bullet),
    ]
