"""Defaults of torch that name the device: `torch.set_default_device("cuda")`, default types.

A default is applied by a function mode below all others, so nobody else turns the device that it
adds into meta.  The mode of `with torch.device("cuda")` lies above: others see what it adds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device

from rooftrace.tracer.emulation import legacy
from rooftrace.tracer.emulation.state import Answers
from rooftrace.tracer.patches import original_of

_META = torch.device("meta")
_torch: Any = torch


def answers(types: dict[str, Any]) -> Iterator[Answers]:
    """What applies a default device, and what sets a default type.  types: of the device."""
    yield _device.DeviceContext, {"__torch_function__": _choosing()}
    default = _DefaultType(types)
    yield _torch, {"set_default_tensor_type": default.set_}
    yield Tensor, {"__new__": staticmethod(default.making())}


def _choosing() -> Any:
    """The method of the mode by which torch chooses a device."""
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

    return __torch_function__


class _DefaultType:
    """The type of tensors that a script sets for all that name none.

    types: those of the device, by name.
    """

    def __init__(self, types: dict[str, Any]) -> None:
        self._types = types
        self._chosen: Any = None  # one of the device; None where it is the host's

    def set_(self, kind: Any) -> None:
        """Stands for `torch.set_default_tensor_type`."""
        name = kind.removeprefix("torch.cuda.") if type(kind) is str else ""
        chosen = self._types.get(name, kind)
        self._chosen = chosen if isinstance(chosen, legacy.Typed) else None
        if self._chosen is not None:
            torch.set_default_dtype(chosen.dtype)
            torch.set_default_device("cuda")
        else:
            original_of(_torch, "set_default_tensor_type")(kind)
            torch.set_default_device(None)

    def making(self) -> Any:
        """What `torch.Tensor(2, 3)` calls: no default device, but this type decides."""
        original: Any = Tensor.__new__

        def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is Tensor and self._chosen is not None and not kwargs:
                return self._chosen(*args)
            return original(cls, *args, **kwargs)

        return __new__
