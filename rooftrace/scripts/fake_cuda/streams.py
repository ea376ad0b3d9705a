"""Streams, events and CUDA graphs of an emulated device."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rooftrace.scripts.fake_cuda.state import Answers, Emulation, refusal
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import META_KEY, Recorded, Tape, library, overrides, taperecords
from rooftrace.tracer.sharding import fsdp as queues
from rooftrace.tracer.torch_private import (
    DisableTorchFunction,
    TorchDispatchMode,
    bindings,
    get_current_dispatch_mode,
    tree_leaves,
    tree_map,
)
from rooftrace.tracer.values import trees

# -- streams ---------------------------------------------------------------------------------------
# Streams and events of torch.cuda: queues that a recording tells apart, and times of its clock.
#
# Work on a stream is recorded under its name, and an event that one stream waits for keeps the
# order (see `sharded.streams`).  The classes stay those of torch, with other methods, so that names
# that user code imported earlier stay valid.

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
        """A new queue."""
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
        return next((number for number, other in self._by_id.items() if other is queue), 0)

    @property
    def several(self) -> bool:
        """Whether there is more than the default stream."""
        return len(self._by_id) > 1


def answers(here: Emulation) -> Iterator[Answers]:
    """Functions that choose a stream, and the classes of streams and events."""
    table = Queues(here)
    yield bindings, _names(table)
    yield (
        _cuda.Stream,
        {**overrides.methods(_Stream), "__new__": staticmethod(_stream_maker(table))},
    )
    yield _cuda.Event, {**overrides.methods(_Event), "__new__": staticmethod(_event_maker(table))}


def _names(table: Queues) -> dict[str, Any]:
    here = table.here

    def choose(stream_id: int, device_index: int = 0, device_type: int = _CUDA) -> None:
        here.choose(device_index)
        queues.select(table.of(stream_id))

    return {
        "_cuda_getCurrentStream": lambda index: (table.current(), index, _CUDA),
        "_cuda_getDefaultStream": lambda index: (0, index, _CUDA),
        "_cuda_getStreamFromExternal": lambda pointer, index: (pointer, index, _CUDA),
        "_cuda_getCurrentRawStream": lambda index: table.current(),
        "_cuda_setStream": choose,
        "_cuda_isCurrentStreamCapturing": lambda: bool(here.settings.get("capturing")),
    }


class _Stream:
    """Methods of `torch.cuda.Stream`, but for the one that makes it."""

    _table: Queues
    stream_id: int
    device_index: int
    __init__ = overrides.nothing
    device = property(lambda self: torch.device("cuda", self.device_index))
    cuda_stream = native_handle = property(lambda self: self.stream_id)
    _as_parameter_ = property(lambda self: ctypes.c_void_p(self.stream_id))

    def synchronize(self) -> None:
        self._table.here.clock.synchronize()

    def query(self) -> bool:
        _say_done(self._table.here)
        return True

    def is_capturing(self) -> bool:
        return bool(self._table.here.settings.get("capturing"))

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


def _stream_maker(table: Queues) -> Callable[..., Any]:
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
        handle = overrides.made(kind, _Stream)
        number = stream_ptr if stream_id is None else stream_id
        if device_index is None:
            index = torch_private.get_device_index(device, optional=True)
            device_index = table.here.current if index < 0 else index
        handle._table, handle.stream_id = table, table.new() if number is None else number
        handle.device_index, handle.device_type = device_index, device_type
        handle.priority = priority
        return handle

    return new


class _Event:
    """Methods of `torch.cuda.Event`, but for the one that makes it."""

    _table: Queues
    _timed: bool
    _seconds: float | None
    _mark: queues.Event
    __init__ = overrides.nothing
    device = property(lambda self: torch.device("cuda", self._table.here.current))
    cuda_event = event_id = property(lambda self: 0 if self._seconds is None else id(self))
    _as_parameter_ = property(lambda self: ctypes.c_void_p(self.cuda_event))
    ipc_handle = from_ipc_handle = refusal(
        "torch.cuda.Event.ipc_handle", "no other process has the device"
    )

    def record(self, stream: Any = None) -> None:
        table = self._table
        self._seconds = table.here.clock.device_seconds()
        if table.several or not self._timed:  # a timer among the work of one stream orders nothing
            self._mark.record(None if stream is None else table.of(stream.stream_id))

    def wait(self, stream: Any = None) -> None:
        self._mark.wait(None if stream is None else self._table.of(stream.stream_id))

    def query(self) -> bool:
        _say_done(self._table.here)
        return True

    def synchronize(self) -> None:
        self._table.here.clock.synchronize()

    def elapsed_time(self, end_event: Any) -> float:
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        apart: float = (end_event._seconds - self._seconds) * 1e3
        return max(apart, _TICK)

    def __repr__(self) -> str:
        return f"<torch.cuda.Event {self.cuda_event:#x}>"


def _event_maker(table: Queues) -> Callable[..., Any]:
    def new(
        kind: Any,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> Any:
        handle = overrides.made(kind, _Event)
        handle._table, handle._mark = table, queues.Event()
        handle._timed, handle._seconds = enable_timing, None
        return handle

    return new


def _say_done(here: Emulation) -> None:
    here.assume("queries", "stream.query() and event.query() say that all work is done")


def _key(stream: Any) -> tuple[int, int]:
    return stream.stream_id, stream.device_index


# -- graphs ----------------------------------------------------------------------------------------
# CUDA graphs: a capture notes the ops that run, a replay runs them again.
#
# A real capture runs nothing; here it runs once, which an assumption says.  A replay puts the noted
# ops through the dispatcher again, so an active recording counts each of them, and frees each
# result when a real one would.  The host time that a graph launch saves is unknown here: the ops
# are dispatched one by one.

_pools = itertools.count(1)
_NO_GRAPH = "there is no graph of the driver's"


@dataclass(frozen=True)
class _Made:
    """A tensor that an op of the capture made: which op, and which of its results."""

    op: int
    result: int


@dataclass
class _Noted:
    """One op of a capture.

    origin: the module, the part of the step and the line, as the recording said them.  last:
    results of earlier ops that nothing reads after this one.  results: the static outputs.
    """

    function: Any
    args: Any
    kwargs: Any
    origin: taperecords.Origin | None = None
    last: list[int] = field(default_factory=list)
    results: dict[int, Any] = field(default_factory=dict)  # weakly, what it made, by place


class _Capture(TorchDispatchMode):
    """Notes the ops that run, without keeping their results alive.

    They are those that the recording notes: of ops that are shown under another name, what runs for
    them, and of wrappers of tensors the tensors inside.
    """

    supports_higher_order_operators = True
    runs_whole = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[_Noted] = []
        self._made: dict[int, tuple[Any, _Made]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(trees.is_wrapper(kind) for kind in types):
            return NotImplemented
        instead = library.behind(func)
        if instead is not None:
            overrides.push(self)
            try:
                return instead(*args, **kwargs)
            finally:
                overrides.pop(self)
        arguments = tree_map(self._noted, args), tree_map(self._noted, kwargs)
        noted = _Noted(func, *arguments)
        before = {id(item) for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **kwargs)
        noted.origin = _origin()
        number = len(self.ops)
        self.ops.append(noted)
        for position, item in enumerate(tree_leaves(result)):
            if isinstance(item, Tensor) and id(item) not in before:
                noted.results[position] = weakref.ref(item)
                self._made[id(item)] = noted.results[position], _Made(number, position)
        return result

    def _noted(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        reference, origin = self._made.get(id(item), (lambda: None, item))
        return origin if reference() is item else item

    def settled(self) -> list[_Noted]:
        """The ops, each with the results that nothing reads afterwards."""
        last: dict[int, int] = {}
        for number, op in enumerate(self.ops):
            last[number] = number
            for item in tree_leaves((op.args, op.kwargs)):
                if isinstance(item, _Made):
                    last[item.op] = number
        for maker, reader in last.items():
            self.ops[reader].last.append(maker)
        self._made.clear()
        return self.ops


def _recording() -> Tape | None:
    """The innermost recording, if it gets the next op."""
    mode: Any = get_current_dispatch_mode()
    tape = getattr(mode, "tape", mode)  # of a mode that follows another thread
    return tape if isinstance(tape, Tape) else None


def _origin() -> taperecords.Origin | None:
    """Where the last op of the innermost recording comes from; None where there is none."""
    recording = _recording()
    last = None if recording is None else next(iter(reversed(recording.graph.nodes)), None)
    noted = None if last is None else last.meta.get(META_KEY)
    return noted.origin if isinstance(noted, Recorded) else None


@contextlib.contextmanager
def _from(origin: taperecords.Origin | None) -> Iterator[None]:
    """Inside, ops have the source of the op of the capture."""
    recording = _recording()
    if recording is None or origin is None:
        yield
        return
    with recording.origins.all_from(origin):
        yield


def _run(ops: Sequence[_Noted]) -> None:
    """Run noted ops again; each result lives until its last reader has run."""
    alive: dict[int, list[Any]] = {}

    def argument(item: Any) -> Any:
        return alive[item.op][item.result] if isinstance(item, _Made) else item

    with torch.no_grad(), DisableTorchFunction():
        for number, op in enumerate(ops):
            args, kwargs = tree_map(argument, op.args), tree_map(argument, op.kwargs)
            with _from(op.origin):
                alive[number] = tree_leaves(op.function(*args, **kwargs))
            del args, kwargs
            for maker in op.last:
                _written(ops[maker].results, alive.pop(maker))


def _written(static: Mapping[int, Any], results: Sequence[Any]) -> None:
    """A replay puts its results where the capture put them: who keeps those reads these."""
    recording = _recording()
    if recording is None:
        return
    for position, reference in static.items():
        kept = reference()
        if kept is not None:
            recording.stands_for(kept, results[position])


class _CUDAGraph:
    """Methods of `torch.cuda.CUDAGraph`, but for the one that makes it."""

    _here: Emulation
    _capture: _Capture | None
    _ops: list[_Noted] | None
    _pool: Any
    __init__ = instantiate = enable_debug_mode = overrides.nothing
    debug_dump = refusal("CUDAGraph.debug_dump", _NO_GRAPH)
    raw_cuda_graph = refusal("CUDAGraph.raw_cuda_graph", _NO_GRAPH)
    raw_cuda_graph_exec = refusal("CUDAGraph.raw_cuda_graph_exec", _NO_GRAPH)
    get_graph_data = refusal("CUDAGraph.get_graph_data", _NO_GRAPH)

    def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        here = self._here
        here.tell("capture")
        here.assume(
            "graph captures",
            "code that a CUDA graph captures runs once while it is captured, and is counted",
        )
        if here.settings.get("capturing"):
            raise RuntimeError("another CUDA graph is being captured")
        self._pool = pool or self._pool
        self._capture = here.settings["capturing"] = _Capture()
        overrides.push(self._capture)

    def capture_end(self) -> None:
        if self._capture is None:
            raise RuntimeError("capture_end() without capture_begin()")
        capture, self._capture = self._capture, None
        self._here.settings.pop("capturing", None)
        overrides.pop(capture)
        self._ops = capture.settled()
        self._here.tell("captured")

    def replay(self) -> None:
        if self._ops is None:
            raise RuntimeError("replay() of a CUDA graph that has captured nothing")
        self._here.assume(
            "graph replays",
            "a replay of a CUDA graph is counted as its ops, each dispatched by itself",
        )
        self._here.tell("replay")
        _run(self._ops)
        self._here.tell("replayed")

    def reset(self) -> None:
        self._ops = None

    def pool(self) -> Any:
        return self._pool


def graph_answers(here: Emulation) -> Iterator[Answers]:
    """The class of graphs, and functions that make some or ask for them."""

    def new(kind: Any, keep_graph: bool = False) -> Any:
        graph = overrides.made(kind, _CUDAGraph)
        graph._here, graph._pool = here, (0, next(_pools))
        graph._tracker = graph._capture = graph._ops = None
        return graph

    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        here.assume(
            "graphed callables",
            "make_graphed_callables returns the callables as they are: each op is dispatched by "
            "itself, and neither warm-up nor capture is counted",
        )
        return callables

    yield torch.cuda.CUDAGraph, {**overrides.methods(_CUDAGraph), "__new__": staticmethod(new)}
    yield (
        torch.cuda,
        {
            "make_graphed_callables": make_graphed_callables,
            "_cuda_isCurrentStreamCapturing": lambda: bool(here.settings.get("capturing")),
            "_graph_pool_handle": lambda: (0, next(_pools)),
        },
    )
