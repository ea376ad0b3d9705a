"""Requests of one step of a server: how much of each is cached, and how many tokens are new."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rooftrace.errors import RequestError

MOST = 1 << 16
"""Requests of one step at most."""
_LONGEST = 1 << 48
"""Positions of a request below which everything stays countable."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Requests that one step runs together, their tokens packed in one row.

    cached: positions in the cache of each, 0 for the start of a prompt.  new: tokens that the step
    runs of each behind them: 1 decodes, several are a part of a prompt or a speculative step.

    A window is how many positions a token sees, itself among them; 0: all before it.
    """

    cached: tuple[int, ...]
    new: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.new)

    @property
    def longest(self) -> int:
        """Positions in the longest cache."""
        return max(self.cached)

    def rows(self, window: int = 0) -> tuple[int, ...]:
        """Rows of a layer's cache before the step, by request: no token sees more."""
        return tuple(min(held, window - 1) if window else held for held in self.cached)

    def keys(self, window: int = 0) -> int:
        """Rows of a layer's cache in the step, with the new ones, of all requests."""
        return sum(self.rows(window)) + self.tokens

    def pairs(self, window: int = 0) -> int:
        """(query, key) pairs of one head of all requests, each alone: new x (rows + new)."""
        rows = self.rows(window)
        return sum(new * (held + new) for held, new in zip(rows, self.new, strict=True))

    def visible(self, window: int = 0) -> int:
        """Those pairs that a causal mask shows: token j sees min(cached + j + 1, window) rows."""
        return sum(
            _visible(held, new, window) for held, new in zip(self.cached, self.new, strict=True)
        )

    def positions(self) -> list[int]:
        """Where each new token stands in its request."""
        return [
            place
            for held, new in zip(self.cached, self.new, strict=True)
            for place in range(held, held + new)
        ]

    def groups(self) -> list[list[int]]:
        """Cached positions, new tokens and how many requests are so, longest first."""
        pairs = sorted(zip(self.cached, self.new, strict=True), reverse=True)
        return [[*pair, len(list(same))] for pair, same in groupby(pairs)]


def _visible(cached: int, new: int, window: int) -> int:
    growing = min(new, max(0, window - cached)) if window else new  # tokens that see all before
    return growing * cached + growing * (growing + 1) // 2 + (new - growing) * window


def read_lengths(cached: Any, new: Any) -> RequestLengths | None:
    """Lengths from a number or several of each; None where neither is there.

    new: default one token each.  cached: default none.  One number of either is for all.  Raises
    RequestError for numbers that do not fit.
    """
    if cached is None and new is None:
        return None
    starts = [0] if cached is None else list(_numbers("cached", cached, least=0))
    tokens = [1] if new is None else list(_numbers("new", new, least=1))
    count = max(len(starts), len(tokens))
    for name, other, numbers in (("cached", "new", starts), ("new", "cached", tokens)):
        if len(numbers) not in (1, count):
            raise RequestError(
                f"--{name} has {len(numbers)} numbers, --{other} has {count}: expected one for "
                "each request, or one for all, for example --cached 4096,100 --new 1,512"
            )
    if count > MOST:
        raise RequestError(f"--cached, --new: {count:,} requests; expected {MOST:,} at most")
    starts, tokens = (each * (count // len(each)) for each in (starts, tokens))
    return RequestLengths(tuple(starts), tuple(tokens))


def _numbers(name: str, value: Any, least: int) -> Iterator[int]:
    several: Sequence[Any] = value if isinstance(value, (list, tuple, range)) else [value]
    if not several:
        raise RequestError(f"--{name}: expected a number for each request, got none")
    for each in several:
        try:
            number = -1 if isinstance(each, bool) else operator.index(each)
        except TypeError:
            number = -1
        if not least <= number < _LONGEST:
            raise RequestError(
                f"--{name} {each}: expected whole numbers of at least {least}, one for each "
                "request, for example --cached 4096,100 --new 1,512"
            )
        yield number
