"""Names of old scripts: `torch.cuda.FloatTensor(...)`, `tensor.type("torch.cuda.FloatTensor")`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.emulation.refused import refusal
from rooftrace.tracer.emulation.state import Answers

_PRECISIONS = {
    "BFloat16Tensor": torch.bfloat16,
    "BoolTensor": torch.bool,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "ShortTensor": torch.int16,
}
_DEVICE = torch.device("cuda")
_original_type: Any = Tensor.type


class Typed(type):
    """Tensors of the device in one precision are instances of these classes."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        args = args or (0,)
        data = args[0] if len(args) == 1 else None
        if data is None or isinstance(data, (int, torch.Size)):
            sizes = (args or (0,)) if data is None else data
            return torch.empty(sizes, dtype=cls.dtype, device=_DEVICE)
        if isinstance(data, Tensor):
            return data.to(_DEVICE, cls.dtype)
        return torch.tensor(data, dtype=cls.dtype, device=_DEVICE)


def answers(types: dict[str, Any]) -> Iterator[Answers]:
    """The classes of torch.cuda, and methods of tensors that take them or their names."""
    yield torch.cuda, {**types, **_storages()}
    yield Tensor, {"type": _typing(types)}


def classes() -> dict[str, Any]:
    """The classes of torch.cuda, by name."""
    made = {
        name: Typed(name, (), {"dtype": dtype, "is_cuda": True, "is_sparse": False})
        for name, dtype in _PRECISIONS.items()
    }
    for kind in made.values():
        kind.__module__ = "torch.cuda"
    return made


def _storages() -> dict[str, Any]:
    """The classes of storages of torch.cuda, by name: their memory cannot be given."""
    names = [name for name in torch.cuda.__all__ if name.endswith("Storage")]
    return {
        name: refusal(f"torch.cuda.{name}", "there is no memory of the device to hold")
        for name in names
    }


def _typing(own: dict[str, Any]) -> Any:
    named = {f"torch.cuda.{name}": kind for name, kind in own.items()}
    names = {kind.dtype: name for name, kind in named.items()}

    def type_(tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **kw: Any) -> Any:
        if dtype is None and tensor.is_cuda:
            return names.get(tensor.dtype, f"torch.cuda.{tensor.dtype}")
        kind = named.get(dtype, dtype) if isinstance(dtype, str) else dtype
        if isinstance(kind, Typed):
            return tensor.to(_DEVICE, kind.dtype, non_blocking=non_blocking)
        return _original_type(tensor, *(() if dtype is None else (dtype,)), **kw)

    return type_
