"""Reading a CSV file so that every error names its line and column."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rooftrace._escapes import from_cell
from rooftrace._reading import WHOLE, FileKind, text_of
from rooftrace.errors import ProfileError

_KIND = FileKind("CSV file", ProfileError)

MOST_SIZE = float(1 << 63)
"""Bytes that a count of a run may reach: 9 EB."""
_NAMED = 6
"""How many of many names an error shows."""


def texts(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line that is not blank, for formats that quote nothing."""
    path = Path(path)
    try:
        text = text_of(path, _KIND).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not a text file in UTF-8 ({error.reason})") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def named(names: Iterable[str]) -> str:
    """The first few different names, and how many others there are; "nothing" for none."""
    shown = [f"{name:.60}" for name in dict.fromkeys(names)]
    if len(shown) > _NAMED:
        shown[_NAMED:] = [f"{len(shown) - _NAMED:,} others"]
    return ", ".join(shown) or "nothing"


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
    path: Path,
    line: int,
    column: str,
    text: str,
    *,
    positive: bool = True,
    unit: float = 1.0,
    most: float = math.inf,
) -> float:
    """A finite number in a cell, times `unit`; above 0, or not below where `positive` is false.

    most: the largest result that is read, where there is one.
    """
    where = f"{path}: line {line}, column {column!r:.60}"
    wanted = "expected a number above 0" if positive else "expected a number of at least 0"
    if not text:
        raise ProfileError(f"{where}: the cell is empty; {wanted}")
    try:
        value = float(text.replace(",", "")) * unit
    except ValueError:
        raise ProfileError(f"{where}: {text!r:.60}: {wanted}") from None
    if most < value and most != math.inf:
        raise ProfileError(f"{where}: {text!r:.60}: expected a number of at most {most / unit:.3g}")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ProfileError(f"{where}: {text!r:.60}: {wanted}")
    return value


def exact(path: Path, line: int, column: str, text: str) -> int:
    """A whole number in a cell, of 64 bits at most, with every digit: a time in nanoseconds."""
    if not re.fullmatch(r"[0-9]{1,20}", text) or int(text) not in WHOLE:
        raise ProfileError(
            f"{path}: line {line}, column {column!r:.60}: {text!r:.60}: expected a whole number"
        )
    return int(text)


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
