"""Which things of two sides are the same: by keys, exact ones first, then ever looser ones."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")
W = TypeVar("W")


class Pair(NamedTuple, Generic[T]):
    """A thing of either side that are the same; `times` of the runs of each."""

    before: T
    after: T
    times: int


class Pairing(Generic[T]):
    """The pairs of two sides so far, and what has no partner yet: its runs, in order.

    before, after: the things of each side; a mapping has how often each runs.
    """

    def __init__(self, before: Iterable[T], after: Iterable[T]) -> None:
        self.left = tuple(
            {item: times for item, times in side.items() if times}
            if isinstance(side, Mapping)
            else dict.fromkeys(side, 1)
            for side in (before, after)
        )
        self.pairs: list[Pair[T]] = []

    @property
    def is_left(self) -> bool:
        """Whether both sides have things without a partner."""
        return all(self.left)

    def by(
        self,
        before: Callable[[T], Hashable],
        after: Callable[[T], Hashable],
        *,
        alone: bool = False,
    ) -> None:
        """Pair what has the same key, the first with the first; a key of None pairs nothing.

        before, after: give the key of a thing of either side.  alone: only what alone has its key
        on its side.
        """
        keys = {item: before(item) for item in self.left[0]}
        queues: dict[Hashable, deque[T]] = defaultdict(deque)
        for item in self.left[1]:
            queues[after(item)].append(item)
        counts = Counter(keys.values()) if alone else {}
        for item, key in keys.items():
            if key is None or key not in queues:
                continue
            queue = queues[key]
            if alone and max(len(queue), counts[key]) > 1:
                continue
            while queue and item in self.left[0]:
                self.pair(item, queue[0])
                if queue[0] not in self.left[1]:
                    queue.popleft()

    def pair(self, before: T, after: T) -> None:
        """Pair two things, as many runs as are left of both."""
        times = min(self.left[0][before], self.left[1][after])
        self.pairs.append(Pair(before, after, times))
        for side, item in zip(self.left, (before, after), strict=True):
            side[item] -= times
            if not side[item]:
                del side[item]


def union(
    first: Mapping[T, V], second: Mapping[T, V], missing: W
) -> Iterator[tuple[T, V | W, V | W]]:
    """Every key of two mappings, those of the first one first, with its values in both."""
    for key in dict.fromkeys((*first, *second)):
        yield key, first.get(key, missing), second.get(key, missing)
