"""Tensors in nested Python values (containers, dataclasses, cache objects), and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (
    int,
    float,
    bool,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
"""Types of values that hold nothing else and never change."""
_DEPTH = 6
"""How deep objects inside objects are looked into."""


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors reachable in `tree`, each once, in the order they are met."""
    found: list[Tensor] = []
    _search(tree, _DEPTH, set(), found)
    return found


def _search(tree: Any, depth: int, seen: set[int], found: list[Tensor]) -> None:
    if tree is None or isinstance(tree, (str, bytes, int, float, nn.Module, type)):
        return
    if id(tree) in seen:
        return
    seen.add(id(tree))
    if isinstance(tree, Tensor):
        found.append(tree)
    elif depth:
        for item in _children(tree):
            _search(item, depth - 1, seen, found)


def _children(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Mapping):
        return tree.values()
    if isinstance(tree, (list, tuple, set, frozenset)):
        return tree
    if callable(tree):
        return ()
    slots = (getattr(tree, name, None) for name in getattr(type(tree), "__slots__", ()))
    return (*vars(tree).values(), *slots) if hasattr(tree, "__dict__") else tuple(slots)


def arguments_in(items: Iterable[Any], found: list[Tensor]) -> None:
    """Append the tensors among an op's arguments (lists and tuples only) to `found`."""
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            arguments_in(item, found)


def bytes_of(tensor: Tensor) -> int:
    """Identity of the bytes of a tensor while it lives: the same for all its views."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def listed(item: Any) -> list[Tensor]:
    """The tensors of one argument: itself, or those in a list of it."""
    found: list[Tensor] = []
    arguments_in((item,), found)
    return found


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class are made of others (DTensor, nested, quantized)."""
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[tuple[Tensor, str]]:
    """The plain tensors that hold the bytes of a tensor, each with a suffix for its name."""
    if not is_wrapper(type(tensor)):
        return [(tensor, "")]
    flat: Any = tensor
    names: list[str] = flat.__tensor_flatten__()[0]
    inside = [(name, getattr(tensor, name)) for name in names]
    found = [(name, part) for name, part in inside if isinstance(part, Tensor)]
    return [
        (part, ("" if len(found) == 1 else f".{name}") + suffix)
        for name, inner in found
        for part, suffix in parts_of(inner)
    ]
