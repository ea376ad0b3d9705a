"""DRAM bytes from hardware counters: totals of regions by LIKWID, each kernel by AMD's rocprof."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rooftrace.errors import ProfileError
from rooftrace.measured.profiles import tables, tables as tabular
from rooftrace.measured.profiles.tables import KernelCounters

# -- counters --------------------------------------------------------------------------------------
# What moved between memory and caches in total, as counters of memory controllers tell it.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCount:
    """The DRAM bytes of a region of code, or of a whole command, over all sockets.

    Memory controllers count what anybody moves, also other programs on the machine.
    """

    name: str  # of the region; "" for a whole command
    read: int | None  # byte; None where reads and writes were counted as one
    written: int | None  # byte; None where reads and writes were counted as one
    seconds: float | None = None  # s, of all calls; None where the file does not say
    calls: int | None = None  # how often the region ran; None where the file does not say
    together: int | None = None  # byte, read and written, where these were counted as one

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return (self.read or 0) + (self.written or 0) + (self.together or 0)


def memory_count(
    name: str,
    sides: dict[str, float],
    seconds: float | None,
    calls: int | None = None,
) -> MemoryCount | None:
    """The record of the bytes of "read" and "written", or else of "together"; None for neither.

    sides: bytes by one of these three words.  Reads without writes, or the other way, are no total.
    """
    if "read" in sides and "written" in sides:
        return MemoryCount(
            name=name,
            read=round(sides["read"]),
            written=round(sides["written"]),
            seconds=seconds,
            calls=calls,
        )
    if "together" not in sides:
        return None
    return MemoryCount(
        name=name,
        read=None,
        written=None,
        seconds=seconds,
        calls=calls,
        together=round(sides["together"]),
    )


# -- likwid ----------------------------------------------------------------------------------------
# Reads the CSV of `likwid-perfctr -g MEM`: DRAM bytes of regions, or of a whole command.
#
# LIKWID writes tables: a line `TABLE,...` that names the region, the group and the number of
# lines, a header with the hardware threads, and the lines.  One thread of each socket counts what
# its memory controllers move, and the others have 0: so the sum over threads is the total.

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
        raise ProfileError(f"{path}: no table of metrics of LIKWID; make it with `{LIKWID}`")
    groups = {table.group: table.name for table in metrics}
    if len(groups) > 1:
        raise ProfileError(
            f"{path}: {len(groups)} groups ({tabular.named(groups.values())}): LIKWID takes turns, "
            f"so none counts the whole run; measure one group, as in `{LIKWID}`"
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
            f"as `{LIKWID}` writes it"
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
            f"make it with `{LIKWID}`"
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
            f"it has {there}): expected 'Memory data volume [GBytes]'; make it with `{LIKWID}`"
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
            f"only ({tabular.named(volumes)}): measure a group that has both, as in `{LIKWID}`"
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


# -- rocprof ---------------------------------------------------------------------------------------
# Reads the CSV of AMD's rocprof: the DRAM bytes of each dispatch of a kernel.
#
# rocprof and rocprofv2 write a line for each dispatch, with a column for each counter.  rocprofv3
# writes a line for each counter of each dispatch, into *_counter_collection.csv; the files of
# several passes may stand in one file, each with its header.  Grids are counted in work items
# there, and in blocks here.

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
"""What rocprof writes after the name of a function: the suffix of its kernel descriptor."""

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
    """One dispatch of a kernel: its cells, and its counters with the line of each."""

    line: int
    cells: Mapping[str, str]
    counters: dict[str, tuple[int, str]] = field(default_factory=dict)


def read_rocprof(path: str | os.PathLike[str]) -> tuple[KernelCounters, ...]:
    """The dispatches in a CSV file of rocprof, rocprofv2 or rocprofv3, in order.

    Raises FileNotFoundError, or ProfileError for another kind of file, counters that do not tell
    the bytes, and a cell that is no number.
    """
    path = Path(path)
    rows = tables.lines(path)
    line, header = next(rows, (0, []))
    tables.check_header(path, line, header)
    name = _first(header, _NAME)
    if not name:
        raise ProfileError(
            f"{path}: no CSV of rocprof: line {line or 1} has no column {' or '.join(_NAME)}; "
            f"make it with `{ROCPROF}`"
        )
    table = ((n, tables.cells(path, n, header, row)) for n, row in rows if row != header)
    if _COUNTER in header:
        missing = [column for column in (_VALUE, _DISPATCH) if column not in header]
        if missing:
            raise ProfileError(
                f"{path}: line {line}: no column {' and '.join(missing)} beside {_COUNTER!r}; "
                f"make it with `{ROCPROF}`"
            )
        dispatches = _of_counters(path, name, table)
    else:
        dispatches = [_Dispatch(n, cells, {c: (n, cells[c]) for c in cells}) for n, cells in table]
    if not dispatches:
        raise ProfileError(f"{path}: no kernel after the header in line {line}")
    return tuple(_kernel(path, i, name, dispatch) for i, dispatch in enumerate(dispatches))


def _first(there: Mapping[str, str] | Sequence[str], names: Sequence[str]) -> str:
    """The first of these names that is there; "" where none is."""
    return next((name for name in names if name in there), "")


def _of_counters(
    path: Path, name: str, table: Iterator[tuple[int, Mapping[str, str]]]
) -> list[_Dispatch]:
    """The dispatches of rocprofv3, which has a line for each counter, in the order of their ids."""
    dispatches: dict[tuple[int, str], _Dispatch] = {}
    for line, cells in table:
        number = tables.exact(path, line, _DISPATCH, cells[_DISPATCH])
        key = (number, cells.get("Agent_Id", ""))
        dispatch = dispatches.setdefault(key, _Dispatch(line, cells))
        first, counter = dispatch.cells[name], cells[_COUNTER]
        if cells[name] != first:
            raise ProfileError(
                f"{path}: line {line}, column {name!r}: {cells[name]!r:.60}: dispatch "
                f"{cells[_DISPATCH]:.60} is {first!r:.60} in line {dispatch.line}; join only "
                "passes of one run of one program"
            )
        if counter in dispatch.counters:
            raise ProfileError(
                f"{path}: line {line}, column {_COUNTER!r}: {counter!r:.60} of dispatch "
                f"{cells[_DISPATCH]:.60} is there twice, first in line "
                f"{dispatch.counters[counter][0]}; join only passes of different counters"
            )
        dispatch.counters[counter] = (line, cells[_VALUE])
    return [dispatches[key] for key in sorted(dispatches)]


def _kernel(path: Path, index: int, name: str, dispatch: _Dispatch) -> KernelCounters:
    function = dispatch.cells[name]
    for ending in _KERNEL_ENDINGS:
        function = function.removesuffix(ending)
    if not function:
        raise ProfileError(f"{path}: line {dispatch.line}, column {name!r}: the cell is empty")
    grid, block = _blocks(path, dispatch)
    return KernelCounters(
        index=index,
        name=function,
        duration=_duration(path, dispatch),
        read=_bytes(path, dispatch, "read", _READ),
        written=_bytes(path, dispatch, "written", _WRITTEN),
        grid=grid,
        block=block,
        device=dispatch.cells.get(_first(dispatch.cells, _DEVICE), ""),
    )


def _bytes(path: Path, dispatch: _Dispatch, side: str, formulas: Sequence[Formula]) -> int:
    """The bytes of one side by the first formula whose counters are there."""
    formula = next((f for f in formulas if f.keys() <= dispatch.counters.keys()), None)
    if formula is None:
        wanted = " or ".join(" with ".join(f) for f in formulas)
        known = {name for f in (*_READ, *_WRITTEN) for name in f}
        there = tables.named(c for c in dispatch.counters if c in known)
        raise ProfileError(
            f"{path}: line {dispatch.line}: no counters of the bytes {side} (of the "
            f"counters that tell bytes there is {there}): expected {wanted}; make it with "
            f"`{ROCPROF}`"
        )
    total = 0.0
    for counter, size in formula.items():
        line, text = dispatch.counters[counter]
        most = tables.MOST_SIZE / abs(size)
        total += size * tables.number(path, line, counter, text, positive=False, most=most)
    if total < 0:
        raise ProfileError(
            f"{path}: line {dispatch.line}: {' and '.join(formula)} contradict each other: more "
            "small requests than requests; count them in one pass"
        )
    return round(total)


def _blocks(
    path: Path, dispatch: _Dispatch
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """How many blocks there are, and how many work items each has; None where it is not said."""
    sizes = []
    for names in (_GRID, _BLOCK):
        column = _first(dispatch.cells, names)
        size = tables.whole_number(path, dispatch.line, column, dispatch.cells.get(column, ""))
        if size == 0:
            raise ProfileError(
                f"{path}: line {dispatch.line}, column {column!r}: '0': expected a number of work "
                "items above 0"
            )
        sizes.append(size)
    items, block = sizes
    if items is None or block is None:
        return None, None if block is None else (block,)
    return (-(-items // block),), (block,)


def _duration(path: Path, dispatch: _Dispatch) -> float | None:
    """Seconds of the kernel; None where no times were taken."""
    cells, line = dispatch.cells, dispatch.line
    if cells.get(_LENGTH):
        return tables.number(path, line, _LENGTH, cells[_LENGTH], unit=1e-9)
    for begin, end in _TIMES:
        if not (cells.get(begin) and cells.get(end)):
            continue
        first, last = (tables.exact(path, line, column, cells[column]) for column in (begin, end))
        if first == last == 0:
            return None
        if last <= first:
            raise ProfileError(
                f"{path}: line {line}, column {end!r}: {cells[end]!r:.60}: expected a time after "
                f"{begin} ({cells[begin]:.60})"
            )
        return (last - first) * 1e-9
    return None
