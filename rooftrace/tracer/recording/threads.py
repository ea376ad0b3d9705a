"""Threads: work that the traced code hands to other threads is recorded like its own.

Dispatch modes, function modes and the default device belong to one thread.  A recorder is entered
in the threads that its code starts, around the calls that it submits to a pool, and in any thread
that calls one of its modules.  Threads of anybody else run as they are.  Ops are recorded one at a
time, under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooftrace.tracer.patches import Scope, contexts, original_of, replaced
from rooftrace.tracer.recording.autocast import carried_here
from rooftrace.tracer.recording.functions import Functions
from rooftrace.tracer.source import source_line
from rooftrace.tracer.tape import Tape
from rooftrace.tracer.vocabulary import UNRECORDED

_PATIENCE = 30.0
"""Seconds that a thread of the step may go on computing after the step has returned."""
_STILL = 0.1
"""Seconds in which a thread that was told to go on wakes up, also on a busy machine."""
_WATCHERS = frozenset({"tqdm._monitor"})
"""Modules whose threads look after progress bars, and compute nothing."""


Dispatch = Callable[..., Any]
"""The `__torch_dispatch__` of a recorder."""


class Follower(TorchDispatchMode):
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
        """Where the other threads stand: the innermost frame of each, and its instruction."""
        frames = sys._current_frames()
        others = self._threads.idents.keys() - {threading.get_ident()}
        return {n: (frames[n], frames[n].f_lasti) for n in others if n in frames}

    def _say(self, text: str) -> None:
        tape = self._tape
        with tape.lock:
            tape.values.assume(UNRECORDED, f"{text}: what it runs is not counted")

    def _started(self, original: Callable[..., Any], thread: threading.Thread) -> Any:
        own = self._threads.here() and not self._tape.here.submitting
        if own and type(thread).__module__ not in _WATCHERS:
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
        here = self._tape.here
        before, here.submitting = here.submitting, True  # the pool's own threads serve others too
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
        device = here.device or contexts.default_device()
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
        """Begin to follow this thread; returns what ends that, None if there is nothing to do.

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
        contexts.push(follower)
        undo.callback(contexts.pop, follower)
        multithreading = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        undo.callback(torch._C._set_multithreading_enabled, multithreading)
        here = tape.here
        here.device = device

        def leave() -> None:
            self.leaving()
            undo.close()
            with tape.lock:
                here.__init__()  # type: ignore[misc]
                self._threads.idents.pop(ident, None)

        return leave
