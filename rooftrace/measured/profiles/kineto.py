"""Traces of torch.profiler (Kineto, in Chrome's format; plain or gzip), read as a stream.

Only the fields of records are kept, in columns, so that memory grows with the number of ops and
kernels, not with the size of the file.  `linking` adds nesting and launches.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias

from rooftrace._progress import tell
from rooftrace._reading import (
    GZIP,
    MOST_AT_ONCE,
    MOST_UNPACKED,
    FileKind,
    JsonStream,
    opened,
)
from rooftrace.errors import ProfileError
from rooftrace.measured.profiles.linking import STEP, Launches, ModuleSpans, link
from rooftrace.measured.profiles.mending import (
    LostEventError,
    decimal,
    mended_events,
    text_of,
    whole,
    wholes,
)
from rooftrace.measured.profiles.records import (
    NONE,
    Annotation,
    CallInputs,
    Kernels,
    Numbered,
    Ops,
    Trace,
)

_MICROSECOND = 1e-6
_KIND = FileKind("trace", ProfileError)
_HOW = "make it with torch.profiler's export_chrome_trace(FILE)"
_DEVICE_WORK = {"kernel": 0, "gpu_memcpy": 1, "memcpy": 1, "gpu_memset": 2, "memset": 2}
_MODULE = "nn.Module: "
_SPARE = ("python_function", "cuda_runtime", "cuda_driver", "runtime")
"""Categories whose events only help to place others."""
_MOST_DEVICES = 1 << 31
_REPORTED = 1 << 16
"""Events between two reports of progress."""
_BLOCK = 1 << 16
"""Bytes that are parsed at a time."""


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """The records of a trace of torch.profiler.

    Raises FileNotFoundError, or ProfileError for a file that is truncated, empty, no trace, or has
    no op and no kernel in it.
    """
    path = Path(path)
    try:
        reader, count = _read(path, _events)
    except _AlmostJsonError as almost:
        reader, count = _read(path, partial(_mended, almost))
    if not count:
        raise ProfileError(f'{path}: no events (no list "traceEvents" with any); {_HOW}')
    if not len(reader.ops) and not len(reader.kernels):
        raise ProfileError(
            f"{path}: none of its {count:,} events is a CPU op or a kernel; profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], and with a schedule "
            "call step() often enough to reach an active step"
        )
    return reader.profile(str(path))


def _read(
    path: Path, events: Callable[[Path, IO[bytes]], Iterator[Mapping[str, Any] | LostEventError]]
) -> tuple[_KinetoReader, int]:
    """The records of a file, and how many events it has."""
    reader, count = _KinetoReader(), 0
    with _opened(path) as file:
        reader.devices = _devices(file)
        for event in events(path, file):
            count += 1
            if not count % _REPORTED:
                tell(f"reading {path.name}, {count:,} events")
            try:
                reader.take(event)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise ProfileError(
                    f"{path}: event {count:,} is not one of torch.profiler's "
                    f"({error}): {str(event)[:200]}"
                ) from None
    return reader, count


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of the file, decompressed where it is gzip; their errors as ProfileError."""
    with opened(path) as raw:
        head = raw.read(2)
        if not head:
            raise ProfileError(f"{path}: the file is empty; {_HOW}")
        raw.seek(0)
        try:
            if head == GZIP:
                with gzip.open(raw) as file:
                    yield file  # type: ignore[misc]
            else:
                yield raw
        except EOFError:
            raise ProfileError(
                f"{path}: the gzip file is truncated: it ends before its end marker; "
                "copy it again, or let the program that writes it end"
            ) from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise ProfileError(f"{path}: a damaged gzip file ({error}); copy it again") from None


def _events(path: Path, file: IO[bytes]) -> Iterator[Mapping[str, Any]]:
    """The events of the trace, one after the other: of "traceEvents", or of a bare list."""
    import ijson

    first = _first_byte(file)
    if first not in (b"{", b"["):
        raise ProfileError(f"{path}: not JSON: it begins with {first!r}, a trace with {{; {_HOW}")
    where = "traceEvents.item" if first == b"{" else "item"
    count = 0
    try:
        stream = JsonStream(file, path, _KIND)
        for event in ijson.items(stream, where, use_float=True, buf_size=_BLOCK):
            count += 1
            if isinstance(event, dict):
                yield event
    except ProfileError:
        raise
    except (ijson.JSONError, ValueError, OverflowError) as error:
        text = " ".join(str(error).split())
        if "premature" in text or "Incomplete" in text:
            raise _truncated(path, count) from None
        raise _AlmostJsonError(f"{path}: not JSON, after {count:,} events: {text[:120]}") from None


class _AlmostJsonError(ProfileError):
    """A trace that is no JSON from some event on."""


def _mended(
    almost: ProfileError, path: Path, file: IO[bytes]
) -> Iterator[Mapping[str, Any] | LostEventError]:
    """The events of a trace that is almost JSON.  Raises `almost` where none can be told apart."""
    count, most = 0, max(MOST_AT_ONCE, MOST_UNPACKED * path.stat().st_size)
    try:
        for event in mended_events(file, _first_byte(file) == b"[", MOST_AT_ONCE):
            count += 1
            if file.tell() > most:
                raise almost
            yield event
    except EOFError:
        raise _truncated(path, count) from None
    except ProfileError:
        raise
    except ValueError:
        raise almost from None


def _truncated(path: Path, count: int) -> ProfileError:
    return ProfileError(
        f"{path}: the trace is truncated: it ends after {count:,} events, inside of its "
        "JSON; copy it again, or let the program that writes it end"
    )


def _devices(file: IO[bytes]) -> dict[int, str]:
    """Names of the devices by number, from the head of the file."""
    text = file.read(1 << 16).decode("utf-8", "replace")
    file.seek(0)
    head = re.search(r'"deviceProperties"\s*:\s*', text)
    try:
        listed = json.JSONDecoder(strict=False).raw_decode(text, head.end())[0] if head else []
    except (ValueError, RecursionError):  # reading the events will refuse the file
        return {}
    devices = listed if isinstance(listed, list) else []
    named = (
        (whole(device.get("id")), text_of(device.get("name")))
        for device in devices
        if isinstance(device, dict)
    )
    return {number: name for number, name in named if number is not None and name is not None}


def _first_byte(file: IO[bytes]) -> bytes:
    """The first byte that is no white space; rewinds the file."""
    block = file.read(4096)
    file.seek(0)
    return block.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


Facts: TypeAlias = Mapping[str, Any]
"""An event, or its arguments, of which any value may be missing or of another kind."""
Taker: TypeAlias = Callable[[Facts, Facts], None]


class _KinetoReader:
    """Collects the records of events.  Times are kept in seconds since the first event."""

    def __init__(self) -> None:
        self.ops, self.kernels = Ops(), Kernels()
        self.launches, self.modules = Launches(), ModuleSpans()
        self.annotations: list[Annotation] = []
        self.device_steps: list[Annotation] = []
        self.threads = Numbered()
        self.devices: dict[int, str] = {}
        self.origin: float | None = None
        self._inputs: dict[str, int] = {}
        self._takers: dict[str, Taker | None] = {}
        self.left_out: dict[str, int] = {}  # values of another kind than expected, in words

    def take(self, event: Mapping[str, Any] | LostEventError) -> None:
        """One event of the trace.  Raises ValueError for a value that is needed, and is missing or
        of another kind; other such values are left out, and counted."""
        if isinstance(event, LostEventError):
            if self._needs(event.category):
                raise event
            self._leave_out(f"a {event.category or 'nameless'} event that is not JSON")
            return
        if event.get("ph") != "X":
            return
        taker = self._taker_of(str(event.get("cat", "")))
        if taker is not None:
            facts = event.get("args")
            taker(event, facts if isinstance(facts, dict) else {})

    def _needs(self, category: str) -> bool:
        """Whether a step lacks something without an event of this category."""
        return self._taker_of(category) is not None and category.lower() not in _SPARE

    def _taker_of(self, category: str) -> Taker | None:
        if category not in self._takers:
            self._takers[category] = self._taker(category.lower())
        return self._takers[category]

    def _taker(self, category: str) -> Taker | None:
        """The handler for events of a category, None to skip them; old versions write capitals."""
        if category in _DEVICE_WORK:
            return partial(self._kernel, _DEVICE_WORK[category])
        if category.endswith(("_runtime", "_driver")) or category == "runtime":
            return self._launch
        takers: dict[str, Taker] = {
            "cpu_op": self._op,
            "operator": self._op,
            "python_function": self._module,
            "user_annotation": partial(self._annotation, self.annotations),
            "gpu_user_annotation": partial(self._annotation, self.device_steps),
        }
        return takers.get(category)

    def _leave_out(self, words: str) -> None:
        self.left_out[words] = self.left_out.get(words, 0) + 1

    def _fact(self, facts: Facts, name: str, read: Callable[[Any], Any] = whole) -> Any:
        """An argument of an event, None without one; one that is of another kind is left out."""
        value = facts.get(name)
        if value is None:
            return None
        known = read(value)
        if known is None:
            self._leave_out(f"args.{name}={value!r:.40}")
        return known

    def _time(self, event: Facts) -> tuple[float, float]:
        """(start, duration) in seconds.  Raises ValueError."""
        stamp, duration = decimal(event.get("ts")), decimal(event.get("dur", 0.0))
        if stamp is None or duration is None:
            said = ", ".join(f"{key}={event.get(key)!r:.40}" for key in ("ts", "dur"))
            raise ValueError(f"{said}: expected finite numbers")
        if self.origin is None:
            self.origin = stamp
        # Stamps are whole nanoseconds, which floats of large stamps are not.
        return round(stamp - self.origin, 3) * _MICROSECOND, duration * _MICROSECOND

    def _thread(self, event: Facts) -> int:
        return self.threads.number((str(event.get("pid")), str(event.get("tid"))))

    def _op(self, event: Facts, facts: Facts) -> None:
        ops, name = self.ops, _name(event)
        start, duration = self._time(event)
        ops.name.append(ops.names.number(name))
        ops.start.append(start)
        ops.duration.append(duration)
        ops.thread.append(self._thread(event))
        ops.external.append(self._external(facts))
        ops.sequence.append(_or_none(self._fact(facts, "Sequence number")))
        ops.backward.append(1 if facts.get("Fwd thread id") not in (None, 0, "0", "") else 0)
        ops.inputs.append(self._inputs_of(facts))
        hierarchy = self._fact(facts, "Module Hierarchy", text_of)
        stack = tuple(part.split("::")[0] for part in hierarchy.split(".")) if hierarchy else None
        ops.modules.append(ops.stacks.number(stack) if stack else NONE)

    def _inputs_of(self, facts: Facts) -> int:
        """The number of these inputs; NONE where shapes were not recorded."""
        if facts.get("Input Dims") is None:
            return NONE
        listed = tuple(facts.get(key) for key in ("Input Dims", "Input type", "Input Strides"))
        key = repr(listed)
        number = self._inputs.get(key)
        if number is None:
            shapes = self._fact(facts, "Input Dims", _shapes)
            if shapes is None:
                return NONE
            types, strides = listed[1], self._fact(facts, "Input Strides", _shapes)
            words = tuple(map(str, types)) if isinstance(types, list) else ()
            record = CallInputs(shapes, words, strides or ())
            number = self._inputs[key] = self.ops.call_inputs.number(record)
        return number

    def _external(self, facts: Facts) -> int:
        """The id that links a kernel to the op around its launch, by either of its keys."""
        name = "External id" if "External id" in facts else "external id"
        return _or_none(self._fact(facts, name))

    def _correlation(self, facts: Facts) -> int:
        """The number that a launch and its kernels share; CUPTI and ROCm count from 1."""
        return _or_none(self._fact(facts, "correlation") or None)

    def _kernel(self, kind: int, event: Facts, facts: Facts) -> None:
        kernels, name = self.kernels, _name(event)
        start, duration = self._time(event)
        kernels.name.append(kernels.names.number(name))
        kernels.kind.append(kind)
        kernels.start.append(start)
        kernels.duration.append(duration)
        device = self._fact(facts, "device") if "device" in facts else whole(event.get("pid"))
        kernels.device.append(_or_none(device if abs(device or 0) < _MOST_DEVICES else None))
        stream = self._fact(facts, "stream") if "stream" in facts else whole(event.get("tid"))
        kernels.stream.append(_or_none(stream))
        kernels.correlation.append(self._correlation(facts))
        kernels.external.append(self._external(facts))
        shape = tuple(self._fact(facts, key, wholes) for key in ("grid", "block"))
        kernels.shape.append(kernels.shapes.number(shape))
        kernels.bytes.append(_or_none(self._fact(facts, "bytes")))

    def _launch(self, event: Facts, facts: Facts) -> None:
        correlation = self._correlation(facts)
        if correlation == NONE:
            return
        try:
            start, duration = self._time(event)
        except ValueError as error:  # its kernels are then placed by their ops
            self._leave_out(f"a launch with {error}")
            return
        if str(event.get("name")).endswith("Synchronize"):
            self.launches.waits.append((start, start + duration))
        self.launches.add(correlation, start, self._thread(event), self._external(facts))

    def _module(self, event: Facts, facts: Facts) -> None:
        name = event.get("name")
        # Of Python's own functions there are far too many.
        if isinstance(name, str) and name.startswith(_MODULE):
            try:
                start, duration = self._time(event)
            except ValueError as error:
                self._leave_out(f"a module call with {error}")
                return
            self.modules.add(_name(event)[len(_MODULE) :], start, duration, self._thread(event))

    def _annotation(self, into: list[Annotation], event: Facts, facts: Facts) -> None:
        """A range of the program, or of the device, where only steps count."""
        name = text_of(event.get("name")) or ""
        step = STEP.fullmatch(name) is not None
        if into is self.device_steps and not step:
            return
        try:
            start, duration = self._time(event)
        except ValueError as error:
            if step:
                raise
            self._leave_out(f"a range with {error}")
            return
        external = self._external(facts)
        thread = self._thread(event)
        into.append(
            Annotation(name, start, duration, thread, None if external == NONE else external)
        )

    def _begin_at_zero(self) -> None:
        ranges = (self.annotations, self.device_steps)
        tables = (self.ops.start, self.kernels.start, self.launches.start, self.modules.start)
        earliest = min(
            *(min(starts, default=0.0) for starts in tables),
            *(timed.start for listed in ranges for timed in listed),
            0.0,
        )
        for starts in tables:
            _shift(starts, earliest)
        for listed in ranges:
            listed[:] = [replace(timed, start=timed.start - earliest) for timed in listed]
        waits = self.launches.waits
        waits[:] = [(start - earliest, end - earliest) for start, end in waits]

    def profile(self, source: str) -> Trace:
        """The records, linked; times since the earliest event, wherever in the file it stands."""
        self._begin_at_zero()
        annotations = tuple(sorted(self.annotations, key=lambda span: (span.start, -span.duration)))
        linked = link(
            self.ops, self.kernels, self.launches, self.modules, annotations, self.device_steps
        )
        return Trace(
            source=source,
            ops=self.ops,
            kernels=self.kernels,
            annotations=annotations,
            steps=linked.steps,
            devices=self.devices,
            marked_by=linked.marked_by,
            cut=linked.cut,
            placements=linked.placements,
            left_out=tuple(sorted(self.left_out.items(), key=lambda item: -item[1])),
            processes=len({self.threads.items[thread][0] for thread in set(self.ops.thread)}),
        )


def _shift(starts: array[float], by: float) -> None:
    for index, start in enumerate(starts):
        starts[index] = start - by


def _name(event: Facts) -> str:
    name = text_of(event.get("name"))
    if name is None:
        raise ValueError(f"name={event.get('name')!r:.40}: expected a text")
    return name


def _or_none(number: int | None) -> int:
    return NONE if number is None else number


def _shapes(item: Any) -> tuple[Any, ...] | None:
    """Sizes of each operand, nested for a list of tensors; None for anything else."""
    if isinstance(item, str):
        try:
            item = json.loads(item)
        except (ValueError, RecursionError):
            return None
    if not isinstance(item, list):
        return None
    shapes = tuple(wholes(x) if _is_flat(x) else _shapes(x) for x in item)
    return None if None in shapes else shapes


def _is_flat(item: Any) -> bool:
    return isinstance(item, list) and not any(isinstance(x, list) for x in item)
