"""The chip of the device at hand: by its name, or measured."""

from __future__ import annotations

import re
from functools import lru_cache

import torch

from rooftrace._progress import tell
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip, available_chips, load_chip
from rooftrace.hardware.units import format_capacity
from rooftrace.measured.bench import devices, measure_chip

_SECONDS = 8.0
"""For the rates of a CPU."""
_NEAR = 0.1
"""The relative difference between two capacities that still are of one chip."""
_FORMS = ("pcie", "nvl")
"""Words of a device's name that tell it from its relatives with other rates."""


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
    words = set(re.findall(r"[a-z0-9]+", device.lower()))
    names = [
        name
        for name in devices.chips_called(device)
        if all(form in name for form in _FORMS if form in words)
        and abs(load_chip(name).memory_capacity.value / capacity - 1) < _NEAR
    ]
    if len(names) == 1:
        return names[0]
    several = f"may be {' or '.join(names)}" if names else "is no chip that comes with rooftrace"
    raise RequestError(
        f"chip: this device calls itself {device!r}, has {format_capacity(capacity)} and "
        f'{several}: say chip="NAME", one of {", ".join(available_chips())}, or the path of a '
        "file that `rooftrace measure --chip-only` writes"
    )
