"""Values that are never written out: elementwise ops on small tensors, which are broadcast.

The mask of a sequence of 131,072 tokens has 1.7e10 elements, and is a comparison of two ranges.  So
it is held as that comparison, at any size; views of it are views of the ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LEAF = "leaf"
UNKNOWN = "unknown"
"""The op of a part that depends on weights or activations."""


@dataclass(frozen=True, slots=True, eq=False)
class Implicit:
    """A value as an elementwise op on parts of the same shape.

    A leaf is a CPU tensor of as many dimensions, of size 1 where it is broadcast.  Nothing writes
    to it, and a copy of a value is itself.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str = LEAF
    parts: tuple[Implicit, ...] = ()
    leaf: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> Implicit:
        return self

    @staticmethod
    def of(value: Tensor | float) -> Implicit:
        """A tensor that is written out, or a number."""
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
        if tensor._is_zerotensor():  # of forward-mode AD: it has no memory
            tensor = torch.zeros((), dtype=tensor.dtype, device="cpu").expand(tensor.shape)
        return Implicit(tuple(tensor.shape), tensor.dtype, leaf=_squeezed(tensor))

    @staticmethod
    def unknown(shape: Iterable[int], dtype: torch.dtype) -> Implicit:
        """A value of this shape of which nothing is known."""
        return Implicit(tuple(shape), dtype, UNKNOWN)

    @staticmethod
    def applied(op: str, *parts: Implicit, dtype: torch.dtype) -> Implicit:
        """An elementwise op on parts, which are broadcast."""
        broadcast: Any = torch.broadcast_shapes
        shape = tuple(broadcast(*(part.shape for part in parts)))
        return Implicit(shape, dtype, op, tuple(part.expanded(shape) for part in parts))

    @property
    def elements(self) -> int:
        """How many elements the value has."""
        return math.prod(self.shape)

    @property
    def leaves(self) -> Iterator[Implicit]:
        """The leaves and the unknown parts."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves

    @property
    def certain(self) -> bool:
        """Whether no part is unknown."""
        return all(leaf.op == LEAF for leaf in self.leaves)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is equal for values that are built alike from equal leaves."""
        inside: tuple[Any, ...] = tuple(part.signature for part in self.parts)
        if self.leaf is not None:
            plain = self.leaf.reshape(-1).clone(memory_format=torch.contiguous_format)
            inside = tuple(self.leaf.shape), hash(bytes(plain.view(torch.uint8).numpy()))
        return self.shape, self.dtype, self.op, inside

    # -- views -------------------------------------------------------------------------------------

    def changed(self, shape: Iterable[int], change: Callable[[Tensor], Tensor]) -> Implicit:
        """A value of this shape, whose leaves are what `change` makes of those of this one."""
        shape = tuple(shape)
        leaf = None if self.leaf is None else change(self.leaf)
        parts = tuple(part.changed(shape, change) for part in self.parts)
        return Implicit(shape, self.dtype, self.op, parts, leaf)

    def expanded(self, shape: Sequence[int]) -> Implicit:
        """It in a shape that it broadcasts to."""
        more = (1,) * (len(shape) - len(self.shape))
        if tuple(shape) == self.shape:
            return self
        return self.changed(shape, lambda leaf: leaf.reshape((*more, *leaf.shape)))

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Implicit:
        """What an op makes of it that takes a view, or copies some rows.  It is run on each leaf.

        Raises what the op raises.
        """
        empty = torch.empty((), device="meta").expand(self.shape)
        shape = tuple(view(empty).shape)
        return self.changed(shape, lambda leaf: _squeezed(view(leaf.expand(self.shape))))

    def reshaped(self, shape: Sequence[int]) -> Implicit:
        """It with the same elements in another shape."""
        groups = list(_groups(self.shape, tuple(shape)))

        def change(leaf: Tensor) -> Tensor:
            before: list[int] = []
            after: list[int] = []
            for old, new in groups:
                sizes = leaf.shape[len(before) : len(before) + len(old)]
                alone = all(size == 1 for size in sizes)
                before += [1] * len(old) if alone else old
                after += [1] * len(new) if alone else new
            return leaf.expand(before).reshape(after)

        return self.changed(shape, change)

    def embedded(self, shape: Sequence[int], starts: Sequence[int]) -> Implicit:
        """A value of this shape, of which this is the box that starts at these indices; what lies
        beside it has no meaning."""

        def padded(leaf: Tensor) -> Tensor:
            for dim, (size, start, own) in enumerate(zip(shape, starts, self.shape, strict=True)):
                if leaf.shape[dim] == 1 or own == size:
                    continue
                wide = leaf.new_zeros((*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]))
                wide.narrow(dim, start, own).copy_(leaf)
                leaf = wide
            return leaf

        return self.changed(shape, padded)


def _groups(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Neighbouring dimensions of two shapes that hold as many elements, from the left."""
    here, there = list(old), list(new)
    while here or there:
        left = [here.pop(0)] if here else []
        right = [there.pop(0)] if there else []
        while math.prod(left) != math.prod(right) or not (left and right):
            if (math.prod(left) <= math.prod(right) and here) or not there:
                if not here:
                    break
                left.append(here.pop(0))
            else:
                right.append(there.pop(0))
        yield left, right


def _squeezed(tensor: Tensor) -> Tensor:
    """A tensor with size 1 where all of a dimension are one element in memory."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
