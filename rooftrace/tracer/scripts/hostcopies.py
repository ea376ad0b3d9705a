"""What tensors of the device hold that came from the host: the host's own tensors, read on demand.

Nothing is copied when a script moves a tensor.  Where somebody asks for its value, or for that of a
view of it, it is that of the host tensor, unless either was written to in the meantime.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rooftrace.tracer.tensors import trees

_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
"""What has a view share the version of its base; torch switches it off while a mode has an op."""


class _HostCopy(NamedTuple):
    """What the bytes of a tensor of the device hold."""

    storage: Any  # a weak reference to these bytes
    source: Tensor
    version: int  # of the source
    look: tuple[Any, ...]  # of the tensor of the device


class HostCopies:
    """Host tensors by the bytes of the device that hold the same, while these are alive."""

    def __init__(self) -> None:
        self.made = 0  # bytes that were computed, and are no tensor of the script's
        self._copies: dict[int, _HostCopy] = {}

    def bring(self, made: Tensor, source: Tensor) -> None:
        """A tensor of the device was made to hold what a host tensor does."""
        if source.is_inference():
            return  # it has no version by which a change would be seen
        copies, key = self._copies, trees.bytes_of(made)

        def gone(storage: Any) -> None:
            if key in copies and copies[key].storage is storage:
                del copies[key]

        storage = weakref.ref(made.untyped_storage(), gone)
        look = tuple(made.shape), made.stride(), made.dtype
        copies[key] = _HostCopy(storage, source, source._version, look)

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Something unknown was written to tensors of the device."""
        for tensor in tensors if self._copies else ():
            self._copies.pop(trees.bytes_of(tensor), None)

    def owned(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, in memory of its own, which may be written to; None: unknown."""
        if self.of(tensor) is None:
            return None
        key = trees.bytes_of(tensor)
        copy = self._copies[key]
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            shape, stride, dtype = copy.look
            source = torch.empty_strided(shape, stride, dtype=dtype).copy_(copy.source)
        self._copies[key] = copy._replace(source=source, version=source._version)
        return self.of(tensor)

    def settle(self, tensors: Sequence[Tensor]) -> None:
        """What was written to tensors of the device was written to what they own, too."""
        for key in map(trees.bytes_of, tensors):
            copy = self._copies[key]
            self._copies[key] = copy._replace(version=copy.source._version)

    def of(self, tensor: Tensor) -> Tensor | None:
        """The value of a tensor of the device, in memory of the host's; None where it is unknown.

        It is only read.
        """
        copy = self._copies.get(trees.bytes_of(tensor)) if tensor.is_meta else None
        if copy is None or copy.source._version != copy.version:
            return None
        shape, stride, dtype = copy.look
        if tensor.dtype != dtype or tensor.is_conj() or tensor.is_neg():
            return None
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            source = copy.source.to(dtype)
            if source.stride() != stride:
                source = torch.empty_strided(shape, stride, dtype=dtype).copy_(source)
            offset = source.storage_offset() + tensor.storage_offset()
            with torch._C._SetExcludeDispatchKeyGuard(_VERSIONS, False):
                return source.as_strided(tensor.shape, tensor.stride(), offset)
