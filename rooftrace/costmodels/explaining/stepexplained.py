"""A whole step as a worked example: sums of formulas by engine and role, times, and B_crit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.explaining.quantities import (
    Quantity,
    SizedPlace,
    bytes_of,
    flops_of,
)
from rooftrace.costmodels.explaining.rates import Rate, rates_of
from rooftrace.costmodels.explaining.scaling import ScalingTest
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.planforms import Conditions, PlanForm, Points
from rooftrace.costmodels.sweeping import Form
from rooftrace.costmodels.timing.steps import StepAmounts, time_step
from rooftrace.hardware import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """The least value of a size at which a step is limited by computing, over all values tried.

    by_peaks: at the datasheet's rates, t_comp >= t_hbm of all kernels together.  expected: the
    largest part of the expected time is compute.  None: at none of them.  limiter: what is then
    the largest part at `high`.  stays: whether it also is at all larger ones tried.
    more_flops, more_bytes: what the last one of all values adds to a step, FLOP and byte.
    """

    name: str
    low: int
    high: int
    by_peaks: int | None
    expected: int | None
    limiter: str
    stays: bool
    more_flops: int
    more_bytes: int

    @property
    def more_intensity(self) -> float:
        """FLOP/byte of what the last value adds: where that is below the ridge, none will do."""
        return self.more_flops / self.more_bytes if self.more_bytes else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """The numbers of a step, each with its formula.

    flops: by operation and precision, then their sum; bytes: by role, then their sum through HBM,
    and over links where there are any.
    """

    flops: tuple[Quantity, ...]
    bytes: tuple[Quantity, ...]
    peak: float  # FLOP/s of the engine with most matrix FLOPs
    peak_precision: str
    bandwidth: float  # byte/s
    rates: tuple[Rate, ...]  # FLOP that are computed, by engine
    t_comp_peaks: float  # s, all FLOPs at the rates of their engines
    t_hbm_peaks: float
    t_comp: float
    t_hbm: float
    t_net: float
    t_launch: float  # gaps, and waiting for the host
    t_bound: float
    t_est: float
    regime_shares: Mapping[str, float]
    limiter: str
    margin: float
    critical: Critical | None
    scaling: tuple[ScalingTest, ...]

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        total = self.total_bytes.value
        return self.total_flops.value / total if total else float("inf")

    @property
    def ridge(self) -> float:
        """FLOP/byte from which on computing limits, at the peaks."""
        return self.peak / self.bandwidth

    @property
    def total_flops(self) -> Quantity:
        """Of the step."""
        return next(item for item in self.flops if item.name == TOTAL)

    @property
    def total_bytes(self) -> Quantity:
        """Through HBM."""
        return next(item for item in self.bytes if item.name == TOTAL)


TOTAL = "all"


def step_of(
    plan: PlanForm,
    place: SizedPlace,
    estimate: Estimate,
    critical: Critical | None,
    scaling: tuple[ScalingTest, ...],
) -> ExplainedStep:
    """The worked example of a step at a place, whose plan and estimate are known."""
    times = estimate.times
    ideal = peak_times(plan, place, estimate.chip)
    return ExplainedStep(
        flops=tuple(_flops(plan, place, estimate.chip)),
        bytes=tuple(_bytes(plan, place)),
        peak=estimate.peak,
        peak_precision=estimate.peak_precision,
        bandwidth=estimate.chip.memory_bandwidth.value,
        rates=tuple(rates_of(estimate, estimate.plan.total.work.items(), streaming=False)),
        t_comp_peaks=ideal[0],
        t_hbm_peaks=ideal[1],
        t_comp=times.t_comp,
        t_hbm=times.t_hbm,
        t_net=times.t_net,
        t_launch=times.regime_seconds["launch"],
        t_bound=times.t_bound,
        t_est=times.t_est,
        regime_shares=times.regime_shares,
        limiter=times.regime,
        margin=times.margin,
        critical=critical,
        scaling=scaling,
    )


def _flops(plan: PlanForm, place: SizedPlace, chip: Chip) -> Iterator[Quantity]:
    kinds = dict.fromkeys(
        (work.key.operation, work.key.precision)
        for kernel in plan.kernels
        for work in kernel.works
        if work.key.is_dense
    )
    for operation, precision in kinds:
        parts = [
            (kernel.times, work.flop)
            for kernel in plan.kernels
            for work in kernel.works
            if work.key.is_dense
            and (work.key.operation, work.key.precision) == (operation, precision)
        ]
        yield place.total(f"{operation} {engines.precision_on(chip, precision)}", parts, "FLOP")
    yield place.total(TOTAL, flops_of(plan.kernels), "FLOP")


def _bytes(plan: PlanForm, place: SizedPlace) -> Iterator[Quantity]:
    accesses = [item.access for kernel in plan.kernels for item in kernel.traffic]
    for role in dict.fromkeys(access.role for access in accesses if access.wire == "hbm"):
        yield place.total(role, bytes_of(plan.kernels, role=role), "byte")
    yield place.total(TOTAL, bytes_of(plan.kernels), "byte")
    if any(access.wire == "link" for access in accesses):
        yield place.total("over links", bytes_of(plan.kernels, "link"), "byte")


def peak_times(plan: PlanForm, place: SizedPlace, chip: Chip) -> tuple[float, float]:
    """Seconds of all FLOPs, and of all bytes, at the datasheet's rates."""
    points = Points({n: [v] for n, v in zip(place.names, place.values, strict=True)})
    step = plan.step(points)
    timed = time_step(at_peaks(step), chip)
    return float(timed.t_comp[0]), float(timed.t_hbm[0])


def at_peaks(step: StepAmounts) -> StepAmounts:
    """The kernels of a plan with every engine at its whole rate, as datasheets have it."""
    execution = step.execution
    full = replace(execution.utilization, b_sat=None, eta_scalar=None, tiles=False)
    whole = replace(execution, knobs=None, utilization=full)
    return replace(step, execution=whole)


def critical_of(
    form: Form,
    name: str,
    values: range,
    sizes: Mapping[str, int],
    chip: Chip,
    conditions: Conditions,
) -> Critical:
    """The least of these values at which computing limits; the other sizes stay as they are."""
    levels = {n: np.full(len(values), size) for n, size in sizes.items()}
    levels[name] = np.arange(values.start, values.stop)
    points = Points({n: levels[n] for n in form.names})
    peaks = np.zeros(len(values), dtype=bool)
    expected = np.zeros(len(values), dtype=bool)
    largest = np.zeros(len(values), dtype=np.int64)
    names: list[str] = []
    totals = {"flops": np.zeros(len(values)), "bytes": np.zeros(len(values))}
    for plan, places in form.plans(points, conditions):
        step = plan.step(points.where(places), plan.cache_of(chip))
        totals["flops"][places] = plan.flops(points.where(places))
        totals["bytes"][places] = plan.bytes(points.where(places))
        timed = time_step(step, chip)
        names = list(timed.regime_seconds)
        largest[places] = np.stack(list(timed.regime_seconds.values())).argmax(axis=0)
        expected[places] = largest[places] == names.index("compute")
        fast = time_step(at_peaks(step), chip)
        peaks[places] = fast.t_comp >= fast.t_hbm
    first = int(expected.argmax()) if expected.any() else None
    return Critical(
        name=name,
        low=values.start,
        high=values.stop - 1,
        by_peaks=values.start + int(peaks.argmax()) if peaks.any() else None,
        expected=None if first is None else values.start + first,
        limiter=names[int(largest[-1])],
        stays=first is not None and bool(expected[first:].all()),
        more_flops=_last_step(totals["flops"]),
        more_bytes=_last_step(totals["bytes"]),
    )


def _last_step(totals: np.ndarray[Any, np.dtype[np.float64]]) -> int:
    """What the last value adds to the one before; all of it where there is one value."""
    return int(totals[-1] - totals[-2]) if len(totals) > 1 else int(totals[-1])
