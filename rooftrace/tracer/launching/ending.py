"""How a program ends: what it asked to run at its end, its threads, and being stopped."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from rooftrace.errors import RequestError
from rooftrace.tracer.launching.records import HardExit, Stopped
from rooftrace.tracer.patches import original_of, put

GENTLE = 3
"""How often a program that goes on is told to stop, before its process ends where it stands."""
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

    It is made in the main thread, where it may run a handler of a signal.  give_up: ends the
    process at once, as if the program had ended where it stands; for one that goes on after it was
    told to stop several times.
    """

    def __init__(self, give_up: Callable[[], object]) -> None:
        self._asked, self._give_up = 0, give_up
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._stop_here)

    def stop(self) -> None:
        """Raise Stopped in the running call, and in the main thread, which may wait for it."""
        self._asked += 1
        main = threading.main_thread()
        if threading.current_thread() is main:
            self._stop_here()
        if _SIGNAL is not None and signal.getsignal(_SIGNAL) == self._stop_here:
            signal.pthread_kill(main.ident or 0, _SIGNAL)
        raise Stopped

    def _stop_here(self, *signalled: Any) -> None:
        if self._asked > GENTLE:
            self._give_up()
        raise Stopped


_SIGNAL: Any = getattr(signal, "SIGUSR2", None)


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


def shut_down(before: set[threading.Thread], waiting: bool) -> None:
    """Do what Python does at the end of a program: end its pools, wait for its threads, call its
    exit functions.

    before: threads that are not the program's.  waiting: False, where the program was stopped:
    its threads have some seconds.
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
    atexit._run_exitfuncs()  # they print what they raise
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sys.stdout.flush()


def leave(code: int, error: BaseException | None) -> NoReturn:
    """End this process at once, as Python ends one: an error is printed."""
    if error is not None:
        traceback.print_exception(error)
        code = 1
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sys.stderr.flush()
    original_of(os, "_exit")(code)
    raise AssertionError
