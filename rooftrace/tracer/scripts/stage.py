"""Which thread of a script makes turns: its main one, until another takes the lead.

One may do so as often as no turn is open halfway.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rooftrace.tracer.scripts.recorders import ScriptRecorder

_MOMENT = 0.005
"""Seconds between two looks at a thread that another waits for."""


class RecorderStage:
    """The recorder of a run, and the thread whose work it records.

    ended: is called at the end of the task of another thread than the main one, if that leads.
    """

    def __init__(self, recorder: ScriptRecorder, ended: Callable[[], None]) -> None:
        self.recorder, self._ended = recorder, ended
        self._main, self._threads = threading.get_ident(), recorder.threads
        self._turns = threading.RLock()  # of the thread that looks at turns or changes them
        self._holder: int | None = None  # that thread
        recorder.tell_of_ends(self._leave)

    @property
    def leads(self) -> bool:
        """Whether the running thread is the one that leads."""
        return threading.get_ident() == self._threads.leader

    @property
    def is_aside(self) -> bool:
        """Whether the running thread has led and does not now: nothing that it runs is recorded."""
        here = threading.get_ident()
        return not self.leads and self._threads.idents.get(here) == here

    @property
    def waits(self) -> bool:
        """Whether the leading thread waits for others."""
        return self._threads.awaits_others(self._threads.leader)

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Inside, no other thread takes the lead.

        False where another one has a call under way that waits, perhaps for this thread.
        """
        while not (mine := self._turns.acquire(timeout=_MOMENT)):
            holder = self._holder
            if holder is not None and self._threads.awaits_others(holder):
                yield False
                return
        outer, self._holder = self._holder, threading.get_ident()
        try:
            yield mine
        finally:
            self._holder = outer
            self._turns.release()

    def lead(self, first: Callable[[], None]) -> bool:
        """Have the running thread lead; False where nothing that it runs is seen.

        first: is called before this thread leads.
        """
        if not self._threads.here():
            return False
        first()
        here = threading.get_ident()
        self._threads.idents[here] = self._threads.leader = here
        self.recorder.renew(record=False)
        return True

    def _leave(self) -> None:
        """A thread is at the end of its task."""
        with self._turns:
            if self.leads:
                self._ended()
                self._threads.leader = self._main
