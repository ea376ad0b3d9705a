"""The length at which attention outlasts the MLP, and rates that make a step compute-bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short
from rooftrace.costmodels.advice import Study, Variant
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.sweeps import SweepCase
from rooftrace.costmodels.timing.steps import time_plan
from rooftrace.costmodels.timing.timings import StepTimes
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip

# -- passing ---------------------------------------------------------------------------------------
# The length at which attention takes longer than the MLP: an exact search over whole sizes.

ATTENTION = ("attention",)
MLP = ("dense", "moe")
"""Families of products outside of attention: dense layers and experts; the head is neither."""


@dataclass(frozen=True)
class FamilyTimes:
    """Seconds of a step at one size: of attention, of the MLP, of all."""

    size: int
    attention: float
    mlp: float
    step: float


@dataclass(frozen=True, eq=False, kw_only=True)
class PassingAnswer(Plain, Shown):
    """Where attention passes the MLP as a size grows.

    before, after: the last size at which the MLP takes at least as long, and the first at which
    attention takes longer; None where there is no such size within `looked`.
    """

    title: str
    chip: str
    name: str  # of the size
    at: dict[str, int]  # the other sizes
    looked: tuple[int, int]
    before: FamilyTimes | None
    after: FamilyTimes | None
    rests: tuple[str, ...]

    KEYS = "title chip name **at looked before after rests_on=rests"

    def __repr__(self) -> str:
        where = f"{self.name} {self.after.size:,}" if self.after else "nowhere"
        return short(self, f"{self.title} on {self.chip}: {where}")


def times_of(result: Estimate, size: int) -> FamilyTimes:
    """Seconds on the device by family."""
    seconds = {family: part.t_device for family, part in result.by_family().items()}
    return FamilyTimes(
        size,
        sum(seconds.get(family, 0.0) for family in ATTENTION),
        sum(seconds.get(family, 0.0) for family in MLP),
        result.t_est,
    )


def passing(
    shares: Callable[[int], FamilyTimes], low: int, high: int
) -> tuple[FamilyTimes | None, FamilyTimes | None]:
    """The sizes around which attention passes the MLP, by bisection between low and high."""
    first, last = shares(low), shares(high)
    if first.attention > first.mlp:
        return None, first
    if last.attention <= last.mlp:
        return last, None
    while last.size - first.size > 1:
        middle = shares((first.size + last.size) // 2)
        if middle.attention > middle.mlp:
            last = middle
        else:
            first = middle
    return first, last


# -- rates -----------------------------------------------------------------------------------------
# Which bandwidth, FLOP rate or link would make a step limited by computing.

_FARTHEST = 2.0**40
"""By how much a rate is changed at most."""
_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class NeededRate(Plain):
    """One rate of a chip, and the value at which computing becomes what limits a step.

    fact: "memory_bandwidth", "flops" (all peaks together) or "link".  now, needed: byte/s, for
    flops FLOP/s of `engine`; needed is None where no value of it alone does, and `why` says so.
    step: seconds there.  by_totals: the value at which the totals of the step take equally long,
    as on a roofline of the whole step.
    """

    fact: str
    engine: str  # of the peak that is shown: "bf16 matrix"; "" of others
    now: float
    needed: float | None
    step: float | None
    by_totals: float | None
    why: str = ""

    KEYS = "fact engine now needed factor step by_totals why"

    @property
    def factor(self) -> float | None:
        """The needed value over today's."""
        return None if self.needed is None else self.needed / self.now


@dataclass(frozen=True, eq=False, kw_only=True)
class RatesAnswer(Plain, Shown):
    """What limits a step on a chip, and the rates at which computing would."""

    title: str
    chip: str
    sizes: dict[str, int]
    limiter: str
    share: float  # of the time of the step
    seconds: dict[str, float]  # by regime; they add up to the step
    step: float
    intensity: float | None  # FLOP per byte through HBM, of the step; None without bytes
    ridge: float
    rates: tuple[NeededRate, ...]
    rests: tuple[str, ...]

    KEYS = "title chip **sizes limiter share seconds step intensity ridge rates rests_on=rests"

    def __repr__(self) -> str:
        return short(self, f"{self.title} on {self.chip}: limited by {self.limiter}")


def needed_rates(
    case: SweepCase, sizes: dict[str, int], chip: Chip, title: str, rests: tuple[str, ...]
) -> RatesAnswer:
    """The answer at one place.  Raises MissingPeakError where the chip cannot run it."""
    for size in sizes.values():
        if size < 1:
            raise RequestError(f"size {size}: expected at least 1")
    here = {name: sizes[name] for name in case.form.names}
    study = Study.of_form(case.form, here, chip, case.conditions)
    step = study.step
    limiter = step.times.regime
    return RatesAnswer(
        title=title, chip=chip.name, sizes=dict(sizes), limiter=limiter,
        share=step.times.regime_seconds[limiter] / step.t_est if step.t_est else 0.0,
        seconds=dict(step.times.regime_seconds), step=step.t_est,
        intensity=step.flops / step.bytes_hbm if step.bytes_hbm else None,
        ridge=step.peak / chip.memory_bandwidth.value,
        rates=tuple(_rates(study)), rests=rests,
    )  # fmt: skip


def _rates(study: Study) -> Iterator[NeededRate]:
    step, chip = study.step, study.step.chip
    compute, hbm, net = step.times.t_comp, step.times.t_hbm, step.times.t_net
    bandwidth = chip.memory_bandwidth.value
    yield _needed(
        study, "memory_bandwidth", "", bandwidth, rising=True,
        by_totals=bandwidth * hbm / compute if compute else None,
    )  # fmt: skip
    yield _needed(
        study, "flops", step.peak_precision, step.peak, rising=False,
        by_totals=step.peak * compute / max(hbm, net) if max(hbm, net) else None,
    )  # fmt: skip
    links = [link.bandwidth.value for link in chip.links]
    if not links:
        return
    if not net:
        yield NeededRate(
            fact="link", engine="", now=max(links), needed=None, step=None, by_totals=None,
            why="nothing of this step goes over a link: none limits it",
        )  # fmt: skip
        return
    yield _needed(
        study, "link", "", max(links), rising=True,
        by_totals=max(links) * net / compute if compute else None,
    )  # fmt: skip


def _needed(
    study: Study, fact: str, engine: str, now: float, *, rising: bool, by_totals: float | None
) -> NeededRate:
    """The factor on one rate at which computing takes over, by halving the span of its exponent."""
    facts = {n: f.value for n, f in study.numbers.facts.items() if n.startswith(_NAMES[fact])}
    rates = {n: value for n, value in facts.items() if not n.endswith(".latency")}

    def times(factor: float) -> StepTimes:
        changed = {name: value * factor for name, value in rates.items()}
        return time_plan(*study.planned(Variant(numbers=changed))).step

    known: dict[str, Any] = {"fact": fact, "engine": engine, "now": now, "by_totals": by_totals}
    good, bad = (_FARTHEST, 1 / _FARTHEST) if rising else (1 / _FARTHEST, _FARTHEST)
    left = times(good).regime
    if left != "compute":
        why = f"no value of it alone: {left} limits then"
        return NeededRate(**known, needed=None, step=None, why=why)
    if times(bad).regime == "compute":
        return NeededRate(**known, needed=None, step=None, why="any value of it: computing limits")
    for _ in range(_STEPS):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if times(middle).regime == "compute" else (good, middle)
    return NeededRate(**known, needed=now * good, step=times(good).t_est)


_NAMES: Mapping[str, tuple[str, ...]] = {
    "memory_bandwidth": ("chip.memory_bandwidth",),
    "flops": ("chip.matrix.", "chip.vector."),
    "link": ("chip.link.",),
}
"""The beginnings of the numbers of a chip that one rate of an answer stands for."""
