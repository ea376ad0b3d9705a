"""The device that steps run on, and its chip: by its name, or measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip, available_chips, load_chip
from rooftrace.hardware.chipfile import chips_called
from rooftrace.hardware.units import format_capacity
from rooftrace.measured.bench import measure_chip

_SECONDS = 8.0
"""For the rates of a CPU."""
_NEAR = 0.1
"""The relative difference between two capacities that still are of one chip."""


def chip_at_hand(device: torch.device) -> Chip:
    """The chip of a device.  A CPU is measured, once in a process: that takes some seconds.

    Raises RequestError for a GPU that is none of the chips that come along.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return load_chip(name_of(properties.name, properties.total_memory))
    return _measured(str(device))


@lru_cache
def _measured(device: str) -> Chip:
    tell("measuring the rates of this device")
    return measure_chip(device, _SECONDS)


def name_of(device: str, capacity: int) -> str:
    """The name of the chip that calls itself `device` and has so many bytes.

    Raises RequestError where none, or more than one, fits.
    """
    names = [
        name
        for name in chips_called(device)
        if abs(load_chip(name).memory_capacity.value / capacity - 1) < _NEAR
    ]
    if len(names) == 1:
        return names[0]
    several = f"may be {' or '.join(names)}" if names else "is no chip that comes with rooftrace"
    raise RequestError(
        f"chip: this device calls itself {device!r}, has {format_capacity(capacity)} and "
        f'{several}: say chip="NAME", one of {", ".join(available_chips())}, or the path of a '
        "file that `rooftrace measure --chip-only` writes"
    )


def device_of(modules: Sequence[Any]) -> torch.device:
    """The device of the modules' first tensor."""
    if not modules:
        raise RequestError("live(): pass the module, or the modules, that a step calls")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise RequestError(
                f"live({module!r:.60}): expected the modules that a step calls, got "
                f"{type(module).__name__}; a function of yours goes inside `with live.step():`"
            )
    tensors = (t for module in modules for t in (*module.parameters(), *module.buffers()))
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise RequestError(
            f"{type(modules[0]).__name__} is on {device}: expected cpu or cuda, where steps run"
        )
    return device
