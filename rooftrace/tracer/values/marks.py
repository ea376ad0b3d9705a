"""Marks on meta tensors: the real tensor that a meta tensor stands for, and its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

META = torch.device("meta")

_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
"""Two values in a byte; torch 2.8 cannot copy such a tensor."""
MAX_INTEGERS = 1 << 22
"""Integer and boolean tensors up to this many elements are carried along."""
MAX_CHOSEN = 1 << 28
"""Whole numbers up to this many that follow from a choice (of experts) are carried along: the rows
of each expert depend on them.  Equal layers share them."""
MAX_ASSUMED = 1 << 24
"""Unknown tensors up to this many elements get an assumed value where the code needs one."""
MAX_FLOATS = 1 << 16
"""Floating tensors up to this many elements are carried along; they seldom decide anything."""

KNOWN = "_rooftrace_known"
"""Attribute of a meta tensor whose value a running capture knows; each adds a number of its own."""
REAL = "_rooftrace_real"
"""Attribute of a meta tensor made from a real one: the real one, as a `Real`."""
REAL_VALUE = "_rooftrace_value"
"""Attribute of a meta tensor made from a small real one: its value, for a capture to learn."""


UNIFORM = "_rooftrace_uniform"
"""Attribute of a meta tensor of whole numbers that were drawn here: among how many, all equally
likely.  What they reach counts as expected, and not as in the one draw."""

_STORED = "_rooftrace_stored"
"""Attribute of a module: formats in which a checkpoint stores its parameters, by their names."""


class Real:
    """A reference to the user's own tensor, which is only read; a copy of it is itself."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: Any) -> Real:
        return self


class Known(NamedTuple):
    """The value of a meta tensor (on the CPU), the assumptions it rests on, its storage's epoch."""

    value: Tensor
    taint: frozenset[int]
    epoch: int


def small(tensor: Tensor) -> bool:
    """Whether the values of a tensor are worth carrying: few enough, and one to an element."""
    if tensor.dtype is _PACKED:
        return False
    inexact = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MAX_FLOATS if inexact else MAX_INTEGERS)


def fits_chosen(tensor: Tensor) -> bool:
    """Whether the values of a tensor that follow from a choice are worth carrying."""
    whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return small(tensor) or (whole and tensor.numel() <= MAX_CHOSEN)


def store(module: Any, name: str, form: str) -> None:
    """Mark a parameter of a module with the format in which a checkpoint stores it."""
    vars(module).setdefault(_STORED, {})[name] = form


def stored_in(module: Any) -> dict[str, str]:
    """Formats of the parameters of a module itself that are marked, by their names."""
    marked: dict[str, str] = vars(module).get(_STORED, {})
    return marked
