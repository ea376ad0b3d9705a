"""Memory of the host that is pinned, and what else tensors do only where there is a device.

Pinning copies a tensor of the host into memory that the device may read by itself.  Emulation that
memory is ordinary: it is noted which storages are pinned.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rooftrace.tracer.emulation.state import Answers
from rooftrace.tracer.patches import contexts, original_of


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
            with contexts.plainly():
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
            with contexts.plainly():
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
            asked = kwargs.pop("pin_memory")
            made = func(*args, **kwargs)
            if asked and isinstance(made, Tensor) and _plain(made):
                self._pinned.add(made)
            return made
        return func(*args, **kwargs)


_PLACING = frozenset({torch.device, torch._C._nn._parse_to})
"""Calls whose first argument may be the number of a device."""


def _numbered(item: Any) -> Any:
    """A device for its number."""
    return torch.device("cuda", item) if type(item) is int else item


def _on_device(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def _plain(tensor: Tensor) -> bool:
    """Whether a tensor is numbers in the memory of the host."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
