"""Reading a CSV file so that every error names its line and column."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rooftrace._escapes import from_cell
from rooftrace._reading import WHOLE, FileKind, text_of
from rooftrace.errors import ProfileError

_KIND = FileKind("CSV file", ProfileError)


def lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each line that is not blank, without the quotes of `to_cell`."""
    path = Path(path)
    try:
        text = text_of(path, _KIND).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [from_cell(cell.strip()) for cell in cells]
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not a text file in UTF-8 ({error.reason})") from None
    except csv.Error as error:
        raise ProfileError(f"{path}: line {reader.line_num}: not CSV ({error})") from None


def check_header(path: Path, line: int, header: Sequence[str]) -> None:
    """Raise ProfileError for a header that names a column twice."""
    twice = [name for name, count in Counter(map(str.lower, header)).items() if name and count > 1]
    if twice:
        places = [i for i, name in enumerate(header, start=1) if name.lower() == twice[0]]
        raise ProfileError(
            f"{path}: line {line}: column {twice[0]!r:.60} is there {len(places)} times (as "
            f"columns {', '.join(map(str, places)):.60}): give each its own name"
        )


def cells(path: Path, line: int, header: Sequence[str], row: Sequence[str]) -> Mapping[str, str]:
    """A row by column name; ProfileError where it has more or fewer cells than the header."""
    if len(row) != len(header):
        raise ProfileError(
            f"{path}: line {line}: {len(row)} cells, the header has {len(header)}: "
            f"{','.join(row):.100}"
        )
    return dict(zip(header, row, strict=True))


def number(
    path: Path, line: int, column: str, text: str, *, positive: bool = True, unit: float = 1.0
) -> float:
    """A finite number in a cell, times `unit`; above 0, or not below where `positive` is false."""
    where = f"{path}: line {line}, column {column!r:.60}"
    wanted = "expected a number above 0" if positive else "expected a number of at least 0"
    if not text:
        raise ProfileError(f"{where}: the cell is empty; {wanted}")
    try:
        value = float(text.replace(",", "")) * unit
    except ValueError:
        raise ProfileError(f"{where}: {text!r:.60}: {wanted}") from None
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ProfileError(f"{where}: {text!r:.60}: {wanted}")
    return value


def whole(path: Path, line: int, column: str, text: str) -> int | None:
    """A whole number in a cell, of 64 bits at most; None for an empty cell."""
    if not text:
        return None
    value = number(path, line, column, text, positive=False)
    if value != int(value) or int(value) not in WHOLE:
        raise ProfileError(
            f"{path}: line {line}, column {column!r:.60}: {text!r:.60}: expected a whole number"
        )
    return int(value)
