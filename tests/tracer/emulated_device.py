"""An H100 that is not there, for tests: memory and time are what the test says."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import overrides

from rooftrace.hardware import load_chip
from rooftrace.scripts.fake_cuda import Device, emulate
from rooftrace.scripts.fake_cuda.entering import _forget_answers
from rooftrace.tracer.recording import overrides as replacing
from rooftrace.tracer.sharding import fsdp


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
    """Inside, torch sees `count` devices of a chip, of which this process has one.

    A script has a process of its own for that.  Here it is undone at the end, for the next test.
    """
    own = Emulation()
    device = Device.of(load_chip(chip), count)
    queue = fsdp.DeviceModule.current_stream()
    dtype, finders = torch.get_default_dtype(), [*sys.meta_path]
    with put_back():
        emulate(device, own.bytes, own.ticks, index, own.assume, own.told.append)
        try:
            yield own
        finally:
            fsdp.select(queue)
            torch.set_default_device(None)
            torch.set_default_dtype(dtype)
            overrides._pop_mode()  # type: ignore[no-untyped-call]
            sys.meta_path[:] = finders
    _forget_answers()


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """At the end what was replaced for the whole process is as before."""
    places: list[tuple[Any, str]] = []
    put = replacing.put

    def noted(home: Any, replacements: Mapping[str, Any]) -> None:
        places.extend((home, name) for name in replacements)
        put(home, replacements)

    homes = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("rooftrace.") and vars(module).get("put") is put
    ]
    with contextlib.ExitStack() as undo:
        for module in homes:
            undo.enter_context(mock.patch.object(module, "put", noted))
        try:
            yield
        finally:
            for home, name in places:
                guard = replacing._GUARDS.pop((id(home), name), None)
                if guard is not None:
                    guard.instead = guard.original
                    guard.remove()
