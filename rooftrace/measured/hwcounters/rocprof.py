"""Reads the CSV of AMD's rocprof: the DRAM bytes of each dispatch of a kernel.

rocprof and rocprofv2 write a line for each dispatch, with a column for each counter.  rocprofv3
writes a line for each counter of each dispatch, into *_counter_collection.csv; the files of several
passes may stand in one file, each with its header.  Grids are counted in work items there, and in
blocks here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rooftrace.errors import ProfileError
from rooftrace.measured.tables import KernelCounters, tabular

COMMAND = "rocprofv3 --pmc FETCH_SIZE WRITE_SIZE --output-format csv -- ..."

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
    rows = tabular.lines(path)
    line, header = next(rows, (0, []))
    tabular.check_header(path, line, header)
    name = _first(header, _NAME)
    if not name:
        raise ProfileError(
            f"{path}: no CSV of rocprof: line {line or 1} has no column {' or '.join(_NAME)}; "
            f"make it with `{COMMAND}`"
        )
    table = ((n, tabular.cells(path, n, header, row)) for n, row in rows if row != header)
    if _COUNTER in header:
        missing = [column for column in (_VALUE, _DISPATCH) if column not in header]
        if missing:
            raise ProfileError(
                f"{path}: line {line}: no column {' and '.join(missing)} beside {_COUNTER!r}; "
                f"make it with `{COMMAND}`"
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
        number = tabular.exact(path, line, _DISPATCH, cells[_DISPATCH])
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
        there = tabular.named(c for c in dispatch.counters if c in known)
        raise ProfileError(
            f"{path}: line {dispatch.line}: no counters of the bytes {side} (of the "
            f"counters that tell bytes there is {there}): expected {wanted}; make it with "
            f"`{COMMAND}`"
        )
    total = 0.0
    for counter, size in formula.items():
        line, text = dispatch.counters[counter]
        most = tabular.MOST_SIZE / abs(size)
        total += size * tabular.number(path, line, counter, text, positive=False, most=most)
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
        size = tabular.whole(path, dispatch.line, column, dispatch.cells.get(column, ""))
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
        return tabular.number(path, line, _LENGTH, cells[_LENGTH], unit=1e-9)
    for begin, end in _TIMES:
        if not (cells.get(begin) and cells.get(end)):
            continue
        first, last = (tabular.exact(path, line, column, cells[column]) for column in (begin, end))
        if first == last == 0:
            return None
        if last <= first:
            raise ProfileError(
                f"{path}: line {line}, column {end!r}: {cells[end]!r:.60}: expected a time after "
                f"{begin} ({cells[begin]:.60})"
            )
        return (last - first) * 1e-9
    return None
