"""Threads: work that the traced code hands to other threads is recorded like its own.

Dispatch modes, function modes and the default device belong to one thread.  A recorder is entered
in the threads that its code starts, around the calls that it submits to a pool, and in any thread
that calls one of its modules.  Threads of anybody else run as they are.  Ops are recorded one at a
time, under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from rooftrace.tracer.graph import UNRECORDED
from rooftrace.tracer.recording.functions import Functions
from rooftrace.tracer.recording.origin import source_line

if TYPE_CHECKING:
    from rooftrace.tracer.recording.recorder import Recorder

_PATIENCE = 30.0
"""Seconds that a thread of the step may go on computing after the step has returned."""
_WAITING = frozenset({threading.__file__, queue.__file__, selectors.__file__})
"""Files of the standard library in which a thread stands that waits for others."""


class Here(threading.local):
    """Where one thread stands in the code that is being traced."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []
        self.modules: list[Any] = []
        self.called_for: list[Any] = []  # the autograd node that ran when each module was called
        self.part = "forward"
        self.function = ""
        self.after_backward = False
        self.inside = 0
        self.paused = False  # what runs does not enter the graph
        self.functions: Functions | None = None  # the mode under which autograd runs
        self.source = ""  # the line that handed this thread its work
        self.device: torch.device | None = None  # where another thread makes tensors
        self.submitting = False
        self.leave: Callable[[], None] | None = None  # what a module's call has begun


class _Follower(TorchDispatchMode):
    """Hands the ops of another thread to the recorder, while that one records."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.recorder.live:  # a thread that outlives the capture
            return func(*args, **(kwargs or {}))
        return self.recorder.__torch_dispatch__(func, types, args, kwargs)


class Threads:
    """The threads in which one recorder records."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._idents: set[int] = set()
        self.entered = 0
        """How often another thread was entered so far."""

    @property
    def running(self) -> bool:
        """Whether another thread than the recorder's own is recorded now."""
        return len(self._idents) > 1

    def here(self) -> bool:
        """Whether the running thread is recorded."""
        return threading.get_ident() in self._idents

    def own(self) -> bool:
        """Whether only the thread that entered the recorder is recorded, and runs."""
        return len(self._idents) == 1 and self.here()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, work that this thread hands to others is recorded."""
        ident = threading.get_ident()
        self._idents.add(ident)
        kinds: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (threading.Thread, "start", self._started),
            (ThreadPoolExecutor, "submit", self._submitted),
            (ProcessPoolExecutor, "submit", self._elsewhere),
            (BaseProcess, "start", self._elsewhere),
        )
        originals = [(kind, name, vars(kind)[name]) for kind, name, _ in kinds]
        for (kind, name, ours), (_, _, original) in zip(kinds, originals, strict=True):
            setattr(kind, name, _method(original, ours))
        try:
            yield
        finally:
            for kind, name, original in originals:
                setattr(kind, name, original)
            self._idents.clear()

    def settle(self) -> None:
        """Let threads that nobody joined come to their end: those that do not are said.

        A thread ends, or waits for others; when all that are left wait, nothing more will run.
        """
        end = time.monotonic() + _PATIENCE
        before: dict[int, tuple[Any, int]] = {}
        while self.running and time.monotonic() < end:
            now = self._places()
            if now == before and all(_waits(frame) for frame, _ in now.values()):
                break
            before = now
            time.sleep(0.001)
        if self.running:
            self._say("a thread that the step started was still running when the step ended")

    def _places(self) -> dict[int, tuple[Any, int]]:
        """Where the other threads stand: the innermost frame of each, and its instruction."""
        frames = sys._current_frames()
        others = self._idents - {threading.get_ident()}
        return {n: (frames[n], frames[n].f_lasti) for n in others if n in frames}

    def _say(self, text: str) -> None:
        recorder = self._recorder
        with recorder.lock:
            recorder.values.assume(UNRECORDED, f"{text}: what it runs is not counted")

    def _started(self, original: Callable[..., Any], thread: threading.Thread) -> Any:
        own = self.here() and not self._recorder.here.submitting
        if own:
            run = self._task(thread.run)

            def once() -> None:
                del thread.__dict__["run"]
                run()

            thread.__dict__["run"] = once
        return original(thread)

    def _submitted(
        self, original: Callable[..., Any], pool: Any, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.here():
            return original(pool, function, *args, **kwargs)
        here = self._recorder.here
        before, here.submitting = here.submitting, True  # the pool's own threads serve others too
        try:
            return original(pool, self._task(function), *args, **kwargs)
        finally:
            here.submitting = before

    def _elsewhere(self, original: Callable[..., Any], worker: Any, *args: Any, **kw: Any) -> Any:
        if self.here():
            self._say("the step hands work to another process")
        return original(worker, *args, **kw)

    def _task(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as it is to run in another thread: recorded."""
        here = self._recorder.here
        device = here.device or torch.get_default_device()
        start = list(here.stack), list(here.modules), here.part, here.function
        source, paused = source_line(3) or here.source, here.paused

        @functools.wraps(function, updated=())
        def task(*args: Any, **kwargs: Any) -> Any:
            with self.entered_here(device) as inside:
                if inside is not None:
                    inside.stack, inside.modules, inside.part, inside.function = start
                    inside.source, inside.paused = source, paused
                return function(*args, **kwargs)

        return task

    @contextlib.contextmanager
    def entered_here(self, device: torch.device) -> Iterator[Here | None]:
        """Record what this thread runs inside; None where it is recorded already, or no more.

        device: on which it makes tensors.
        """
        leave = self.enter_here(device)
        if leave is None:
            yield None
            return
        try:
            yield self._recorder.here
        finally:
            leave()

    def enter_here(self, device: torch.device) -> Callable[[], None] | None:
        """Begin to record this thread, and what ends that; None where there is nothing to do."""
        recorder, ident = self._recorder, threading.get_ident()
        with recorder.lock:
            if not recorder.live or ident in self._idents:
                return None
            self._idents.add(ident)
            self.entered += 1
            recorder.rolling.depends()
        # Modes that enter themselves note what was on in variables that all threads share.
        functions = Functions(recorder, device)
        functions.__enter__()  # type: ignore[no-untyped-call]
        _push_mode(_Follower(recorder))
        multithreading = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        here = recorder.here
        here.device = device

        def leave() -> None:
            torch._C._set_multithreading_enabled(multithreading)
            _pop_mode()
            functions.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            with recorder.lock:
                here.__init__()  # type: ignore[misc]
                self._idents.discard(ident)

        return leave


def _waits(frame: Any) -> bool:
    return frame.f_code.co_filename in _WAITING


def _method(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return method
