"""Seconds from costs: what each kernel takes on a chip, and when the step ends.

Per kernel group  t_device = max(t_comp, t_hbm, t_net) + kernel gap.
Per step          t_bound  = max of the totals at the datasheet's rates (perfect overlap),
                  t_serial = sum of t_device,
                  t_est    = end of a two-track queue: host enqueues in order, device runs in order.
So t_bound <= t_serial <= t_est, and t_launch = t_est - t_serial.

Of a step of several processes, t_serial is the sum over the main stream, with what it waits for
(t_exposed): what runs on other streams meanwhile is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

REGIMES = ("compute", "hbm", "network", "launch")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a kernel group, over all kernels that it stands for."""

    t_comp: float
    t_hbm: float
    t_net: float
    gap: float  # between kernels, see `Chip.kernel_gap`
    start: float = 0.0  # when the first of the kernels starts
    more: float = 0.0  # what imperfect overlap adds to the largest term

    def of(self, count: int, start: float) -> Timing:
        """The timing of `count` such kernels, of which the first starts at `start`."""
        return Timing(
            t_comp=count * self.t_comp,
            t_hbm=count * self.t_hbm,
            t_net=count * self.t_net,
            gap=count * self.gap,
            start=start,
            more=count * self.more,
        )

    def slowed(self, factor: float) -> Timing:
        """The timing of as much more work of the same kind."""
        return Timing(
            t_comp=factor * self.t_comp,
            t_hbm=factor * self.t_hbm,
            t_net=factor * self.t_net,
            gap=self.gap,
            start=self.start,
            more=factor * self.more,
        )

    @property
    def t_device(self) -> float:
        """Seconds for which the group keeps the device busy, gaps included."""
        return max(self.t_comp, self.t_hbm, self.t_net) + self.more + self.gap

    @property
    def regime(self) -> str:
        """The largest term (the first of equal ones); launch where that is the gap."""
        terms = self.terms
        return max(terms, key=terms.__getitem__)

    @property
    def margin(self) -> float:
        """The largest term over the next one (infinite when nothing else takes time)."""
        return margin(self.terms)

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by regime."""
        return {
            "compute": self.t_comp,
            "hbm": self.t_hbm,
            "network": self.t_net,
            "launch": self.gap,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step on one chip, and which regime they belong to."""

    t_comp: float  # of all kernels, by the rates of their engines
    t_hbm: float
    t_net: float
    t_bound: float  # at the datasheet's rates, if engines overlap perfectly: no step is faster
    t_serial: float  # of all kernels one after the other, gaps included
    t_est: float  # until the queue ends
    t_exposed: float = 0.0  # for which computing waits for collectives
    regime_seconds: Mapping[str, float]  # by name in REGIMES; they add up to t_est

    @property
    def t_launch(self) -> float:
        """Time in which the device waits for the host."""
        return self.t_est - self.t_serial

    @property
    def regime_shares(self) -> dict[str, float]:
        """Share of t_est by regime; launch holds kernel gaps and waiting."""
        total = sum(self.regime_seconds.values())
        return {
            name: (seconds / total if total else 0.0)
            for name, seconds in self.regime_seconds.items()
        }

    @property
    def regime(self) -> str:
        """The regime with the largest share."""
        return ranked(self.regime_seconds)[0]

    @property
    def next_regime(self) -> str:
        """The regime with the second largest share."""
        return ranked(self.regime_seconds)[1]

    @property
    def margin(self) -> float:
        """The largest regime's seconds over the next one's."""
        return margin(self.regime_seconds)


def ranked(terms: Mapping[str, float]) -> list[str]:
    """Names by falling value; ties keep the order compute, hbm, network, launch."""
    return sorted(terms, key=lambda name: (-terms[name], REGIMES.index(name)))


def margin(terms: Mapping[str, float]) -> float:
    """Largest value over the second largest."""
    first, second = sorted(terms.values(), reverse=True)[:2]
    return first / second if second > 0 else float("inf")


def lower_bound(kernels: Iterable[tuple[int, Timing, Timing]]) -> float:
    """Seconds that a step takes at least: perfect overlap of engines at the datasheet's rates.

    kernels: how many there are of each kind, and what one takes at those rates and by knobs.  A
    kernel that is faster by knobs, because a cache feeds it, counts with that time.
    """
    t_comp = t_hbm = t_net = 0.0
    for count, fast, real in kernels:
        t_comp += count * min(fast.t_comp, real.t_comp)
        t_hbm += count * min(fast.t_hbm, real.t_hbm)
        t_net += count * fast.t_net
    return max(t_comp, t_hbm, t_net)


def step_times(
    timings: Iterable[Timing], t_est: float, t_bound: float, exposed: float = 0.0
) -> StepTimes:
    """Totals and regime seconds of a step that ends at `t_est`; t_bound: see `lower_bound`.

    The work of a group belongs to its largest term, all gaps and waiting to launch.  exposed:
    seconds for which these groups wait for collectives, which are none of them.
    """
    timings = list(timings)
    t_comp = sum(t.t_comp for t in timings)
    t_hbm = sum(t.t_hbm for t in timings)
    t_net = sum(t.t_net for t in timings)
    t_serial = sum(t.t_device for t in timings) + exposed
    seconds = dict.fromkeys(REGIMES, 0.0)
    seconds["network"] = exposed
    for t in timings:
        seconds["launch"] += t.gap
        work = max(t.t_comp, t.t_hbm, t.t_net)
        regime = "compute" if work == t.t_comp else "hbm" if work == t.t_hbm else "network"
        seconds[regime] += work + t.more
    t_est = max(t_est, t_serial)  # equal but for rounding when the host is never late
    seconds["launch"] += t_est - t_serial
    return StepTimes(
        t_comp=t_comp,
        t_hbm=t_hbm,
        t_net=t_net,
        t_bound=t_bound,
        t_serial=t_serial,
        t_est=t_est,
        t_exposed=exposed,
        regime_seconds=seconds,
    )
