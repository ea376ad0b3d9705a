"""Reads measured collectives: the text that nccl-tests print, and a CSV of one row for each point.

CSV: the columns op, ranks, bytes, seconds; where they matter dtype and library.  Bytes count the
whole buffer, like the size of nccl-tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from rooftrace.errors import ProfileError, hint
from rooftrace.hardware.systems.records import COLLECTIVES, LIBRARIES
from rooftrace.measured.collectives.fitting import TimedCollective
from rooftrace.measured.tables import tabular

SPELLINGS = {text: kind.name for kind in COLLECTIVES.values() for text in kind.spellings}
COLUMNS = ("op", "dtype", "ranks", "bytes", "seconds", "library")
NEEDED = ("op", "ranks", "bytes", "seconds")
_PROGRAM = re.compile(r"\b(\w+)_perf(?:_mpi)?\b")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b")
_THREADS = re.compile(r"^#\s+nThread\s+(\d+)\s+nGpus\s+(\d+)")
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([a-z]\w*)\s+(\w+)\s+(.*)$")


def read_collectives(path: str | os.PathLike[str]) -> tuple[TimedCollective, ...]:
    """The measured collectives of a file; its contents tell what it is.

    Raises OSError, or ProfileError for a file that holds none.
    """
    path = Path(path)
    rows = list(tabular.texts(path))
    if not rows:
        raise ProfileError(f"{path}: the file is empty; {EXPECTED}")
    first = [cell.strip().lower() for cell in rows[0][1].split(",")]
    if len(first) > 1 and "op" in first:
        points = tuple(_csv_points(path))
    else:
        points = tuple(_printed_points(path, rows))
    if not points:
        raise ProfileError(f"{path}: no measured collective in it; {EXPECTED}")
    return points


EXPECTED = (
    "expected what all_reduce_perf and its like of nccl-tests print, or a CSV with the columns "
    f"{','.join(NEEDED)}"
)


def _op(path: Path, line: int, text: str) -> str:
    name = SPELLINGS.get(text.lower(), text.lower())
    if name not in COLLECTIVES:
        raise ProfileError(
            f"{path}: line {line}: op {text!r:.60}: expected one of {', '.join(COLLECTIVES)}"
            f"{hint(name, COLLECTIVES)}"
        )
    return name


def _csv_points(path: Path) -> Iterator[TimedCollective]:
    table = tabular.lines(path)
    number, header = next(table)
    header = [name.strip().lower() for name in header]
    tabular.check_header(path, number, header)
    missing = [name for name in NEEDED if name not in header]
    if missing:
        raise ProfileError(f"{path}: line {number}: no column {', '.join(missing)}; {EXPECTED}")
    for line, row in table:
        cells = tabular.cells(path, line, header, row)
        ranks = tabular.exact(path, line, "ranks", cells["ranks"])
        if ranks < 2:
            raise ProfileError(f"{path}: line {line}: {ranks} ranks: expected 2 or more")
        library = cells.get("library", "") or "nccl"
        if library not in LIBRARIES:
            raise ProfileError(
                f"{path}: line {line}: library {library!r:.60}: expected one of "
                f"{', '.join(LIBRARIES)}"
            )
        yield TimedCollective(
            op=_op(path, line, cells["op"]),
            ranks=ranks,
            nbytes=tabular.number(path, line, "bytes", cells["bytes"], most=tabular.MOST_SIZE),
            seconds=tabular.number(path, line, "seconds", cells["seconds"]),
            dtype=cells.get("dtype", ""),
            library=library,
        )


def _printed_points(path: Path, rows: list[tuple[int, str]]) -> Iterator[TimedCollective]:
    """The rows of tables that nccl-tests print; one file may hold several runs."""
    op, ranks, listed = "", 0, 0
    for line, text in rows:
        program, rank, threads = _PROGRAM.search(text), _RANK.match(text), _THREADS.match(text)
        if program is not None:
            op = _op(path, line, program[1])
        if threads is not None:
            ranks, listed = int(threads[1]) * int(threads[2]), 0
        if rank is not None:
            listed += 1
        row = _ROW.match(text)
        if row is None or int(row[1]) == 0:  # sizes too small to be shared out
            continue
        if not op:
            op = _op_of_name(path, line)
        yield _printed_point(path, line, op, listed or ranks, row)


def _op_of_name(path: Path, line: int) -> str:
    """The op by the file's name, where the output does not say what ran."""
    for name in (*COLLECTIVES, *SPELLINGS):
        if path.stem.lower().startswith(name):
            return SPELLINGS.get(name, name)
    raise ProfileError(
        f"{path}: line {line}: it does not say which collective ran; keep the line with the "
        "command, or call the file all_reduce.txt or its like"
    )


def _printed_point(
    path: Path, line: int, op: str, ranks: int, row: re.Match[str]
) -> TimedCollective:
    """One row: size, count, type, redop, perhaps root, then time, algbw, busbw out of place."""
    if ranks < 2:
        raise ProfileError(
            f"{path}: line {line}: {ranks} ranks: expected the lines '#  Rank  0 ...' or "
            "'# nThread 1 nGpus 8' of nccl-tests above the table, with 2 ranks or more"
        )
    numbers = row[5].split()
    if len(numbers) % 4 == 1:  # the root stands first, which old releases do not print
        numbers = numbers[1:]
    if not numbers:
        raise ProfileError(f"{path}: line {line}: no time in the row {row[0].strip()[:60]!r}")
    return TimedCollective(
        op=op,
        ranks=ranks,
        nbytes=tabular.number(path, line, "size", row[1], most=tabular.MOST_SIZE),
        seconds=tabular.number(path, line, "time", numbers[0], unit=1e-6),
        dtype=row[3],
        library="nccl",
    )
