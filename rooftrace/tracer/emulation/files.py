"""Files of `torch.save`: tensors of the device are written without numbers, and read as such.

What is on the host is written and read as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, _weights_only_unpickler as unpickler, serialization

from rooftrace.tracer.emulation.state import Answers, Emulation
from rooftrace.tracer.patches import contexts, original_of

_META = "meta"
_NOTES = "_rooftrace"
"""How the names begin of what recordings note on tensors."""


def answers(here: Emulation) -> Iterator[Answers]:
    """What writes and reads files, and pickles tensors and storages of the device."""
    functions = _functions(here)
    yield torch, functions
    yield serialization, {**functions, "default_restore_location": _placing()}
    rebuilt = _rebuilding(here)
    yield torch._utils, {"_get_obj_state": _states(), _REBUILD: rebuilt}
    allowed = original_of(unpickler, "_get_allowed_globals")
    made = {f"torch._utils.{_REBUILD}": rebuilt}
    yield unpickler, {"_get_allowed_globals": lambda: {**allowed(), **made}}
    yield torch.UntypedStorage, _of_storages()
    yield torch.Tensor, {"__reduce_ex__": _reducing()}


def _functions(here: Emulation) -> dict[str, Any]:
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
        before, _PLACES.asked = _PLACES.asked, map_location
        if isinstance(map_location, (str, torch.device)) and _is_device(str(map_location)):
            map_location = _META
        try:
            with contexts.plainly():
                return load(file, map_location, *args, **kwargs)
        finally:
            _PLACES.asked = before

    return {"save": saved, "load": loaded}


def _placing() -> Any:
    """What puts a storage that was read where it belongs."""
    home: Any = serialization
    place = original_of(home, "default_restore_location")

    def default_restore_location(storage: Any, location: Any) -> Any:
        return place(storage, _META if _is_device(str(location)) else location)

    return default_restore_location


class _Places(threading.local):
    asked: Any = None  # the map_location of the `torch.load` that this thread is in


_PLACES = _Places()


def _is_for_host(asked: Any, saved: str) -> bool:
    """Whether a `map_location` takes to the host what was on the device that is called `saved`."""
    if isinstance(asked, Mapping):
        asked = asked.get(saved)
    elif callable(asked):
        kind: Any = torch.UntypedStorage
        place = asked(kind(0), saved)
        asked = None if place is None else place.device
    return asked is not None and torch.device(asked).type == "cpu"


def _rebuilding(here: Emulation) -> Any:
    """How a tensor of the device is made of its shape, by pickles and by `torch.load`."""
    rebuild = original_of(torch._utils, _REBUILD)

    def rebuilt(*look: Any) -> Tensor:
        with contexts.plainly():
            made: Tensor = rebuild(*look)
        if not _is_for_host(_PLACES.asked, f"cuda:{here.current}"):
            return made
        here.assume(
            "torch.load",
            "tensors of the device that torch.load takes to the host hold 1 everywhere",
        )
        number = torch.ones((), dtype=made.dtype, device="cpu")
        return number.expand(made.shape).requires_grad_(made.requires_grad)

    return rebuilt


_REBUILD = "_rebuild_meta_tensor_no_storage"


def _states() -> Any:
    """What says which attributes of a tensor belong into a file."""
    home: Any = torch._utils
    state_of = original_of(home, "_get_obj_state")

    def _get_obj_state(item: Any) -> Any:
        state = state_of(item)
        return _without_notes(state) if isinstance(state, dict) else state

    return _get_obj_state


def _without_notes(state: dict[str, Any]) -> dict[str, Any]:
    """Attributes without those of a recording, which end with it."""
    return {name: item for name, item in state.items() if not name.startswith(_NOTES)}


def _reducing() -> Any:
    """The method by which tensors are pickled: those of the device by their shapes."""
    reduce = original_of(torch.Tensor, "__reduce_ex__")

    def __reduce_ex__(tensor: Any, protocol: Any) -> Any:
        with contexts.plainly():
            return reduce(tensor, protocol)

    return __reduce_ex__


def _of_storages() -> dict[str, Any]:
    """Methods of storages that move them to the device."""

    kind: Any = torch.UntypedStorage
    make = kind.__new__

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        device = _META if _is_device(str(device)) else device
        return make(cls, *args, **kwargs, **({} if device is None else {"device": device}))

    def cuda(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return kind(storage.nbytes(), device=_META)

    return {"cuda": cuda, "__new__": staticmethod(new)}


def _is_device(location: str) -> bool:
    return location.partition(":")[0] == "cuda"
