"""Reads CSV tables so that errors name line and column: step times and Nsight Compute counters."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


def whole_number(path: Path, line: int, column: str, text: str) -> int | None:
    """A whole number in a cell, of 64 bits at most; None for an empty cell."""
    if not text:
        return None
    value = number(path, line, column, text, positive=False)
    if value != int(value) or int(value) not in WHOLE:
        raise ProfileError(
            f"{path}: line {line}, column {column!r:.60}: {text!r:.60}: expected a whole number"
        )
    return int(value)


# -- steptimes -------------------------------------------------------------------------------------
# Step times from a table: a plain CSV with one measured step in each line.
#
# Columns may come in any order and case; a prefix "infer_" or "train_" is dropped, so that tables
# of timm's benchmark read as they are.  Spaces and dashes count as underscores.
#
#   target      model, target, name                        what ran; required
#   time        ms | step_ms | latency_ms | step_time_ms | step_time (ms, as timm writes it)
#               us | step_us | latency_us,  s | seconds | step_s | step_seconds
#               samples_per_sec | items_per_s (with batch)   one of these is required
#   batch       batch, batch_size, bs
#   seq, kv     seq, seq_len, sequence, isl;   kv, kv_len, cache
#   image_size  image_size, img_size, size                 pixels of one side
#   phase       phase;  "forward" for infer_ columns, "training" for train_ columns
#   dtype       dtype, precision
#   execution   execution, mode, backend
#   chip        chip, device, gpu
#
# Other columns are kept as text in `extra`.

_TEXT = {
    "target": ("model", "target", "name"),
    "phase": ("phase",),
    "dtype": ("dtype", "precision"),
    "execution": ("execution", "mode", "backend"),
    "chip": ("chip", "device", "gpu"),
}
_WHOLE = {
    "batch": ("batch", "batch_size", "bs"),
    "seq": ("seq", "seq_len", "sequence", "isl"),
    "kv": ("kv", "kv_len", "cache"),
    "image_size": ("image_size", "img_size", "size"),
}
# Names of a time, and its unit in seconds.
_TIMES = {
    1e-3: ("ms", "step_ms", "latency_ms", "time_ms", "step_time_ms", "step_time"),
    1e-6: ("us", "step_us", "latency_us", "time_us", "step_time_us"),
    1.0: ("s", "seconds", "step_s", "step_seconds", "latency_s", "time_s", "step_time_s"),
}
_RATES = ("samples_per_sec", "samples_per_s", "items_per_s", "images_per_s")
_PREFIXES = {"infer_": "forward", "train_": "training"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One measured step of a table.  A field that the table does not have is None."""

    target: str  # what ran, as the table names it
    seconds: float  # s, of one step
    batch: int | None = None
    seq: int | None = None
    kv: int | None = None
    image_size: int | None = None  # pixels of one side
    phase: str | None = None
    dtype: str | None = None
    execution: str | None = None  # how it ran
    chip: str | None = None  # where it ran
    line: int = 0  # of the file
    extra: Mapping[str, str] = field(default_factory=dict)  # other columns, by name


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of the header by their meaning."""

    text: Mapping[str, str]
    whole: Mapping[str, str]
    time: str
    unit: float | None  # seconds; None where the column holds items per second
    phase: str | None


def read_steps(path: str | os.PathLike[str], skip_empty: bool = False) -> tuple[StepTime, ...]:
    """The steps in a CSV file, in order.

    skip_empty: leave out lines without a time (runs that failed).

    Raises FileNotFoundError, or ProfileError naming line and column for a column that is missing
    or there twice, and for a cell that is empty, not a number, negative or not finite.
    """
    path = Path(path)
    rows = lines(path)
    first = next(rows, None)
    if first is None:
        raise ProfileError(f"{path}: the file is empty; expected a header such as model,batch,ms")
    line, header = first
    check_header(path, line, header)
    columns = _columns(path, line, header)
    table = ((n, cells(path, n, header, row)) for n, row in rows)
    steps = tuple(
        _step(path, n, row, columns) for n, row in table if row[columns.time] or not skip_empty
    )
    if not steps:
        raise ProfileError(f"{path}: no steps after the header in line {line}")
    return steps


def _columns(path: Path, line: int, header: Sequence[str]) -> _Columns:
    plain: dict[str, str] = {}
    phase = None
    for name in header:
        short = name.lower().replace(" ", "_").replace("-", "_")
        for prefix, meaning in _PREFIXES.items():
            if short.startswith(prefix):
                short, phase = short.removeprefix(prefix), meaning
        if short in plain:
            raise ProfileError(
                f"{path}: line {line}: columns {plain[short]!r:.60} and {name!r:.60} say the same: "
                "keep one of them"
            )
        plain[short] = name

    def pick(meaning: str, spellings: Sequence[str]) -> str | None:
        columns = [plain[s] for s in spellings if s in plain]
        if len(columns) > 1 and meaning != "target":
            raise ProfileError(
                f"{path}: line {line}: columns {columns[0]!r:.60} and {columns[1]!r:.60} both say "
                f"{meaning}: keep one of them"
            )
        return columns[0] if columns else None

    text = {key: column for key, names in _TEXT.items() if (column := pick(key, names))}
    whole = {key: column for key, names in _WHOLE.items() if (column := pick(key, names))}
    if "target" not in text:
        raise ProfileError(
            f"{path}: line {line}: no column for what ran (model, target or name) among "
            f"{', '.join(header):.300}"
        )
    units = {name: unit for unit, names in _TIMES.items() for name in names}
    time = pick("the time", tuple(units))
    if time is not None:
        unit = next(units[s] for s in units if plain.get(s) == time)
        return _Columns(text, whole, time, unit, phase)
    rate = pick("the rate", _RATES)
    if rate is None:
        raise ProfileError(
            f"{path}: line {line}: no column for the time (ms, us, s, seconds, step_ms, "
            f"samples_per_sec ...) among {', '.join(header):.300}"
        )
    if "batch" not in whole:
        raise ProfileError(
            f"{path}: line {line}: {rate!r:.60} gives a step time only with a column batch"
        )
    return _Columns(text, whole, rate, None, phase)


def _step(path: Path, line: int, row: Mapping[str, str], columns: _Columns) -> StepTime:
    text = {key: row[name] or None for key, name in columns.text.items()}
    if not text["target"]:
        raise ProfileError(
            f"{path}: line {line}, column {columns.text['target']!r:.60}: the cell is empty; "
            "expected what ran"
        )
    whole = {key: whole_number(path, line, name, row[name]) for key, name in columns.whole.items()}
    if not row[columns.time]:
        raise ProfileError(
            f"{path}: line {line}, column {columns.time!r:.60}: the cell is empty; expected a "
            "number above 0 (read_steps(..., skip_empty=True) leaves out runs that failed)"
        )
    unit = 1.0 if columns.unit is None else columns.unit
    seconds = number(path, line, columns.time, row[columns.time], unit=unit)
    if columns.unit is None:
        batch = whole["batch"]
        if not batch or not 0 < batch / seconds < math.inf:
            column = columns.whole["batch"]
            state = f"{row[column]!r:.60}" if row[column] else "the cell is empty"
            raise ProfileError(
                f"{path}: line {line}, column {column!r:.60}: {state}, and {columns.time!r:.60} "
                "gives a step time only with a batch"
            )
        seconds = batch / seconds
    used = {*columns.text.values(), *columns.whole.values(), columns.time}
    return StepTime(
        target=str(text["target"]),
        seconds=seconds,
        batch=whole.get("batch"),
        seq=whole.get("seq"),
        kv=whole.get("kv"),
        image_size=whole.get("image_size"),
        phase=text.get("phase") or columns.phase,
        dtype=text.get("dtype"),
        execution=text.get("execution"),
        chip=text.get("chip"),
        line=line,
        extra={name: cell for name, cell in row.items() if name not in used},
    )


# -- ncu -------------------------------------------------------------------------------------------
# Reads the CSV of Nsight Compute, `--page raw` or `--page details`: counters by kernel.
#
# The raw page has a column for each metric and a second line with the units; the details page has
# a line for each metric.  Lines that ncu prints before the table ("==PROF== ...") are skipped.

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
    rows = lines(path)
    for line, header in rows:
        if "Kernel Name" in header:
            check_header(path, line, header)
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
    units = cells(path, line, header, second)
    if units["Kernel Name"]:
        raise ProfileError(
            f"{path}: line {line}: expected the line of units that ncu writes under the header, "
            f"found a kernel ({units['Kernel Name'][:60]})"
        )
    for index, (line, row) in enumerate(rows):
        entry = cells(path, line, header, row)
        metrics = {name: (line, entry[name], units[name]) for name in (TIME, READ, WRITTEN)}
        yield _kernel(path, index, entry, metrics, TIME)


def _details(
    path: Path, line: int, header: Sequence[str], rows: Iterator[tuple[int, list[str]]]
) -> Iterator[KernelCounters]:
    """A line for each metric of each launch."""
    launches: dict[str, tuple[Mapping[str, str], dict[str, tuple[int, str, str]]]] = {}
    for line, row in rows:
        entry = cells(path, line, header, row)
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
        return number(path, line, name, text, positive=positive, unit=factor)

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
