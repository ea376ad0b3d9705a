"""Streams and events of torch.cuda: queues that a recording tells apart, and times of its clock.

Work on a stream is recorded under its name, and an event that one stream waits for keeps the order
(see `sharded.streams`).  The classes stay those of torch, with other methods, so that what user
code imported before is what it gets.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rooftrace.tracer.emulation.handles import made, methods, nothing
from rooftrace.tracer.emulation.refused import refusal
from rooftrace.tracer.emulation.state import Answers, Emulation
from rooftrace.tracer.sharded import streams as queues

_CUDA = 1
"""torch's number for the type of the device."""
_TICK = 0.0005
"""Milliseconds that two events are apart at least: the resolution of CUDA's timers."""
_cuda: Any = torch.cuda
_Queue = queues.Stream


class Queues:
    """The queues behind the streams of one emulation, by the numbers that torch gives streams."""

    def __init__(self, here: Emulation) -> None:
        self.here = here
        self._by_id: dict[int, _Queue] = {0: queues.MAIN}

    def new(self) -> int:
        """A queue of its own."""
        number = len(self._by_id)
        self._by_id[number] = _Queue(name=f"stream {number}")
        return number

    def of(self, number: int) -> _Queue:
        """The queue of a stream; one of another library is new the first time."""
        if number not in self._by_id:
            self._by_id[number] = _Queue(name=f"stream {number:#x}")
        return self._by_id[number]

    def current(self) -> int:
        """The stream of the running thread."""
        queue = queues.DeviceModule.current_stream()
        return next((number for number, own in self._by_id.items() if own is queue), 0)

    @property
    def several(self) -> bool:
        """Whether there is more than the default stream."""
        return len(self._by_id) > 1


def answers(here: Emulation) -> Iterator[Answers]:
    """What chooses a stream, and the classes of streams and events."""
    own = Queues(here)
    yield torch._C, _names(own)
    yield _cuda.Stream, {**methods(_Stream), "__new__": staticmethod(_stream_maker(own))}
    yield _cuda.Event, {**methods(_Event), "__new__": staticmethod(_event_maker(own))}


def _names(own: Queues) -> dict[str, Any]:
    here = own.here

    def choose(stream_id: int, device_index: int = 0, device_type: int = _CUDA) -> None:
        here.choose(device_index)
        queues.select(own.of(stream_id))

    return {
        "_cuda_getCurrentStream": lambda index: (own.current(), index, _CUDA),
        "_cuda_getDefaultStream": lambda index: (0, index, _CUDA),
        "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, index, _CUDA),
        "_cuda_getCurrentRawStream": lambda index: own.current(),
        "_cuda_setStream": choose,
        "_cuda_isCurrentStreamCapturing": lambda: bool(here.settings.get("capturing")),
    }


class _Stream:
    """Methods of `torch.cuda.Stream`, but for the one that makes it."""

    _own: Queues
    stream_id: int
    device_index: int
    __init__ = nothing
    device = property(lambda self: torch.device("cuda", self.device_index))
    cuda_stream = native_handle = property(lambda self: self.stream_id)
    _as_parameter_ = property(lambda self: ctypes.c_void_p(self.stream_id))

    def synchronize(self) -> None:
        self._own.here.clock.synchronize()

    def query(self) -> bool:
        _say_done(self._own.here)
        return True

    def is_capturing(self) -> bool:
        return bool(self._own.here.settings.get("capturing"))

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        if stream.stream_id != self.stream_id:
            self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        event = _cuda.Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Any:
        vars(self).setdefault("_outer", []).append(_cuda.current_stream())
        _cuda.set_stream(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        _cuda.set_stream(vars(self)["_outer"].pop())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _cuda.Stream) and _key(self) == _key(other)

    def __hash__(self) -> int:
        return hash(_key(self))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"


def _stream_maker(own: Queues) -> Callable[..., Any]:
    def new(
        kind: Any,
        device: Any = None,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = _CUDA,
        stream_ptr: int | None = None,
        **kwargs: Any,
    ) -> Any:
        handle = made(kind, _Stream)
        number = stream_ptr if stream_id is None else stream_id
        if device_index is None:
            index = _cuda._utils._get_device_index(device, optional=True)
            device_index = own.here.current if index < 0 else index
        handle._own, handle.stream_id = own, own.new() if number is None else number
        handle.device_index, handle.device_type = device_index, device_type
        handle.priority = priority
        return handle

    return new


class _Event:
    """Methods of `torch.cuda.Event`, but for the one that makes it."""

    _own: Queues
    _timed: bool
    _seconds: float | None
    _mark: queues.Event
    __init__ = nothing
    device = property(lambda self: torch.device("cuda", self._own.here.current))
    cuda_event = event_id = property(lambda self: 0 if self._seconds is None else id(self))
    _as_parameter_ = property(lambda self: ctypes.c_void_p(self.cuda_event))
    ipc_handle = from_ipc_handle = refusal(
        "torch.cuda.Event.ipc_handle", "no other process has the device"
    )

    def record(self, stream: Any = None) -> None:
        own = self._own
        self._seconds = own.here.clock.device_seconds()
        if own.several or not self._timed:  # a timer among the work of one stream orders nothing
            self._mark.record(None if stream is None else own.of(stream.stream_id))

    def wait(self, stream: Any = None) -> None:
        self._mark.wait(None if stream is None else self._own.of(stream.stream_id))

    def query(self) -> bool:
        _say_done(self._own.here)
        return True

    def synchronize(self) -> None:
        self._own.here.clock.synchronize()

    def elapsed_time(self, end_event: Any) -> float:
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        apart: float = (end_event._seconds - self._seconds) * 1e3
        return max(apart, _TICK)

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


def _event_maker(own: Queues) -> Callable[..., Any]:
    def new(
        kind: Any,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Any:
        handle = made(kind, _Event)
        handle._own, handle._mark = own, queues.Event()
        handle._timed, handle._seconds = enable_timing, None
        return handle

    return new


def _say_done(here: Emulation) -> None:
    here.assume("queries", "stream.query() and event.query() say that all work is done")


def _key(stream: Any) -> tuple[int, int]:
    return stream.stream_id, stream.device_index
