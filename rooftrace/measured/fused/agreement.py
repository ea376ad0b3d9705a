"""How far two ways to put the ops of a graph into kernels agree, and where they differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two partitions of the same ops into kernels, ours beside theirs.

    precision, recall: of pairs of ops in one kernel; theirs are the truth.  rand: the adjusted Rand
    index (Hubert and Arabie 1985), 1 for equal partitions and about 0 for independent ones.
    """

    ops: int  # how many ops both have
    precision: float
    recall: float
    rand: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0

    @staticmethod
    def of(ours: Mapping[int, int], theirs: Mapping[int, int]) -> Agreement:
        """Of two kernels by op, over the ops of `theirs`, all of which `ours` has."""
        both = Counter((ours[op], theirs[op]) for op in theirs)
        same = sum(comb(n, 2) for n in both.values())
        a = sum(comb(n, 2) for n in Counter(ours[op] for op in theirs).values())
        b = sum(comb(n, 2) for n in Counter(theirs.values()).values())
        expected = a * b / max(comb(len(theirs), 2), 1)
        spread = (a + b) / 2 - expected
        return Agreement(
            len(theirs),
            same / a if a else 1.0,
            same / b if b else 1.0,
            (same - expected) / spread if spread else 1.0,
        )


def tangles(
    ours: Mapping[int, int], theirs: Mapping[int, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(kernels of ours, kernels of theirs) that share ops with each other and with no others.

    One of each where the two agree; (1, n) where theirs fused less, (n, 1) where it fused more.
    """
    joined: dict[int, set[int]] = defaultdict(set)
    back: dict[int, set[int]] = defaultdict(set)
    for op, kernel in theirs.items():
        joined[kernel].add(ours[op])
        back[ours[op]].add(kernel)
    seen: set[int] = set()
    for first in joined:
        if first in seen:
            continue
        left: set[int] = set()
        right, waiting = {first}, [first]
        while waiting:
            for kernel in joined[waiting.pop()] - left:
                left.add(kernel)
                new = back[kernel] - right
                right |= new
                waiting += new
        seen |= right
        yield tuple(sorted(left)), tuple(sorted(right))
