"""Reads the CSV of `likwid-perfctr -g MEM`: DRAM bytes of regions, or of a whole command.

LIKWID writes tables: a line `TABLE,...` that names the region, the group and the number of lines,
a header with the hardware threads, and the lines.  One thread of each socket counts what its memory
controllers move, and the others have 0: so the sum over threads is the total.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rooftrace.errors import ProfileError
from rooftrace.measured.hwcounters.memorycount import MemoryCount, memory_count
from rooftrace.measured.tables import tabular

COMMAND = "likwid-perfctr -C 0-3 -g MEM -o FILE.csv ..."

_TABLE = re.compile(
    r"TABLE,(?:Region (?P<region>.*),)?Group (?P<group>\d{1,9}) (?P<kind>Raw|Metric)"
    r"(?P<stat> STAT)?,(?P<name>[^,]*),(?P<rows>\d{1,9}),*"
)
_VOLUME = re.compile(
    r"(?P<memory>Memory|(?:DDR|HBM|MCDRAM)(?: Memory)?) "
    r"(?:(?P<side>read|load|write|writeback|evict) )?data volume \[GBytes?\]"
)
_SIDES = {
    **dict.fromkeys(("read", "load"), "read"),
    **dict.fromkeys(("write", "writeback", "evict"), "written"),
}
_GBYTE = 1e9
"""LIKWID's formulas of groups multiply by 1.0E-09."""
_RUNTIME, _REGION_TIME, _CALLS = "Runtime (RDTSC) [s]", "RDTSC Runtime [s]", "call count"
_INFO = "Region Info"
"""Begins the lines of a region's time and calls, above its counters."""


@dataclass(frozen=True, slots=True)
class _Table:
    """A table of metrics, or what is said of a region above its table of counters."""

    line: int
    region: str
    group: int
    kind: str
    name: str  # of the group
    rows: int  # as its first line says
    lines: list[tuple[int, list[str]]] = field(default_factory=list)


def read_likwid(path: str | os.PathLike[str]) -> tuple[MemoryCount, ...]:
    """The DRAM bytes of each region in a CSV file of `likwid-perfctr`, or of a whole command.

    Raises FileNotFoundError, or ProfileError for another kind of file, a group that does not tell
    the bytes, and a cell that is no number.
    """
    path = Path(path)
    tables = tuple(_tables(path))
    metrics = [table for table in tables if table.kind == "Metric"]
    if not metrics:
        raise ProfileError(f"{path}: no table of metrics of LIKWID; make it with `{COMMAND}`")
    groups = {table.group: table.name for table in metrics}
    if len(groups) > 1:
        raise ProfileError(
            f"{path}: {len(groups)} groups ({tabular.named(groups.values())}): LIKWID takes turns, "
            f"so none counts the whole run; measure one group, as in `{COMMAND}`"
        )
    infos = {table.region: table for table in tables if table.kind == "Raw"}
    first: dict[str, int] = {}
    for table in metrics:
        if table.region in first:
            raise ProfileError(
                f"{path}: line {table.line}: a second table of {_called(table)}, the first is in "
                f"line {first[table.region]}: keep one run in one file"
            )
        first[table.region] = table.line
    return tuple(_count(path, table, infos.get(table.region)) for table in metrics)


def _called(table: _Table) -> str:
    return f"region {table.region!r:.60}" if table.region else "the whole command"


# -- tables ----------------------------------------------------------------------------------------


def _tables(path: Path) -> Iterator[_Table]:
    """The tables that are no statistics; what stands before the first is the program's output."""
    table = None
    for line, text in tabular.texts(path):
        if text.startswith("TABLE,"):
            if table is not None:
                yield table
            table = _begun(path, line, text)
        elif text.startswith("STRUCT,"):
            if table is not None:
                yield table
            table = None
        elif table is not None:
            table.lines.append((line, [cell.strip() for cell in text.split(",")]))
    if table is not None:
        yield table


def _begun(path: Path, line: int, text: str) -> _Table | None:
    """The table that a line begins; None for statistics, which repeat what the others say."""
    match = _TABLE.fullmatch(text)
    if match is None:
        raise ProfileError(
            f"{path}: line {line}: {text!r:.100}: expected TABLE,Region NAME,Group 1 Metric,MEM,9 "
            f"as `{COMMAND}` writes it"
        )
    if match["stat"]:
        return None
    return _Table(
        line=line,
        region=match["region"] or "",
        group=int(match["group"]),
        kind=match["kind"],
        name=match["name"],
        rows=int(match["rows"]),
    )


def _values(
    path: Path, table: _Table, header: str, rows: int
) -> dict[str, list[tuple[int, str, str]]]:
    """(line, thread, text) by the name that begins a line, of `rows` lines under a header."""
    start = next((i for i, (_, cells) in enumerate(table.lines) if cells[0] == header), None)
    if start is None:
        raise ProfileError(
            f"{path}: line {table.line}: no line {header!r} in the table of {_called(table)}; "
            f"make it with `{COMMAND}`"
        )
    threads = [cell for cell in table.lines[start][1][1:] if cell]
    body = table.lines[start + 1 : start + 1 + rows]
    if len(body) < rows:
        raise ProfileError(
            f"{path}: line {table.line}: the table of {_called(table)} has {len(body):,} lines of "
            f"the {rows:,} that are announced: the file is cut off or changed; make it again"
        )
    values: dict[str, list[tuple[int, str, str]]] = {}
    for line, cells in body:
        if len(cells) <= len(threads):
            raise ProfileError(
                f"{path}: line {line}: {len(cells)} cells, the header has {len(threads) + 1}: "
                f"{','.join(cells):.100}"
            )
        if cells[0] in values:
            raise ProfileError(f"{path}: line {line}: {cells[0]!r:.60} is there twice")
        values[cells[0]] = [
            (line, thread, text) for thread, text in zip(threads, cells[1:], strict=False)
        ]
    return values


# -- counts ----------------------------------------------------------------------------------------


def _count(path: Path, table: _Table, info: _Table | None) -> MemoryCount:
    metrics = _values(path, table, "Metric", table.rows)
    volumes = {name: m for name in metrics if (m := _VOLUME.fullmatch(name)) is not None}
    if not volumes:
        there = tabular.named(name for name in metrics if "volume" in name.lower())
        raise ProfileError(
            f"{path}: line {table.line}: group {table.name!r:.60} tells no DRAM bytes (of volumes "
            f"it has {there}): expected 'Memory data volume [GBytes]'; make it with `{COMMAND}`"
        )
    memories: dict[str, dict[str, float]] = defaultdict(dict)
    for name, match in volumes.items():
        side = _SIDES.get(match["side"], "together")
        cells = _numbers(path, name, metrics[name], _GBYTE, tabular.MOST_SIZE)
        memories[match["memory"]][side] = sum(cells)
    seconds, calls = _run(path, metrics, info)
    count = memory_count(table.region, _sum(memories), seconds, calls)
    if count is None:
        raise ProfileError(
            f"{path}: line {table.line}: group {table.name!r:.60} tells DRAM bytes of one side "
            f"only ({tabular.named(volumes)}): measure a group that has both, as in `{COMMAND}`"
        )
    return count


def _sum(memories: dict[str, dict[str, float]]) -> dict[str, float]:
    """The bytes of all memories: by side where each of them has both sides."""
    sums: dict[str, float] = defaultdict(float)
    split = all("read" in sides and "written" in sides for sides in memories.values())
    for sides in memories.values():
        if split:
            sums["read"] += sides["read"]
            sums["written"] += sides["written"]
        elif "together" in sides:
            sums["together"] += sides["together"]
        elif len(sides) == 2:
            sums["together"] += sides["read"] + sides["written"]
        else:
            return {}
    return sums


def _run(
    path: Path, metrics: dict[str, list[tuple[int, str, str]]], info: _Table | None
) -> tuple[float | None, int | None]:
    """Seconds and calls of the slowest thread; None where the file does not say."""
    if info is not None and any(cells[0] == _INFO for _, cells in info.lines):
        above = _values(path, info, _INFO, rows=2)
        seconds = _numbers(path, _REGION_TIME, above.get(_REGION_TIME, ()))
        calls = _numbers(path, _CALLS, above.get(_CALLS, ()), most=2.0**63)
        return max(seconds, default=None), round(max(calls)) if calls else None
    return max(_numbers(path, _RUNTIME, metrics.get(_RUNTIME, ())), default=None), None


def _numbers(
    path: Path,
    name: str,
    cells: Sequence[tuple[int, str, str]],
    unit: float = 1.0,
    most: float = float("inf"),
) -> list[float]:
    read = partial(tabular.number, positive=False, unit=unit, most=most)
    return [read(path, line, f"{thread} of {name}", text) for line, thread, text in cells]
