"""Moments of a loop, and the seconds between two of them, without waiting for the device.

On CUDA a moment is an event on the current stream: the host goes on, and the seconds are read when
the device has passed both.  Elsewhere, and with a clock that the caller hands in, it is a number.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Mark = Any
"""A moment: a number of seconds, or a CUDA event."""


class HostMarks:
    """Moments by a clock of the host."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def now(self) -> Mark:
        """This moment."""
        return self._clock()

    def passed(self, mark: Mark) -> bool:
        """Whether the seconds until this moment can be read without waiting."""
        return True

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds from one moment to another."""
        return float(end - start)


class CudaMarks:
    """Moments of a CUDA device, each an event on the stream that is current in the loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Mark:
        """The moment at which the device has done what was queued so far."""
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, mark: Mark) -> bool:
        """Whether the seconds until this moment can be read without waiting."""
        return bool(mark.query())

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds from one moment to another; waits for the later one."""
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # torch gives milliseconds


def marks_for(device: torch.device, clock: Callable[[], float] | None) -> HostMarks | CudaMarks:
    """Moments of a device; by `clock` where the caller has one."""
    if clock is not None:
        return HostMarks(clock)
    return CudaMarks(device) if device.type == "cuda" else HostMarks()
