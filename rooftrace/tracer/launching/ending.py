"""How a program ends: what it asked to run at its end, its threads, and being stopped."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.records import HardExit, Stopped
from rooftrace.tracer.patches import original_of, replaced

GENTLE = 3
"""How often a program that goes on is told to stop as an exception of its own call, before every
jump or call that it makes raises."""
_PATIENCE = 5.0
"""Seconds in which threads of a program may end after it."""
_REPLACING = ("execv", "execve", "execl", "execle", "execlp", "execlpe", "execvp", "execvpe")


class AtExit:
    """Functions that a program registers by `atexit`, which run at its end and not at ours.

    Those that a library registers while it is imported are of the library, which stays.
    """

    def __init__(self) -> None:
        self._functions: list[tuple[Any, Any, Any]] = []
        self._process = os.getpid()

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Inside, the program's calls of `atexit` come here."""
        names = {"register": self._register, "unregister": self._unregister}
        with replaced(atexit, names), replaced(os, self._exits()):
            yield

    def _exits(self) -> dict[str, Any]:
        def leave(status: int) -> None:
            if os.getpid() != self._process:  # a process that the program forked
                original_of(os, "_exit")(status)
            raise HardExit(status)

        def become(name: str) -> Callable[..., Any]:
            def refuse(*args: Any, **kwargs: Any) -> Any:
                if os.getpid() != self._process:
                    return original_of(os, name)(*args, **kwargs)
                raise RequestError(
                    f"os.{name}: the program would become another one, and take this process with "
                    "it; run that program itself"
                )

            return refuse

        there = [name for name in _REPLACING if hasattr(os, name)]
        return {"_exit": leave} | {name: become(name) for name in there}

    def _register(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _importing_library(sys._getframe(1)):
            return original_of(atexit, "register")(function, *args, **kwargs)
        self._functions.append((function, args, kwargs))
        return function

    def _unregister(self, function: Any) -> None:
        self._functions = [entry for entry in self._functions if entry[0] != function]
        original_of(atexit, "unregister")(function)

    def run(self) -> None:
        """Call the functions, the last first; what they raise is printed, as Python does."""
        while self._functions:
            function, args, kwargs = self._functions.pop()
            try:
                function(*args, **kwargs)
            except (Exception, SystemExit, Stopped, HardExit) as error:
                if not isinstance(error, SystemExit | Stopped | HardExit):
                    traceback.print_exception(error)


def _importing_library(frame: FrameType | None) -> bool:
    """Whether the code of a frame runs because an installed module is being imported."""
    inner = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name == "<frozen importlib._bootstrap>":
            return "-packages" in inner or inner.startswith(_STANDARD)
        inner = name if frame.f_code.co_name == "<module>" else inner
        frame = frame.f_back
    return False


_STANDARD = os.path.dirname(os.__file__)


class Stopping:
    """Ends a program that runs, by `stop` in one of its calls."""

    def __init__(self) -> None:
        self.asked = 0
        """How often the program was told to stop: all but the last were swallowed."""

    def stop(self) -> None:
        """Raise Stopped in the running call.

        A program that swallowed it several times is then stopped at any jump or call, also of its
        handlers.
        """
        self.asked += 1
        if self.asked > GENTLE:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not _is_start(frame):
                frame.f_trace = _stopping
                frame = frame.f_back
            sys.settrace(_stopping)  # the last: our own lines raise from here on
        raise Stopped


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


def threads_of(before: set[threading.Thread]) -> tuple[str, ...]:
    """Wait for threads that came after `before`; the names of those that go on.

    Python waits for threads that are no daemons, and ends with the others.
    """
    end = time.monotonic() + _PATIENCE
    own = [thread for thread in threading.enumerate() if thread not in before]
    for thread in own:
        if not thread.daemon and thread is not threading.current_thread():
            thread.join(max(end - time.monotonic(), 0))
    return tuple(thread.name for thread in own if thread.is_alive())
