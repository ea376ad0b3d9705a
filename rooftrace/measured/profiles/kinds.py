"""The kinds of files with measurements, which their first bytes decide, never their names.

To add a kind: a function that reads it, with @rooftrace.extend.source.
"""

from __future__ import annotations

import codecs
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args, overload

from rooftrace._extensions import failures, load, owner, refuse_second, track
from rooftrace._reading import beginning
from rooftrace.errors import ProfileError
from rooftrace.measured.bench import Run
from rooftrace.measured.profiles.counters import MemoryCount, read_likwid, read_rocprof
from rooftrace.measured.profiles.kineto import read_trace
from rooftrace.measured.profiles.perfstat import is_perf_stat, read_perf_stat
from rooftrace.measured.profiles.records import Trace
from rooftrace.measured.profiles.tables import KernelCounters, StepTime, read_counters, read_steps

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
        refuse_second(
            f"{name!r} already is a source",
            old.read if old is not None else None,
            read,
            override=override,
        )
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
