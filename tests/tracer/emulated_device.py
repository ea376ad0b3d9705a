"""An H100 that is not there, for tests: memory and time are what the test says."""

import contextlib
from collections.abc import Iterator

from rooftrace.hardware import load_chip
from rooftrace.tracer.emulation import Device, emulated


class Bytes:
    """Memory of the device, set by the test."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def grow(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def allocated(self) -> int:
        return self.now

    def peak(self) -> int:
        return self.most

    def reset_peak(self) -> None:
        self.most = self.now


class Ticks:
    """Time of the device, set by the test; counts how often the host waited."""

    def __init__(self) -> None:
        self.seconds, self.waits = 0.0, 0

    def synchronize(self) -> None:
        self.waits += 1

    def device_seconds(self) -> float:
        return self.seconds


class Emulation:
    """What a test sets and reads while a device is emulated."""

    def __init__(self) -> None:
        self.bytes, self.ticks = Bytes(), Ticks()
        self.assumed: dict[str, str] = {}
        self.told: list[str] = []

    def assume(self, kind: str, text: str) -> None:
        assert kind not in self.assumed, "each kind is told once"
        self.assumed[kind] = text


@contextlib.contextmanager
def h100(count: int = 1, index: int = 0, chip: str = "h100-sxm") -> Iterator[Emulation]:
    """Inside, torch sees `count` devices of a chip, of which this process has one."""
    own = Emulation()
    device = Device.of(load_chip(chip), count)
    with emulated(device, own.bytes, own.ticks, index, own.assume, own.told.append):
        yield own
