"""The time that a script sees: that of this machine, or that of the chip and its system.

Simulated time passes as on this machine while the script sets up, and between its turns.  A turn
takes the seconds that it is expected to take on the device, or those that its data loaders took
here, whichever are more; what recording it took here does not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.patches import original_of, replaced
from rooftrace.tracer.scripts.records import TurnPiece

_CLOCKS = ("time", "perf_counter", "monotonic")
"""Functions of the standard library that give seconds, each with one for nanoseconds."""


class HostClock:
    """That of this machine: the device is done as soon as its work is launched."""

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def device_seconds(self) -> float:
        """The time of this machine; seconds from an unknown beginning."""
        return perf_counter()

    def began(self) -> None:
        """A turn begins."""

    def ended(self, pieces: Sequence[TurnPiece], loading: float) -> None:
        """A turn of these pieces has ended; data loaders took `loading` seconds in it."""


class SimulatedClock(HostClock):
    """That of the device.

    seconds: of a graph on it.  graphs: those of the run so far.  settle: ends the open turn if all
    of it has run, before the time is told; it says how far an open turn is, from 0 to 1.
    """

    def __init__(
        self,
        seconds: Callable[[OpGraph], float],
        graphs: Sequence[OpGraph],
        settle: Callable[[], float],
    ) -> None:
        self._seconds, self._graphs, self._settle = seconds, graphs, settle
        self._of: dict[int, float] = {}  # seconds by the place of the graph
        self._start = perf_counter()
        self._shift = 0.0  # simulated seconds less those of this machine
        self._opened: float | None = None  # when the open turn began, by this machine
        self._last = 0.0  # seconds of the last turn

    def began(self) -> None:
        """A turn begins."""
        self._opened = perf_counter()

    def ended(self, pieces: Sequence[TurnPiece], loading: float) -> None:
        """A turn of these pieces has ended; data loaders took `loading` seconds in it."""
        if self._opened is not None:
            self._shift -= perf_counter() - self._opened
        self._opened = None
        self._last = max(sum(self._piece(p.graph) * p.times for p in pieces), loading)
        self._shift += self._last

    def _piece(self, place: int) -> float:
        if place not in self._of:
            began = perf_counter()
            self._of[place] = self._seconds(self._graphs[place])
            self._shift -= perf_counter() - began
        return self._of[place]

    def device_seconds(self) -> float:
        """Simulated seconds since the beginning of the run."""
        done = self._settle()
        if self._opened is None:
            return perf_counter() - self._start + self._shift
        return self._opened - self._start + self._shift + done * self._last

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Inside, functions of `time` give simulated time to the threads of the scope."""
        clocks: Any = time
        stand_ins: dict[str, Any] = {}
        for name in _CLOCKS:
            offset = original_of(clocks, name)() - self.device_seconds()
            stand_ins[name] = _from(self.device_seconds, offset, 1.0)
            stand_ins[f"{name}_ns"] = _from(self.device_seconds, offset, 1e9)
        with replaced(clocks, stand_ins):
            yield


def _from(seconds: Callable[[], float], offset: float, scale: float) -> Callable[[], float]:
    if scale == 1.0:
        return lambda: offset + seconds()
    return lambda: int((offset + seconds()) * scale)
