"""Reads the CSV of Nsight Compute, `--page raw` or `--page details`: counters by kernel.

The raw page has a column for each metric and a second line with the units; the details page has a
line for each metric.  Lines that ncu prints before the table ("==PROF== ...") are skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rooftrace.errors import ProfileError
from rooftrace.measured.tables import tabular

TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
_DURATION = "Duration"
"""The name of the time on the details page."""
COMMAND = f"ncu --csv --page raw --metrics {TIME},{READ},{WRITTEN}"

_SECONDS = {
    **dict.fromkeys(("nsecond", "ns"), 1e-9),
    **dict.fromkeys(("usecond", "us", "µs"), 1e-6),
    **dict.fromkeys(("msecond", "ms"), 1e-3),
    **dict.fromkeys(("second", "s"), 1.0),
}
_BYTES = {"byte": 1.0, "b": 1.0}
for _prefix, _factor in (("k", 1e3), ("m", 1e6), ("g", 1e9), ("t", 1e12)):
    _BYTES |= {f"{_prefix}byte": _factor, f"{_prefix}b": _factor}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCounters:
    """The DRAM bytes of one launch of a kernel, from Nsight Compute or rocprof."""

    index: int  # of the launch in the file
    name: str
    duration: float | None  # s; None without times; ncu sets clocks (by default locked to base)
    read: int  # byte, through DRAM
    written: int  # byte, through DRAM
    grid: tuple[int, ...] | None = None  # blocks; None where the file does not say
    block: tuple[int, ...] | None = None  # threads of a block; None where the file does not say
    device: str = ""
    capability: str = ""  # compute capability of the device, "9.0"; "" where it is not said

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def bandwidth(self) -> float | None:
        """Achieved byte/s; None without a time."""
        return None if self.duration is None else self.bytes / self.duration


def read_counters(path: str | os.PathLike[str]) -> tuple[KernelCounters, ...]:
    """The launches in a CSV file of Nsight Compute, in order.

    Raises FileNotFoundError, or ProfileError for another kind of file, a missing metric, or a cell
    that is no number or has no known unit.
    """
    path = Path(path)
    rows = tabular.lines(path)
    for line, header in rows:
        if "Kernel Name" in header:
            tabular.check_header(path, line, header)
            break
    else:
        raise ProfileError(
            f'{path}: no CSV of Nsight Compute: no line has a column "Kernel Name"; '
            f"make it with `{COMMAND} ... > FILE`"
        )
    read = _details if {"Metric Name", "Metric Value"} <= set(header) else _raw
    launches = tuple(read(path, line, header, rows))
    if not launches:
        raise ProfileError(f"{path}: no kernel after the header in line {line}")
    return launches


def _raw(
    path: Path, line: int, header: Sequence[str], rows: Iterator[tuple[int, list[str]]]
) -> Iterator[KernelCounters]:
    """A line for each launch."""
    _check_metrics(path, set(header), (TIME, READ, WRITTEN))
    place = next(rows, None)
    if place is None:
        return
    line, second = place
    units = tabular.cells(path, line, header, second)
    if units["Kernel Name"]:
        raise ProfileError(
            f"{path}: line {line}: expected the line of units that ncu writes under the header, "
            f"found a kernel ({units['Kernel Name'][:60]})"
        )
    for index, (line, row) in enumerate(rows):
        entry = tabular.cells(path, line, header, row)
        metrics = {name: (line, entry[name], units[name]) for name in (TIME, READ, WRITTEN)}
        yield _kernel(path, index, entry, metrics, TIME)


def _details(
    path: Path, line: int, header: Sequence[str], rows: Iterator[tuple[int, list[str]]]
) -> Iterator[KernelCounters]:
    """A line for each metric of each launch."""
    launches: dict[str, tuple[Mapping[str, str], dict[str, tuple[int, str, str]]]] = {}
    for line, row in rows:
        entry = tabular.cells(path, line, header, row)
        _, metrics = launches.setdefault(entry.get("ID", ""), (entry, {}))
        metrics.setdefault(
            entry["Metric Name"], (line, entry["Metric Value"], entry.get("Metric Unit", ""))
        )
    for index, (entry, metrics) in enumerate(launches.values()):
        time = TIME if TIME in metrics else _DURATION
        _check_metrics(path, set(metrics), (time, READ, WRITTEN))
        yield _kernel(path, index, entry, metrics, time)


def _check_metrics(path: Path, have: set[str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in have]
    if missing:
        raise ProfileError(f"{path}: no metric {', '.join(missing)}; make it with `{COMMAND} ...`")


def _kernel(
    path: Path,
    index: int,
    entry: Mapping[str, str],
    metrics: Mapping[str, tuple[int, str, str]],
    time: str,
) -> KernelCounters:
    def value(name: str, units: Mapping[str, float], positive: bool) -> float:
        line, text, unit = metrics[name]
        factor = units.get(unit.lower())
        if factor is None:
            raise ProfileError(
                f"{path}: line {line}, metric {name:.60}: unit {unit!r:.60}: expected one of "
                f"{', '.join(units)}"
            )
        return tabular.number(path, line, name, text, positive=positive, unit=factor)

    def size(*names: str) -> tuple[int, ...] | None:
        text = next((entry[name] for name in names if entry.get(name)), "")
        numbers = tuple(int(n) for n in re.findall(r"\d{1,18}", text.replace(",", " ")))
        return numbers or None

    count: Callable[[str], int] = lambda name: round(value(name, _BYTES, False))  # noqa: E731
    return KernelCounters(
        index=index,
        name=entry["Kernel Name"],
        duration=value(time, _SECONDS, True),
        read=count(READ),
        written=count(WRITTEN),
        grid=size("Grid Size", "launch__grid_size"),
        block=size("Block Size", "launch__block_size"),
        device=entry.get("Device", ""),
        capability=entry.get("CC", ""),
    )
