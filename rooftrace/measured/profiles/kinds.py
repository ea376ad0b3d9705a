"""The kinds of files with measurements, which their first bytes decide, never their names.

To add a kind: a function that reads it, with @rooftrace.extend.source.
"""

from __future__ import annotations

import codecs
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, overload

from rooftrace._extensions import failures, load, owner, refuse_second, track
from rooftrace._reading import beginning
from rooftrace.errors import ProfileError
from rooftrace.measured.bench import Run
from rooftrace.measured.profiles import tables
from rooftrace.measured.profiles.counters import (
    MemoryCount,
    memory_count,
    read_likwid,
    read_rocprof,
)
from rooftrace.measured.profiles.kineto import read_trace
from rooftrace.measured.profiles.records import Trace
from rooftrace.measured.profiles.tables import KernelCounters, StepTime, read_counters, read_steps

# -- perf stat -------------------------------------------------------------------------------------
# The output of `perf stat -x,`: DRAM bytes of a command by counters of memory controllers.
#
# A line is: value, unit, event, and more that is not read.  Before the value may stand "summary",
# a time in seconds (of `-I`), and a socket, die, core, node or CPU with the number that were added.

COMMAND = (
    "perf stat -a -x, -o FILE -e uncore_imc/cas_count_read/,uncore_imc/cas_count_write/,"
    "duration_time -- ..."
)

_SEPARATORS = (",", ";", "\t", "|")
_STARTED = "# started on"
_TIME = "duration_time"
_NOTHING = ("<not counted>", "<not supported>")
_NUMBER = re.compile(r"\d+(\.\d+)?([eE][+-]?\d+)?")
_LIKE_NUMBER = re.compile(r"[\d.,]+([eE][+-]?\d+)?")
_PLACE = re.compile(r"S\d+(-[A-Z]+\d+)*|N\d+|CPU\d+")
_RAN = re.compile(r"([,;|\t])\d+\1\d{1,3}\.\d\d(\1|$)")
"""The time that an event was counted, and its share of the run."""
_BYTES = {"bytes": 1.0, "b": 1.0, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_BYTES |= {"kb": 1e3, "mb": 1e6, "gb": 1e9}
_SECONDS = {"": 1e-9, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "msec": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class _PerfLine:
    """One line of perf."""

    line: int
    time: float | None  # s since the start, where perf writes one
    place: str  # "S0", "CPU3", or ""
    value: str
    unit: str
    event: str


def read_perf_stat(path: str | os.PathLike[str]) -> tuple[MemoryCount, ...]:
    """The DRAM bytes of a command in a CSV file of `perf stat`, as one record.

    Raises FileNotFoundError, or ProfileError for another kind of file, events that do not tell the
    bytes, and a value that is no number or was not counted.
    """
    path = Path(path)
    readings = _readings(path)
    seconds = max((r.time for r in readings if r.time is not None), default=None)
    # After the intervals of -I, `--summary` repeats their sums, without times.
    sums = [reading for reading in readings if reading.time is None]
    readings = sums or readings
    if seconds is None:
        lengths = [_seconds(path, reading) for reading in readings if reading.event == _TIME]
        seconds = max(lengths, default=None)
    counted = [(r, event) for r in readings if (event := memory_event(r.event)) is not None]
    if not counted:
        raise ProfileError(
            f"{path}: no event tells DRAM bytes: it has {tables.named(r.event for r in readings)};"
            f" expected {EXPECTED}; make it with `{COMMAND}`"
        )
    _check_families(path, counted)
    sides: dict[str, float] = defaultdict(float)
    for reading, event in counted:
        sides[event.side] += _bytes(path, reading, event)
    count = memory_count("", sides, seconds)
    if count is None:
        (side,) = sides
        other = "written" if side == "read" else "read"
        raise ProfileError(
            f"{path}: only bytes {side} are counted ({tables.named(r.event for r, _ in counted)}): "
            f"count those {other} in the same run, as in `{COMMAND}`"
        )
    return (count,)


def is_perf_stat(text: str) -> bool:
    """Whether a text begins as `perf stat -x,` writes, with any of its separators."""
    for line in text.splitlines():
        if line.startswith(_STARTED):
            return True
        if line.strip() and not line.startswith("#"):
            return _RAN.search(line) is not None and any(
                reading is not None and bool(reading.event)
                for reading in (_parsed(1, line, separator) for separator in _SEPARATORS)
            )
    return False


# -- lines -----------------------------------------------------------------------------------------


def _readings(path: Path) -> list[_PerfLine]:
    """The lines that have an event."""
    separator, started = "", 0
    readings: list[_PerfLine] = []
    for line, text in tables.texts(path):
        if text.startswith("#"):
            started += text.startswith(_STARTED)
            continue
        separator = separator or next((s for s in _SEPARATORS if _parsed(line, text, s)), "")
        reading = _parsed(line, text, separator) if separator else None
        if reading is None:
            raise ProfileError(
                f"{path}: line {line}: {text!r:.100}: expected value, unit and event as `perf stat "
                f"-x,` writes them; with `-o FILE` they stand alone: `{COMMAND}`"
            )
        if reading.event:  # else it is a metric of the line above
            readings.append(reading)
    if not readings:
        raise ProfileError(f"{path}: no line has an event; make it with `{COMMAND}`")
    if started > 1:
        raise ProfileError(
            f"{path}: there are {started} runs ({_STARTED!r}): write each into its own file, "
            "without --append"
        )
    return readings


def _parsed(line: int, text: str, separator: str) -> _PerfLine | None:
    """A line cut at a separator; None where it is no line of perf."""
    cells = [cell.strip() for cell in text.split(separator)]
    cells += [""] * 6
    time = None
    if cells[0] == "summary":
        cells = cells[1:]
    elif _NUMBER.fullmatch(cells[0]) and (_is_value(cells[1]) or _PLACE.fullmatch(cells[1])):
        time = float(cells[0])
        cells = cells[1:]
    place = ""
    if _PLACE.fullmatch(cells[0]):
        place, *cells = cells
        if cells[0].isdecimal() and (_is_value(cells[1]) or not any(cells[1:3])):
            cells = cells[1:]
    value, unit, event, *more = cells
    while separator == "," and event.count("/") == 1 and any(more):  # perf quotes no comma
        event += f",{more.pop(0)}"
    if not event and not value:  # a metric alone, unless the line is cut off
        is_line = any(more) or not (time or place)
    else:
        is_line = _is_value(value) and bool(event)
    return _PerfLine(line, time, place, value, unit, event) if is_line else None


def _is_value(text: str) -> bool:
    return text in _NOTHING or _LIKE_NUMBER.fullmatch(text) is not None


# -- values ----------------------------------------------------------------------------------------


def _check_families(path: Path, counted: Sequence[tuple[_PerfLine, MemoryEvent]]) -> None:
    """Raise ProfileError where events count the same bytes twice."""
    first, family = counted[0][0], counted[0][1].family
    seen: dict[tuple[float | None, str, str], _PerfLine] = {}
    for reading, event in counted:
        if event.family != family:
            raise ProfileError(
                f"{path}: line {reading.line}: {reading.event!r:.60} counts what "
                f"{first.event!r:.60} of line {first.line} counts: leave one of them out"
            )
        key = (reading.time, reading.place, reading.event)
        if event.box and key in seen:
            raise ProfileError(
                f"{path}: line {reading.line}: {reading.event!r:.60} is there twice, first in line "
                f"{seen[key].line}: leave one of them out"
            )
        seen[key] = reading


def _bytes(path: Path, reading: _PerfLine, event: MemoryEvent) -> float:
    """The bytes of one line: in its unit, or in counts of the event where it has none."""
    size = float(event.size) if not reading.unit else _BYTES.get(reading.unit.lower())
    if size is None:
        raise ProfileError(
            f"{path}: line {reading.line}: unit {reading.unit!r:.60} of {reading.event!r:.60}: "
            "expected none (a count), MiB, KiB, GiB or Bytes"
        )
    return _value(path, reading) * size


def _seconds(path: Path, reading: _PerfLine) -> float:
    """Seconds of the event duration_time."""
    unit = _SECONDS.get(reading.unit.lower())
    if unit is None:
        raise ProfileError(
            f"{path}: line {reading.line}: unit {reading.unit!r:.60} of {_TIME!r}: expected ns"
        )
    return _value(path, reading, positive=True) * unit


def _value(path: Path, reading: _PerfLine, positive: bool = False) -> float:
    where = f"{path}: line {reading.line}, value of {reading.event!r:.60}"
    if reading.value in _NOTHING:
        raise ProfileError(
            f"{where}: {reading.value}: count the whole machine (-a) as root, and fewer events at "
            "once"
        )
    if not _NUMBER.fullmatch(reading.value):
        raise ProfileError(
            f"{where}: {reading.value!r:.60}: expected digits and one dot; run perf with LC_ALL=C"
        )
    cell = tables.CsvCell(path, reading.line, reading.event, reading.value)
    return cell.number(positive=positive, most=tables.MOST_SIZE / 2**30)


# -- events ----------------------------------------------------------------------------------------
# Events of Linux perf that count DRAM traffic, and the bytes of one count.
#
# Sources: PMU drivers of Linux (sysfs events with their units), tools/perf/pmu-events for Intel and
# AMD, and Documentation/admin-guide/perf for Alibaba.  Linux does not say the bytes of one count of
# other chips, so flux_rd of HiSilicon and cmem_rd_data of NVIDIA Grace are not here.

Side = Literal["read", "written", "together"]

_SIDES: dict[str, Side] = {
    **dict.fromkeys(("read", "reads", "rd", "rdcas"), "read"),
    **dict.fromkeys(("write", "writes", "wr", "wrcas", "rmw"), "written"),
    **dict.fromkeys(("total", "all"), "together"),
}

# (name of the family, pattern of its events, in small letters); one count is 64 byte in all of
# them.  <side>: read or written, and together where it is not in the pattern; <box>: the number of
# one memory controller or channel.
_FAMILIES = (
    ("imc/cas_count_*/", r"(?:uncore_)?imc(?:_(?P<box>\d+))?/cas_count_(?P<side>read|write)/"),
    ("imc/data_*/", r"(?:uncore_)?imc(?:_(?P<box>\d+))?/data_(?P<side>reads|writes)/"),
    (
        "imc_free_running/data_*/",
        r"(?:uncore_)?imc_free_running(?:_(?P<box>\d+))?/data_(?P<side>read|write|total)/",
    ),
    ("unc_m_cas_count.*", r"unc_m_cas_count(?:_sch(?P<box>\d))?\.(?P<side>rd|wr|all)"),
    ("unc_mc*_*cas_count_freerun", r"unc_mc(?P<box>\d)_(?P<side>rdcas|wrcas)_count_freerun"),
    ("llc_misses.mem_*", r"llc_misses\.mem_(?P<side>read|write)"),
    (
        "umc_cas_cmd.*",
        r"(?:amd_umc(?:_(?P<box>\d+))?/)?umc_cas_cmd\.(?P<side>rd|wr|all)/?",
    ),
    ("dram_channel_data_controller_*", r"(?:amd_df/)?dram_channel_data_controller_(?P<box>\d+)/?"),
    (
        "*_processor_*_data_beats_cs*",
        r"(?:amd_df/)?(?:local|remote)_processor_(?P<side>read|write)_data_beats_cs(?P<box>\d+)/?",
    ),
    (
        "local_or_remote_socket_*_data_beats_dram_*",
        r"(?:amd_df/)?local_or_remote_socket_(?P<side>read|write)_data_beats_dram_(?P<box>\d+)/?",
    ),
    ("ali_drw/hif_*/", r"ali_drw_(?P<box>[0-9a-f]+)/hif_(?P<side>rd|wr|rmw)/"),
)
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _FAMILIES)
_SIZE = 64

EXPECTED = (
    "uncore_imc/cas_count_read/ and cas_count_write (Intel servers), "
    "uncore_imc_free_running/data_read/ and data_write (Intel PCs), umc_cas_cmd.rd and .wr (AMD)"
)
"""The events to count, for errors."""

_MODIFIERS = re.compile(r"( \[[^\]]*\])|(?<=/)[a-z]+$|:[a-zA-Z]+$")
"""Suffixes of the name of an event: a PMU in brackets, and modifiers such as :u."""


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """The DRAM traffic that an event of perf counts."""

    family: str  # events that may be added; two families count the same bytes
    side: Side
    box: str  # number of its controller or channel; "" for all of them
    size: int  # byte of one count


def memory_event(name: str) -> MemoryEvent | None:
    """The traffic that an event counts, by its name; None where that is no DRAM traffic."""
    plain = _MODIFIERS.sub("", name.strip()).strip().lower()
    for family, pattern in _PATTERNS:
        match = pattern.fullmatch(plain)
        if match is None:
            continue
        parts = match.groupdict()
        side = _SIDES[parts["side"]] if "side" in parts else "together"
        box = parts.get("box") or ""
        return MemoryEvent(family if box else f"{family} of all", side, box, _SIZE)
    return None


# -- kinds -----------------------------------------------------------------------------------------

Records: TypeAlias = Literal["run", "trace", "steps", "counters", "totals"]
"""The records of a reader: a Run, a Trace, or StepTimes; or DRAM bytes that complement these:
KernelCounters of each kernel of a step, or MemoryCounts of regions or a command."""

Measured: TypeAlias = "Run | Trace | Sequence[StepTime]"

_USES: Mapping[str, str] = {
    "counters": "it stands beside a trace, as in `rooftrace validate TRACE --counters {path}`",
    "totals": "it counts a whole command or region, for `rooftrace calibrate --counters {path}`",
}
"""The use of records that are no measurement of a step."""

Reader = TypeVar("Reader", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A kind of file that holds measurements."""

    name: str
    about: str  # in words, for errors: "a run file of `rooftrace measure`"
    begins: Callable[[bytes], bool]  # whether the first 64 KiB, decompressed, are of this kind
    gives: Records
    read: Callable[[str], Any]  # from the path of a file to its records

    def place(self, path: str) -> str:
        """The use of its records, if they only complement measurements; else ""."""
        return _USES.get(self.gives, "").format(path=path)


_HEAD = 1 << 16
"""Bytes of a file that are examined."""
_SCHEMA = re.compile(r'"schema"\s*:\s*"(rooftrace\.[\w.]+/[^"]*)"')
_NCU = re.compile(r'^(==PROF== |"ID",.*"Kernel Name")', re.MULTILINE)
_LIKWID = re.compile(r"^(STRUCT,Info,|TABLE,(Region|Group) )", re.MULTILINE)
_TRACE = re.compile(r'"(traceEvents|schemaVersion|deviceProperties|displayTimeUnit|ph)"\s*:')


def _text(head: bytes) -> str:
    """The beginning as text, without leading blanks; a character that is cut off is left out.

    Raises UnicodeDecodeError for bytes that are not UTF-8.
    """
    return codecs.getincrementaldecoder("utf-8")().decode(head).lstrip("\ufeff \t\r\n")


def _is_json(text: str) -> bool:
    return text[:1] in ("{", "[")


def _is_run(text: str) -> bool:
    schema = _SCHEMA.search(text)
    return _is_json(text) and schema is not None and schema[1].startswith("rooftrace.run/")


def _is_trace(text: str) -> bool:
    return _is_json(text) and not _SCHEMA.search(text) and _TRACE.search(text) is not None


def _is_counters(text: str) -> bool:
    """Messages of Nsight Compute, and of the program that it runs, may stand before the table."""
    return _NCU.search(text) is not None or (not _is_json(text) and "Kernel Name" in text)


def _is_rocprof(text: str) -> bool:
    first = text.partition("\n")[0]
    return not _is_json(text) and ("KernelName" in first or "Kernel_Name" in first)


def _is_likwid(text: str) -> bool:
    """The output of the program may stand before the tables."""
    return _LIKWID.search(text) is not None


def _is_table(text: str) -> bool:
    return not _is_json(text) and "," in text.partition("\n")[0]


def _text_source(
    name: str, gives: Records, about: str, begins: Callable[[str], bool], read: Callable[..., Any]
) -> Source:
    """A kind of text file, by its first characters."""

    def begins_as_text(head: bytes) -> bool:
        try:
            return begins(_text(head))
        except UnicodeDecodeError:
            return False

    return Source(name=name, about=about, begins=begins_as_text, gives=gives, read=read)


SOURCES = (
    _text_source("run", "run", "a run file of `rooftrace measure`", _is_run, Run.load),
    _text_source("trace", "trace", "a trace of torch.profiler", _is_trace, read_trace),
    _text_source("counters", "counters", "a CSV of Nsight Compute", _is_counters, read_counters),
    _text_source("rocprof", "counters", "a CSV of AMD's rocprof", _is_rocprof, read_rocprof),
    _text_source("perf", "totals", "counts of `perf stat -x,`", is_perf_stat, read_perf_stat),
    _text_source("likwid", "totals", "a CSV of likwid-perfctr", _is_likwid, read_likwid),
    _text_source("steps", "steps", "a CSV of step times (model,batch,ms)", _is_table, read_steps),
)
"""The kinds of this package in the order of trial, after those of users.

The last takes any table, so it comes after the CSVs that other programs write.
"""

_ADDED: dict[str, Source] = track({})


def source(
    name: str,
    *,
    about: str,
    begins: Callable[[bytes], bool],
    gives: Records = "steps",
    override: bool = False,
) -> Callable[[Reader], Reader]:
    """Register the decorated function `read(path)` for a kind of file that holds measurements.

    about: the kind in words, for errors.  begins: whether the first 64 KiB of a file, decompressed
    where it is gzip, are of this kind; it is tried before the kinds of rooftrace.  gives: the
    result of the function: "steps" (a sequence of StepTime), "run" (a Run) or "trace" (a Trace).
    A second source of one name raises ValueError, unless override=True or it is the same function
    defined again; so does the name of a kind of rooftrace, and another word in `gives`.
    """
    if gives in _USES or gives not in get_args(Records):
        raise ValueError(f'source({name!r}): gives={gives!r}; expected "steps", "run" or "trace"')
    if any(name == ours.name for ours in SOURCES):
        raise ValueError(f"{name!r} is a source of rooftrace's own; use another name")

    def register(read: Reader) -> Reader:
        old = _ADDED.get(name)
        there, taken = f"{name!r} already is a source", getattr(old, "read", None)
        refuse_second(there, taken, read, override=override)
        _ADDED[name] = Source(name=name, about=about, begins=begins, gives=gives, read=read)
        return read

    return register


def sources() -> tuple[Source, ...]:
    """Every kind of file in the order of trial: kinds of users come first."""
    load("rooftrace.sources")
    return (*_ADDED.values(), *SOURCES)


# -- a file ----------------------------------------------------------------------------------------


def source_of(path: str | os.PathLike[str]) -> Source:
    """The kind of a file, plain or gzip, from its first bytes.

    The reader of that kind checks the rest.  Raises OSError, or ProfileError for a file of no kind.
    """
    try:
        head = beginning(path, _HEAD)
    except zlib.error as error:
        raise ProfileError(f"{path}: a damaged gzip file ({error}); copy it again") from None
    if not head:
        raise ProfileError(f"{path}: the file is empty; {_expected()}")
    for kind in sources():
        if kind.begins(head):
            return kind
    raise ProfileError(f"{path}: {_no_kind(head)}; {_expected()}")


@overload
def counts_of(path: str, gives: Literal["counters"]) -> tuple[KernelCounters, ...]: ...
@overload
def counts_of(path: str, gives: Literal["totals"]) -> tuple[MemoryCount, ...]: ...
def counts_of(path: str, gives: Literal["counters", "totals"]) -> Any:
    """The DRAM bytes in a file: of each kernel of a step, or of regions or a command.

    Raises OSError, or ProfileError for a file of another kind, or that its reader refuses.
    """
    kind = source_of(path)
    if kind.gives != gives:
        *first, last = (source.about for source in SOURCES if source.gives == gives)
        place = kind.place(path)
        raise ProfileError(
            f"{path}: {kind.about}, expected {', '.join(first)} or {last}{place and f'; {place}'}"
        )
    return kind.read(path)


def records_of(kind: Source, path: str) -> Measured:
    """The measurements in a file of a kind that gives a run, a trace or steps.

    Raises the errors of its reader, and ProfileError where that returned something else.
    """
    records: Measured = kind.read(path)
    if kind.gives == "steps":
        fits = isinstance(records, Sequence) and all(isinstance(r, StepTime) for r in records)
    else:
        fits = isinstance(records, Run if kind.gives == "run" else Trace)
    if not fits:
        expected = {"run": "a Run", "trace": "a Trace"}.get(kind.gives, "a sequence of StepTime")
        raise ProfileError(
            f"{path}: {owner(kind.read)} returned {records!r:.60} for it; expected {expected}, as "
            f"its source {kind.name!r} says"
        )
    return records


def _no_kind(head: bytes) -> str:
    """The beginning of a file of no kind, for errors."""
    try:
        text = _text(head)
    except UnicodeDecodeError as error:
        return f"not text in UTF-8 ({error.reason})"
    if not _is_json(text):
        return f"begins with {text.partition(chr(10))[0].strip()[:60]!r}"
    schema = _SCHEMA.search(text)
    if schema:
        return f"a file of schema {schema[1]!r}"
    return f"JSON that begins with {text[:60]!r}, without a schema and without events"


def _expected() -> str:
    *first, last = (kind.about for kind in (*SOURCES, *_ADDED.values()))
    expected = f"expected {', '.join(first)} or {last}"
    return "; ".join((expected, *failures("rooftrace.sources")))
