"""Which call of one side is which of the other, and which kernel.

Calls pair in order, by ever looser keys: each pass pairs what stands between two pairs of the one
before.  What was moved pairs by its key alone.  Inside of two calls kernels pair by their names,
then whatever is left of both stands for each other: one kernel in place of another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rooftrace.measured.alignment import keys as alignment_keys
from rooftrace.measured.rundiffs.kernelnames import kernel_key
from rooftrace.measured.rundiffs.sides import MeasuredCall, MeasuredKernel, MeasuredSide
from rooftrace.tracer.changes.aligning import Pairing

_Key = Callable[[MeasuredCall], Hashable]


@dataclass(frozen=True, slots=True)
class KernelPair:
    """Kernels of a call before and after, one of the two maybe empty."""

    before: MeasuredCall | None
    after: MeasuredCall | None
    was: tuple[MeasuredKernel, ...]
    now: tuple[MeasuredKernel, ...]


def _names(call: MeasuredCall) -> tuple[str, ...]:
    return tuple(kernel_key(name) for name in call.names)


def _purpose(call: MeasuredCall) -> Hashable:
    """The family of a call, where two calls of it may do the same: addmm in place of mm."""
    return call.family if call.family not in _ANYTHING else (call.name, _names(call))


_ANYTHING = frozenset({"elementwise", "other", "copies"})
"""Families of calls that have nothing else in common."""

_PASSES: tuple[_Key, ...] = (
    lambda call: (call.name or _names(call), call.module, call.part, call.sizes),
    lambda call: (call.name or _names(call), call.module, call.part),
    lambda call: (call.name, call.part, call.sizes, _names(call)),
    lambda call: (call.name, call.part, call.sizes) if call.name else _names(call),
    lambda call: (call.part, _names(call)),
    lambda call: (call.name, call.part) if call.name else _names(call),
    lambda call: (call.module, call.part, _purpose(call)),
    lambda call: (call.part, _purpose(call)),
)
"""What two calls must share: where they stand and what they are, or less."""
_MOVED = _PASSES[:3]
"""Keys that say enough to pair calls that are out of order."""


def paired(before: MeasuredSide, after: MeasuredSide) -> list[KernelPair]:
    """Every kernel of both sides, each in one pair; the other way round it gives the same pairs."""
    if _order(after.calls) < _order(before.calls):
        return [KernelPair(p.after, p.before, p.now, p.was) for p in paired(after, before)]
    calls = before.calls, after.calls
    pairing = Pairing(*(range(len(side)) for side in calls))
    in_order = before.in_order and after.in_order
    for number, key in enumerate(_PASSES):
        keys = tuple([key(call) for call in side] for side in calls)
        if in_order:
            _between(pairing, keys)
        if key in _MOVED or not in_order:
            _anywhere(pairing, keys)
        if number == 0 and len(pairing.pairs) == min(map(len, calls)):
            break
    partner = {pair.before: pair.after for pair in pairing.pairs}
    pairs: list[KernelPair] = []
    for number, call in enumerate(before.calls):
        if number in partner:
            pairs += _inside(call, after.calls[partner[number]])
        else:
            pairs += [KernelPair(call, None, (kernel,), ()) for kernel in call.kernels]
    for number in pairing.left[1]:
        call = after.calls[number]
        pairs += [KernelPair(None, call, (), (kernel,)) for kernel in call.kernels]
    return pairs


def _order(calls: Sequence[MeasuredCall]) -> list[tuple[object, ...]]:
    """Calls as values that compare, so that the order of the two sides does not matter."""
    return [
        (c.name, c.sizes, c.module, c.part, *((k.name, k.count, k.seconds) for k in c.kernels))
        for c in calls
    ]


_Keys = tuple[Sequence[Hashable], ...]
"""The keys of the things of either side, by their numbers."""


def _between(pairing: Pairing[int], keys: _Keys) -> None:
    """Pair what has no partner yet, in order, between things that have one."""
    left = pairing.left
    for ranges in list(alignment_keys.gaps(_rising(pairing), *map(len, keys))):
        free = [[i for i in part if i in side] for part, side in zip(ranges, left, strict=True)]
        wanted = [[side[i] for i in each] for side, each in zip(keys, free, strict=True)]
        # Equal items are all that the search asks for.
        for x, y in alignment_keys.common(*wanted):  # type: ignore[arg-type]
            pairing.pair(free[0][x], free[1][y])


def _anywhere(pairing: Pairing[int], keys: _Keys) -> None:
    """Pair what has no partner yet by its key alone, the first with the first."""
    pairing.by(keys[0].__getitem__, keys[1].__getitem__)


def _rising(pairing: Pairing[int]) -> list[tuple[int, int]]:
    """The longest part of the pairs in which both numbers rise."""
    pairs = sorted((pair.before, pair.after) for pair in pairing.pairs)
    ends: list[int] = []
    at: list[int] = []
    above: list[int] = []
    for number, (_, other) in enumerate(pairs):
        place = bisect_left(ends, other)
        above.append(at[place - 1] if place else -1)
        if place == len(ends):
            ends.append(other)
            at.append(number)
        else:
            ends[place], at[place] = other, number
    chain: list[tuple[int, int]] = []
    number = at[-1] if at else -1
    while number >= 0:
        chain.append(pairs[number])
        number = above[number]
    return chain[::-1]


def _inside(before: MeasuredCall, after: MeasuredCall) -> list[KernelPair]:
    """The kernels of two calls that are each other's.

    They pair by name, then by name without sizes; what is left between two pairs on both sides is
    one in place of the other.
    """
    was, now = before.kernels, after.kernels
    pairing = Pairing(range(len(was)), range(len(now)))
    for name_of in (str, kernel_key):
        keys = tuple([(name_of(k.name), k.kind) for k in side] for side in (was, now))
        _between(pairing, keys)
        _anywhere(pairing, keys)
    pairs = [KernelPair(before, after, (was[i],), (now[j],)) for i, j, _ in pairing.pairs]
    i = j = 0
    for end, other in [*_rising(pairing), (len(was), len(now))]:
        gone = tuple(was[k] for k in range(i, end) if k in pairing.left[0])
        new = tuple(now[k] for k in range(j, other) if k in pairing.left[1])
        if gone and new:
            pairs.append(KernelPair(before, after, gone, new))
        else:
            pairs += [KernelPair(before, after, (kernel,), ()) for kernel in gone]
            pairs += [KernelPair(before, after, (), (kernel,)) for kernel in new]
        i, j = end + 1, other + 1
    return pairs
