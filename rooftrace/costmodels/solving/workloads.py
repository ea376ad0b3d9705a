"""Requests that a service receives, limits that it must hold, and the fewest chips by memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.sweeps import SweepCase
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time


@dataclass(frozen=True)
class RequestKind:
    """Requests of one kind: tokens of the prompt, tokens of the output, and how many come."""

    prompt: int
    output: int
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1:
            raise RequestError(
                f"{self.prompt}:{self.output}: expected at least one token of prompt and of output"
            )
        if not 0 < self.share < math.inf:
            raise RequestError(f"{self.prompt}:{self.output}@{self.share:g}: a share is above 0")

    def __str__(self) -> str:
        return f"{self.prompt:,} in, {self.output:,} out"


@dataclass(frozen=True)
class Mix:
    """Requests of several kinds, by their shares (which need not add up to 1)."""

    kinds: tuple[RequestKind, ...]

    @classmethod
    def of(cls, asked: str | Iterable[str]) -> Mix:
        """A mix as "2048:256" or "2048:256@3,8192:1024@1": prompt, output, share.

        Raises RequestError for another form.
        """
        texts = asked.split(",") if isinstance(asked, str) else list(asked)
        kinds = tuple(_kind(text.strip(), str(asked)) for text in texts if text.strip())
        if not kinds:
            raise RequestError(f"mix {asked!r}: it is empty; for example 2048:256@3,8192:1024")
        return cls(kinds)

    def __str__(self) -> str:
        total = sum(kind.share for kind in self.kinds)
        return "; ".join(
            f"{kind.share / total:.0%} {kind}" if len(self.kinds) > 1 else str(kind)
            for kind in self.kinds
        )

    @property
    def outputs(self) -> float:
        """Tokens of output per request."""
        return self._mean(kind.output for kind in self.kinds)

    @property
    def prompts(self) -> float:
        """Tokens of prompt per request."""
        return self._mean(kind.prompt for kind in self.kinds)

    @property
    def kv(self) -> int:
        """The mean length of the cache over all decode steps, rounded up.

        A request of P and O tokens has P + 1 to P + O entries over its O steps, so that it counts
        O times with P + (O + 1) / 2.
        """
        steps = [(Fraction(k.share) * k.output, k.prompt + Fraction(k.output + 1, 2))
                 for k in self.kinds]  # fmt: skip
        return math.ceil(sum(n * length for n, length in steps) / sum(n for n, _ in steps))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(kind.prompt for kind in self.kinds)

    def mean(self, values: Iterable[float]) -> float:
        """The mean over requests of a number that each kind has."""
        return self._mean(values)

    def _mean(self, values: Iterable[float]) -> float:
        shares = [kind.share for kind in self.kinds]
        pairs = zip(values, shares, strict=True)
        return sum(value * share for value, share in pairs) / sum(shares)


def _kind(text: str, asked: str) -> RequestKind:
    sizes, _, share = text.partition("@")
    prompt, colon, output = sizes.partition(":")
    try:
        if not colon:
            raise ValueError(text)
        numbers = int(prompt), int(output), float(share) if share else 1.0
    except ValueError:
        raise RequestError(
            f"mix {asked!r}: {text!r}: expected PROMPT:OUTPUT in tokens with a share if there are "
            "several, for example 2048:256@3,8192:1024@1"
        ) from None
    return RequestKind(*numbers)


@dataclass(frozen=True, kw_only=True)
class Limits(Plain):
    """What a deployment has to hold, in seconds; None: not asked.

    step: of one step.  tpot: time per output token, with the prefills in between.  ttft: time to
    the first token of the longest prompt.
    """

    step: float | None = None
    tpot: float | None = None
    ttft: float | None = None

    KEYS = "step? tpot? ttft?"

    def __post_init__(self) -> None:
        for name, value in self:
            if not 0 < value < math.inf:
                raise RequestError(f"{name} {value!r}: expected seconds above 0")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                yield each.name, value

    def __str__(self) -> str:
        parts = [f"{WORDS[name]} of at most {format_time(value)}" for name, value in self]
        return " and ".join(parts)


WORDS = {"step": "a step", "tpot": "a time per token", "ttft": "a time to the first token"}


# -- capacity --------------------------------------------------------------------------------------
# How many chips a step needs by what it keeps in memory.


@dataclass(frozen=True, kw_only=True)
class Needed(Plain):
    """Chips of one kind for a step under one condition.  used: the share of their memory."""

    chip: str
    labels: Mapping[str, Any]
    chips: int
    memory: int
    weights: int
    kv: int
    capacity: float  # byte of one chip, that may be used
    price: float | None  # dollar/hour of one

    KEYS = "chip **labels chips memory weights kv capacity used dollars_per_hour=dollars"

    @property
    def used(self) -> float:
        """The share of the memory of all that the step takes."""
        return self.memory / (self.chips * self.capacity)

    @property
    def dollars(self) -> float | None:
        """Dollars per hour of all."""
        return None if self.price is None else self.chips * self.price


@dataclass(frozen=True, eq=False, kw_only=True)
class CapacityAnswer(Plain, Shown):
    """The least number of each chip by capacity; fewest first."""

    title: str
    sizes: Mapping[str, int]
    rows: tuple[Needed, ...]
    rests: tuple[str, ...]

    KEYS = "title **sizes rows rests_on=rests"

    def __repr__(self) -> str:
        return short(self, f"{self.title}: {self.rows[0].chips} x {self.rows[0].chip}")


def needed_chips(
    case: SweepCase, sizes: Mapping[str, int], chips: Sequence[Chip], kept_free: float
) -> list[Needed]:
    """The least number of each chip for one case."""
    graph = case.form.graph(**sizes)
    numbers = case.conditions.numbers(graph)
    peak = max(numbers.alive, default=0)
    return [
        Needed(
            chip=chip.name, labels=case.labels, chips=chip.count_holding(peak, kept_free),
            memory=peak, weights=numbers.weights, kv=numbers.kv,
            capacity=chip.room(kept_free),
            price=None if chip.price is None else chip.price.value,
        )
        for chip in chips
    ]  # fmt: skip
