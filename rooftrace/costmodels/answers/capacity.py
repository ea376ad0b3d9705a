"""How many chips a step needs by what it keeps in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftrace._shown import Shown, short
from rooftrace.costmodels.sweeping import SweepCase
from rooftrace.hardware import Chip


@dataclass(frozen=True, kw_only=True)
class Needed:
    """Chips of one kind for a step under one condition.  used: the share of their memory."""

    chip: str
    labels: Mapping[str, Any]
    chips: int
    memory: int
    weights: int
    kv: int
    capacity: float  # byte of one chip, that may be used
    price: float | None  # dollar/hour of one

    @property
    def used(self) -> float:
        """The share of the memory of all that the step takes."""
        return self.memory / (self.chips * self.capacity)

    @property
    def dollars(self) -> float | None:
        """Dollars per hour of all."""
        return None if self.price is None else self.chips * self.price


@dataclass(frozen=True, eq=False, kw_only=True)
class CapacityAnswer(Shown):
    """The least number of each chip by capacity; fewest first."""

    title: str
    sizes: Mapping[str, int]
    rows: tuple[Needed, ...]
    rests: tuple[str, ...]

    def __repr__(self) -> str:
        return short(self, f"{self.title}: {self.rows[0].chips} x {self.rows[0].chip}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; SI units."""
        return {
            "title": self.title, **self.sizes,
            "rows": [
                {"chip": r.chip, **r.labels, "chips": r.chips, "memory": r.memory,
                 "weights": r.weights, "kv": r.kv, "capacity": r.capacity, "used": r.used,
                 "dollars_per_hour": r.dollars}
                for r in self.rows
            ],
            "rests_on": list(self.rests),
        }  # fmt: skip


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
