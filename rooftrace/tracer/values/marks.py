"""Marks on meta tensors: the real tensor that a meta tensor stands for, and its value."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftrace.tracer.values.implicit import Implicit

META = torch.device("meta")

_PACKED = getattr(torch, "float4_e2m1fn_x2", None)
"""Two values in a byte; torch 2.8 cannot copy such a tensor."""
MAX_INTEGERS = 1 << 22
"""Integer and boolean tensors up to this many elements are written out; larger ones are `Implicit`
where they are made of such."""
MAX_CHOSEN = 1 << 28
"""Whole numbers up to this many that follow from a choice (of experts) are carried along: the rows
of each expert depend on them.  Equal layers share them."""
MAX_MARKED = 1 << 25
"""Truths up to this many that follow from a choice (marks of experts, or of the keys that sparse
attention takes) are carried along: each layer makes and looks at its own."""
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
IMPLICIT = "_rooftrace_implicit"
"""Attribute of a meta tensor that is too large for that: its `Implicit` value."""

UNIFORM = "_rooftrace_uniform"
"""Attribute of a meta tensor of whole numbers that were drawn here: among which range, all equally
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


class LearntValue(NamedTuple):
    """What is known of a meta tensor at any size: as `Known`, or as an `Implicit` value."""

    value: Tensor | Implicit
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
    most = MAX_MARKED if tensor.dtype == torch.bool else MAX_CHOSEN
    return small(tensor) or (whole and tensor.numel() <= most)


def store(module: Any, name: str, form: str) -> None:
    """Mark a parameter of a module with the format in which a checkpoint stores it."""
    vars(module).setdefault(_STORED, {})[name] = form


def stored_in(module: Any) -> dict[str, str]:
    """Formats of the parameters of a module itself that are marked, by their names."""
    marked: dict[str, str] = vars(module).get(_STORED, {})
    return marked


MASKED = -9e3
"""A number up to this, added to a score of attention, hides its position: -10,000 is, which bf16
holds as -9,984."""


def mask_of(tensor: Tensor) -> Implicit | None:
    """The value of a meta tensor that is too large to be known by itself, where it may be a mask.

    It was made of ranges, or stands for a real one of truths (also as 0 and 1) or of very negative
    numbers.
    """
    value: Implicit | None = tensor.__dict__.get(IMPLICIT)
    real: Real | None = tensor.__dict__.get(REAL)
    weight = tensor.requires_grad or isinstance(tensor, torch.nn.Parameter)
    if value is not None or real is None or weight:
        return value
    return mask_in(real.tensor.detach())


def mask_in(data: Tensor) -> Implicit | None:
    """The value of a real tensor, where it may be a mask."""
    if data.dim() < _PLANE or data.layout is not torch.strided:
        return None
    value = Implicit.of(data)
    leaf = data if value.leaf is None else value.leaf
    if data.dtype in _FLOATS and data.numel():
        row = leaf[(0,) * (leaf.dim() - 1)]  # tells most other tensors from masks
        truths = all(bool(((some == 0) | (some == 1)).all()) for some in (row, leaf))
        masks = truths or float(leaf.min()) <= MASKED
    else:
        masks = data.dtype == torch.bool
    return value if masks else None


_PLANE = 2  # dimensions
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
