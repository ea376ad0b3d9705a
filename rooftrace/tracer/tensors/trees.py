"""Tensors in nested Python values (containers, dataclasses, cache objects), and their bytes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

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
_SPARSE = frozenset(
    {
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    }
)
_DEPTH = 6
"""How deep objects inside objects are looked into."""


def tensors_in(tree: Any, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors reachable in `tree`, each once, in the order they are met.

    seen: identities of objects not to look into, to which those are added that were met.
    """
    found: list[Tensor] = []
    depths: dict[int, int] = {}
    _search(tree, _DEPTH, frozenset() if seen is None else seen, depths, found)
    if seen is not None:
        seen.update(depths)
    return found


def _search(
    tree: Any,
    depth: int,
    seen: Collection[int],
    depths: dict[int, int],
    found: list[Tensor],
) -> None:
    """Append the tensors at most `depth` steps below.

    depths: how deep each object was looked into already, so that one that was first met far down
    is looked into again where it is nearer.
    """
    if tree is None or isinstance(tree, (str, bytes, int, float, nn.Module, type, ModuleType)):
        return
    if id(tree) in seen or depths.get(id(tree), -1) >= depth:
        return
    new = id(tree) not in depths
    depths[id(tree)] = depth
    if isinstance(tree, Tensor):
        if new:
            found.append(tree)
    elif depth:
        for item in _children(tree):
            _search(item, depth - 1, seen, depths, found)


def _children(tree: Any) -> Iterable[Any]:
    if isinstance(tree, (dict, MappingProxyType)):
        return tree.values()  # any other mapping may load what it is asked for: look inside of it
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


def look_of(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides (of a sparse tensor the layout) and precision."""
    strided = tensor.layout is torch.strided
    return tuple(tensor.shape), tensor.stride() if strided else tensor.layout, tensor.dtype


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor stores some of its elements only."""
    return tensor.layout is not torch.strided and tensor.layout in _SPARSE


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that hold what a tensor stores: itself, or indices and values."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def listed(item: Any) -> list[Tensor]:
    """The tensors of one argument: itself, or those in a list of it."""
    found: list[Tensor] = []
    arguments_in((item,), found)
    return found


OURS = "_rooftrace"
"""What names of the attributes begin with that the tracer gives to tensors."""
HAS_BYTES = f"{OURS}_has_bytes"
"""Attribute of a meta tensor of a class of its own that stands for one with bytes of its own."""
ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
"""Classes of tensors that hold their bytes and nothing else."""


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class handle ops themselves (DTensor, nested, quantized).

    Fake tensors do not: a mode that comes before ours does it for them.
    """
    if issubclass(kind, FakeTensor):
        return False
    handles = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    return handles or hasattr(kind, "__tensor_flatten__")


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """What a user's code has set on a tensor, in its `__dict__` or its slots."""
    found = {name: item for name, item in vars(tensor).items() if not name.startswith(OURS)}
    for kind in type(tensor).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(tensor, name):
                found.setdefault(name, getattr(tensor, name))
    return found


def is_hollow(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no bytes of its own: `_make_wrapper_subclass` made it."""
    if type(tensor) in ORDINARY or not is_wrapper(type(tensor)):
        return False
    if tensor.layout is not torch.strided:
        return True
    if tensor.device.type == "meta":  # no address says it there: what it is made of does
        return not vars(tensor).get(HAS_BYTES) and bool(tensors_in(attributes_of(tensor)))
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def parts_of(tensor: Tensor, beside: bool = True) -> list[tuple[Tensor, str]]:
    """The plain tensors that hold the bytes of a tensor, each with a suffix for its name.

    beside: also tensors among the attributes of one that has bytes of its own, and a class of its
    own (scales of packed weights).
    """
    kind = type(tensor)
    if kind in ORDINARY:
        return [(tensor, "")]
    own: list[tuple[Tensor, str]] = []
    if hasattr(kind, "__tensor_flatten__"):
        flat: Any = tensor
        inside = [(name, getattr(tensor, name)) for name in flat.__tensor_flatten__()[0]]
        found = [(name, part) for name, part in inside if isinstance(part, Tensor)]
    else:
        if not is_hollow(tensor):
            own = [(tensor, "")]
            if not beside:
                return own
        found = [
            (name, part)
            for name, item in attributes_of(tensor).items()
            for part in tensors_in(item)
            if part is not tensor
        ]
    alone = len(found) + len(own) == 1
    for name, inner in found:
        parts = [(inner, "")] if inner is tensor else parts_of(inner)
        own += [(part, ("" if alone else f".{name}") + suffix) for part, suffix in parts]
    return own or [(tensor, "")]


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that hold these tensors; of wrappers those of the tensors inside, views of one once."""
    total = 0
    for tensor in tensors:
        parts = {bytes_of(part): part for part, _ in reversed(parts_of(tensor))}
        pieces = [piece for part in parts.values() for piece in pieces_of(part)]
        total += sum(piece.numel() * piece.element_size() for piece in pieces)
    return total
