"""Streams of a device that is not there: which one work is put on, and which waits for which.

They stand for `torch.cuda.Stream` and `torch.cuda.Event` in code that asks a mesh for its device.
An event is an op in the recording (see `collectives.marks`), so its order among the work is kept.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

from rooftrace.tracer.collectives import marks

_Library: Any = torch.library.Library
_library = _Library("rooftrace", "FRAGMENT")
_library.define(f"{marks.RECORD_EVENT.partition('.')[2]}() -> Tensor")
_library.define(f"{marks.WAIT_EVENT.partition('.')[2]}(Tensor event) -> ()")
_library.define(f"{marks.RESIZE_STORAGE.partition('.')[2]}(Tensor(a!) self, int size) -> ()")
_library.define(f"{marks.FREE_STORAGES.partition('.')[2]}(Tensor[] tensors) -> ()")
_library.define(f"{marks.BRING_STORAGES.partition('.')[2]}(Tensor[] tensors) -> ()")


def _record_event() -> torch.Tensor:
    return torch.empty(0, device="meta")


def _nothing(*args: Any) -> None:
    pass


_EVERYWHERE = "CompositeExplicitAutograd"
_library.impl("record_event", _record_event, _EVERYWHERE)
_library.impl("wait_event", _nothing, _EVERYWHERE)
_library.impl("resize_storage", _nothing, _EVERYWHERE)
_library.impl("free_storages", _nothing, _EVERYWHERE)
_library.impl("bring_storages", _nothing, _EVERYWHERE)
_OPS: Any = torch.ops.rooftrace


_numbers = itertools.count(1)


class Event:
    """A point on a stream that others wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._token: torch.Tensor | None = None

    def record(self, stream: Stream | None = None) -> None:
        """The event is when all that is on the stream now is done."""
        with _On(stream or _here.stream):
            self._token = _OPS.record_event()

    def wait(self, stream: Stream | None = None) -> None:
        """The stream goes on after the event."""
        if self._token is not None:
            with _On(stream or _here.stream):
                _OPS.wait_event(self._token)

    def query(self) -> bool:
        """Whether the event has come: nothing waits here."""
        return True

    def synchronize(self) -> None:
        """The host would wait; nothing runs."""


class Stream:
    """A queue of the device; name: what it is for, "" for the main one."""

    def __init__(self, device: Any = None, priority: int = 0, name: str | None = None) -> None:
        self.name = f"stream {next(_numbers)}" if name is None else name

    def wait_event(self, event: Event) -> None:
        """What comes next here starts after the event."""
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        """What comes next here starts after what is on the other stream now."""
        if stream is not self:
            self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """An event for what is on this stream now."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all is done: nothing runs."""
        return True

    def synchronize(self) -> None:
        """The host would wait; nothing runs."""


MAIN = Stream(name="")


class _Here(threading.local):
    """The stream of one thread."""

    def __init__(self) -> None:
        self.stream = MAIN


_here = _Here()


class _On:
    """The context in which a stream is the current one of its thread."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream, self._outer = stream or _here.stream, MAIN

    def __enter__(self) -> None:
        self._outer, _here.stream = _here.stream, self._stream

    def __exit__(self, *exception: Any) -> None:
        _here.stream = self._outer


def current_stream() -> str:
    """The name of the stream that the running thread puts work on; "" is the main one."""
    return _here.stream.name


def select(stream: Stream) -> None:
    """From here on the running thread puts work on this stream."""
    _here.stream = stream


class DeviceModule:
    """Stands for the module of a device (`torch.cuda`) in what a mesh runs."""

    Stream, Event, stream = Stream, Event, _On

    @staticmethod
    def current_stream(device: Any = None) -> Any:
        """The stream that the running thread puts work on."""
        return _here.stream

    @staticmethod
    def current_device() -> int:
        """There is one."""
        return 0

    @staticmethod
    def is_available() -> bool:
        """It stands for one."""
        return True

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """The host would wait; nothing runs."""
