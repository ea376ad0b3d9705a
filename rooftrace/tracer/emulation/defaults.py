"""Defaults of torch that name the device: `torch.set_default_device("cuda")`, default types.

A default is applied by a function mode below all others, so nobody else turns the device that it
adds into meta.  The mode of `with torch.device("cuda")` lies above: others see what it adds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device

from rooftrace.tracer.emulation import legacy
from rooftrace.tracer.patches import original_of

_META = torch.device("meta")
_torch: Any = torch


def context_methods() -> dict[str, Any]:
    """Methods of the mode by which torch chooses a device."""
    kind: Any = _device.DeviceContext
    handle = original_of(kind, "__torch_function__")

    def __torch_function__(
        self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        makes = self.device.type == "cuda" and func in _device._device_constructors()
        if makes and kwargs.get("device") is None:
            lowest = not torch._C._len_torch_function_stack()
            kwargs = {**kwargs, "device": _META if lowest else self.device}
        return handle(self, func, types, args, kwargs)

    return {"__torch_function__": __torch_function__}


class DefaultType:
    """The type of tensors that a script sets for all that name none.

    types: those of the device, by name.
    """

    def __init__(self, types: dict[str, Any]) -> None:
        self._types = types
        self._chosen: Any = None  # one of the device; None where it is the host's

    def functions(self) -> dict[str, Any]:
        """Functions of torch that set it."""
        original = original_of(_torch, "set_default_tensor_type")

        def set_default_tensor_type(kind: Any) -> None:
            name = kind.removeprefix("torch.cuda.") if type(kind) is str else ""
            chosen = self._types.get(name, kind)
            self._chosen = chosen if isinstance(chosen, legacy.Typed) else None
            if self._chosen is not None:
                torch.set_default_dtype(chosen.dtype)
                torch.set_default_device("cuda")
            else:
                original(kind)
                torch.set_default_device(None)

        return {"set_default_tensor_type": set_default_tensor_type}

    def methods(self) -> dict[str, Any]:
        """What `torch.Tensor(2, 3)` makes: no default device, but this type decides."""
        original: Any = Tensor.__new__

        def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is Tensor and self._chosen is not None and not kwargs:
                return self._chosen(*args)
            return original(cls, *args, **kwargs)

        return {"__new__": staticmethod(__new__)}


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Inside, code may set other defaults; at the end they are as before."""
    context, dtype = _context(), torch.get_default_dtype()
    try:
        yield
    finally:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if _context() is not context:
            torch.set_default_device(None if context is None else context.device)


def _context() -> Any:
    """The mode that puts this thread's default device into calls; None where there is none."""
    return getattr(_torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
