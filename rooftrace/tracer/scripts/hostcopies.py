"""What tensors of the device hold that came from the host: the host's own tensors, read on demand.

Nothing is copied when a script moves a tensor.  Where somebody asks for its value, or for that of a
view of it, it is that of the host tensor, unless either was written to in the meantime.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from rooftrace.tracer.ops import info_of, traits
from rooftrace.tracer.tensors import tensors_in, trees
from rooftrace.tracer.values import Values

_VERSIONS = torch._C.DispatchKey.ADInplaceOrView
"""What has a view share the version of its base; torch switches it off while a mode has an op."""


_MAX_MADE = 10**9
"""The most bytes that are computed while nothing is recorded, of what came from the host."""
_CPU = torch.device("cpu")


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

    def follow(
        self, values: Values, func: Any, arguments: Any, written: Sequence[Tensor], out: Any
    ) -> bool:
        """Compute what an op makes of tensors that came from the host, where nothing is recorded
        from which it could be computed later.  False where it cannot.

        arguments: those without a name, and those with one.  values: what is known of others.
        """
        tensors, real = tensors_in(arguments), dict[int, Tensor]()
        if not isinstance(out, Tensor) or not out.is_meta or out.requires_grad or not tensors:
            return False
        if traits.is_random(func) or func._overloadpacket in flop_registry:
            return False
        if not written and trees.bytes_of(out) in map(trees.bytes_of, tensors):
            return True  # a view
        for tensor in tensors:
            entry = values.known(tensor)
            value = self.of(tensor) if entry is None else entry.value
            if value is None or (entry and entry.taint) or trees.is_sparse(tensor):
                return False
            real[id(tensor)] = value
        self.made += out.numel() * out.element_size()
        if trees.is_sparse(out) or self.made > _MAX_MADE:
            return False
        for tensor in written:
            if (own := self._owned(tensor)) is None:
                return False
            real[id(tensor)] = own
        result = _on_host(func, arguments, real)
        if result is None or result.shape != out.shape:
            return False
        for key in map(trees.bytes_of, written):  # what was written to the device's, is in ours
            copy = self._copies[key]
            self._copies[key] = copy._replace(version=copy.source._version)
        if not written:
            self.bring(out, result)
        return True

    def _owned(self, tensor: Tensor) -> Tensor | None:
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


def _on_host(func: Any, arguments: Any, real: Mapping[int, Tensor]) -> Any:
    """The result of an op on the device, on real tensors by identity; None for lack of a kernel."""

    def swapped(item: Any) -> Any:
        return real.get(id(item), _CPU if isinstance(item, torch.device) else item)

    args, kwargs = tree_map(swapped, (list(arguments[0]), arguments[1]))
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            return traits.run_on_cpu(info_of(func).name, func, args, kwargs)
        except (RuntimeError, NotImplementedError, IndexError):
            return None
