"""Output sizes of ops that ran before: most of a model's ops repeat with equal sizes.

PyTorch's meta kernels are Python for many ops and take ten times as long as a look-up.  Only ops
that neither write nor return their inputs' memory are remembered: each output is a fresh tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

_empty_strided = torch.ops.aten.empty_strided.default
_CONVOLUTION = torch.ops.aten.convolution.default
_META = torch.device("meta")
_NEVER = object()


class SizeCache:
    """Runs functional ops on meta tensors, each with the same sizes once."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of `func(*args, **kwargs)`, from the sizes of an equal earlier call if any.

        Only for ops without aliasing or mutation, on strided meta tensors.
        """
        key: list[Any] = [func, torch.get_default_dtype()]
        if not (_describe(args, key) and (not kwargs or _describe_named(kwargs, key))):
            return _run(func, args, kwargs)
        signature = tuple(key)
        try:
            made = self._known.get(signature)
        except TypeError:  # an argument that cannot be hashed (a symbolic size, a generator)
            return _run(func, args, kwargs)
        if made is None:
            result = _run(func, args, kwargs)
            self._known[signature] = _recipe(result, args, kwargs)
            return result
        if made is _NEVER:
            return _run(func, args, kwargs)
        kind, outputs = made
        tensors = [
            None if spec is None else _empty_strided(spec[0], spec[1], dtype=spec[2], device=_META)
            for spec in outputs
        ]
        return tensors[0] if kind is Tensor else kind(tensors)


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op; a convolution's result gets the layout that it has on a device.

    cuDNN and oneDNN write channels last where the input or the weight is so; on meta the result is
    always contiguous.
    """
    result = func(*args, **kwargs)
    if func is _CONVOLUTION and result.dim() == 4 and any(map(_channels_last, args[:2])):
        return result.contiguous(memory_format=torch.channels_last)
    return result


def _channels_last(tensor: Tensor) -> bool:
    return suggest_memory_format(tensor) is torch.channels_last


def writes_lists(name: str, args: Sequence[Any]) -> bool:
    """Whether an op writes tensors of a list in place, each from others of its size.

    On meta such a call does nothing, and takes as long as one op for each tensor.
    """
    if not name.startswith("aten._foreach_") or not name.endswith("_"):
        return False
    lists = [item for item in args if isinstance(item, (list, tuple)) and item]
    lists = [item for item in lists if isinstance(item[0], Tensor)]
    return bool(lists) and all(
        len(item) == len(lists[0])
        and all(a.shape == b.shape for a, b in zip(item, lists[0], strict=True))
        for item in lists[1:]
    )


def _describe(items: Sequence[Any], key: list[Any]) -> bool:
    """Append everything that the sizes of an op's outputs depend on; False if that is unknown."""
    for item in items:
        if isinstance(item, Tensor):
            if (
                item.layout is not torch.strided
                or item.device.type != "meta"
                or item.dtype.is_complex
            ):
                return False
            key.append((item.shape, item.stride(), item.dtype))
        elif isinstance(item, (list, tuple)):
            key.append(len(item))
            if not _describe(item, key):
                return False
        else:
            # 1, 1.0 and True are equal as keys, and promote differently.
            key.append(type(item))
            key.append(item)
    return True


def _describe_named(kwargs: dict[str, Any], key: list[Any]) -> bool:
    for name, item in kwargs.items():
        key.append(name)
        if not _describe((item,), key):
            return False
    return True


def _recipe(result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """(type, size of each output) of a call; _NEVER where outputs are not fresh tensors."""
    kind = Tensor if isinstance(result, Tensor) else type(result)
    if kind not in (Tensor, tuple, list):
        return _NEVER
    outputs = (result,) if kind is Tensor else result
    storages = set()
    specs: list[Any] = []
    for output in outputs:
        if output is None:
            specs.append(None)
            continue
        plain = isinstance(output, Tensor) and output.layout is torch.strided
        if not plain or output.device.type != "meta" or output.storage_offset():
            return _NEVER
        storages.add(output.untyped_storage()._cdata)
        specs.append((tuple(output.shape), output.stride(), output.dtype))
    fresh = len(storages) == sum(spec is not None for spec in specs)
    return (
        (kind, tuple(specs))
        if fresh and not storages & _storages((args, kwargs.values()))
        else _NEVER
    )


def _storages(items: Any) -> set[int]:
    storages: set[int] = set()
    for item in items:
        if isinstance(item, Tensor):
            storages.add(item.untyped_storage()._cdata)
        elif not isinstance(item, (str, bytes)) and hasattr(item, "__iter__"):
            storages |= _storages(item)
    return storages
