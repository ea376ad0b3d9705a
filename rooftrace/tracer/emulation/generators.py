"""Random generators of the device: their seeds and states, on the host.

A generator of a real device draws on the device.  Tensors there carry no numbers, so only what a
script does with seeds and states is kept: set, saved and put back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rooftrace.tracer.emulation.state import Answers, Emulation

_Original: Any = torch.Generator


class OnDevice(_Original):  # type: ignore[misc]
    """A generator that says it is the device's."""

    index = 0

    @property
    def device(self) -> torch.device:
        """The device that it would draw on."""
        return torch.device("cuda", self.index)

    def clone_state(self) -> Any:
        """Another generator in the same state."""
        return _in_state(self.index, self.get_state())

    def __reduce__(self) -> Any:
        return _in_state, (self.index, self.get_state())


class _Kind(type):
    """`isinstance(generator, torch.Generator)` holds for those made before, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Original)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _Original)


def made(index: int, seed: int | None = None) -> Any:
    """A generator of one device."""
    generator = OnDevice()
    generator.index = index
    if seed is not None:
        generator.manual_seed(seed)
    return generator


def _in_state(index: int, state: torch.Tensor) -> Any:
    generator = made(index)
    generator.set_state(state)
    return generator


_SEED = 67280421310721
"""The seed of torch's generators until somebody sets one."""


def answers(here: Emulation) -> Iterator[Answers]:
    """The generators of all devices, and `torch.Generator`, which makes others of them."""
    of_devices = tuple(made(index, _SEED) for index in range(here.device.count))
    yield torch.cuda, {"default_generators": of_devices}

    class Generator(metaclass=_Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            place = torch.device(device)
            if place.type != "cuda":
                return _Original(device)
            return made(here.current if place.index is None else place.index, _SEED)

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    yield torch, {"Generator": Generator}
