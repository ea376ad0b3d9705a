"""Tensor subclasses: the tensors that hold their bytes, and attributes that the user set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rooftrace.tracer.tensors.trees import bytes_of, named_pieces, tensors_in, unwrapped

OURS = "_rooftrace"
"""The prefix of the attributes that the tracer sets on tensors."""
HAS_BYTES = f"{OURS}_has_bytes"
"""Attribute of a meta tensor of a class of its own that stands for one with bytes of its own."""
ORDINARY = (Tensor, nn.Parameter, nn.Buffer)
"""Classes of plain tensors, which hold their own bytes and nothing else."""


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class handle ops themselves (DTensor, nested, quantized).

    Fake tensors do not: a mode that comes before ours does it for them.
    """
    if issubclass(kind, FakeTensor):
        return False
    handles = getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__
    return handles or hasattr(kind, "__tensor_flatten__")


def attributes_of(tensor: Tensor) -> dict[str, Any]:
    """The attributes that a user's code has set on a tensor, in its `__dict__` or its slots."""
    attributes = {name: item for name, item in vars(tensor).items() if not name.startswith(OURS)}
    for kind in type(tensor).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(tensor, name):
                attributes.setdefault(name, getattr(tensor, name))
    return attributes


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
    tensor = unwrapped(tensor)
    kind = type(tensor)
    if kind in ORDINARY:
        return named_pieces(tensor)
    own: list[tuple[Tensor, str]] = []
    if hasattr(kind, "__tensor_flatten__"):
        flat: Any = tensor
        inside = [(name, getattr(tensor, name)) for name in flat.__tensor_flatten__()[0]]
        named = [(name, part) for name, part in inside if isinstance(part, Tensor)]
    else:
        if not is_hollow(tensor):
            own = [(tensor, "")]
            if not beside:
                return own
        named = [
            (name, part)
            for name, item in attributes_of(tensor).items()
            for part in tensors_in(item)
            if part is not tensor
        ]
    alone = len(named) + len(own) == 1
    for name, inner in named:
        parts = [(inner, "")] if inner is tensor else parts_of(inner)
        own += [(part, ("" if alone else f".{name}") + suffix) for part, suffix in parts]
    return own or [(tensor, "")]


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that store these tensors: for a wrapper the tensors inside; views of one count once."""
    total = 0
    for tensor in tensors:
        parts = {bytes_of(part): part for part, _ in reversed(parts_of(tensor))}
        total += sum(part.numel() * part.element_size() for part in parts.values())
    return total
