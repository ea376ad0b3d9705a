"""Threads that the traced code starts, recorded like it, and stand-ins for device functions."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from rooftrace._processes import Shared
from rooftrace.graph import UNRECORDED
from rooftrace.tracer import source_line, spec_after, torch_private
from rooftrace.tracer.recording import overrides
from rooftrace.tracer.recording.autocast import carried_here
from rooftrace.tracer.recording.functions import Functions
from rooftrace.tracer.recording.overrides import Scope, original_of, replaced
from rooftrace.tracer.recording.tape import Tape
from rooftrace.tracer.values import trees

# -- stand-ins -------------------------------------------------------------------------------------
# Stand-ins for functions and classes of torch that need a device, during a trace.
#
# User code may import these names meanwhile and keep them.  So a class stays the same object, with
# other methods during the trace, and a stand-in function calls the original after the trace.  Other
# threads of the process see neither (see `patches`).


class _PlainImports:
    """A finder that lets modules run as they would outside: none of their tensors is on meta."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        spec: Any = spec_after(self, name, path, target)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module") and not isinstance(loader, type):
            loader.exec_module = _plainly(loader)
        return spec


def _plainly(loader: Any) -> Callable[[Any], None]:
    run = loader.exec_module  # it may be that of another finder, which replaces what it imports

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        if Scope.current() is None:  # a thread of somebody else imports it
            run(module)
            return
        with overrides.plainly():
            run(module)

    return exec_module


@contextlib.contextmanager
def plain_imports() -> Iterator[None]:
    """Inside, a module that is imported for the first time is not part of what is traced."""
    finder: Any = _PlainImports()
    original = original_of(torch_private.nested_tensor, "_nt_view_dummy")

    def dummy() -> Any:
        """Torch makes this tensor with the first nested one of a process."""
        with overrides.plainly():
            return original()

    with torch_private.disable_current_modes():
        pass  # it imports lazily, the first time
    sys.meta_path.insert(0, finder)
    try:
        with replaced(torch_private.nested_tensor, {"_nt_view_dummy": dummy}):
            yield
    finally:
        sys.meta_path.remove(finder)


class _NoDevice:
    """Stands for contexts of a GPU that is not there: does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> _NoDevice:
        return self

    def __getattr__(self, name: str) -> _NoDevice:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> _NoDevice:
        return self

    def __exit__(self, *exception: Any) -> None:
        pass


def _made(kind: Any, *args: Any, **kwargs: Any) -> Any:
    """An instance of a class of streams or events without its device."""
    return overrides.made(kind, _NoDevice)


_HANDLE: dict[str, Any] = {
    "__new__": staticmethod(_made),
    "__init__": overrides.nothing,
    "__eq__": lambda self, other: type(self) is type(other),
    "__hash__": lambda self: 0,
    "__repr__": lambda self: f"<{type(self).__name__} of no device>",
    "__reduce__": lambda self: (type(self), ()),
    "query": lambda self: True,
    "synchronize": overrides.nothing,
    "device": property(lambda self: torch.device("cuda", 0)),
}
_STREAM = {
    **_HANDLE,
    "wait_event": overrides.nothing,
    "wait_stream": overrides.nothing,
    "record_event": lambda self, event=None: event or _made(torch.cuda.Event),
    "stream_id": 0,
    "cuda_stream": 0,
    "priority": 0,
}
_EVENT = {
    **_HANDLE,
    "record": overrides.nothing,
    "wait": overrides.nothing,
    "elapsed_time": lambda self, end: 1.0,  # ms: no time passes, and nobody may divide by it
}
_REGION = dict.fromkeys(("__init__", "__enter__", "__exit__"), overrides.nothing)


_CUDA = {
    "synchronize": overrides.nothing,
    "set_device": overrides.nothing,
    "set_stream": overrides.nothing,
    "stream": lambda stream: _NoDevice(),
    "current_stream": lambda device=None: _made(torch.cuda.Stream),
    "default_stream": lambda device=None: _made(torch.cuda.Stream),
    "current_device": lambda: 0,
}


@contextlib.contextmanager
def jagged_attention_fused() -> Iterator[None]:
    """Inside, attention of jagged tensors takes flash attention on meta, as it does on a GPU.

    PyTorch asks the device, and does so itself where a FlopCounterMode looks on.
    """
    home: Any = torch_private.nested_attention
    name = "_is_computing_meta_flops"
    original = getattr(home, name, None)
    if original is None:
        yield
        return
    with replaced(home, {name: trees.on_meta}):
        yield


@contextlib.contextmanager
def device_calls_quiet() -> Iterator[None]:
    """Inside, on a machine without a GPU, calls that wait for one or choose its streams do nothing.

    A trace needs no device, but these calls would fail without one.  Where a device is emulated
    (see `emulation`) it answers them.
    """
    cuda = torch.cuda
    with contextlib.ExitStack() as undo:
        if not cuda.is_available():
            for home, replacements in (
                (cuda.Stream, _STREAM),
                (cuda.Event, _EVENT),
                (cuda.device, _REGION),
                (cuda, _CUDA),
                (cuda.nvtx, dict.fromkeys(("range_push", "range_pop", "mark"), overrides.nothing)),
            ):
                undo.enter_context(replaced(home, replacements))
        yield


class _OursToIgnore:
    """The pattern of a filter of warnings: matches only in threads that are recorded."""

    def match(self, text: str) -> bool:
        """Whether a warning of this text is not to be shown."""
        return Scope.current() is not None and text.startswith(_NOT_OURS)


_NOT_OURS = (
    "Using `torch.compile(module)` when there are",
    "Sparse CSR",
    "Sparse invariant",
    "To copy construct from a tensor",
    "FSDP2-wrapped module (",
)
"""Warnings of torch with a line of ours or of torch, harmless in a trace."""


def _ignored() -> Callable[[], None]:
    """Add a filter of warnings; return its undo."""
    entry: Any = ("ignore", _OursToIgnore(), Warning, None, 0)
    warnings.filters.insert(0, entry)  # type: ignore[attr-defined]

    def undo() -> None:
        with contextlib.suppress(ValueError):  # somebody has set other filters since
            warnings.filters.remove(entry)  # type: ignore[attr-defined]

    return undo


_WARNINGS = Shared(_ignored)


def warnings_quiet() -> contextlib.AbstractContextManager[None]:
    """Inside, warnings that would name a line of ours are not shown; other threads' are."""
    return _WARNINGS.used()


# -- caches ----------------------------------------------------------------------------------------

_LENGTH = "_rooftrace_length"
"""Attribute of a layer of a cache: the tokens that recorded calls have put into it."""


@contextlib.contextmanager
def static_caches_counted() -> Iterator[None]:
    """Inside, a layer of a static cache knows its length from the calls that filled it.

    Transformers 4 counts the slots that are not zero, which no trace knows.  The calls that fill a
    cache say it too.
    """
    kind: Any = getattr(sys.modules.get("transformers.cache_utils"), "StaticLayer", None)
    if kind is None or "cumulative_length" in kind.__init__.__code__.co_names:
        yield
        return
    update, length = original_of(kind, "update"), original_of(kind, "get_seq_length")

    def counted(layer: Any, key_states: Any, *args: Any, **kwargs: Any) -> Any:
        before = vars(layer).get(_LENGTH) if layer.is_initialized else 0
        filled = update(layer, key_states, *args, **kwargs)
        if before is not None:  # else the user has filled it
            setattr(layer, _LENGTH, before + key_states.shape[-2])
        return filled

    def seen_length(layer: Any) -> Any:
        recorded = vars(layer).get(_LENGTH)
        return length(layer) if recorded is None else recorded

    with replaced(kind, {"update": counted, "get_seq_length": seen_length}):
        yield


# -- threads ---------------------------------------------------------------------------------------
# Threads: work that the traced code hands to other threads is recorded like the work of its thread.
#
# Dispatch modes, function modes and the default device belong to one thread.  A recorder is
# entered in the threads that its code starts, around the calls that it submits to a pool, and in
# any thread that calls one of its modules.  Threads of anybody else run as they are.  Ops are
# recorded one at a time, under a lock.

_PATIENCE = 30.0
"""Seconds that a thread of the step may go on computing after the step has returned."""
_STILL = 0.1
"""Seconds in which a notified thread wakes up, also on a busy machine."""
_WATCHERS = frozenset({"tqdm._monitor"})
"""Modules whose threads look after progress bars, and compute nothing."""


Dispatch = Callable[..., Any]
"""The `__torch_dispatch__` of a recorder."""


class Follower(torch_private.TorchDispatchMode):
    """Hands the ops of another thread to the recorder, while that one records."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, tape: Tape, dispatch: Dispatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self._dispatch = tape, dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.tape.live:  # a thread that outlives the recording
            return func(*args, **(kwargs or {}))
        return self._dispatch(func, types, args, kwargs)


class Threads:
    """Follows one recording into other threads.

    dispatch: records an op, as `__torch_dispatch__` of the recorder does.  scope: the recording's.
    functions: makes the function mode of a thread.
    """

    told_of_forks = False  # True: somebody hears when a process that the code forks computes

    def __init__(
        self,
        tape: Tape,
        dispatch: Dispatch,
        scope: Scope,
        functions: Callable[[torch.device], Functions],
    ) -> None:
        self._tape, self._dispatch, self._scope = tape, dispatch, scope
        self._functions = functions
        self._threads = tape.threads
        self.leaving: Callable[[], object] = lambda: None  # called as another thread's task ends

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, work that this thread hands to others is recorded."""
        self._threads.leader = ident = threading.get_ident()
        self._threads.idents[ident] = ident
        kinds: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (threading.Thread, "start", self._started),
            (ThreadPoolExecutor, "submit", self._submitted),
            (ProcessPoolExecutor, "submit", self._elsewhere),
            (BaseProcess, "start", self._elsewhere),
        )
        try:
            with contextlib.ExitStack() as undo:
                for kind, name, ours in kinds:
                    method = functools.partial(ours, original_of(kind, name))
                    undo.enter_context(replaced(kind, {name: method}))
                yield
        finally:
            self._threads.idents.clear()

    def settle(self) -> None:
        """Wait for threads that the code did not join; an assumption names threads that go on.

        A thread ends, or waits for others; when all that are left wait, nothing more will run.
        """
        end = time.monotonic() + _PATIENCE
        before: dict[int, tuple[Any, int]] = {}
        since = time.monotonic()
        while self._threads.running and time.monotonic() < end:
            now = self._places()
            if now != before or not all(map(self._threads.awaits_others, now)):
                since = time.monotonic()
            elif time.monotonic() - since > _STILL:
                break
            before = now
            time.sleep(0.001)
        if self._threads.running:
            self._say("a thread that the step started was still running when the step ended")

    def _places(self) -> dict[int, tuple[Any, int]]:
        """Positions of the other threads: the innermost frame of each, and its instruction."""
        frames = sys._current_frames()
        others = self._threads.idents.keys() - {threading.get_ident()}
        return {n: (frames[n], frames[n].f_lasti) for n in others if n in frames}

    def _say(self, text: str) -> None:
        tape = self._tape
        with tape.lock:
            tape.values.assume(UNRECORDED, f"{text}: what it runs is not counted")

    def _started(self, original: Callable[..., Any], thread: threading.Thread) -> Any:
        started_here = self._threads.here() and not self._tape.here.submitting
        if started_here and type(thread).__module__ not in _WATCHERS:
            torch_private.DYNAMO_LATER.load()  # no other thread sees torch while it is imported
            run = self._task(thread.run)

            def once() -> None:
                del thread.__dict__["run"]
                run()

            thread.__dict__["run"] = once
        return original(thread)

    def _submitted(
        self, original: Callable[..., Any], pool: Any, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._threads.here():
            return original(pool, function, *args, **kwargs)
        torch_private.DYNAMO_LATER.load()
        here = self._tape.here
        before, here.submitting = here.submitting, True  # the threads of the pool serve others too
        try:
            return original(pool, self._task(function), *args, **kwargs)
        finally:
            here.submitting = before

    def _elsewhere(self, original: Callable[..., Any], worker: Any, *args: Any, **kw: Any) -> Any:
        if self._threads.here() and not self.told_of_forks:
            self._say("the step hands work to another process")
        return original(worker, *args, **kw)

    def _task(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, recorded when another thread runs it."""
        here = self._tape.here
        device = here.device or overrides.default_device()
        start = list(here.stack), list(here.modules), here.part, here.function
        source, paused = source_line(3) or here.source, here.paused
        leader = self._threads.idents[threading.get_ident()]

        @functools.wraps(function, updated=())
        def task(*args: Any, **kwargs: Any) -> Any:
            leave = self.enter_here(device, leader)
            if leave is None:  # it is recorded already, or no more
                return function(*args, **kwargs)
            here.stack, here.modules, here.part, here.function = start
            here.source, here.paused = source, paused
            try:
                return function(*args, **kwargs)
            finally:
                leave()

        return task

    def enter_here(self, device: torch.device, leader: int) -> Callable[[], None] | None:
        """Begin to follow this thread; return its undo, None if there is nothing to do.

        leader: the thread whose work it does.
        """
        tape, ident = self._tape, threading.get_ident()
        with tape.lock:
            if not tape.live or ident in self._threads.idents or Scope.current() is not None:
                return None
            self._threads.idents[ident] = leader
            self._threads.entered += 1
            tape.rolling.depends()
        undo = contextlib.ExitStack()
        undo.enter_context(self._scope.entered())
        undo.enter_context(carried_here())
        undo.enter_context(self._functions(device))
        follower = Follower(tape, self._dispatch)
        overrides.push(follower)
        undo.callback(overrides.pop, follower)
        multithreading = torch_private.is_multithreading_enabled()
        torch_private.set_multithreading_enabled(False)
        undo.callback(torch_private.set_multithreading_enabled, multithreading)
        here = tape.here
        here.device = device

        def leave() -> None:
            self.leaving()
            undo.close()
            with tape.lock:
                here.__init__()  # type: ignore[misc]
                self._threads.idents.pop(ident, None)

        return leave
