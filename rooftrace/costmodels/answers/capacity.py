"""How many chips a step needs by what it keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.sweeping import SweepCase
from rooftrace.hardware import Chip


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
