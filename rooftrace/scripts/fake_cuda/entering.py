"""An emulated device: from here on torch.cuda answers for a chip, in all of the process.

Calls of torch's Python code into its C half are answered there, so that most of torch.cuda runs
as it is written, also where user code imported a function of it before.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rooftrace.scripts.fake_cuda import backends, devices, extensions, memory, streams
from rooftrace.scripts.fake_cuda.state import Answers, Assume, Clock, Device, Emulation, Meter, Tell
from rooftrace.tracer.recording import original_of, overrides, put
from rooftrace.tracer.torch_private import parse_to

_cuda: Any = torch.cuda


def emulate(
    device: Device,
    meter: Meter,
    clock: Clock,
    index: int = 0,
    assume: Assume | None = None,
    tell: Tell | None = None,
) -> None:
    """From here on this process sees a CUDA device.  For a process that runs nothing else.

    index: the device of this process.  assume: takes, once for each kind, answers that follow
    a policy: kind and text.  tell: takes events of CUDA graphs: "capture", "captured", "replay",
    "replayed".
    """
    here = Emulation(device, meter, clock, index, assume, tell)
    _forget_answers()
    pinned = Pinned()
    for home, answers in _answers(here, pinned):
        for place, some in _wherever_bound(answers) if home is _cuda else [(home, answers)]:
            put(place, some)
    extensions.watch_imports()
    entered: Any = Calls(pinned)
    entered.__enter__()  # for as long as the process lives
    for fact in device.guessed:
        here.assume(
            f"device {fact}",
            f"{device.name}: the {fact} is not in its chip file and was inferred",
        )


def _answers(here: Emulation, pinned: Pinned) -> Iterator[Answers]:
    """All answers; a later one replaces an earlier one."""
    types = devices.classes()
    yield from extensions.answers()
    for answers in (
        backends.answers,
        devices.answers,
        memory.answers,
        streams.answers,
        devices.accelerator_answers,
        memory.generator_answers,
        streams.graph_answers,
        memory.file_answers,
    ):
        yield from answers(here)
    yield from pinned.answers()
    yield from devices.legacy_answers(types)
    yield from devices.default_answers(types)
    yield from extensions.triton_answers(here.assume)


def _wherever_bound(answers: dict[str, Any]) -> Iterator[Answers]:
    """Modules of torch.cuda that hold one of these names: they import them from each other."""
    named = {id(part): part for name, part in sys.modules.items() if name.startswith("torch.cuda")}
    parts = [part for part in named.values() if part is not None]
    for part in parts:
        yield part, {name: item for name, item in answers.items() if name in vars(part)}
    # The C half puts these into torch.cuda when it is initialized.
    unset = answers.keys() - {name for part in parts for name in vars(part)}
    yield _cuda, {name: answers[name] for name in unset}


_ASKING = ("torch.cuda", "torch.accelerator", "torch.utils._triton", "torch._utils", "torch.amp")
"""Modules of torch that cache facts of a device."""


def _forget_answers() -> None:
    """Clear the caches of functions that ask for a device: their answers change here."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_ASKING) and module is not None:
            for item in list(vars(module).values()):
                clear = getattr(item, "cache_clear", None)
                if clear is not None and getattr(item, "__module__", "").startswith("torch"):
                    clear()


# -- pinning ---------------------------------------------------------------------------------------
# Pinned host memory, and other methods of tensors that need a device.
#
# Pinning copies a tensor of the host into memory that the device may read by itself.  Emulation
# that memory is ordinary: it is noted which storages are pinned.


class Pinned:
    """Which storages of the host are pinned."""

    def __init__(self) -> None:
        self._storages: dict[int, Any] = {}

    def add(self, tensor: Tensor) -> None:
        """The memory of a tensor of the host is pinned from here on."""
        storage = tensor.untyped_storage()
        key, storages = id(storage), self._storages
        storages[key] = weakref.ref(storage, lambda gone: storages.pop(key, None))

    def has(self, tensor: Tensor) -> bool:
        """Whether the memory of a tensor is pinned."""
        storage = tensor.untyped_storage()
        reference = self._storages.get(id(storage))
        return reference is not None and reference() is storage

    def answers(self) -> Iterator[Answers]:
        """Methods of tensors that a build without a device refuses."""

        def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
            with overrides.plainly():
                if _on_device(tensor):
                    raise RuntimeError(
                        f"cannot pin a tensor of {tensor.dtype} on the device: "
                        "only dense CPU tensors can be pinned"
                    )
                if not _plain(tensor) or self.has(tensor):
                    return tensor
                copy: Tensor = tensor.detach().clone(memory_format=torch.preserve_format)
                self.add(copy)
            return copy

        def is_pinned(tensor: Tensor, device: Any = None) -> bool:
            with overrides.plainly():
                return _plain(tensor) and self.has(tensor)

        def record_stream(tensor: Tensor, stream: Any) -> None:
            """Nothing frees memory early here: each tensor lives as long as its last user."""

        def share_memory_(tensor: Tensor) -> Tensor:
            """Other processes may share memory of the device as it is."""
            return tensor if _on_device(tensor) else share(tensor)

        def is_shared(tensor: Tensor) -> bool:
            return _on_device(tensor) or shared(tensor)

        share, shared = original_of(Tensor, "share_memory_"), original_of(Tensor, "is_shared")
        yield (
            Tensor,
            {
                "share_memory_": share_memory_,
                "is_shared": is_shared,
                "pin_memory": pin_memory,
                "is_pinned": is_pinned,
                "record_stream": record_stream,
            },
        )


class Calls(TorchFunctionMode):
    """Answers calls of one thread that torch's C half refuses without a device.

    These are `torch.empty(..., pin_memory=True)` and its like, and devices by their number:
    `torch.device(0)`, `module.to(0)`.
    """

    def __init__(self, pinned: Pinned) -> None:
        super().__init__()
        self._pinned = pinned

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PLACING:
            args = (*map(_numbered, args[:1]), *args[1:])
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _numbered(kwargs["device"])}
        elif "pin_memory" in kwargs:
            kwargs = {**kwargs}
            pinned = kwargs.pop("pin_memory")
            made = func(*args, **kwargs)
            if pinned and isinstance(made, Tensor) and _plain(made):
                self._pinned.add(made)
            return made
        return func(*args, **kwargs)


_PLACING = frozenset({torch.device, parse_to})
"""Calls whose first argument may be the number of a device."""


def _numbered(item: Any) -> Any:
    """A device for its number."""
    return torch.device("cuda", item) if type(item) is int else item


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is numbers in the memory of the host."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
