"""This process and others: its stack, changes that its threads share, Pythons that it starts.

Those import nothing from the working folder, as the installed command.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

_SAFE = "PYTHONSAFEPATH"

ONE_TASK: list[str] = []
"""Not empty in a process of the command line: it records in one thread, for one user's request."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_stack(function: _Function) -> _Function:
    """The function, called on a stack of Python's that has room for all that it calls.

    Since 3.11 CPython maps memory for frames by 16 KiB, and unmaps each part as soon as the calls
    in it have ended: a loop whose calls begin a part maps one at each call.  For a frame of this
    size it maps 1 MiB at once, of which half is left.
    """
    changed: Any = function
    changed.__code__ = changed.__code__.replace(co_stacksize=_SLOTS)
    return function


_SLOTS = 2**16
"""Slots of 8 bytes: with CPython's margin more than half a MiB, and it maps a power of 2."""


@contextlib.contextmanager
def safe_path() -> Iterator[None]:
    """Inside, Pythons that this process starts look for no module in the working folder.

    multiprocessing starts them with `-c`, which looks there first: a `multiprocessing.py` of a
    cloned repository would run.  They get the import path of this process.  Python 3.10 does not
    have the variable.
    """
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE, None)
        if before is not None:
            os.environ[_SAFE] = before


def processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def started_again() -> dict[str, str]:
    """The environment for `python -m` of a module of this rooftrace, not of the working folder."""
    path = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    return {**os.environ, _SAFE: "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}


class Shared:
    """A change of the process that the first user makes and the last one undoes.

    install: makes the change; returns what undoes it.
    """

    def __init__(self, install: Callable[[], Callable[[], Any]]) -> None:
        self._install = install
        self._lock = threading.RLock()
        self._count = 0
        self._undo: Callable[[], Any] | None = None

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Inside, the change is made."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    def take(self) -> None:
        """One more user: the change is made until it is given back."""
        with self._lock:
            if not self._count:
                self._undo = self._install()
            self._count += 1

    def give_back(self) -> None:
        """One user less."""
        with self._lock:
            self._count -= 1
            if not self._count and self._undo is not None:
                undo, self._undo = self._undo, None
                undo()


def alone() -> bool:
    """Whether no other thread runs Python.  One that starts later is started by the traced code,
    and belongs to it.

    Nothing runs between the call and `len`: another thread, whose frame we had in hand, would keep
    the variables of a function that has ended.  No collection either: until Python 3.12 one could
    begin in the call, under the lock that the end of a `threading.local` waits for.
    """
    with collector_off.used():
        return next(map(len, iter(sys._current_frames, None))) == 1


def _collector_off() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()
    return gc.enable


collector_off = Shared(_collector_off)
"""No garbage collection, in any thread: from the first that needs that to the last."""
