"""Memory, random generators and saved files of an emulated CUDA device."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, serialization

from rooftrace.scripts.fake_cuda.state import Answers, DeviceError, Emulation, refusal
from rooftrace.tracer.recording import original_of, overrides
from rooftrace.tracer.torch_private import bindings, unpickler, utils

# -- files -----------------------------------------------------------------------------------------
# Files of `torch.save`: tensors of the device are written without numbers, and read as such.
#
# Host tensors are written and read as they are.

_META = "meta"
_NOTES = "_rooftrace"
"""Prefix of the attributes that recordings set on tensors."""


def file_answers(here: Emulation) -> Iterator[Answers]:
    """Functions that write and read files, and pickle tensors and storages of the device."""
    functions = _functions(here)
    yield torch, functions
    yield serialization, {**functions, "default_restore_location": _placing()}
    rebuilt = _rebuilding(here)
    yield utils, {"_get_obj_state": _states(), _REBUILD: rebuilt}
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
        with overrides.plainly():
            return save(*args, **kwargs)

    def loaded(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        before, _PLACES.map_location = _PLACES.map_location, map_location
        if isinstance(map_location, (str, torch.device)) and _is_device(str(map_location)):
            map_location = _META
        try:
            with overrides.plainly():
                return load(file, map_location, *args, **kwargs)
        finally:
            _PLACES.map_location = before

    return {"save": saved, "load": loaded}


def _placing() -> Any:
    """The function that moves a storage that was read to its device."""
    home: Any = serialization
    restore = original_of(home, "default_restore_location")

    def default_restore_location(storage: Any, location: Any) -> Any:
        return restore(storage, _META if _is_device(str(location)) else location)

    return default_restore_location


class _Places(threading.local):
    map_location: Any = None  # the map_location of the `torch.load` that this thread is in


_PLACES = _Places()


def _is_for_host(map_location: Any, saved: str) -> bool:
    """Whether a `map_location` takes tensors of the device called `saved` to the host."""
    if isinstance(map_location, Mapping):
        map_location = map_location.get(saved)
    elif callable(map_location):
        kind: Any = torch.UntypedStorage
        restored = map_location(kind(0), saved)
        map_location = None if restored is None else restored.device
    return map_location is not None and torch.device(map_location).type == "cpu"


def _rebuilding(here: Emulation) -> Any:
    """How a tensor of the device is made of its shape, by pickles and by `torch.load`."""
    rebuild = original_of(utils, _REBUILD)

    def rebuilt(*look: Any) -> Tensor:
        with overrides.plainly():
            made: Tensor = rebuild(*look)
        if not _is_for_host(_PLACES.map_location, f"cuda:{here.current}"):
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
    """The function that chooses the attributes of a tensor that go into a file."""
    home: Any = utils
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
        with overrides.plainly():
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


# -- generators ------------------------------------------------------------------------------------
# Random generators of the device: their seeds and states, on the host.
#
# A generator of a real device draws on the device.  Tensors there carry no numbers, so only what a
# script does with seeds and states is kept: set, saved and put back.

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


def generator_answers(here: Emulation) -> Iterator[Answers]:
    """The generators of all devices, and `torch.Generator`, which makes others of them."""
    of_devices = tuple(made(index, _SEED) for index in range(here.device.count))
    yield torch.cuda, {"default_generators": of_devices}

    class Generator(metaclass=_Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            target = torch.device(device)
            if target.type != "cuda":
                return _Original(device)
            return made(here.current if target.index is None else target.index, _SEED)

    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    yield torch, {"Generator": Generator}


# -- memory ----------------------------------------------------------------------------------------
# Memory of the device: bytes that the recording has alive, in the words of PyTorch's allocator.
#
# The recording knows the bytes of tensors.  Which blocks and segments the allocator would make of
# them is priced elsewhere, after the run: here reserved memory is the largest so far in segments
# of 2 MiB, which a real allocator exceeds.

_cuda: Any = torch.cuda
_SEGMENT = 2 << 20
_KIND = "memory"
_GIB = 1 << 30


def _read(here: Emulation) -> tuple[int, int, int, int]:
    """Bytes allocated, their peak, bytes reserved, their peak."""
    here.assume(
        _KIND,
        "torch.cuda's memory numbers are those of the tensors that the recording has alive; "
        "reserved memory is the largest of them in segments of 2 MiB",
    )
    settings: Any = here.settings
    allocated = here.meter.allocated()
    peak = max(here.meter.peak(), allocated)
    most = peak if peak > settings.get("peak_when_emptied", 0) else allocated
    reserved = settings["reserved"] = max(settings.get("reserved", 0), _in_segments(most))
    top = settings["reserved_peak"] = max(settings.get("reserved_peak", 0), reserved)
    return allocated, peak, reserved, top


def _in_segments(size: int) -> int:
    return -(-size // _SEGMENT) * _SEGMENT


def free(here: Emulation) -> int:
    """Bytes of the device that nobody has."""
    *_, reserved, _ = _read(here)
    return max(here.device.memory - here.device.context - reserved, 0)


def _statistics(here: Emulation) -> dict[str, Any]:
    """Statistics of the allocator as nested dictionaries, as far as the recording has them."""
    allocated, peak, reserved, top = _read(here)
    tensors = {"all": {"current": allocated, "peak": peak}}
    segments = {"all": {"current": reserved, "peak": top}}
    inactive = {"all": {"current": reserved - allocated, "peak": top}}
    return {
        "allocated_bytes": tensors,
        "requested_bytes": tensors,
        "active_bytes": tensors,
        "reserved_bytes": segments,
        "inactive_split_bytes": inactive,
        "num_alloc_retries": 0,
        "num_ooms": 0,
        "max_split_size": -1,
    }


def answers(here: Emulation) -> Iterator[Answers]:
    """Functions of torch._C that a build without CUDA lacks, and of torch.cuda that show more."""
    yield bindings, _names(here)
    yield _cuda, _memory_functions(here)
    statistics = original_of(_cuda.memory, "memory_stats")
    yield _cuda, {"memory_stats": lambda device=None: Statistics(statistics(device))}


def _names(here: Emulation) -> dict[str, Any]:
    settings = here.settings

    def reset_peak(device: int = 0) -> None:
        here.meter.reset_peak()
        settings.pop("reserved_peak", None)
        settings.pop("peak_when_emptied", None)

    def empty() -> None:
        allocated, peak, *_ = _read(here)
        settings["reserved"], settings["peak_when_emptied"] = _in_segments(allocated), peak

    def set_fraction(fraction: float, device: int = 0) -> None:
        settings["memory_fraction"] = fraction
        here.assume(
            "memory fraction",
            f"set_per_process_memory_fraction({fraction}): a limit below the device's memory is "
            "not enforced",
        )

    def history(enabled: Any = None, *args: Any, **kwargs: Any) -> None:
        if enabled:
            raise DeviceError.of(
                "torch.cuda.memory._record_memory_history",
                "there are no blocks of an allocator whose history could be kept",
                "The report has the memory of the step over time, by role",
            )

    hidden = "there are no blocks of an allocator"
    report = "The report has the memory of the step over time, by role"
    snapshot = refusal("torch.cuda.memory_snapshot", hidden, report)
    pinned = refusal("torch.cuda.host_memory_stats", "pinned memory is not counted")
    return {
        "_cuda_memoryStats": lambda device: _statistics(here),
        "_cuda_resetPeakMemoryStats": reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_resetPeakHostMemoryStats": lambda: None,
        "_cuda_resetAccumulatedHostMemoryStats": lambda: None,
        "_cuda_hostMemoryStats": pinned,
        "_cuda_emptyCache": empty,
        "_host_emptyCache": lambda: None,
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda device: settings.get("memory_fraction", 1.0),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": history,
        "_cuda_record_memory_history_legacy": history,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_attach_out_of_memory_observer": lambda observer: None,
        "_cuda_allocationTraceback": snapshot,
        "_cuda_cudaCachingAllocator_set_allocator_settings": lambda text: None,
    }


def _memory_functions(here: Emulation) -> dict[str, Any]:
    def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
        allocated, peak, reserved, top = _read(here)
        rows = (
            ("Allocated memory", allocated, peak),
            ("GPU reserved memory", reserved, top),
        )
        lines = [
            f"Memory of {here.device.name} (emulated), device {here.current}",
            f"{'':<22}{'now':>14}{'peak':>14}",
            *(
                f"{name:<22}{now / _GIB:>10.3f} GiB{most / _GIB:>10.3f} GiB"
                for name, now, most in rows
            ),
            "Blocks, segments and retries of the allocator are not known.",
        ]
        return "\n".join(lines)

    pools = "memory pools are the allocator's, which is not run"
    return {
        "memory_summary": memory_summary,
        "change_current_allocator": refusal("torch.cuda.memory.change_current_allocator", pools),
        "use_mem_pool": refusal("torch.cuda.use_mem_pool", pools),
    }


class Statistics(OrderedDict[str, Any]):
    """The result of `torch.cuda.memory_stats()`; an unknown statistic is an error."""

    def __missing__(self, name: str) -> Any:
        raise DeviceError.of(
            f"torch.cuda.memory_stats()[{name!r}]",
            f"the recording knows bytes, not blocks: {', '.join(self)}",
        )
