"""Which call of one side is which of the other, and which kernel.

Calls pair in order, by ever looser keys: each pass pairs what stands between two pairs of the one
before.  What was moved pairs by its key alone.  Inside of two calls kernels pair by their names,
then whatever is left of both stands for each other: one kernel in place of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rooftrace.measured.alignment import keys
from rooftrace.measured.rundiffs.kernelnames import kernel_key
from rooftrace.measured.rundiffs.sides import MeasuredCall, MeasuredKernel, MeasuredSide

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
    in_order = before.in_order and after.in_order
    partner = _partners(before.calls, after.calls, in_order)
    pairs: list[KernelPair] = []
    taken = set(partner.values())
    for number, call in enumerate(before.calls):
        if number in partner:
            pairs += _inside(call, after.calls[partner[number]])
        else:
            pairs += [KernelPair(call, None, (kernel,), ()) for kernel in call.kernels]
    for number, call in enumerate(after.calls):
        if number not in taken:
            pairs += [KernelPair(None, call, (), (kernel,)) for kernel in call.kernels]
    return pairs


def _order(calls: Sequence[MeasuredCall]) -> list[tuple[object, ...]]:
    """Calls as values that compare, so that the order of the two sides does not matter."""
    return [
        (c.name, c.sizes, c.module, c.part, *((k.name, k.count, k.seconds) for k in c.kernels))
        for c in calls
    ]


def _partners(
    before: Sequence[MeasuredCall], after: Sequence[MeasuredCall], in_order: bool
) -> dict[int, int]:
    """The number of the call of `after` for a call of `before`."""
    partner: dict[int, int] = {}
    for number, key in enumerate(_PASSES):
        have, wanted = [key(call) for call in before], [key(call) for call in after]
        if in_order:
            _between(partner, have, wanted)
        if key in _MOVED or not in_order:
            _anywhere(partner, have, wanted)
        if number == 0 and len(partner) == min(len(before), len(after)):
            break
    return partner


def _between(partner: dict[int, int], have: Sequence[Hashable], wanted: Sequence[Hashable]) -> None:
    """Pair what has no partner yet, in order, between calls that have one."""
    taken = set(partner.values())
    for mine, other in keys.gaps(_rising(partner), len(have), len(wanted)):
        free = [i for i in mine if i not in partner]
        open_ = [j for j in other if j not in taken]
        if not free or not open_:
            continue
        # Equal items are all that the search asks for.
        a, b = [have[i] for i in free], [wanted[j] for j in open_]
        for x, y in keys.common(a, b):  # type: ignore[arg-type]
            partner[free[x]] = open_[y]


def _rising(partner: dict[int, int]) -> list[tuple[int, int]]:
    """The longest part of the pairs in which both numbers rise."""
    from bisect import bisect_left

    pairs = sorted(partner.items())
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


def _anywhere(
    partner: dict[int, int], have: Sequence[Hashable], wanted: Sequence[Hashable]
) -> None:
    """Pair what has no partner yet by its key alone, the first with the first."""
    taken = set(partner.values())
    free: dict[Hashable, list[int]] = defaultdict(list)
    for number in reversed(range(len(wanted))):
        if number not in taken:
            free[wanted[number]].append(number)
    for number, key in enumerate(have):
        if number not in partner and free.get(key):
            partner[number] = free[key].pop()


def _inside(before: MeasuredCall, after: MeasuredCall) -> list[KernelPair]:
    """The kernels of two calls that are each other's.

    They pair by name, then by name without sizes; what is left between two pairs on both sides is
    one in place of the other.
    """
    was, now = before.kernels, after.kernels
    partner: dict[int, int] = {}
    for key in (lambda name: name, kernel_key):
        have, wanted = ([(key(k.name), k.kind) for k in side] for side in (was, now))
        _between(partner, have, wanted)
        _anywhere(partner, have, wanted)
    pairs = [KernelPair(before, after, (was[i],), (now[j],)) for i, j in partner.items()]
    taken, rising = set(partner.values()), _rising(partner)
    i = j = 0
    for end, other in [*rising, (len(was), len(now))]:
        gone = tuple(was[k] for k in range(i, end) if k not in partner)
        new = tuple(now[k] for k in range(j, other) if k not in taken)
        if gone and new:
            pairs.append(KernelPair(before, after, gone, new))
        else:
            pairs += [KernelPair(before, after, (kernel,), ()) for kernel in gone]
            pairs += [KernelPair(before, after, (), (kernel,)) for kernel in new]
        i, j = end + 1, other + 1
    return pairs
