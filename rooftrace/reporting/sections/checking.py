"""Checks of a section that a user or a third-party package adds, before anything prints it."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from rooftrace._extensions import owner
from rooftrace.errors import hint, worded
from rooftrace.reporting.view import model as view

OUTPUTS = get_args(view.Output)
NUMBERS = ("integer", "number")
"""Types of units whose columns hold numbers.  A count may be an average, so not whole."""


class SectionError(ValueError):
    """A section of a user's own that cannot be shown: names it, its function, and the column."""


def built(key: str, build: Callable[..., object], results: object) -> view.Section:
    """The section that a user's function returns.  Raises SectionError."""
    about = f"section {key!r} ({owner(build)}): "
    try:
        section = build(results)
        if not isinstance(section, view.Section):
            raise ValueError(f"it returned {section!r:.60}; expected a rooftrace.Section")
        _check(section)
    except Exception as error:  # whatever the code of a user may raise
        raise SectionError(f"{about}{worded(error)}") from error
    return section


def check_output(on: object) -> None:
    """Raise ValueError for an output that does not exist."""
    if on not in OUTPUTS:
        raise ValueError(f"on={on!r}: expected one of {', '.join(OUTPUTS)}{hint(str(on), OUTPUTS)}")


def _check(section: view.Section) -> None:
    for number, part in enumerate(section.parts):
        if isinstance(part, view.Section):
            _check(part)
        elif isinstance(part, view.Table):
            check_output(part.on)
            _check_table(part, f"table {part.key or number}")
        elif isinstance(part, (view.Note, view.Image)):
            check_output(part.on)
        else:
            raise ValueError(
                f"part {number} is {part!r:.60}; expected a Table, a Note, an Image or a Section"
            )


def _check_table(table: view.Table, name: str) -> None:
    if not isinstance(table.rows, Sequence):
        raise ValueError(f"{name}: rows={table.rows!r:.60}: expected a list of rows")
    for column in table.columns:
        if not isinstance(column, view.Column):
            raise ValueError(f"{name}: column {column!r:.60}: expected a rooftrace.Column")
        check_output(column.on)
        for number, row in enumerate(table.rows):
            try:
                _check_cell(column, row)
            except Exception as error:  # a record without the field, a unit that cannot print it
                where = f"{name}, column {column.key!r}, row {number}"
                raise ValueError(f"{where}: {worded(error)}") from error


def _check_cell(column: view.Column, row: Any) -> None:
    if column.of is None and isinstance(row, Mapping) and column.key not in row:
        raise ValueError(
            f"the row has no such key, only {', '.join(map(repr, row))}; "
            "expected a value, None (shown as a dash), or '' (blank)"
        )
    cell = column.read(row)
    if not isinstance(cell, view.Cell):
        cell = view.Cell(cell)
    unit, value = cell.unit or column.unit, cell.value
    if value is None or value == "" or cell.mark == "plain":
        return
    if unit.type in NUMBERS and not isinstance(value, numbers.Number):
        of = f" in {unit.symbol}" if unit.symbol else ""
        raise ValueError(f"{value!r:.60}: expected a number{of}")
    for page in (True, False):
        unit.written(value, page=page)
