"""Files of `torch.save`: tensors of the device are written without numbers, and read as such.

What is on the host is written and read as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import serialization

from rooftrace.tracer.emulation.state import Emulation
from rooftrace.tracer.patches import contexts, original_of

_META = "meta"
_NOTES = "_rooftrace"
"""How the names begin of what recordings note on tensors."""


def functions(here: Emulation) -> dict[str, Any]:
    """Functions of torch and of torch.serialization."""
    home: Any = serialization
    save, load = original_of(home, "save"), original_of(home, "load")

    def saved(*args: Any, **kwargs: Any) -> Any:
        here.assume(
            "torch.save",
            "torch.save writes tensors of the device by their shapes and precisions, without "
            "numbers",
        )
        with contexts.plainly():
            return save(*args, **kwargs)

    def loaded(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(map_location, (str, torch.device)) and _is_device(str(map_location)):
            map_location = _META
        with contexts.plainly():
            return load(file, map_location, *args, **kwargs)

    return {"save": saved, "load": loaded}


def placing() -> dict[str, Any]:
    """Functions of torch.serialization that put what was read where it belongs."""
    home: Any = serialization
    place = original_of(home, "default_restore_location")

    def default_restore_location(storage: Any, location: Any) -> Any:
        return place(storage, _META if _is_device(str(location)) else location)

    return {"default_restore_location": default_restore_location}


def states() -> dict[str, Any]:
    """Functions of torch._utils that say what of a tensor's attributes belongs into a file."""
    home: Any = torch._utils
    state_of = original_of(home, "_get_obj_state")

    def _get_obj_state(item: Any) -> Any:
        state = state_of(item)
        return _without_notes(state) if isinstance(state, dict) else state

    return {"_get_obj_state": _get_obj_state}


def _without_notes(state: dict[str, Any]) -> dict[str, Any]:
    """Attributes without those of a recording, which end with it."""
    return {name: item for name, item in state.items() if not name.startswith(_NOTES)}


def tensor_methods() -> dict[str, Any]:
    """Methods of tensors by which they are pickled: those of the device by their shapes."""
    reduce = original_of(torch.Tensor, "__reduce_ex__")

    def __reduce_ex__(tensor: Any, protocol: Any) -> Any:
        with contexts.plainly():
            return reduce(tensor, protocol)

    return {"__reduce_ex__": __reduce_ex__}


def storage_methods() -> dict[str, Any]:
    """Methods of storages that move them to the device."""

    def cuda(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        kind: Any = torch.UntypedStorage
        return kind(storage.nbytes(), device=_META)

    return {"cuda": cuda}


def _is_device(location: str) -> bool:
    return location.partition(":")[0] == "cuda"
