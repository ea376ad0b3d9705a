"""The time that a script sees."""

from __future__ import annotations

import time


class HostClock:
    """That of this machine: the device is done as soon as its work is launched."""

    def synchronize(self) -> None:
        """Nothing is waited for."""

    def device_seconds(self) -> float:
        """The time of this machine; seconds from an unknown beginning."""
        return time.perf_counter()
