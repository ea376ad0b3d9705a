"""Bounds of implicit values over many elements, and the pairs that a boolean value shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.values.implicit import LEAF, UNKNOWN, Implicit

# -- bounds ----------------------------------------------------------------------------------------
# Bounds of an `Implicit` value over many elements at once, from bounds of its leaves.
#
# OPS is the table of elementwise ops that such a value can be made of.  Numbers are float64; true
# and false are 1 and 0.  Where both bounds of all parts are equal, so are the bounds of
# the result, and they are the value.

Bounds = tuple[Tensor, Tensor]
"""The least and the largest value, of equal shapes."""
Interval = Callable[..., Bounds]

_INF = float("inf")
_broadcast: Any = torch.broadcast_tensors


def bounds_of(value: Implicit, leaf: Callable[[Implicit], Bounds]) -> Bounds:
    """Bounds of a value.  `leaf`: of its leaves."""
    if value.op == LEAF:
        return leaf(value)
    if value.op == UNKNOWN:
        infinite = torch.full((), _INF, dtype=torch.float64)
        zero = torch.zeros((), dtype=torch.float64)
        return (zero, zero + 1) if value.dtype == torch.bool else (-infinite, infinite)
    low, high = OPS[value.op](*(bounds_of(part, leaf) for part in value.parts))
    if value.dtype == torch.bool and value.op not in _TRUTHS:
        return _truth((low, high))
    return low, high


def written_out(value: Implicit) -> Tensor:
    """A value as a new CPU tensor."""

    def exact(part: Implicit) -> Bounds:
        assert part.leaf is not None
        return (number := part.leaf.double()), number

    low, _ = bounds_of(value, exact)
    return low.to(value.dtype).expand(value.shape).contiguous()


# -- numbers -------------------------------------------------------------------------------------


def _hull(*corners: Tensor) -> Bounds:
    """The least and the largest of some numbers; anything where one of them is not a number."""
    stacked = torch.stack(_broadcast(*corners))
    low, high = stacked.nan_to_num(-_INF, _INF, -_INF), stacked.nan_to_num(_INF, _INF, -_INF)
    exact = (stacked == stacked[:1]).all(0)
    return (
        torch.where(exact, stacked[0], low.amin(0)),
        torch.where(exact, stacked[0], high.amax(0)),
    )


def _add(a: Bounds, b: Bounds) -> Bounds:
    return _hull(a[0] + b[0], a[1] + b[1])


def _quotient(a: Bounds, b: Bounds) -> Bounds:
    """a / b; anything where b may be 0 and is uncertain."""
    low, high = _hull(*(x / y for x in a for y in b))
    crosses = (b[0] <= 0) & (b[1] >= 0) & (b[0] != b[1])
    return torch.where(crosses, -_INF, low), torch.where(crosses, _INF, high)


def _floored(a: Bounds, b: Bounds) -> Bounds:
    low, high = _quotient(a, b)
    return low.floor(), high.floor()


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    """a mod b, of the sign of b."""
    same = (a[0] / b[0]).floor() == (a[1] / b[1]).floor()
    exact = (b[0] == b[1]) & same
    zero = torch.zeros((), dtype=torch.float64)
    low = torch.where(exact, a[0].remainder(b[0]), torch.minimum(b[0], zero))
    high = torch.where(exact, a[1].remainder(b[1]), torch.maximum(b[1], zero))
    return low, high


def _abs(a: Bounds) -> Bounds:
    crosses = (a[0] <= 0) & (a[1] >= 0)
    low, high = torch.minimum(a[0].abs(), a[1].abs()), torch.maximum(a[0].abs(), a[1].abs())
    return torch.where(crosses, torch.minimum(low, -a[0] * 0), low), high


def _rising(function: Callable[[Tensor], Tensor]) -> Interval:
    """The interval of a function that never falls."""
    return lambda a: (function(a[0]), function(a[1]))


def _by_points(function: Callable[..., Tensor]) -> Interval:
    """The interval of any function: exact where its parts are, else anything."""

    def interval(*parts: Bounds) -> Bounds:
        exact = function(*(low for low, _ in parts))
        fixed = torch.ones((), dtype=torch.bool)
        for low, high in parts:
            fixed = fixed & (low == high)
        return torch.where(fixed, exact, -_INF), torch.where(fixed, exact, _INF)

    return interval


def _by_bits(function: Callable[..., Tensor]) -> Interval:
    """The interval of a function of the bits of integers."""
    return _by_points(lambda *parts: function(*(part.long() for part in parts)).double())


# -- truths --------------------------------------------------------------------------------------


def _truth(a: Bounds) -> Bounds:
    """Whether numbers are not 0."""
    zero = (a[0] == 0) & (a[1] == 0)
    nonzero = (a[0] > 0) | (a[1] < 0)
    return nonzero.double(), (~zero).double()


def _less(a: Bounds, b: Bounds) -> Bounds:
    return (a[1] < b[0]).double(), (a[0] < b[1]).double()


def _less_or_equal(a: Bounds, b: Bounds) -> Bounds:
    return (a[1] <= b[0]).double(), (a[0] <= b[1]).double()


def _equal(a: Bounds, b: Bounds) -> Bounds:
    surely = (a[0] == a[1]) & (b[0] == b[1]) & (a[0] == b[0])
    return surely.double(), ((a[0] <= b[1]) & (b[0] <= a[1])).double()


def _not(a: Bounds) -> Bounds:
    low, high = _truth(a)
    return 1 - high, 1 - low


def _and(a: Bounds, b: Bounds) -> Bounds:
    (low, high), (other_low, other_high) = _truth(a), _truth(b)
    return torch.minimum(low, other_low), torch.minimum(high, other_high)


def _where(condition: Bounds, a: Bounds, b: Bounds) -> Bounds:
    low, high = _truth(condition)
    first, second = low > 0, high == 0
    return (
        torch.where(first, a[0], torch.where(second, b[0], torch.minimum(a[0], b[0]))),
        torch.where(first, a[1], torch.where(second, b[1], torch.maximum(a[1], b[1]))),
    )


_TRUTHS: dict[str, Interval] = {
    "lt": _less,
    "le": _less_or_equal,
    "gt": lambda a, b: _less(b, a),
    "ge": lambda a, b: _less_or_equal(b, a),
    "eq": _equal,
    "ne": lambda a, b: _not(_equal(a, b)),
    "logical_not": _not,
    "logical_and": _and,
    "logical_or": lambda a, b: _not(_and(_not(a), _not(b))),
    "logical_xor": lambda a, b: _not(_equal(_truth(a), _truth(b))),
}

OPS: dict[str, Interval] = {
    **_TRUTHS,
    "where": _where,
    "to": lambda a: a,
    "trunc": _rising(torch.trunc),
    "add": _add,
    "sub": lambda a, b: _hull(a[0] - b[1], a[1] - b[0]),
    "mul": lambda a, b: _hull(*(x * y for x in a for y in b)),
    "div": _quotient,
    "floor_divide": _floored,
    "remainder": _remainder,
    "neg": lambda a: (-a[1], -a[0]),
    "abs": _abs,
    "minimum": lambda a, b: (torch.minimum(a[0], b[0]), torch.minimum(a[1], b[1])),
    "maximum": lambda a, b: (torch.maximum(a[0], b[0]), torch.maximum(a[1], b[1])),
    "floor": _rising(torch.floor),
    "ceil": _rising(torch.ceil),
    "exp": _rising(torch.exp),
    "log": _rising(torch.log),
    "sqrt": _rising(torch.sqrt),
    "sign": _rising(torch.sign),
    "fmod": _by_points(torch.fmod),
    "pow": _by_points(torch.pow),
    **{name: _by_bits(getattr(torch, name)) for name in (
        "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift",
        "bitwise_right_shift",
    )},
}  # fmt: skip
"""Elementwise ops by name, and the interval of each."""


# -- pairs -----------------------------------------------------------------------------------------
# Which pairs of rows and columns an `Implicit` truth shows, exactly and at any size.
#
# The plane is cut into four again and again.  Bounds of the value over a square say that all of
# its pairs are shown, or none; only squares with both are cut further, down to a few pairs.

_MOST_SQUARES = 1 << 21
"""How many squares are looked at before a truth counts as unknown: it has no pattern.  They are
enough to look at each of half a billion pairs."""
_DENSE = 4
"""Squares of side 2**_DENSE are not cut further: their pairs are looked at."""
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
    counts, first, last, seen = _PairSearch(value, flat, planes, sizes[0], sizes[1]).run()
    if sizes[1] == 1:  # each row shows all columns or none
        counts, last = counts * columns, torch.where(last >= 0, columns - 1, last)
        first, seen = torch.where(counts > 0, 0, columns), seen * columns
    return ShownPairs(rows, columns, counts, first, last, round(int(seen.sum()) / planes))


class _PairSearch:
    """The search of one plane or several, of so many rows and columns."""

    def __init__(
        self, value: Implicit, leaves: dict[int, Tensor], planes: int, rows: int, columns: int
    ) -> None:
        self.value, self.planes, self.rows, self.columns = value, planes, rows, columns
        self.leaves = {
            key: leaf.to(torch.uint8) if leaf.dtype == torch.bool else leaf
            for key, leaf in leaves.items()
        }
        self.top = max((max(rows, columns, 1) - 1).bit_length(), _DENSE)
        self.shown: dict[int, list[tuple[Tensor, ...]]] = {}  # full squares, by their level
        self.looked = 0

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """By plane and row: shown columns, the first and the last; by plane: columns seen."""
        at: tuple[Tensor, ...] = tuple(torch.arange(self.planes) * step for step in (1, 0, 0))
        levels = {key: list(_pyramid(leaf, self.top + 1)) for key, leaf in self.leaves.items()}
        for level in range(self.top, _DENSE, -1):
            cut = []
            for part in _parts(at, _AT_ONCE):
                low, high = self._bounds({key: item[level] for key, item in levels.items()}, part)
                low, high = low.expand(part[0].shape), high.expand(part[0].shape)
                full = low > 0
                self.shown.setdefault(level, []).append(tuple(item[full] for item in part))
                mixed = (low <= 0) & (high > 0)
                cut.append(tuple(item[mixed] for item in part))
            at = self._quarters(tuple(torch.cat(items) for items in zip(*cut, strict=True)), level)
        return self._gathered(at)

    def _bounds(self, leaves: dict[int, Bounds], at: tuple[Tensor, ...]) -> Bounds:
        """Bounds of the value at indices of these leaves: of squares, or of single pairs."""

        def leaf(part: Implicit) -> Bounds:
            low, high = leaves[id(part.leaf)]
            indices = tuple(
                item if size > 1 else item.new_zeros(())
                for item, size in zip(at, low.shape, strict=True)
            )
            return low[indices].double(), high[indices].double()

        return bounds_of(self.value, leaf)

    def _quarters(self, at: tuple[Tensor, ...], level: int) -> tuple[Tensor, ...]:
        """The squares of half the side in squares of this level."""
        plane, row, column = at
        rows = torch.cat([2 * row, 2 * row, 2 * row + 1, 2 * row + 1])
        columns = torch.cat([2 * column, 2 * column + 1] * 2)
        side = 1 << (level - 1)
        inside = (rows * side < self.rows) & (columns * side < self.columns)
        self.looked += int(inside.sum())
        if self.looked > _MOST_SQUARES:
            raise NoPatternError("a mask has no pattern, and too many pairs to look at each")
        return plane.repeat(4)[inside], rows[inside], columns[inside]

    def _gathered(self, rest: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The pairs of all squares; pairs of the smallest ones, `rest`, are looked at singly."""
        counts = torch.zeros((self.planes, 1), dtype=torch.int64)
        first, last = torch.full_like(counts, self.columns), torch.full_like(counts, -1)
        seen = torch.zeros((self.planes, 1), dtype=torch.bool)
        for level in range(self.top, -1, -1):
            side = 1 << level
            height, width = (-(-size // side) for size in (self.rows, self.columns))
            counts, first, last = (_halved(item, height) for item in (counts, first, last))
            seen = _halved(seen, width)
            for plane, row, column in self.shown.get(level, ()):
                start, end = column * side, ((column + 1) * side).clamp(max=self.columns)
                place = plane * height + row
                counts.view(-1).index_add_(0, place, end - start)
                first.view(-1).scatter_reduce_(0, place, start, "amin")
                last.view(-1).scatter_reduce_(0, place, end - 1, "amax")
                seen.view(-1)[plane * width + column] = True
        leaves = {key: (leaf, leaf) for key, leaf in self.leaves.items()}
        steps = torch.arange(1 << _DENSE)
        for plane, row, column in _parts(rest, _AT_ONCE >> 2 * _DENSE):
            rows, columns = (item[:, None] * len(steps) + steps for item in (row, column))
            inside = (rows < self.rows)[:, :, None] & (columns < self.columns)[:, None]
            rows, columns = rows.clamp(max=self.rows - 1), columns.clamp(max=self.columns - 1)
            at = plane[:, None, None], rows[:, :, None], columns[:, None]
            shows = (self._bounds(leaves, at)[0] > 0) & inside
            place = (plane[:, None] * self.rows + rows).view(-1)
            counts.view(-1).index_add_(0, place, shows.sum(2).view(-1))
            least = torch.where(shows, columns[:, None], self.columns).amin(2)
            most = torch.where(shows, columns[:, None], -1).amax(2)
            first.view(-1).scatter_reduce_(0, place, least.view(-1), "amin")
            last.view(-1).scatter_reduce_(0, place, most.view(-1), "amax")
            seen.view(-1)[(plane[:, None] * self.columns + columns)[shows.any(1)]] = True
        return counts, first, last, seen.sum(1)


def _parts(at: tuple[Tensor, ...], count: int) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(item, count) for item in at), strict=True)


def _halved(item: Tensor, size: int) -> Tensor:
    """The facts of squares, for each half of them."""
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
