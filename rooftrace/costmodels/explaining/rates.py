"""How the seconds of a kernel follow from its FLOPs and bytes: rates, and shares of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rooftrace.costmodels.costs import COMPUTED, Work
from rooftrace.costmodels.estimating import Estimate, Row
from rooftrace.costmodels.kernels import engines


@dataclass(frozen=True, slots=True)
class Rate:
    """Work of one engine: FLOP of one launch, the engine's rate in FLOP/s, seconds at that rate."""

    engine: str
    precision: str
    flop: float
    rate: float

    @property
    def seconds(self) -> float:
        """At the whole rate."""
        return self.flop / self.rate


@dataclass(frozen=True, slots=True)
class RateShares:
    """The share of a rate that a kernel reaches: that of its class by knobs, and of what is left.

    rest: whole tiles, whole waves and feeding them, the blocks of attention, or layout copies.
    """

    whole: float
    knobs: float

    @property
    def rest(self) -> float:
        """What the share of the class does not explain."""
        return self.whole / self.knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """The seconds of one launch and what they are made of.  They are those of the estimate.

    compute: the sum over rates of FLOP/rate, over the share.  hbm: bytes / (bandwidth x share).
    more: what imperfect overlap adds to the largest term.  device: largest term + more + gap.
    """

    rates: tuple[Rate, ...]
    compute_share: RateShares | None  # None: nothing is computed
    hbm_share: RateShares | None
    bandwidth: float  # byte/s
    link: float  # byte/s; infinite where nothing moves over one
    compute: float
    hbm: float
    network: float
    gap: float
    more: float
    device: float
    kind: str  # class of kernels whose knobs hold
    knobs: str  # their title; "" for the peaks of the datasheet


def seconds_of(estimate: Estimate, row: Row, kind: str) -> Seconds:
    """Seconds of one launch of a row; kind: the class of kernels that it is of."""
    chip, timing, count = estimate.chip, row.timing, row.count
    eager = row.index in estimate.plan.eager
    knobs = estimate.execution.outside.knobs_on(chip) if eager else estimate.knobs
    cost = estimate.plan.costs[row.index]
    rates = tuple(rates_of(estimate, cost.work.items()))
    ideal = sum(rate.seconds for rate in rates)
    compute, hbm = timing.t_comp / count, timing.t_hbm / count
    bandwidth = chip.memory_bandwidth.value
    by_class = knobs.reached(kind) if knobs else (1.0, 1.0)
    return Seconds(
        rates=rates,
        compute_share=RateShares(ideal / compute, by_class[0]) if compute else None,
        hbm_share=RateShares(row.bytes / count / bandwidth / hbm, by_class[1]) if hbm else None,
        bandwidth=bandwidth,
        link=engines.link_bandwidth(row.bytes_net, chip),
        compute=compute,
        hbm=hbm,
        network=timing.t_net / count,
        gap=timing.gap / count,
        more=timing.more / count,
        device=timing.t_device / count,
        kind=kind,
        knobs=knobs.title if knobs else "",
    )


def rates_of(
    estimate: Estimate, works: Iterable[tuple[Work, int]], streaming: bool = True
) -> Iterator[Rate]:
    """The works that are computed, by engine.

    streaming: whether products with few rows run on the vector engine where that is faster.
    """
    flops: dict[tuple[str, str], float] = {}
    chip, execution = estimate.chip, estimate.execution
    for work, flop in works:
        if work.count in COMPUTED and flop:
            engine = (engines.product_engine if streaming else engines.engine_of)(
                work, chip, execution
            )
            flops[engine] = flops.get(engine, 0) + flop
    for (name, precision), total in flops.items():
        yield Rate(name, precision, total, chip.peak(name, precision))
