"""Traces of torch.profiler (Kineto, in Chrome's format; plain or gzip), read as a stream.

Only the fields of records are kept, in columns, so that memory grows with the number of ops and
kernels, not with the size of the file.  `linking` adds nesting and launches.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypedDict, cast

from rooftrace._progress import tell
from rooftrace._reading import GZIP, FileKind, JsonStream, opened, record_of
from rooftrace.errors import ProfileError
from rooftrace.measured.profiles.linking import STEP, Launches, ModuleSpans, link
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
    reader = _KinetoReader()
    count = 0
    with _opened(path) as file:
        reader.devices = _devices(file)
        for event in _events(path, file):
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
    if not count:
        raise ProfileError(f'{path}: no events (no list "traceEvents" with any); {_HOW}')
    if not len(reader.ops) and not len(reader.kernels):
        raise ProfileError(
            f"{path}: none of its {count:,} events is a CPU op or a kernel; profile with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], and with a schedule "
            "call step() often enough to reach an active step"
        )
    return reader.profile(str(path))


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
            raise ProfileError(
                f"{path}: the trace is truncated: it ends after {count:,} events, inside of its "
                "JSON; copy it again, or let the program that writes it end"
            ) from None
        raise ProfileError(f"{path}: not JSON, after {count:,} events: {text[:120]}") from None


def _devices(file: IO[bytes]) -> dict[int, str]:
    """Names of the devices by number, from the head of the file."""
    text = file.read(1 << 16).decode("utf-8", "replace")
    file.seek(0)
    head = re.search(r'"deviceProperties"\s*:\s*', text)
    try:
        listed = json.JSONDecoder().raw_decode(text, head.end())[0] if head else []
        return {
            device["id"]: device["name"] for device in record_of(list[_Device], listed, "", _KIND)
        }
    except (ValueError, RecursionError):  # reading the events will refuse the file
        return {}


def _first_byte(file: IO[bytes]) -> bytes:
    """The first byte that is no white space; rewinds the file."""
    block = file.read(4096)
    file.seek(0)
    return block.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]


class _Device(TypedDict):
    id: int
    name: str


_Facts = TypedDict(
    "_Facts",
    {
        "External id": Any,
        "external id": Any,
        "Sequence number": int,
        "Fwd thread id": Any,
        "Input Dims": list[Any],
        "Input type": list[Any],
        "Input Strides": list[Any],
        "Module Hierarchy": str,
        "device": Any,
        "stream": Any,
        "correlation": int,
        "grid": list[int],
        "block": list[int],
        "bytes": int,
    },
    total=False,
)
"""Arguments of an event that are read; they depend on its category and the version."""


class _Always(TypedDict):
    name: str
    ts: float | str


class _KinetoEvent(_Always, total=False):
    """Fields of an event that are read."""

    dur: float | str
    pid: int | str | None
    tid: int | str | None
    args: _Facts


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
        self._inputs: dict[tuple[str, str, str], int] = {}
        self._takers: dict[str, Callable[[Mapping[str, Any]], None] | None] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """One event of the trace."""
        if event.get("ph") != "X":
            return
        category = str(event.get("cat", ""))
        if category not in self._takers:
            self._takers[category] = self._taker(category.lower())
        taker = self._takers[category]
        if taker is not None:
            checked = record_of(_KinetoEvent, event, "its values", _KIND)
            taker(cast(Mapping[str, Any], checked))

    def _taker(self, category: str) -> Callable[[Mapping[str, Any]], None] | None:
        """The handler for events of a category, None to skip them; old versions write capitals."""
        if category in _DEVICE_WORK:
            return partial(self._kernel, _DEVICE_WORK[category])
        if category.endswith(("_runtime", "_driver")) or category == "runtime":
            return self._launch
        takers: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "cpu_op": self._op,
            "operator": self._op,
            "python_function": self._module,
            "user_annotation": partial(self._annotation, self.annotations),
            "gpu_user_annotation": self._device_range,
        }
        return takers.get(category)

    def _time(self, event: Mapping[str, Any]) -> tuple[float, float]:
        """(start, duration) in seconds."""
        stamp, duration = float(event["ts"]), float(event.get("dur", 0.0))
        if not math.isfinite(stamp) or not math.isfinite(duration):
            raise ValueError(f"ts={stamp}, dur={duration}: expected finite numbers")
        if self.origin is None:
            self.origin = stamp
        return (stamp - self.origin) * _MICROSECOND, duration * _MICROSECOND

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self.threads.number((event.get("pid"), event.get("tid")))

    def _op(self, event: Mapping[str, Any]) -> None:
        ops, facts = self.ops, event.get("args", {})
        start, duration = self._time(event)
        ops.name.append(ops.names.number(event["name"]))
        ops.start.append(start)
        ops.duration.append(duration)
        ops.thread.append(self._thread(event))
        ops.external.append(_external(facts))
        ops.sequence.append(facts.get("Sequence number", NONE))
        ops.backward.append(1 if facts.get("Fwd thread id") else 0)
        ops.inputs.append(self._inputs_of(facts))
        hierarchy = facts.get("Module Hierarchy")
        stack = tuple(part.split("::")[0] for part in hierarchy.split(".")) if hierarchy else None
        ops.modules.append(ops.stacks.number(stack) if stack else NONE)

    def _inputs_of(self, facts: Mapping[str, Any]) -> int:
        """The number of these inputs; NONE where shapes were not recorded."""
        shapes = facts.get("Input Dims")
        if shapes is None:
            return NONE
        types, strides = facts.get("Input type"), facts.get("Input Strides")
        key = (repr(shapes), repr(types), repr(strides))
        number = self._inputs.get(key)
        if number is None:
            record = CallInputs(
                _shapes(shapes), tuple(map(str, types or ())), _shapes(strides or ())
            )
            number = self._inputs[key] = self.ops.call_inputs.number(record)
        return number

    def _kernel(self, kind: int, event: Mapping[str, Any]) -> None:
        kernels, facts = self.kernels, event.get("args", {})
        start, duration = self._time(event)
        kernels.name.append(kernels.names.number(event["name"]))
        kernels.kind.append(kind)
        kernels.start.append(start)
        kernels.duration.append(duration)
        device = facts.get("device", event.get("pid"))
        kernels.device.append(device if isinstance(device, int) else NONE)
        stream = facts.get("stream", event.get("tid"))
        kernels.stream.append(stream if isinstance(stream, int) else NONE)
        kernels.correlation.append(facts.get("correlation", NONE))
        kernels.external.append(_external(facts))
        shape = tuple(tuple(facts[key]) if key in facts else None for key in ("grid", "block"))
        kernels.shape.append(kernels.shapes.number(shape))
        kernels.bytes.append(facts.get("bytes", NONE))

    def _launch(self, event: Mapping[str, Any]) -> None:
        facts = event.get("args", {})
        correlation = facts.get("correlation", NONE)
        if correlation == NONE:
            return
        start, duration = self._time(event)
        if event["name"].endswith("Synchronize"):
            self.launches.waits.append((start, start + duration))
        self.launches.add(correlation, start, self._thread(event), _external(facts))

    def _module(self, event: Mapping[str, Any]) -> None:
        name = event["name"]
        if name.startswith(_MODULE):  # of Python's own functions there are far too many
            start, duration = self._time(event)
            self.modules.add(name.removeprefix(_MODULE), start, duration, self._thread(event))

    def _device_range(self, event: Mapping[str, Any]) -> None:
        if STEP.fullmatch(event["name"]):
            self._annotation(self.device_steps, event)

    def _annotation(self, into: list[Annotation], event: Mapping[str, Any]) -> None:
        start, duration = self._time(event)
        external = _external(event.get("args", {}))
        into.append(
            Annotation(
                event["name"],
                start,
                duration,
                self._thread(event),
                None if external == NONE else external,
            )
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
            processes=len({self.threads.items[thread][0] for thread in set(self.ops.thread)}),
        )


def _shift(starts: array[float], by: float) -> None:
    for index, start in enumerate(starts):
        starts[index] = start - by


def _external(facts: Mapping[str, Any]) -> int:
    """The id that links a kernel to the op around its launch; its key depends on the version."""
    number = facts.get("External id", facts.get("external id", NONE))
    return number if isinstance(number, int) else NONE


def _shapes(item: Any) -> tuple[Any, ...]:
    """Sizes of each operand, nested for a list of tensors.  Raises TypeError for other items."""
    if not all(isinstance(x, list) for x in item):
        raise TypeError(f"sizes {item!r:.60}: expected a list for each operand")
    return tuple(map(_sizes, item))


def _sizes(item: list[Any]) -> tuple[Any, ...]:
    if all(isinstance(x, int) for x in item):
        return tuple(item)
    return _shapes(item)
