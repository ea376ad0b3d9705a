"""Sequences that one attention kernel runs together: pairs that a band lets through, and lengths.

A band shows query i of n the keys j of m with -behind <= j - (i + shift) <= ahead; None: no bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys a query sees; see above.  from_end: the last query stands at the last key."""

    behind: int | None = None
    ahead: int | None = None
    from_end: bool = True
    least_shift: int | None = None  # for kernels that never move the diagonal to the left

    def _shift(self, queries: int, keys: int) -> int:
        shift = keys - queries if self.from_end else 0
        return shift if self.least_shift is None else max(shift, self.least_shift)

    def pairs(self, queries: int, keys: int) -> int:
        """How many (query, key) pairs of one head the band shows."""
        shift = self._shift(queries, keys)
        above = 0 if self.behind is None else _below(queries, keys, shift - self.behind - 1)
        if self.ahead is None:
            return queries * keys - above
        return _below(queries, keys, shift + self.ahead) - above

    def seen(self, queries: int, keys: int) -> int:
        """How many keys some query sees."""
        shift = self._shift(queries, keys)
        first = 0 if self.behind is None else max(0, shift - self.behind)
        end = keys if self.ahead is None else min(keys, queries + shift + self.ahead)
        return max(0, end - first) if queries else 0


def _below(queries: int, keys: int, most: int) -> int:
    """Pairs with j - i <= most: the sum over i of i + most + 1, cut to 0 ... keys."""
    ends = (queries + most, most, queries + most - keys, most - keys)
    first, second, third, fourth = (max(end, 0) * (max(end, 0) + 1) // 2 for end in ends)
    return first - second - third + fourth


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of one size, as they stand in a kernel."""

    count: int
    queries: int  # of each
    keys: int
    visible: int  # pairs of one head of each


def together(kinds: Sequence[Packed]) -> dict[str, float]:
    """Fields of `AttentionSizes` for sequences of these kinds: their means, and the long ones.

    The long ones are as many sequences of the longest kind as give, with equal others, the mean and
    the variance of lengths (queries and keys together) that all have.  For two kinds that is how
    many there are of the longer.  Totals of sequences, queries, keys and pairs are kept.
    """
    first = kinds[0]
    if len(kinds) == 1:
        return {"batch": first.count, "queries": first.queries, "keys": first.keys,
                "visible": first.visible}  # fmt: skip
    count = sum(kind.count for kind in kinds)
    names = ("queries", "keys", "visible")
    totals = {name: sum(kind.count * getattr(kind, name) for kind in kinds) for name in names}
    fields = {"batch": count, **{name: total / count for name, total in totals.items()}}
    mean = fields["queries"] + fields["keys"]
    spread = sum(kind.count * (kind.queries + kind.keys - mean) ** 2 for kind in kinds)
    longest = max(kinds, key=lambda kind: (kind.queries + kind.keys, kind.visible))
    long = spread / (spread / count + (longest.queries + longest.keys - mean) ** 2) if spread else 0
    for name, total in totals.items():  # the others keep at least what the least of all has
        most, least = getattr(longest, name), min(getattr(kind, name) for kind in kinds)
        if most > least:
            long = min(long, (total - count * least) / (most - least))
    of_longest = {f"long_{name}": float(getattr(longest, name)) for name in names}
    return {**fields, "long": long, **of_longest} if long else fields
