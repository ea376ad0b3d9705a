"""Seconds as records: of one kernel group, and of one step, with what limits each."""

from __future__ import annotations

from collections.abc import Mapping
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
