"""One quantity before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rooftrace._plain import Plain


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
        """Whether noise explains the difference; None where there is none, or it is not known."""
        return None

    @property
    def percent(self) -> str:
        """The relative change in words: "+5.0 %", "new" where there was nothing before."""
        if self.relative is None:
            return "new"
        return f"{self.relative:+.1%}".replace("%", " %") if self.delta else "0 %"

    @property
    def mark(self) -> str:
        """How a change is marked in a view: to have more of a cost is worse."""
        if self.within_noise or not self.delta:
            return "faint"
        return "worse" if self.delta > 0 else "good"
