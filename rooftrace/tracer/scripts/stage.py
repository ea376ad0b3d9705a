"""Recorders that follow one another in the middle of a script, under whatever modes it has on.

One thread leads: what it does makes turns.  That is the script's main one until another takes the
lead, which it may as often as no turn is open halfway.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rooftrace.tracer.scripts.recorders import ScriptRecorder

_MOMENT = 0.005
"""Seconds between two looks at a thread that another waits for."""


class RecorderStage:
    """The recorders that are on: one in each thread that has led so far and is not at its end.

    make: makes one; its argument says whether it records.
    """

    def __init__(self, make: Callable[[bool], ScriptRecorder]) -> None:
        self._make = make
        self._main = self._leader = threading.get_ident()
        self._recorders = {self._main: make(False)}
        self._turns = threading.RLock()  # of the thread that looks at turns or changes them
        self._holder: int | None = None  # that thread
        self.unrecorded = 0  # ops of recorders that were taken off

    @property
    def recorder(self) -> ScriptRecorder:
        """That of the thread that leads."""
        return self._recorders[self._leader]

    @property
    def here(self) -> ScriptRecorder:
        """That of the running thread, or that of the leading one, which follows it."""
        return self._recorders.get(threading.get_ident(), self.recorder)

    @property
    def leads(self) -> bool:
        """Whether the running thread is the one that leads."""
        return threading.get_ident() == self._leader

    def open(self) -> None:
        """The script begins: its first recorder is on, and records nothing."""
        self.recorder.__enter__()

    @property
    def is_aside(self) -> bool:
        """Whether the running thread has led and does not now: nothing that it runs is recorded."""
        return not self.leads and threading.get_ident() in self._recorders

    @property
    def waits(self) -> bool:
        """Whether the leading thread waits for others."""
        return self.recorder.threads.awaits_others(self._leader)

    @contextlib.contextmanager
    def turn(self) -> Iterator[bool]:
        """Inside, no other thread takes the lead.

        False where another one has a call under way that waits, perhaps for this thread.
        """
        while not (mine := self._turns.acquire(timeout=_MOMENT)):
            holder = self._holder
            if holder is not None and self.recorder.threads.awaits_others(holder):
                yield False
                return
        outer, self._holder = self._holder, threading.get_ident()
        try:
            yield mine
        finally:
            self._holder = outer
            self._turns.release()

    def lead(self, first: Callable[[], None], ended: Callable[[], None]) -> bool:
        """Have the running thread lead; False where no recorder has followed it.

        The recorder of the thread that led stays on.  first: is called before this thread leads.
        ended: is called at the end of its task, if it leads then.
        """
        ident = threading.get_ident()
        if ident in self._recorders:
            first()
        else:
            new = self._make(False)
            if not new.lead_here(first, lambda: self._leave(ident, ended)):
                return False
            self._recorders[ident] = new
        self._leader = ident
        return True

    def _leave(self, ident: int, ended: Callable[[], None]) -> ScriptRecorder:
        """A thread that has led is at the end of its task: its recorder, which is still on."""
        with self._turns:
            if self._leader == ident:
                ended()
                self._leader = self._main
            last = self._recorders.pop(ident)
            self.unrecorded += last.unrecorded
        return last

    def change(self, prepare: Callable[[ScriptRecorder], None] | None = None) -> ScriptRecorder:
        """Another recorder takes the place of the leading thread's, which is returned.

        prepare: is called with the new one before it is on.  In another thread it only records no
        more: it goes on there until that thread leads again.
        """
        old = self.recorder
        if not self.leads:
            old.stop()
            return old
        new = self._make(True)
        if prepare is not None:
            prepare(new)
        old.give_way(new)
        self._recorders[self._leader] = new
        return old

    def close(self) -> ScriptRecorder:
        """The script has ended: no recorder is on in the main thread."""
        last = self._recorders[self._main]
        self.unrecorded += last.unrecorded
        last.give_way(None)
        return last
