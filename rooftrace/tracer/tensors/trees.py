"""Tensors in nested Python values (containers, dataclasses, cache objects), and their look."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import CellType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN: tuple[type, ...] = (
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

    seen: identities of objects that are not searched; the objects met here are added.
    """
    tensors: list[Tensor] = []
    depths: dict[int, int] = {}
    _search(tree, _DEPTH, frozenset() if seen is None else seen, depths, tensors)
    if seen is not None:
        seen.update(depths)
    return tensors


def _search(
    tree: Any,
    depth: int,
    seen: Collection[int],
    depths: dict[int, int],
    tensors: list[Tensor],
) -> None:
    """Append the tensors at most `depth` steps below.

    depths: how deep each object was searched already: one that was first met far down is searched
    again where it is nearer.
    """
    if tree is None or isinstance(tree, (str, bytes, int, float, nn.Module, type, ModuleType)):
        return
    if id(tree) in seen or depths.get(id(tree), -1) >= depth:
        return
    new = id(tree) not in depths
    depths[id(tree)] = depth
    if isinstance(tree, Tensor):
        if new:
            tensors.append(tree)
    elif depth:
        for item in held_in(tree):
            _search(item, depth - 1, seen, depths, tensors)


def held_in(item: Any) -> Iterable[Any]:
    """The contents of an object: a container's items, else its attributes; none for a callable.

    A dict gives its values.  Any other mapping may load items on access, so it gives its
    attributes.
    """
    if isinstance(item, (dict, MappingProxyType)):
        return item.values()
    if isinstance(item, (list, tuple, set, frozenset)):
        return item
    if callable(item):
        return ()
    slots = (getattr(item, name, None) for name in getattr(type(item), "__slots__", ()))
    return (*vars(item).values(), *slots) if hasattr(item, "__dict__") else tuple(slots)


ABSENT: object = object()
"""The value of a variable that has no value yet."""


def cell_content(cell: CellType) -> Any:
    """The value of a variable that functions share (a cell of a closure), or ABSENT."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def arguments_in(items: Iterable[Any], tensors: list[Tensor]) -> None:
    """Append the tensors among an op's arguments (lists and tuples only) to `tensors`."""
    for item in items:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, (list, tuple)):
            arguments_in(item, tensors)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor under the wrappers of torch.func's transforms; ops are recorded on that."""
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on meta, also where a script is shown it on a GPU."""
    with torch._C.DisableTorchFunction():
        return tensor.device.type == "meta"


def bytes_of(tensor: Tensor) -> int:
    """Identity of the bytes of a tensor while it lives: the same for all its views."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def look_of(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides (for a sparse tensor its layout) and precision."""
    strided = tensor.layout is torch.strided
    return tuple(tensor.shape), tensor.stride() if strided else tensor.layout, tensor.dtype


def label_of(tensor: Tensor) -> str:
    """Precision and shape in words for a message: "float32[8, 16]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def is_sparse(tensor: Tensor) -> bool:
    """Whether a tensor stores only some of its elements."""
    return tensor.layout is not torch.strided and tensor.layout in _SPARSE


def pieces_of(tensor: Tensor) -> list[Tensor]:
    """The strided tensors that store a tensor: itself, or its indices and values."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


STORES_NOTHING = "_rooftrace_stores_nothing"
"""Attribute of a sparse tensor on meta that is known to store no element."""
_PIECES = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""What the pieces of a sparse tensor are called, in the order of `pieces_of`."""


def named_pieces(tensor: Tensor) -> list[tuple[Tensor, str]]:
    """The pieces of a tensor, each with a suffix for its name; of a sparse one the values first.

    A sparse one that stores nothing on meta stands for itself, unless it was emptied: it was made
    by an op that cannot know there what it stores.
    """
    if not is_sparse(tensor):
        return [(tensor, "")]
    if tensor.is_meta and not tensor._nnz() and STORES_NOTHING not in vars(tensor):
        return [(tensor, "")]
    names = [f".{name}" for name in _PIECES[tensor.layout]]
    with torch._C._AutoDispatchBelowAutograd():
        return list(zip(pieces_of(tensor), names, strict=True))[::-1]


def listed(item: Any) -> list[Tensor]:
    """The tensors of one argument: itself, or those in a list of it."""
    tensors: list[Tensor] = []
    arguments_in((item,), tensors)
    return tensors
