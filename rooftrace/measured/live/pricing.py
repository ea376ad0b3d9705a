"""What a part of a step costs, in sums that add up over parts and over steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from rooftrace.costmodels.estimating import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Sums of a part, of a step, or of many steps."""

    flops: float = 0.0  # FLOP, attention dense, without recomputation
    flops_matrix: float = 0.0  # FLOP of these in matrix products and convolutions
    bytes: float = 0.0  # byte through HBM
    useful_s: float = 0.0  # s of its useful matrix FLOPs at the peak: MFU times the time
    matrix_s: float = 0.0  # s of all its matrix FLOPs at the peak: HFU times the time
    expected: float = 0.0  # s
    low: float = 0.0  # s; nine of ten steps lie between low and high
    high: float = 0.0  # s; NaN where there is no interval
    bound: float = 0.0  # s

    def times(self, count: int) -> Price:
        """The sums of so many of them."""
        return Price(**{part.name: count * getattr(self, part.name) for part in fields(self)})


def price_of(estimate: Estimate) -> Price:
    """The price of one graph."""
    low, high = estimate.t_interval or (float("nan"), float("nan"))
    return Price(
        flops=estimate.flops,
        flops_matrix=estimate.flops_matrix,
        bytes=estimate.bytes_hbm,
        useful_s=(estimate.mfu or 0.0) * estimate.t_est,
        matrix_s=(estimate.hfu or 0.0) * estimate.t_est,
        expected=estimate.t_est,
        low=low,
        high=high,
        bound=estimate.t_bound,
    )


def total(prices: Iterable[Price]) -> Price:
    """The sums of several."""
    listed = list(prices)
    return Price(
        **{part.name: sum(getattr(price, part.name) for price in listed) for part in fields(Price)}
    )
