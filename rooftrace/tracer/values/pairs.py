"""Which pairs of rows and columns an `Implicit` truth shows, exactly and at any size.

The plane is cut into four again and again.  Bounds of the value over a square say that all of its
pairs are shown, or none; only squares with both are cut further.  A causal mask of S rows takes
about 4 S of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftrace.tracer.values.implicit import Implicit
from rooftrace.tracer.values.intervals import Bounds, bounds_of

_MOST_SQUARES = 1 << 27
"""How many squares are looked at before a truth counts as unknown: it has no pattern, and squares
of a few elements all differ."""
_AT_ONCE = 1 << 20


class NoPatternError(ValueError):
    """A truth that is too large to look at pair by pair, and has no pattern."""


@dataclass(frozen=True, slots=True)
class ShownPairs:
    """The pairs that are shown in each plane [rows, columns] of a value.

    Planes that are the same for some leading dimensions stand for all of them; so does one row
    where all rows are the same.  An empty row has `first` = columns and `last` = -1.
    """

    rows: int
    columns: int
    counts: Tensor  # int64[planes, rows or 1]: columns that a row shows
    first: Tensor  # int64, likewise: the first and the last of them
    last: Tensor
    seen: int  # columns that some row shows, mean over the planes

    @property
    def pairs(self) -> int:
        """Shown pairs of a plane, mean over the planes."""
        planes, rows = self.counts.shape
        return round(int(self.counts.sum()) * (self.rows // rows) / planes)


def shown_pairs(value: Implicit, rows: int, columns: int) -> ShownPairs:
    """The pairs that a boolean value [..., rows or 1, columns or 1] shows.

    Raises NoPatternError where there are too many to look at, and no pattern.
    """
    value = value.expanded((1,) * (2 - len(value.shape)) + value.shape)
    leaves = {id(leaf.leaf): leaf.leaf for leaf in value.leaves if leaf.leaf is not None}
    lead = tuple(
        max((leaf.shape[dim] for leaf in leaves.values()), default=1)
        for dim in range(len(value.shape) - 2)
    )
    planes = math.prod(lead)
    flat = {
        key: leaf.expand(*lead, *leaf.shape[-2:]).reshape(planes, *leaf.shape[-2:])
        if any(size > 1 for size in leaf.shape[:-2])
        else leaf.reshape(1, *leaf.shape[-2:])
        for key, leaf in leaves.items()
    }
    sizes = [max((leaf.shape[dim] for leaf in flat.values()), default=1) for dim in (1, 2)]
    search = _Search(value, flat, planes, sizes[0], sizes[1])
    search.run()
    counts, first, last, seen = search.gathered()
    if sizes[1] == 1:  # each row shows all columns or none
        counts, last = counts * columns, torch.where(last >= 0, columns - 1, last)
        first, seen = torch.where(counts > 0, 0, columns), seen * columns
    return ShownPairs(rows, columns, counts, first, last, round(int(seen.sum()) / planes))


class _Search:
    """The search of one plane or several, of so many rows and columns."""

    def __init__(
        self, value: Implicit, leaves: dict[int, Tensor], planes: int, rows: int, columns: int
    ) -> None:
        self.value, self.planes, self.rows, self.columns = value, planes, rows, columns
        self.levels = (max(rows, columns, 1) - 1).bit_length() + 1
        self.bounds = {
            key: list(_pyramid(leaf.double(), self.levels)) for key, leaf in leaves.items()
        }
        self.shown: list[
            tuple[Tensor, ...]
        ] = []  # by level, from the whole: squares that are shown
        self.looked = 0

    def run(self) -> None:
        """Find the squares that are shown."""
        at = tuple(torch.arange(self.planes) * step for step in (1, 0, 0))
        for level in reversed(range(self.levels)):
            whole, cut = [], []
            for part in zip(*(torch.split(item, _AT_ONCE) for item in at), strict=True):
                low, high = self._bounds(level, part)
                whole.append(tuple(item[low > 0] for item in part))
                cut.append(tuple(item[(low <= 0) & (high > 0)] for item in part))
            self.shown.append(tuple(torch.cat(items) for items in zip(*whole, strict=True)))
            at = self._quarters(tuple(torch.cat(items) for items in zip(*cut, strict=True)), level)

    def _bounds(self, level: int, at: tuple[Tensor, ...]) -> Bounds:
        self.looked += len(at[0])
        if self.looked > _MOST_SQUARES:
            raise NoPatternError("a mask has no pattern, and too many pairs to look at each")

        def leaf(part: Implicit) -> Bounds:
            low, high = self.bounds[id(part.leaf)][level]
            places = tuple(
                item if size > 1 else torch.zeros((), dtype=torch.int64)
                for item, size in zip(at, low.shape, strict=True)
            )
            return low[places], high[places]

        low, high = bounds_of(self.value, leaf)
        return low.expand(at[0].shape), high.expand(at[0].shape)

    def _quarters(self, at: tuple[Tensor, ...], level: int) -> tuple[Tensor, ...]:
        """The squares of half the side in squares of this level."""
        if not level:
            return tuple(item[:0] for item in at)
        plane, row, column = at
        rows = torch.cat([2 * row, 2 * row, 2 * row + 1, 2 * row + 1])
        columns = torch.cat([2 * column, 2 * column + 1] * 2)
        side = 1 << (level - 1)
        inside = (rows * side < self.rows) & (columns * side < self.columns)
        return plane.repeat(4)[inside], rows[inside], columns[inside]

    def gathered(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """By plane and row: shown columns, the first and the last; by plane: columns seen."""
        shape = (self.planes, 1)
        counts = torch.zeros(shape, dtype=torch.int64)
        first, last = torch.full_like(counts, self.columns), torch.full_like(counts, -1)
        seen = torch.zeros(shape, dtype=torch.bool)
        for level, (plane, row, column) in zip(
            reversed(range(self.levels)), self.shown, strict=True
        ):
            side = 1 << level
            height, width = (-(-size // side) for size in (self.rows, self.columns))
            counts, first, last = (_halved(item, height) for item in (counts, first, last))
            seen = _halved(seen, width)
            start, end = column * side, ((column + 1) * side).clamp(max=self.columns)
            place = plane * height + row
            counts.view(-1).index_add_(0, place, end - start)
            first.view(-1).scatter_reduce_(0, place, start, "amin")
            last.view(-1).scatter_reduce_(0, place, end - 1, "amax")
            seen.view(-1)[plane * width + column] = True
        return counts, first, last, seen.sum(1)


def _halved(item: Tensor, size: int) -> Tensor:
    """What holds for squares, for each half of them."""
    if item.shape[1] == size:
        return item
    return item.repeat_interleave(2, 1)[:, :size].contiguous()


def _pyramid(leaf: Tensor, levels: int) -> Iterator[Bounds]:
    """The least and the largest element in squares of side 1, 2, 4 ... of [planes, rows, columns].

    A dimension of size 1 stays.
    """
    low, high = leaf, leaf
    yield low, high
    for _ in range(levels - 1):
        for dim in (1, 2):
            size = low.shape[dim]
            if size > 1:
                even = [
                    item.narrow(dim, 0, size - size % 2).unfold(dim, 2, 2) for item in (low, high)
                ]
                rest = [item.narrow(dim, size - size % 2, size % 2) for item in (low, high)]
                low = torch.cat([even[0].amin(-1), rest[0]], dim)
                high = torch.cat([even[1].amax(-1), rest[1]], dim)
        yield low, high
