"""Recorders that follow one another in the middle of a script, under whatever modes it has on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rooftrace.tracer.patches import contexts
from rooftrace.tracer.scripts.presenting import Presented
from rooftrace.tracer.scripts.recorders import ScriptRecorder


class RecorderStage:
    """The recorder that is on.

    make: makes one; its argument says whether it records.
    """

    def __init__(self, make: Callable[[bool], ScriptRecorder]) -> None:
        self._make = make
        self.recorder = make(False)

    def open(self) -> None:
        """The script begins: its first recorder is on, and records nothing."""
        self.recorder.__enter__()

    def change(self, prepare: Callable[[ScriptRecorder], None] | None = None) -> ScriptRecorder:
        """Another recorder takes the place of the one that is on, which is returned.

        prepare: is called with the new one before it is on.
        """
        old, new = self.recorder, self._make(True)
        if prepare is not None:
            prepare(new)
        with contexts.exchanging(_is_ours):
            old.give_way(new)
        self.recorder = new
        return old

    def close(self) -> ScriptRecorder:
        """The script has ended: no recorder is on."""
        with contexts.exchanging(_is_ours):
            self.recorder.__exit__(None, None, None)
        return self.recorder


def _is_ours(mode: Any) -> bool:
    return isinstance(mode, (ScriptRecorder, Presented))
