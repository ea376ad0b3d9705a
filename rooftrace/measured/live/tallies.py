"""Times of steps added up by what the steps did."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rooftrace.hardware import Chip
from rooftrace.measured.live.notes import ItemCount, StepPattern
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


@dataclass
class StepTally:
    """Steps since it was made."""

    sums: dict[StepPattern, _Sum] = field(default_factory=dict)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))
    outside: float = 0.0  # s, between steps
    gaps: int = 0

    def add(self, pattern: StepPattern, seconds: float, counted: ItemCount) -> None:
        """Count one step."""
        entry = self.sums.setdefault(pattern, _Sum())
        entry.steps += 1
        entry.seconds += seconds
        entry.samples += counted.samples
        entry.tokens += counted.tokens
        self.last.append(seconds)

    def add_outside(self, seconds: float) -> None:
        """Count the time between two steps."""
        self.outside += seconds
        self.gaps += 1

    @property
    def median(self) -> float | None:
        """Seconds of a step."""
        return statistics.median(self.last) if self.last else None

    def figures(self, price_of: Callable[[StepPattern], Price | None], chip: Chip) -> Figures:
        """The rates of the steps whose work is known."""
        priced = {pattern: price_of(pattern) for pattern in self.sums}
        known = [(self.sums[pattern], p) for pattern, p in priced.items() if p is not None]
        unknown = sum(self.sums[pattern].steps for pattern, p in priced.items() if p is None)
        outside = self.outside / self.gaps if self.gaps else None
        if not known:
            return self._without_work(unknown, outside)
        steps = sum(entry.steps for entry, _ in known)
        seconds = sum(entry.seconds for entry, _ in known)
        price = total(p.times(entry.steps) for entry, p in known)
        interval = (price.low / steps, price.high / steps)
        return Figures(
            steps=steps,
            uncounted=unknown,
            seconds=seconds / steps,
            outside=outside,
            flops=price.flops / steps,
            bytes=price.bytes / steps,
            mfu=_ratio(price.useful_s, seconds),
            hfu=_ratio(price.matrix_s, seconds),
            bandwidth_share=_ratio(price.bytes / chip.memory_bandwidth.value, seconds),
            samples_per_s=_ratio(sum(entry.samples for entry, _ in known), seconds) or None,
            tokens_per_s=_ratio(sum(entry.tokens for entry, _ in known), seconds) or None,
            expected=price.expected / steps,
            interval=None if any(map(math.isnan, interval)) else interval,
            expected_mfu=_ratio(price.useful_s, price.expected),
        )

    def _without_work(self, unknown: int, outside: float | None) -> Figures:
        """The rates that need no count of the work, of all steps."""
        sums = self.sums.values()
        seconds = sum(entry.seconds for entry in sums)
        return Figures(
            steps=0,
            uncounted=unknown,
            seconds=seconds / unknown if unknown else None,
            outside=outside,
            flops=None,
            bytes=None,
            mfu=None,
            hfu=None,
            bandwidth_share=None,
            samples_per_s=_ratio(sum(entry.samples for entry in sums), seconds) or None,
            tokens_per_s=_ratio(sum(entry.tokens for entry in sums), seconds) or None,
            expected=None,
            interval=None,
            expected_mfu=None,
        )


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
