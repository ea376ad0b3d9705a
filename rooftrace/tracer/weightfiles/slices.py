"""A few elements of a tensor at a time, whatever its strides: what is copied has a bound."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SLICE = 1 << 18
"""Elements that are read at once: 2 MiB as doubles, which a cache holds."""


def ranges(elements: int, size: int = SLICE) -> Iterator[tuple[int, int]]:
    """(start, stop) of each slice of so many elements."""
    for start in range(0, elements, size):
        yield start, min(start + size, elements)


def flat_slice(tensor: Tensor, start: int, stop: int) -> Tensor:
    """The elements `start` to `stop` of a strided tensor, in the order of its shape, as a row.

    A contiguous tensor gives a view.  Of any other one these elements alone are copied.
    """
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)[start:stop]
    index = torch.arange(start, stop, device=tensor.device)
    places = torch.zeros_like(index)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        places += index % size * stride
        index = torch.div(index, size, rounding_mode="floor")
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    row = tensor.as_strided((extent,), (1,))
    if row.element_size() == 1:  # indexing knows bytes, and not every format of 8 bits
        return row.view(torch.uint8)[places].view(tensor.dtype)
    return row[places]


def as_doubles(values: Tensor) -> Tensor:
    """Values of any dtype as a row of doubles on the CPU; a complex number is two of them."""
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj()).reshape(-1)
    return values.cpu().to(torch.float64)


def as_bytes(values: Tensor) -> Tensor:
    """The bytes of a row of values, as torch.uint8."""
    values = values.detach().resolve_conj().resolve_neg()
    return values.contiguous().view(torch.uint8)
