"""How a program ends: what it asked to run at its end, its threads, and being stopped."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any, NoReturn

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.records import HardExit, Stopped
from rooftrace.tracer.patches import original_of, put

GENTLE = 3
"""How often a program that goes on is told to stop as an exception of its own call, before every
jump or call that it makes raises."""
_PATIENCE = 5.0
"""Seconds in which threads of a program may end after it."""
_REPLACING = ("execv", "execve", "execl", "execle", "execlp", "execlpe", "execvp", "execvpe")


def raise_exits() -> None:
    """From here on `os._exit` raises HardExit, and the program becomes no other one."""
    own = os.getpid()

    def leave(status: int) -> None:
        if os.getpid() != own:  # a process that the program forked
            original_of(os, "_exit")(status)
        raise HardExit(status)

    def become(name: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != own:
                return original_of(os, name)(*args, **kwargs)
            raise RequestError(
                f"os.{name}: the program would become another one, of which nothing is recorded; "
                "run that program itself"
            )

        return refuse

    there = [name for name in _REPLACING if hasattr(os, name)]
    put(os, {"_exit": leave} | {name: become(name) for name in there})


class Stopping:
    """Ends a program that runs, by `stop` in one of its calls.

    It is made in the main thread, where it may run a handler of a signal.
    """

    def __init__(self) -> None:
        self.asked = 0
        """How often the program was told to stop: all but the last were swallowed."""
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, _stopped)

    def stop(self) -> None:
        """Raise Stopped in the running call, and in the main thread, which may wait for this one.

        A program that swallowed it several times is then stopped at any jump or call, also of its
        handlers.
        """
        self.asked += 1
        main = threading.main_thread()
        other = threading.current_thread() is not main and _SIGNAL is not None
        if other and signal.getsignal(_SIGNAL) is _stopped:
            signal.pthread_kill(main.ident or 0, _SIGNAL)
        if self.asked > GENTLE:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not _is_start(frame):
                frame.f_trace = _stopping
                frame = frame.f_back
            sys.settrace(_stopping)  # the last: our own lines raise from here on
        raise Stopped


_SIGNAL: Any = getattr(signal, "SIGUSR2", None)


def _stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped


class LostErrors:
    """Errors that end a thread of the program, and those of tasks whose result nobody asked for."""

    def __init__(self) -> None:
        self._of_threads: list[tuple[str, BaseException]] = []
        self._of_tasks: dict[int, tuple[str, BaseException]] = {}  # by the identity of the future
        self._futures: list[Future[Any]] = []  # that keeps their identities

    def watch(self) -> None:
        """From here on errors are noted, in every thread."""
        said, failed = threading.excepthook, Future.set_exception

        def ended(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None and not isinstance(args.exc_value, Stopped | HardExit):
                name = args.thread.name if args.thread is not None else "a thread"
                self._of_threads.append((name, args.exc_value))
                said(args)

        def set_exception(future: Future[Any], error: BaseException | None) -> None:
            if error is not None and not isinstance(error, Stopped | HardExit):
                self._futures.append(future)
                self._of_tasks[id(future)] = threading.current_thread().name, error
            failed(future, error)

        def asking(name: str) -> Callable[..., Any]:
            original = getattr(Future, name)

            def asked(future: Future[Any], *args: Any, **kwargs: Any) -> Any:
                self._of_tasks.pop(id(future), None)
                try:
                    return original(future, *args, **kwargs)
                finally:
                    self._of_tasks.pop(id(future), None)

            return asked

        threading.excepthook = ended
        setattr(Future, "set_exception", set_exception)  # noqa: B010  # mypy allows no assignment
        for name in ("result", "exception", "add_done_callback"):
            setattr(Future, name, asking(name))

    def first(self) -> tuple[str, BaseException] | None:
        """The name of a thread and its error; None where there was none."""
        return next(iter((*self._of_threads, *self._of_tasks.values())), None)


def _is_start(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == f"{__package__}.program"


def _stopping(frame: FrameType, event: str, argument: Any) -> Any:
    """A trace function: with each line another Stopped comes, at the next jump or call.

    Python takes a trace function off that raises, so this one does not raise itself.
    """
    if event == "line":
        _raise_soon(Stopped)
    return _stopping


def _raise_soon(kind: type[BaseException]) -> None:
    """Let this thread raise an exception at its next jump backwards or call."""
    thread = ctypes.c_ulong(threading.get_ident())
    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(kind))


def calm() -> None:
    """The program is over: nothing of it raises Stopped any more.

    What is still to come is let come here.  Taking it back would leave a mark in Python 3.11, for
    which a trace function of somebody else would wait for ever.
    """
    sys.settrace(None)
    try:
        _raise_soon(Stopped)
        for _ in range(1000):
            pass
    except Stopped:
        pass


def shut_down(before: set[threading.Thread], waiting: bool) -> tuple[str, ...]:
    """Do what Python does at the end of a program: end its pools, wait for its threads, call its
    exit functions.

    before: threads that are not the program's.  waiting: False, where the program was stopped:
    its threads have some seconds.  Returns the names of those that go on.
    """
    own = [thread for thread in threading.enumerate() if thread not in before]

    def end_threads() -> None:
        for function in reversed(vars(threading).get("_threading_atexits", ())):
            function()
        for thread in own:
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()

    ending = threading.Thread(target=end_threads, daemon=True)
    ending.start()
    ending.join(None if waiting else _PATIENCE)
    on = tuple(thread.name for thread in own if thread.is_alive())
    atexit._run_exitfuncs()  # they print what they raise
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sys.stdout.flush()
    return on


def leave(code: int, error: BaseException | None) -> NoReturn:
    """End this process at once, as Python ends one: an error is printed."""
    if error is not None:
        traceback.print_exception(error)
        code = 1
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sys.stderr.flush()
    original_of(os, "_exit")(code)
    raise AssertionError
