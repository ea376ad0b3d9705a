"""A step on some chips, with what it costs in time, memory, money and energy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftrace._plain import Plain
from rooftrace.hardware import Chip

HOUR = 3600.0
MILLION = 1e6
_SHARED = ("memory_bandwidth", "memory_capacity", "l2_capacity", "sm_count")
"""What several chips have so many times of, besides their rates."""


@dataclass(frozen=True, kw_only=True)
class Deployment(Plain):
    """One way to run a step: on so many chips, at these sizes, in these precisions.

    Seconds: step (low, high: between which 90 % of such steps are, None without knobs), sent (of
    the step, in which chips send to each other and do nothing else), tpot (per
    output token, with the prefills in between; the step, where no requests are given), ttft (to the
    first token of the longest prompt; None where no requests are given).  memory: bytes at the
    fullest moment.  capacity: bytes that the chips may use.  rate: tokens or samples per second of
    all its chips.  price: dollar/hour of one chip; power: watt of one.  None: not known.
    """

    chip: str
    chips: int
    labels: Mapping[str, Any]
    sizes: Mapping[str, int]
    step: float
    low: float | None
    high: float | None
    sent: float
    tpot: float
    ttft: float | None
    memory: int
    capacity: float
    rate: float
    limiter: str
    price: float | None
    power: float | None

    KEYS = (
        "chip chips **labels **sizes step step_low=low step_high=high sent tpot ttft memory "
        "capacity rate rate_per_chip=per_chip rate_per_user=per_user dollars_per_million=dollars "
        "joules_each=joules limiter price power"
    )

    @property
    def per_chip(self) -> float:
        """Tokens or samples per second of one chip."""
        return self.rate / self.chips

    @property
    def per_user(self) -> float:
        """Tokens per second of one sequence."""
        return 1 / self.tpot

    @property
    def dollars(self) -> float | None:
        """Dollars per million tokens or samples; None without a price."""
        if self.price is None:
            return None
        return self.price / HOUR / self.per_chip * MILLION

    @property
    def joules(self) -> float | None:
        """Joules per token or sample with the chips at their full power: at most that many."""
        return None if self.power is None else self.power / self.per_chip

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What tells it from others, its sizes apart."""
        return (self.chip, self.chips, *self.labels.items())

    def uses(self) -> dict[str, tuple[float, str]]:
        """What a limit may be on: seconds or bytes by name."""
        known = {"step": self.step, "tpot": self.tpot, "ttft": self.ttft}
        return {name: (value, "second") for name, value in known.items() if value is not None}


def together(chip: Chip, count: int) -> Chip:
    """`count` chips as if they were one: rates, bandwidth, memory and SMs of all.

    That is an even split of each kernel.  The gap between kernels and the time of the host stay
    those of one; what the chips send to each other is in `splitting`.
    """
    if count == 1:
        return chip
    known = chip.facts_by_name()
    shared = [f"{peak.engine}.{peak.precision}" for peak in chip.peaks]
    shared += [name for name in _SHARED if name in known]
    return chip.with_facts({name: known[name].value * count for name in shared})


def doublings(least: int, most: int) -> Sequence[int]:
    """1, 2, 4, ... from the first that is at least `least`, to `most`."""
    counts = []
    count = 1
    while count <= most:
        if count >= least:
            counts.append(count)
        count *= 2
    return counts
