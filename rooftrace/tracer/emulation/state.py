"""What one emulation knows while it lasts: its device, its meter and clock, what it assumed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol

from rooftrace.tracer.emulation.facts import Device

Assume = Callable[[str, str], None]
"""Takes the kind and the text of an assumption."""
Tell = Callable[[Literal["capture", "captured", "replay", "replayed"]], None]
"""Takes what happens to a CUDA graph: its capture or a replay of it begins, or has ended."""
Answers = tuple[Any, dict[str, Any]]
"""A module or a class of torch, and its attributes that the emulated device answers, by name."""


class Meter(Protocol):
    """Memory of the device, as a recording knows it; bytes."""

    def allocated(self) -> int:
        """Bytes alive now."""

    def peak(self) -> int:
        """The largest number of bytes alive since the last reset."""

    def reset_peak(self) -> None:
        """The peak is what is alive now."""


class Clock(Protocol):
    """Time of the host and the device: simulated, or that of this machine."""

    def synchronize(self) -> None:
        """The host waits until the device has done all that was launched."""

    def device_seconds(self) -> float:
        """When the device will have done all that was launched so far; seconds."""


class _Thread(threading.local):
    index: int | None = None  # the device that the thread chose


class Emulation:
    """One emulation.  index: the device of this process, of `device.count`.

    initialized: whether a call has initialized torch.cuda.
    settings: what the code set and may read again, by name.
    """

    def __init__(
        self,
        device: Device,
        meter: Meter,
        clock: Clock,
        index: int = 0,
        assume: Assume | None = None,
        tell: Tell | None = None,
    ) -> None:
        self.device, self.meter, self.clock, self.index = device, meter, clock, index
        self.tell: Tell = tell or (lambda event: None)
        self.initialized = False
        self.settings: dict[str, object] = {}
        self._assume = assume
        self._assumed: set[str] = set()
        self._thread = _Thread()
        self._visible = os.environ.get(_VISIBLE)

    def assume(self, kind: str, text: str) -> None:
        """Tell of an answer that follows a policy, once for each kind."""
        if self._assume is not None and kind not in self._assumed:
            self._assumed.add(kind)
            self._assume(kind, text)

    @property
    def used(self) -> bool:
        """Whether torch.cuda is initialized: a first call or a first tensor does that."""
        return self.initialized or self.meter.allocated() > 0

    @property
    def count(self) -> int:
        """The devices that the code sees: fewer where it set CUDA_VISIBLE_DEVICES itself."""
        asked = os.environ.get(_VISIBLE)
        if asked is None or asked == self._visible:
            return self.device.count
        names = [name.strip() for name in asked.split(",")]
        seen = 0
        for name in names:
            if (name.isdigit() and int(name) >= self.device.count) or name in ("", "-1"):
                break  # as CUDA does: what follows an unknown device is not seen
            seen += 1
        return seen

    @property
    def current(self) -> int:
        """The device that the running thread chose."""
        chosen = self._thread.index
        return min(self.index, max(self.count - 1, 0)) if chosen is None else chosen

    def choose(self, index: int) -> None:
        """From here on the running thread uses this device; a negative number changes nothing."""
        if index < 0:
            return
        if index >= self.count:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal: device {index} of {self.count} emulated"
            )
        self._thread.index = index

    def exchange(self, index: int) -> int:
        """The device that the running thread used up to here; from here on it is `index`."""
        if index < 0:
            return -1
        before = self.current
        self.choose(index)
        return before


_VISIBLE = "CUDA_VISIBLE_DEVICES"
