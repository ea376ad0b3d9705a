"""Changes of quantities between two sides: metrics, limits on growth, and matching of items."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

from rooftrace._plain import Plain
from rooftrace.errors import RequestError, hint
from rooftrace.hardware.units import (
    UnitError,
    format_capacity,
    format_count,
    format_flops,
    format_share,
    format_time,
    format_traffic,
    parse,
)

# -- metrics ---------------------------------------------------------------------------------------
# Quantities that are compared: their units, and how they are written.


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity that may grow.

    unit: of `hardware.units`.  write: a value in words.  relative: whether a limit may be a share
    of the quantity before.  symbol: allowed behind the prefix of a count: "FLOP".
    """

    unit: str
    write: Callable[[float], str]
    relative: bool = True
    symbol: str = ""


SECONDS = Metric("second", format_time)
FLOPS = Metric("count", format_flops, symbol="FLOP")
TRAFFIC = Metric("byte", format_traffic)
CAPACITY = Metric("byte", format_capacity)
COUNT = Metric("count", format_count)
EXACT = Metric("count", lambda number: f"{number:,.0f}")
NUMBER = Metric("count", EXACT.write, relative=False)
"""A count whose limits are no shares: growth is counted from 0."""
SHARE = Metric("share", format_share, relative=False)

Metrics = Mapping[str, Metric]
TOTALS: Metrics = {
    "time": SECONDS,
    "flops": FLOPS,
    "bytes": TRAFFIC,
    "memory": CAPACITY,
    "params": COUNT,
    "kernels": COUNT,
}
"""The totals of a step, by the names that diffs, budgets and locks have for them."""


# -- change ----------------------------------------------------------------------------------------
# One quantity before and after.


def relative(delta: float, before: float) -> float | None:
    """delta / before; 0 where both are 0, None where only before is."""
    if before:
        return delta / before
    return None if delta else 0.0


@dataclass(frozen=True, slots=True)
class Change(Plain):
    """One quantity before and after (SI units)."""

    rounding: ClassVar[float] = 1e-12
    """Seconds are sums of floats; repeats are added up in another order than layer by layer."""

    before: float
    after: float

    KEYS = "before after delta relative"

    def __add__(self, other: Change) -> Change:
        """The sums of both before and after."""
        return Change(self.before + other.before, self.after + other.after)

    @property
    def delta(self) -> float:
        """after - before; 0 where the two differ by rounding only."""
        delta = self.after - self.before
        return 0.0 if abs(delta) <= self.rounding * abs(self.before) else delta

    @property
    def relative(self) -> float | None:
        """delta / before; None where before is 0 and after is not."""
        return relative(self.delta, self.before)

    @property
    def within_noise(self) -> bool | None:
        """Whether noise explains the difference; None without a difference or a known noise."""
        return None

    @property
    def percent(self) -> str:
        """The relative change in words: "+5.0 %", "new" where there was nothing before."""
        if self.relative is None:
            return "new"
        return f"{self.relative:+.1%}".replace("%", " %") if self.delta else "0 %"

    @property
    def mark(self) -> str:
        """The mark of a change in a view: more of a cost is worse."""
        if self.within_noise or not self.delta:
            return "faint"
        return "worse" if self.delta > 0 else "good"


# -- limits ----------------------------------------------------------------------------------------
# How much a quantity may grow: "time>5%", "memory>1 GiB"; a limit is read here alone.

_CONDITION = re.compile(r"\s*([a-z]+)\s*>\s*(.+?)\s*")
_AMOUNT = re.compile(r"([0-9.,_eE+-]+)\s*(.*)")
_SCALES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "B": 1e9,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
}


@dataclass(frozen=True, slots=True)
class Limit:
    """The allowed growth of a metric, or its allowed maximum."""

    text: str  # as the user wrote it
    most: float  # SI units, or a fraction
    relative: bool = False  # to the quantity before
    ceiling: bool = False  # the most that it may be, whatever it was before
    metric: str = ""

    @classmethod
    def parse(
        cls, text: str, metrics: Metrics, of: str = "", example: str = "", option: str = "--fail-on"
    ) -> Limit:
        """The limit of "time>5%"; an absolute one takes a unit ("memory>1 GiB").

        metrics: those that may be named.  of, example, option: the compared thing, another limit
        and what took the text, for the message of the RequestError that is raised for a text that
        cannot be read.
        """
        match = _CONDITION.fullmatch(text)
        if match is None or match[1] not in metrics:
            name = text.partition(">")[0].strip()
            close = hint(name, tuple(metrics)) if name not in metrics else ""
            also = f' or "{example}"' if example else ""
            raise RequestError(
                f"{option} {text!r}: {f'of {of} ' if of else ''}expected METRIC>LIMIT with METRIC "
                f'one of {", ".join(metrics)}, for example "{next(iter(metrics))}>5%"{also}'
                f"{close}"
            )
        try:
            most, relative = amount_of(match[2], metrics[match[1]])
        except ValueError as error:
            raise RequestError(f"{option} {text!r}: {error}") from None
        return cls(text, most, relative, metric=match[1])

    def growth(self, change: Change) -> float:
        """The number held to the limit: a difference, or a share of the quantity before."""
        if self.ceiling:
            return change.after
        if self.relative:
            return math.inf if change.relative is None else change.relative
        return change.delta

    def exceeded(self, change: Change) -> bool:
        """Whether a change is over the limit."""
        return self.growth(change) > self.most

    def sentence(self, change: Change, metrics: Metrics, where: str = "") -> str:
        """ "decode: time grew by +6.10%, more than 'time>5%' allows"."""
        growth, noise = self.growth(change), " (within the noise of its steps)"
        written = metrics[self.metric].write
        sign = "+" if growth > 0 else ""
        amount = f"{growth:+.2%}" if self.relative else f"{sign}{written(growth)}"
        return (
            f"{where}{self.metric} grew by {amount}, more than {self.text!r} allows"
            f"{noise if change.within_noise else ''}"
        )


def amount_of(text: str, metric: Metric) -> tuple[float, bool]:
    """A quantity in SI units, or a share of the quantity before, and whether it is a share.

    Raises ValueError for another text.
    """
    if text == "0":  # of any unit
        return 0.0, False
    match = _AMOUNT.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    if unit == "%" and (metric.relative or metric.unit == "share"):
        return float(number) / 100, metric.relative
    if metric.unit not in ("count", "share"):
        return parse(text, metric.unit), False
    scale = unit.removesuffix(metric.symbol).strip()
    if not number or scale not in _SCALES or (scale and metric.unit == "share"):
        raise UnitError(f'"{text:.100}": expected a number without a unit')
    return float(number.replace(",", "")) * _SCALES[scale], False


class Limited:
    """A result of two sides, whose changes may be held to limits.

    METRICS: metrics of limits.  COMPARED, EXAMPLE: the compared thing and another limit, for the
    message of a limit that cannot be read.
    """

    __slots__ = ()
    METRICS: ClassVar[Metrics]
    COMPARED: ClassVar[str] = ""
    EXAMPLE: ClassVar[str] = ""

    def places(self) -> Sequence[tuple[str, Mapping[str, Change]]]:
        """The parts that are held to limits: the beginning of a sentence on each, and changes by
        metric."""
        raise NotImplementedError

    @classmethod
    def limits(cls, conditions: Iterable[str], option: str = "--fail-on") -> list[Limit]:
        """The limits that conditions say.  Raises RequestError."""
        kinds = cls.METRICS, cls.COMPARED, cls.EXAMPLE
        return [Limit.parse(text, *kinds, option) for text in conditions]

    def violations(self, conditions: Iterable[str]) -> list[str]:
        """A sentence for each condition ("time>5%", "memory>1 GiB") and each place that breaks it.

        Raises RequestError for a condition that cannot be read, and for a metric that no place has.
        """
        parts, sentences = self.places(), []
        there = {name for _, changes in parts for name in changes}
        for limit in self.limits(conditions):
            if limit.metric not in there:
                raise RequestError(
                    f"--fail-on {limit.text!r}: {limit.metric} was not measured in both; there are "
                    f"{', '.join(name for name in self.METRICS if name in there)}"
                )
            for where, changes in parts:
                change = changes.get(limit.metric)
                if change is not None and limit.exceeded(change):
                    sentences.append(limit.sentence(change, self.METRICS, where))
        return sentences


# -- aligning --------------------------------------------------------------------------------------
# Which things of two sides are the same: by keys, exact ones first, then ever looser ones.

T = TypeVar("T", bound=Hashable)
V = TypeVar("V")
W = TypeVar("W")


class Pair(NamedTuple, Generic[T]):
    """A thing of either side that are the same; `times` of the runs of each."""

    before: T
    after: T
    times: int


class Pairing(Generic[T]):
    """The pairs of two sides so far, and the runs of things without a partner, in order.

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
        """Pair things of the same key, the first with the first; a key of None pairs nothing.

        before, after: give the key of a thing of either side.  alone: only things whose key is
        unique on their side.
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
