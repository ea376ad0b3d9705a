"""CSV tables whose errors name line and column: step times, and counters of Nsight Compute."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rooftrace._escapes import from_cell
from rooftrace._reading import WHOLE, FileKind, text_of
from rooftrace.errors import ProfileError

_KIND = FileKind("CSV file", ProfileError)

MOST_SIZE = float(1 << 63)
"""Bytes that a count of a run may reach: 9 EB."""
_NAMED = 6
"""Names that an error shows of many."""


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))(?=[\d,]*(\.|$))")
"""A comma with three digits after it, before any dot."""


@dataclass(frozen=True, slots=True)
class CsvCell:
    """A cell of a table, and where it stands."""

    path: Path
    line: int
    column: str
    text: str

    def refused(self, message: str) -> ProfileError:
        """The error of this cell."""
        return ProfileError(f"{self.path}: line {self.line}, column {self.column!r:.60}: {message}")

    def number(self, *, positive: bool = True, unit: float = 1.0, most: float = math.inf) -> float:
        """A finite number times `unit`; above 0, or at least 0 where `positive` is false.

        most: the largest accepted result.
        """
        wanted = "expected a number above 0" if positive else "expected a number of at least 0"
        if not self.text:
            raise self.refused(f"the cell is empty; {wanted}")
        shown = f"{self.text!r:.60}"
        try:
            value = float(_THOUSANDS.sub("", self.text)) * unit
        except ValueError:
            comma = ", with a dot before its decimals" if "," in self.text else ""
            raise self.refused(f"{shown}: {wanted}{comma}") from None
        if most < value and most != math.inf:
            raise self.refused(f"{shown}: expected a number of at most {most / unit:.3g}")
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise self.refused(f"{shown}: {wanted}")
        return value

    def exact(self) -> int:
        """A whole number of 64 bits at most, with every digit: a time in nanoseconds."""
        if not re.fullmatch(r"[0-9]{1,20}", self.text) or int(self.text) not in WHOLE:
            raise self.refused(f"{self.text!r:.60}: expected a whole number")
        return int(self.text)

    def whole_number(self) -> int | None:
        """A whole number of 64 bits at most; None for an empty cell."""
        if not self.text:
            return None
        value = self.number(positive=False)
        if value != int(value) or int(value) not in WHOLE:
            raise self.refused(f"{self.text!r:.60}: expected a whole number")
        return int(value)


CsvRow = Mapping[str, CsvCell]
"""The cells of a line by the name of their column."""


def texts(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line that is not blank, for formats that quote nothing."""
    for number, line in enumerate(_decoded(Path(path)).split("\n"), start=1):
        if line.strip():
            yield number, line.rstrip("\r")


def _decoded(path: Path) -> str:
    try:
        return text_of(path, _KIND).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not a text file in UTF-8 ({error.reason})") from None


def named(names: Iterable[str]) -> str:
    """The first few different names and the number of others; "nothing" for none."""
    shown = [f"{name:.60}" for name in dict.fromkeys(names)]
    if len(shown) > _NAMED:
        shown[_NAMED:] = [f"{len(shown) - _NAMED:,} others"]
    return ", ".join(shown) or "nothing"


def lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each line that is not blank, without the quotes of `to_cell`."""
    reader = csv.reader(io.StringIO(_decoded(Path(path)), newline=""), strict=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [from_cell(cell.strip()) for cell in cells]
    except csv.Error as error:
        raise ProfileError(f"{path}: line {reader.line_num}: not CSV ({error})") from None


def check_header(path: Path, line: int, header: Sequence[str]) -> None:
    """Raise ProfileError for a header that names a column twice."""
    twice = [name for name, count in Counter(map(str.lower, header)).items() if name and count > 1]
    if twice:
        numbers = [i for i, name in enumerate(header, start=1) if name.lower() == twice[0]]
        raise ProfileError(
            f"{path}: line {line}: column {twice[0]!r:.60} is there {len(numbers)} times (as "
            f"columns {', '.join(map(str, numbers)):.60}): give each its own name"
        )


def cells(path: Path, line: int, header: Sequence[str], row: Sequence[str]) -> CsvRow:
    """A line by column name; ProfileError where it has more or fewer cells than the header."""
    if len(row) != len(header):
        raise ProfileError(
            f"{path}: line {line}: {len(row)} cells, the header has {len(header)}: "
            f"{','.join(row):.100}"
        )
    columns = zip(header, row, strict=True)
    return {column: CsvCell(path, line, column, text) for column, text in columns}


# -- step times ------------------------------------------------------------------------------------
# One measured step in each line.  Columns may come in any order and case; a prefix "infer_" or
# "train_" is dropped, so that tables of timm's benchmark read as they are.  Spaces and dashes count
# as underscores.
#
#   target      model, target, name                        the model; required
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
_SIZES = {
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
    """One measured step of a table.  None: the table has no such column."""

    target: str  # the model, as the table names it
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

    text: Mapping[str, str]  # by field of StepTime
    sizes: Mapping[str, str]  # of whole numbers, by field of StepTime
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
    table = (cells(path, n, header, row) for n, row in rows)
    steps = tuple(_step(row, columns) for row in table if row[columns.time].text or not skip_empty)
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
    sizes = {key: column for key, names in _SIZES.items() if (column := pick(key, names))}
    if "target" not in text:
        raise ProfileError(
            f"{path}: line {line}: no column for what ran (model, target or name) among "
            f"{', '.join(header):.300}"
        )
    units = {name: unit for unit, names in _TIMES.items() for name in names}
    time = pick("the time", tuple(units))
    if time is not None:
        unit = next(units[s] for s in units if plain.get(s) == time)
        return _Columns(text, sizes, time, unit, phase)
    rate = pick("the rate", _RATES)
    if rate is None:
        raise ProfileError(
            f"{path}: line {line}: no column for the time (ms, us, s, seconds, step_ms, "
            f"samples_per_sec ...) among {', '.join(header):.300}"
        )
    if "batch" not in sizes:
        raise ProfileError(
            f"{path}: line {line}: {rate!r:.60} gives a step time only with a column batch"
        )
    return _Columns(text, sizes, rate, None, phase)


def _step(row: CsvRow, columns: _Columns) -> StepTime:
    fields: dict[str, Any] = {key: row[name].text or None for key, name in columns.text.items()}
    if not fields["target"]:
        raise row[columns.text["target"]].refused("the cell is empty; expected what ran")
    fields |= {key: row[name].whole_number() for key, name in columns.sizes.items()}
    time = row[columns.time]
    if not time.text:
        raise time.refused(
            "the cell is empty; expected a number above 0 (read_steps(..., skip_empty=True) leaves "
            "out runs that failed)"
        )
    seconds = time.number(unit=1.0 if columns.unit is None else columns.unit)
    if columns.unit is None:
        batch, cell = fields["batch"], row[columns.sizes["batch"]]
        if not batch or not 0 < batch / seconds < math.inf:
            state = f"{cell.text!r:.60}" if cell.text else "the cell is empty"
            raise cell.refused(
                f"{state}, and {time.column!r:.60} gives a step time only with a batch"
            )
        seconds = batch / seconds
    fields["phase"] = fields.get("phase") or columns.phase
    used = {*columns.text.values(), *columns.sizes.values(), columns.time}
    extra = {name: cell.text for name, cell in row.items() if name not in used}
    return StepTime(**fields, seconds=seconds, line=time.line, extra=extra)


# -- ncu -------------------------------------------------------------------------------------------
# The CSV of Nsight Compute: `--page raw` has a column for each metric and a second line with the
# units; `--page details` has a line for each metric.  Lines that ncu prints before the table
# ("==PROF== ...") are skipped.

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
    grid: tuple[int, ...] | None = None  # blocks; None: unknown
    block: tuple[int, ...] | None = None  # threads of a block; None: unknown
    device: str = ""
    capability: str = ""  # compute capability of the device, "9.0"; "": unknown

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
    mark = _decimal_mark([each for launch in launches for each in launch.metrics.values()])
    return tuple(_kernel(index, launch, mark) for index, launch in enumerate(launches))


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch: its cells, its metrics with their units, and the name of its time."""

    cells: CsvRow
    metrics: Mapping[str, tuple[CsvCell, str]]
    time: str = TIME


def _raw(
    path: Path, line: int, header: Sequence[str], rows: Iterator[tuple[int, list[str]]]
) -> Iterator[_Launch]:
    """A line for each launch."""
    _check_metrics(path, set(header), (TIME, READ, WRITTEN))
    second = next(rows, None)
    if second is None:
        return
    units = cells(path, second[0], header, second[1])
    if units["Kernel Name"].text:
        raise ProfileError(
            f"{path}: line {second[0]}: expected the line of units that ncu writes under the "
            f"header, found a kernel ({units['Kernel Name'].text[:60]})"
        )
    named = [name for name in header if units[name].text or name in (TIME, READ, WRITTEN)]
    for line, row in rows:
        entry = cells(path, line, header, row)
        yield _Launch(entry, {name: (entry[name], units[name].text) for name in named})


def _details(
    path: Path, line: int, header: Sequence[str], rows: Iterator[tuple[int, list[str]]]
) -> Iterator[_Launch]:
    """A line for each metric of each launch."""
    launches: dict[str, tuple[CsvRow, dict[str, tuple[CsvCell, str]]]] = {}
    for line, row in rows:
        entry = cells(path, line, header, row)
        _, metrics = launches.setdefault(_text(entry, "ID"), (entry, {}))
        name = entry["Metric Name"].text
        value = replace(entry["Metric Value"], column=name)
        metrics.setdefault(name, (value, _text(entry, "Metric Unit")))
    for entry, metrics in launches.values():
        time = TIME if TIME in metrics else _DURATION
        _check_metrics(path, set(metrics), (time, READ, WRITTEN))
        yield _Launch(entry, metrics, time)


def _text(row: CsvRow, column: str) -> str:
    return row[column].text if column in row else ""


def _check_metrics(path: Path, have: set[str], wanted: Sequence[str]) -> None:
    missing = [name for name in wanted if name not in have]
    if missing:
        raise ProfileError(f"{path}: no metric {', '.join(missing)}; make it with `{COMMAND} ...`")


# Numbers are written by the locale of the machine: "1,234.50", "1.234,50" or "1 234,50".  One file
# has one way, which its numbers tell together.

_STYLES = {
    ".": re.compile(r"(\d+|\d{1,3}([,'\u2019 \u00a0\u202f]\d{3})+)(\.\d*)?([eE][+-]?\d+)?"),
    ",": re.compile(r"(\d+|\d{1,3}([.'\u2019 \u00a0\u202f]\d{3})+)(,\d*)?([eE][+-]?\d+)?"),
}
"""Numbers by the mark before their decimals."""
_WHOLE_UNITS = ("byte", "b", "nsecond", "ns")
"""Units in which a sum has no decimals."""


def _number(text: str, mark: str) -> float | None:
    """The number that a text is with this mark before its decimals; None where it is none."""
    if not _STYLES[mark].fullmatch(text):
        return None
    return float(re.sub(rf"[^\deE+\-{mark}]", "", text).replace(mark, "."))


def _decimal_mark(values: Sequence[tuple[CsvCell, str]]) -> str:
    """The mark before the decimals of all numbers of a file.

    values: cells with their units.  Raises ProfileError where the numbers are of two ways, or may
    be of either.
    """
    seen: dict[str, CsvCell] = {}  # a number that only this mark fits
    either: CsvCell | None = None
    for cell, unit in values:
        whole = unit.lower() in _WHOLE_UNITS and cell.column.endswith(".sum")
        read = {mark: _number(cell.text, mark) for mark in _STYLES}
        fits = [m for m, value in read.items() if value is not None and not (whole and value % 1)]
        if len(fits) == 1:
            seen.setdefault(fits[0], cell)
        elif fits and read["."] != read[","]:
            either = either or cell
    if len(seen) > 1:
        first, second = seen.values()
        raise second.refused(
            f"{second.text!r:.60}, and {first.text!r:.60} in line {first.line}: a comma before "
            "decimals beside a dot; make the file again with LC_ALL=C"
        )
    if either is not None and not seen:
        raise either.refused(
            f"{either.text!r:.60}: no other number of the file tells whether its comma or dot is "
            "before decimals; make the file again with LC_ALL=C, or with --print-units base"
        )
    return next(iter(seen), ".")


def _kernel(index: int, launch: _Launch, mark: str) -> KernelCounters:
    """The counters of a launch; mark: before the decimals of its numbers."""
    row, time = launch.cells, launch.time

    def value(name: str, units: Mapping[str, float], positive: bool = False) -> float:
        cell, unit = launch.metrics[name]
        factor = units.get(unit.lower())
        if factor is None:
            raise ProfileError(
                f"{cell.path}: line {cell.line}, metric {name:.60}: unit {unit!r:.60}: expected "
                f"one of {', '.join(units)}"
            )
        number = _number(cell.text, mark)
        plain = cell if number is None else replace(cell, text=repr(number))
        return plain.number(positive=positive, unit=factor)

    def size(*names: str) -> tuple[int, ...] | None:
        text = next(filter(None, (_text(row, name) for name in names)), "")
        return tuple(int(n) for n in re.findall(r"\d{1,18}", text.replace(",", " "))) or None

    return KernelCounters(
        index=index,
        name=row["Kernel Name"].text,
        duration=value(time, _SECONDS, positive=True),
        read=round(value(READ, _BYTES)),
        written=round(value(WRITTEN, _BYTES)),
        grid=size("Grid Size", "launch__grid_size"),
        block=size("Block Size", "launch__block_size"),
        device=_text(row, "Device"),
        capability=_text(row, "CC"),
    )
