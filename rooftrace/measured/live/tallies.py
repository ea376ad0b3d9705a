"""Times of steps added up by what the steps did."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rooftrace.hardware import Chip
from rooftrace.measured.live.callsizes import ItemCount
from rooftrace.measured.live.notes import StepPattern
from rooftrace.measured.live.pricing import Price, total
from rooftrace.measured.live.results import Figures

_LAST = 1000
"""So many times are kept for the median."""


@dataclass(slots=True)
class _Sum:
    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0

    def add(self, other: _Sum) -> None:
        """Add the steps of another."""
        self.steps += other.steps
        self.seconds += other.seconds
        self.samples += other.samples
        self.tokens += other.tokens


@dataclass
class StepTally:
    """Steps since it was made."""

    sums: dict[StepPattern, _Sum] = field(default_factory=dict)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    folded: _Sum = field(default_factory=lambda: _Sum())  # of patterns that are not kept
    folded_price: Price = field(default_factory=Price)
    unknown: _Sum = field(default_factory=lambda: _Sum())  # of these, those that have no price
    outside: float = 0.0  # s, between steps
    gaps: int = 0

    def add(self, pattern: StepPattern, seconds: float, counted: ItemCount) -> None:
        """Count one step."""
        step = _Sum(1, seconds, counted.samples, counted.tokens)
        self.sums.setdefault(pattern, _Sum()).add(step)
        self.last.append(seconds)

    def add_outside(self, seconds: float) -> None:
        """Count the time between two steps."""
        self.outside += seconds
        self.gaps += 1

    @property
    def patterns(self) -> int:
        """How many different steps are kept apart."""
        return len(self.sums)

    def fold(self, price_of: Callable[[StepPattern], Price | None]) -> None:
        """Price the steps, and keep their sums alone: of the most frequent one all is kept."""
        often = max(self.sums, key=lambda pattern: self.sums[pattern].steps)
        for pattern in [other for other in self.sums if other != often]:
            entry, price = self.sums.pop(pattern), price_of(pattern)
            (self.unknown if price is None else self.folded).add(entry)
            if price is not None:
                self.folded_price = total([self.folded_price, price.times(entry.steps)])

    @property
    def median(self) -> float | None:
        """Seconds of a step."""
        return statistics.median(self.last) if self.last else None

    def figures(self, price_of: Callable[[StepPattern], Price | None], chip: Chip) -> Figures:
        """The rates of the steps whose work is known."""
        priced = {pattern: price_of(pattern) for pattern in self.sums}
        known, unknown, prices = _Sum(), _Sum(), [self.folded_price]
        known.add(self.folded)
        unknown.add(self.unknown)
        for pattern, price in priced.items():
            entry = self.sums[pattern]
            (unknown if price is None else known).add(entry)
            if price is not None:
                prices.append(price.times(entry.steps))
        outside = self.outside / self.gaps if self.gaps else None
        if not known.steps:
            return Figures(  # rates that need no count of the work, of all steps
                steps=0,
                uncounted=unknown.steps,
                seconds=unknown.seconds / unknown.steps if unknown.steps else None,
                outside=outside,
                samples_per_s=_ratio(unknown.samples, unknown.seconds) or None,
                tokens_per_s=_ratio(unknown.tokens, unknown.seconds) or None,
            )
        sums, steps, seconds = total(prices), known.steps, known.seconds
        interval = (sums.low / steps, sums.high / steps)
        return Figures(
            steps=steps,
            uncounted=unknown.steps,
            seconds=seconds / steps,
            outside=outside,
            flops=sums.flops / steps,
            bytes=sums.bytes / steps,
            mfu=_ratio(sums.useful_s, seconds),
            hfu=_ratio(sums.matrix_s, seconds),
            bandwidth_share=_ratio(sums.bytes / chip.memory_bandwidth.value, seconds),
            samples_per_s=_ratio(known.samples, seconds) or None,
            tokens_per_s=_ratio(known.tokens, seconds) or None,
            expected=sums.expected / steps,
            interval=None if any(map(math.isnan, interval)) else interval,
            expected_mfu=_ratio(sums.useful_s, sums.expected),
        )


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
