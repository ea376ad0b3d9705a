"""Recorders that follow one another in the middle of a script, under whatever modes it has on.

They are on in the thread that leads: the script's main one, until another thread leads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rooftrace.tracer.scripts.recorders import ScriptRecorder


class RecorderStage:
    """The recorder that is on.

    make: makes one; its argument says whether it records.
    """

    def __init__(self, make: Callable[[bool], ScriptRecorder]) -> None:
        self._make = make
        self.recorder = make(False)
        self._main = self._leader = threading.get_ident()

    @property
    def leads(self) -> bool:
        """Whether the running thread is the one that leads."""
        return threading.get_ident() == self._leader

    def open(self) -> None:
        """The script begins: its first recorder is on, and records nothing."""
        self.recorder.__enter__()

    def lead(self, ended: Callable[[], None]) -> bool:
        """Have the running thread lead until its task ends, if the main one leads and waits for it.

        What the main thread has on goes on, and records nothing.  ended: is called at the end of
        the task.
        """
        if self._leader != self._main:
            return False
        before, new = self.recorder, self._make(False)

        def end() -> None:
            ended()
            self.recorder, self._leader = before, self._main

        if not new.lead_here(end, waiting=self._main):
            return False
        self.recorder, self._leader = new, threading.get_ident()
        return True

    def change(self, prepare: Callable[[ScriptRecorder], None] | None = None) -> ScriptRecorder:
        """Another recorder takes the place of the one that is on, which is returned.

        prepare: is called with the new one before it is on.
        """
        old, new = self.recorder, self._make(True)
        if prepare is not None:
            prepare(new)
        old.give_way(new)
        self.recorder = new
        return old

    def close(self) -> ScriptRecorder:
        """The script has ended: no recorder is on."""
        self.recorder.give_way(None)
        return self.recorder
