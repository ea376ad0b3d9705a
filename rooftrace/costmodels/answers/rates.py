"""Which bandwidth, FLOP rate or link would make a step limited by computing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rooftrace._shown import Shown, short
from rooftrace.costmodels.planforms import Points
from rooftrace.costmodels.sweeping import SweepCase
from rooftrace.costmodels.timing.steps import StepAmounts
from rooftrace.costmodels.timing.steptimes import TimesOverPoints, time_step
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip

_FARTHEST = 2.0**40
"""By how much a rate is changed at most."""
_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class NeededRate:
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

    @property
    def factor(self) -> float | None:
        """The needed value over today's."""
        return None if self.needed is None else self.needed / self.now


@dataclass(frozen=True, eq=False, kw_only=True)
class RatesAnswer(Shown):
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

    def __repr__(self) -> str:
        return short(self, f"{self.title} on {self.chip}: limited by {self.limiter}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; SI units."""
        return {
            "title": self.title, "chip": self.chip, **self.sizes, "limiter": self.limiter,
            "share": self.share, "seconds": self.seconds, "step": self.step,
            "intensity": self.intensity, "ridge": self.ridge,
            "rates": [
                {"fact": r.fact, "engine": r.engine, "now": r.now, "needed": r.needed,
                 "factor": r.factor, "step": r.step, "by_totals": r.by_totals, "why": r.why}
                for r in self.rates
            ],
            "rests_on": list(self.rests),
        }  # fmt: skip


def needed_rates(
    case: SweepCase, sizes: dict[str, int], chip: Chip, title: str, rests: tuple[str, ...]
) -> RatesAnswer:
    """The answer at one place.  Raises MissingPeakError where the chip cannot run it."""
    points = Points({name: _column(sizes[name]) for name in case.form.names})
    ((plan, _),) = case.form.plans(points, case.conditions)
    sized = plan.step(points, plan.cache_of(chip))
    now = time_step(sized, chip)
    regimes = _regimes(now)
    limiter = max(regimes, key=lambda name: regimes[name])
    moved = float(plan.bytes(points)[0])
    flops = float(plan.flops(points)[0])
    step = float(now.t_est[0])
    return RatesAnswer(
        title=title, chip=chip.name, sizes=dict(sizes), limiter=limiter,
        share=regimes[limiter] / step if step else 0.0, seconds=regimes, step=step,
        intensity=flops / moved if moved else None,
        ridge=float(now.peak[0]) / chip.memory_bandwidth.value,
        rates=tuple(_rates(sized, chip, now)), rests=rests,
    )  # fmt: skip


def _rates(sized: StepAmounts, chip: Chip, now: TimesOverPoints) -> Iterator[NeededRate]:
    compute, hbm, net = (float(t[0]) for t in (now.t_comp, now.t_hbm, now.t_net))
    bandwidth = chip.memory_bandwidth.value
    yield _needed(
        sized, chip, "memory_bandwidth", "", bandwidth, rising=True,
        by_totals=bandwidth * hbm / compute if compute else None,
    )  # fmt: skip
    peak = float(now.peak[0])
    engine = f"{now.peak_precisions[int(now.peak_place[0])]}" if now.peak_precisions else ""
    yield _needed(
        sized, chip, "flops", engine, peak, rising=False,
        by_totals=peak * compute / max(hbm, net) if max(hbm, net) else None,
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
        sized, chip, "link", "", max(links), rising=True,
        by_totals=max(links) * net / compute if compute else None,
    )  # fmt: skip


def _needed(
    sized: StepAmounts,
    chip: Chip,
    fact: str,
    engine: str,
    now: float,
    *,
    rising: bool,
    by_totals: float | None,
) -> NeededRate:
    """The factor on one rate at which computing takes over, by halving the span of its exponent."""

    rates = _rates_of(chip, fact)

    def times(factor: float) -> TimesOverPoints:
        changed = chip.with_facts({name: value * factor for name, value in rates.items()})
        return time_step(sized, changed)

    def computing(factor: float) -> bool:
        regimes = _regimes(times(factor))
        return max(regimes, key=lambda name: regimes[name]) == "compute"

    known: dict[str, Any] = {"fact": fact, "engine": engine, "now": now, "by_totals": by_totals}
    good, bad = (_FARTHEST, 1 / _FARTHEST) if rising else (1 / _FARTHEST, _FARTHEST)
    if not computing(good):
        regimes = _regimes(times(good))
        left = max(regimes, key=lambda name: regimes[name])
        why = f"no value of it alone: {left} limits then"
        return NeededRate(**known, needed=None, step=None, why=why)
    if computing(bad):
        return NeededRate(**known, needed=None, step=None, why="any value of it: computing limits")
    for _ in range(_STEPS):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if computing(middle) else (good, middle)
    step = float(times(good).t_est[0])
    return NeededRate(**known, needed=now * good, step=step)


def _regimes(times: TimesOverPoints) -> dict[str, float]:
    return {name: float(times.regime_seconds[name][0]) for name in REGIMES}


def _rates_of(chip: Chip, fact: str) -> dict[str, float]:
    """The numbers of a chip that one rate of an answer stands for, by name."""
    if fact == "flops":
        return {f"{p.engine}.{p.precision}": p.rate.value for p in chip.peaks}
    if fact == "link":
        return {f"link.{x.name}.bandwidth": x.bandwidth.value for x in chip.links}
    return {fact: chip.facts_by_name()[fact].value}


def _column(number: int) -> Any:
    import numpy as np

    if number < 1:
        raise RequestError(f"size {number}: expected at least 1")
    return np.array([number], dtype=np.int64)
