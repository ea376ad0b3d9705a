"""The interface of a watcher of the code's loops; this default does nothing."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rooftrace.tracer.ops import Call


class LoopWatch:
    """Watches the ops of loops, so that a few turns run instead of all (see rolling/loops)."""

    @property
    def label(self) -> tuple[int, int] | None:
        """The loop that is running, by its serial number, and which of its turns."""
        return None

    def depends(self) -> None:
        """Something ran that may depend on a value: the running loop is not cut short."""

    def saw(self, call: Call, outputs: Sequence[Tensor]) -> bool:
        """Look at an op that has run; False for one that is not to be recorded."""
        return True

    def is_short(self, serial: int) -> bool:
        """Whether the loop of this number was not run in full."""
        return False
