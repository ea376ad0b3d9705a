"""DRAM bytes from hardware counters: totals of regions by LIKWID, each kernel by AMD's rocprof."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles import tables
from rooftrace.measured.profiles.tables import CsvCell, CsvRow, KernelCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCount:
    """The DRAM bytes of a region of code, or of a command, over all sockets.

    Memory controllers also count the traffic of other programs on the machine.
    """

    name: str  # of the region; "" for a command
    read: int | None = None  # byte; None where reads and writes were counted as one
    written: int | None = None  # byte; None where reads and writes were counted as one
    seconds: float | None = None  # s, of all calls; None: unknown
    calls: int | None = None  # times that the region ran; None: unknown
    together: int | None = None  # byte, read and written, where these were counted as one

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return (self.read or 0) + (self.written or 0) + (self.together or 0)


def memory_count(
    name: str,
    sides: Mapping[str, float],
    seconds: float | None,
    calls: int | None = None,
) -> MemoryCount | None:
    """The record of the bytes "read" and "written", or else "together"; None without these.

    Reads without writes, or writes without reads, are no total.
    """
    split = "read" in sides and "written" in sides
    if not split and "together" not in sides:
        return None
    kept = ("read", "written") if split else ("together",)
    sizes = {side: round(sides[side]) for side in kept}
    return MemoryCount(name=name, seconds=seconds, calls=calls, **sizes)


# -- likwid ----------------------------------------------------------------------------------------
# `likwid-perfctr -g MEM` writes tables: a line `TABLE,...` that names the region, the group and the
# number of lines, a header with the hardware threads, and the lines.  One thread of each socket
# counts the traffic of its memory controllers, and the others have 0: the sum over threads is the
# total.

LIKWID = "likwid-perfctr -C 0-3 -g MEM -o FILE.csv ..."

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
"""The header of a region's time and calls, above its counters."""


@dataclass(frozen=True, slots=True)
class _LikwidTable:
    """A table of metrics, or the time and calls of a region above its table of counters."""

    path: Path
    line: int
    region: str
    group: int
    kind: str
    name: str  # of the group
    rows: int  # as its first line says
    lines: list[tuple[int, list[str]]] = field(default_factory=list)

    @property
    def called(self) -> str:
        """The region in words."""
        return f"region {self.region!r:.60}" if self.region else "the whole command"

    def refused(self, message: str) -> ProfileError:
        """The error of this table."""
        return ProfileError(f"{self.path}: line {self.line}: {message}; make it with `{LIKWID}`")


def read_likwid(path: str | os.PathLike[str]) -> tuple[MemoryCount, ...]:
    """The DRAM bytes of each region in a CSV file of `likwid-perfctr`, or of a command.

    Raises FileNotFoundError, or ProfileError for another kind of file, a group without the bytes,
    and a cell that is no number.
    """
    path = Path(path)
    listed = tuple(_likwid_tables(path))
    metrics = [table for table in listed if table.kind == "Metric"]
    if not metrics:
        raise ProfileError(f"{path}: no table of metrics of LIKWID; make it with `{LIKWID}`")
    groups = {table.group: table.name for table in metrics}
    if len(groups) > 1:
        raise ProfileError(
            f"{path}: {len(groups)} groups ({tables.named(groups.values())}): LIKWID takes turns, "
            f"so none counts the whole run; measure one group, as in `{LIKWID}`"
        )
    infos = {table.region: table for table in listed if table.kind == "Raw"}
    first: dict[str, int] = {}
    for table in metrics:
        if table.region in first:
            raise ProfileError(
                f"{path}: line {table.line}: a second table of {table.called}, the first is in "
                f"line {first[table.region]}: keep one run in one file"
            )
        first[table.region] = table.line
    return tuple(_count(table, infos.get(table.region)) for table in metrics)


def _likwid_tables(path: Path) -> Iterator[_LikwidTable]:
    """The tables, without statistics; lines before the first are the program's output."""
    table = None
    for line, text in tables.texts(path):
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


def _begun(path: Path, line: int, text: str) -> _LikwidTable | None:
    """The table that a line begins; None for statistics, which repeat the others."""
    match = _TABLE.fullmatch(text)
    if match is None:
        raise ProfileError(
            f"{path}: line {line}: {text!r:.100}: expected TABLE,Region NAME,Group 1 Metric,MEM,9 "
            f"as `{LIKWID}` writes it"
        )
    if match["stat"]:
        return None
    return _LikwidTable(
        path=path,
        line=line,
        region=match["region"] or "",
        group=int(match["group"]),
        kind=match["kind"],
        name=match["name"],
        rows=int(match["rows"]),
    )


def _values(table: _LikwidTable, header: str, rows: int) -> dict[str, list[CsvCell]]:
    """A cell for each thread, by the name that begins a line, of `rows` lines under a header."""
    path = table.path
    start = next((i for i, (_, cells) in enumerate(table.lines) if cells[0] == header), None)
    if start is None:
        raise table.refused(f"no line {header!r} in the table of {table.called}")
    threads = [cell for cell in table.lines[start][1][1:] if cell]
    body = table.lines[start + 1 : start + 1 + rows]
    if len(body) < rows:
        raise ProfileError(
            f"{path}: line {table.line}: the table of {table.called} has {len(body):,} lines of "
            f"the {rows:,} that are announced: the file is cut off or changed; make it again"
        )
    values: dict[str, list[CsvCell]] = {}
    for line, (name, *texts) in body:
        if len(texts) < len(threads):
            raise ProfileError(
                f"{path}: line {line}: {len(texts) + 1} cells, the header has {len(threads) + 1}: "
                f"{','.join((name, *texts)):.100}"
            )
        if name in values:
            raise ProfileError(f"{path}: line {line}: {name!r:.60} is there twice")
        values[name] = [
            CsvCell(path, line, f"{thread} of {name}", text)
            for thread, text in zip(threads, texts, strict=False)
        ]
    return values


def _count(table: _LikwidTable, info: _LikwidTable | None) -> MemoryCount:
    metrics = _values(table, "Metric", table.rows)
    volumes = {name: m for name in metrics if (m := _VOLUME.fullmatch(name)) is not None}
    if not volumes:
        there = tables.named(name for name in metrics if "volume" in name.lower())
        raise table.refused(
            f"group {table.name!r:.60} tells no DRAM bytes (of volumes it has {there}): expected "
            "'Memory data volume [GBytes]'"
        )
    memories: dict[str, dict[str, float]] = defaultdict(dict)
    for name, match in volumes.items():
        side = _SIDES.get(match["side"], "together")
        memories[match["memory"]][side] = sum(
            cell.number(positive=False, unit=_GBYTE, most=tables.MOST_SIZE)
            for cell in metrics[name]
        )
    seconds, calls = _time_and_calls(metrics, info)
    count = memory_count(table.region, _sum(memories), seconds, calls)
    if count is None:
        raise ProfileError(
            f"{table.path}: line {table.line}: group {table.name!r:.60} tells DRAM bytes of one "
            f"side only ({tables.named(volumes)}): measure a group that has both, as in `{LIKWID}`"
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


def _time_and_calls(
    metrics: Mapping[str, Sequence[CsvCell]], info: _LikwidTable | None
) -> tuple[float | None, int | None]:
    """Seconds and calls of the slowest thread; None: unknown."""

    def largest(cells: Sequence[CsvCell], most: float = float("inf")) -> float | None:
        return max((cell.number(positive=False, most=most) for cell in cells), default=None)

    if info is not None and any(cells[0] == _INFO for _, cells in info.lines):
        above = _values(info, _INFO, rows=2)
        seconds, calls = (
            largest(above.get(_REGION_TIME, ())),
            largest(above.get(_CALLS, ()), 2.0**63),
        )
        return seconds, None if calls is None else round(calls)
    return largest(metrics.get(_RUNTIME, ())), None


# -- rocprof ---------------------------------------------------------------------------------------
# rocprof and rocprofv2 write a line for each dispatch, with a column for each counter.  rocprofv3
# writes a line for each counter of each dispatch, into *_counter_collection.csv; one file may have
# several passes, each with its header.  Grids are counted in work items there, and in blocks here.

ROCPROF = "rocprofv3 --pmc FETCH_SIZE WRITE_SIZE --output-format csv -- ..."

_NAME = ("KernelName", "Kernel_Name")
_DEVICE = ("gpu-id", "GPU_ID", "Agent_Id")
_GRID = ("grd", "Grid_Size")
_BLOCK = ("wgr", "Workgroup_Size")
_TIMES = (("BeginNs", "EndNs"), ("Start_Timestamp", "End_Timestamp"))
_LENGTH = "DurationNs"
_COUNTER, _VALUE, _DISPATCH = "Counter_Name", "Counter_Value", "Dispatch_Id"
"""Columns of rocprofv3."""

_KERNEL_ENDINGS = (" [clone .kd]", ".kd")
"""Suffixes of a kernel descriptor, which rocprof writes after the name of a function."""

# Bytes for each count, as in derived_counters.xml and counter_defs.yaml of ROCprofiler-SDK, where
# requests of 32 byte (and 128) are among all requests, and the others have 64.  The first formula
# whose counters are all there is taken.
Formula = Mapping[str, int]
_READ: tuple[Formula, ...] = (
    {"FETCH_SIZE": 1024},
    {"FetchSize": 1024},
    # MI350
    {"TCC_EA0_RDREQ_128B_sum": 128, "TCC_EA0_RDREQ_64B_sum": 64, "TCC_EA0_RDREQ_32B_sum": 32},
    # MI300: a "bubble" is a request of 128 byte
    {"TCC_EA0_RDREQ_sum": 64, "TCC_BUBBLE_sum": 64, "TCC_EA0_RDREQ_32B_sum": -32},
    # MI100, MI200
    {"TCC_EA_RDREQ_sum": 64, "TCC_EA_RDREQ_32B_sum": -32},
)
_WRITTEN: tuple[Formula, ...] = (
    {"WRITE_SIZE": 1024},
    {"WriteSize": 1024},
    {"TCC_EA0_WRREQ_sum": 32, "TCC_EA0_WRREQ_64B_sum": 32},
    {"TCC_EA_WRREQ_sum": 32, "TCC_EA_WRREQ_64B_sum": 32},
)


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """A dispatch of a kernel: its first line, and its counters by name."""

    cells: CsvRow
    counters: dict[str, CsvCell] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The file and the first line, for errors."""
        cell = next(iter(self.cells.values()))
        return f"{cell.path}: line {cell.line}"

    def cell(self, columns: Sequence[str]) -> CsvCell | None:
        """The cell of the first of these columns that the file has."""
        return next((self.cells[column] for column in columns if column in self.cells), None)


def read_rocprof(path: str | os.PathLike[str]) -> tuple[KernelCounters, ...]:
    """The dispatches in a CSV file of rocprof, rocprofv2 or rocprofv3, in order.

    Raises FileNotFoundError, or ProfileError for another kind of file, counters without the bytes,
    and a cell that is no number.
    """
    path = Path(path)
    rows = tables.lines(path)
    line, header = next(rows, (0, []))
    tables.check_header(path, line, header)
    name = next((name for name in _NAME if name in header), "")
    if not name:
        raise ProfileError(
            f"{path}: no CSV of rocprof: line {line or 1} has no column {' or '.join(_NAME)}; "
            f"make it with `{ROCPROF}`"
        )
    table = (tables.cells(path, n, header, row) for n, row in rows if row != header)
    if _COUNTER in header:
        missing = [column for column in (_VALUE, _DISPATCH) if column not in header]
        if missing:
            raise ProfileError(
                f"{path}: line {line}: no column {' and '.join(missing)} beside {_COUNTER!r}; "
                f"make it with `{ROCPROF}`"
            )
        dispatches = _of_counters(name, table)
    else:
        dispatches = [_Dispatch(cells, dict(cells)) for cells in table]
    if not dispatches:
        raise ProfileError(f"{path}: no kernel after the header in line {line}")
    return tuple(_kernel(i, dispatch, name) for i, dispatch in enumerate(dispatches))


def _of_counters(name: str, table: Iterator[CsvRow]) -> list[_Dispatch]:
    """The dispatches of rocprofv3, which has a line for each counter, in the order of their ids."""
    dispatches: dict[tuple[int, str], _Dispatch] = {}
    for cells in table:
        number, agent = cells[_DISPATCH], cells.get("Agent_Id")
        key = (number.exact(), "" if agent is None else agent.text)
        dispatch = dispatches.setdefault(key, _Dispatch(cells))
        first, counter = dispatch.cells[name], cells[_COUNTER]
        if cells[name].text != first.text:
            raise cells[name].refused(
                f"{cells[name].text!r:.60}: dispatch {number.text:.60} is {first.text!r:.60} in "
                f"line {first.line}; join only passes of one run of one program"
            )
        if counter.text in dispatch.counters:
            raise counter.refused(
                f"{counter.text!r:.60} of dispatch {number.text:.60} is there twice, first in line "
                f"{dispatch.counters[counter.text].line}; join only passes of different counters"
            )
        dispatch.counters[counter.text] = replace(cells[_VALUE], column=counter.text)
    return [dispatches[key] for key in sorted(dispatches)]


def _kernel(index: int, dispatch: _Dispatch, column: str) -> KernelCounters:
    function = dispatch.cells[column].text
    for ending in _KERNEL_ENDINGS:
        function = function.removesuffix(ending)
    if not function:
        raise dispatch.cells[column].refused("the cell is empty")
    grid, block = _blocks(dispatch)
    device = dispatch.cell(_DEVICE)
    return KernelCounters(
        index=index,
        name=function,
        duration=_duration(dispatch.cells),
        read=_bytes(dispatch, "read", _READ),
        written=_bytes(dispatch, "written", _WRITTEN),
        grid=grid,
        block=block,
        device="" if device is None else device.text,
    )


def _bytes(dispatch: _Dispatch, side: str, formulas: Sequence[Formula]) -> int:
    """The bytes of one side by the first formula whose counters the dispatch has."""
    formula = next((f for f in formulas if f.keys() <= dispatch.counters.keys()), None)
    if formula is None:
        wanted = " or ".join(" with ".join(f) for f in formulas)
        of_bytes = {name for f in (*_READ, *_WRITTEN) for name in f}
        there = tables.named(c for c in dispatch.counters if c in of_bytes)
        raise ProfileError(
            f"{dispatch.place}: no counters of the bytes {side} (of the counters that tell bytes "
            f"there is {there}): expected {wanted}; make it with `{ROCPROF}`"
        )
    total = 0.0
    for counter, size in formula.items():
        most = tables.MOST_SIZE / abs(size)
        total += size * dispatch.counters[counter].number(positive=False, most=most)
    if total < 0:
        raise ProfileError(
            f"{dispatch.place}: {' and '.join(formula)} contradict each other: more small requests "
            "than requests; count them in one pass"
        )
    return round(total)


def _blocks(dispatch: _Dispatch) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The number of blocks, and the work items of each; None: unknown."""
    sizes = []
    for columns in (_GRID, _BLOCK):
        cell = dispatch.cell(columns)
        size = None if cell is None else cell.whole_number()
        if cell is not None and size == 0:
            raise cell.refused("'0': expected a number of work items above 0")
        sizes.append(size)
    items, block = sizes
    if items is None or block is None:
        return None, None if block is None else (block,)
    return (-(-items // block),), (block,)


def _duration(cells: CsvRow) -> float | None:
    """Seconds of the kernel; None where no times were taken."""
    length = cells.get(_LENGTH)
    if length is not None and length.text:
        return length.number(unit=1e-9)
    for names in _TIMES:
        begin, end = (cells.get(name) for name in names)
        if begin is None or end is None or not (begin.text and end.text):
            continue
        first, last = begin.exact(), end.exact()
        if first == last == 0:
            return None
        if last <= first:
            raise end.refused(
                f"{end.text!r:.60}: expected a time after {begin.column} ({begin.text:.60})"
            )
        return (last - first) * 1e-9
    return None
