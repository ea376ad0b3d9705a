"""Bounds of an `Implicit` value over many elements at once, from bounds of its leaves.

OPS is the table of elementwise ops that such a value can be made of.  Numbers are float64; true and
false are 1 and 0.  Where both bounds of all parts are equal, so are those of the result, and they
are the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.values.implicit import LEAF, UNKNOWN, Implicit

Bounds = tuple[Tensor, Tensor]
"""The least and the largest value, of equal shapes."""
Interval = Callable[..., Bounds]

_INF = float("inf")
_broadcast: Any = torch.broadcast_tensors


def bounds_of(value: Implicit, leaf: Callable[[Implicit], Bounds]) -> Bounds:
    """Bounds of a value.  `leaf` gives those of its leaves."""
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
    """A value as a CPU tensor of its own."""

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


def _sub(a: Bounds, b: Bounds) -> Bounds:
    return _hull(a[0] - b[1], a[1] - b[0])


def _mul(a: Bounds, b: Bounds) -> Bounds:
    return _hull(*(x * y for x in a for y in b))


def _quotient(a: Bounds, b: Bounds) -> Bounds:
    """a / b; anything where b may be 0 and is not known."""
    low, high = _hull(*(x / y for x in a for y in b))
    crosses = (b[0] <= 0) & (b[1] >= 0) & (b[0] != b[1])
    return torch.where(crosses, -_INF, low), torch.where(crosses, _INF, high)


def _floored(a: Bounds, b: Bounds) -> Bounds:
    low, high = _quotient(a, b)
    return low.floor(), high.floor()


def _remainder(a: Bounds, b: Bounds) -> Bounds:
    """a mod b, of the sign of b."""
    same = (a[0] / b[0]).floor() == (a[1] / b[1]).floor()
    whole = (b[0] == b[1]) & same
    zero = torch.zeros((), dtype=torch.float64)
    low = torch.where(whole, a[0].remainder(b[0]), torch.minimum(b[0], zero))
    high = torch.where(whole, a[1].remainder(b[1]), torch.maximum(b[1], zero))
    return low, high


def _abs(a: Bounds) -> Bounds:
    crosses = (a[0] <= 0) & (a[1] >= 0)
    low, high = torch.minimum(a[0].abs(), a[1].abs()), torch.maximum(a[0].abs(), a[1].abs())
    return torch.where(crosses, torch.minimum(low, -a[0] * 0), low), high


def _rising(function: Callable[[Tensor], Tensor]) -> Interval:
    """The interval of a function that never falls."""
    return lambda a: (function(a[0]), function(a[1]))


def _by_points(function: Callable[..., Tensor]) -> Interval:
    """The interval of any function: known where its parts are, else anything."""

    def interval(*parts: Bounds) -> Bounds:
        exact = function(*(low for low, _ in parts))
        known = torch.ones((), dtype=torch.bool)
        for low, high in parts:
            known = known & (low == high)
        return torch.where(known, exact, -_INF), torch.where(known, exact, _INF)

    return interval


def _by_bits(function: Callable[..., Tensor]) -> Interval:
    """The interval of a function of the bits of whole numbers."""
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


def _or(a: Bounds, b: Bounds) -> Bounds:
    return _not(_and(_not(a), _not(b)))


def _xor(a: Bounds, b: Bounds) -> Bounds:
    return _not(_equal(_truth(a), _truth(b)))


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
    "logical_or": _or,
    "logical_xor": _xor,
}

OPS: dict[str, Interval] = {
    **_TRUTHS,
    "where": _where,
    "to": lambda a: a,
    "trunc": _rising(torch.trunc),
    "add": _add,
    "sub": _sub,
    "mul": _mul,
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
