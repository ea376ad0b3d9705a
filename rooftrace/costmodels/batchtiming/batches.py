"""A plan over points on a chip in seconds: `timing.time_plan` at all points at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.batchtiming.plancolumns import PlanColumns, at_points, total
from rooftrace.costmodels.batchtiming.queues import queue_ends
from rooftrace.costmodels.costs import MATRIX
from rooftrace.costmodels.kernels import columns, engines
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.timing import timings
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import compute_family

if TYPE_CHECKING:
    from rooftrace.costmodels.kernels.columns import Amount, Array, KernelColumns, Places


@dataclass(frozen=True, slots=True, eq=False)
class _Seconds:
    """Seconds of all kernels that a `KernelColumns` stands for: arrays over its U sizes."""

    compute: Array
    hbm: Array
    network: Array
    gap: Array
    more: Array  # what imperfect overlap adds to the largest term

    @property
    def work(self) -> Array:
        """The largest term."""
        return np.maximum(np.maximum(self.compute, self.hbm), self.network)

    @property
    def device(self) -> Array:
        """For which the kernels keep the device busy, gaps included."""
        return self.work + self.more + self.gap

    def times(self, count: Amount) -> _Seconds:
        """The seconds of `count` times as many kernels."""
        return _Seconds(
            count * self.compute,
            count * self.hbm,
            count * self.network,
            count * self.gap,
            count * self.more,
        )

    @property
    def by_regime(self) -> Mapping[str, Array]:
        """Seconds by regime; ties go to compute, then to HBM."""
        work = self.work
        compute = work == self.compute
        hbm = ~compute & (work == self.hbm)
        busy = work + self.more
        return {
            "compute": np.where(compute, busy, 0.0),
            "hbm": np.where(hbm, busy, 0.0),
            "network": np.where(compute | hbm, 0.0, busy),
            "launch": self.gap,
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BatchTimes:
    """Seconds of a plan on a chip at P points: arrays of length P, as in `PlanTimes.step`."""

    columns: PlanColumns
    chip: Chip
    knobs: Knobs | None  # what they were computed with; None: the datasheet's peaks
    t_comp: Array
    t_hbm: Array
    t_net: Array
    t_bound: Array
    t_serial: Array
    t_est: Array
    regime_seconds: Mapping[str, Array]  # by name in REGIMES; they add up to t_est
    variance: Array | None  # relative, of steps; None without knobs, nan where nothing takes time
    peak: Array  # FLOP/s, dense, of the engine that runs most of the matrix FLOPs
    peak_precisions: tuple[str, ...]  # what engines compute in that do so at some point
    peak_place: Places  # which of them at each point
    seconds: tuple[_Seconds, ...]  # of each of `columns.kernels`, at its sizes

    @property
    def t_launch(self) -> Array:
        """Time in which the device waits for the host."""
        return self.t_est - self.t_serial

    @property
    def interval(self) -> tuple[Array, Array] | None:
        """Seconds between which 90 % of such steps are, as `interval_of` says it.

        None without knobs; nan at points where they have no spread.
        """
        if self.variance is None or self.knobs is None:
            return None
        low, high = self.knobs.ends()
        deviation = np.sqrt(np.where(self.variance > 0, self.variance, np.nan))
        ends = self.t_est * np.exp(low * deviation), self.t_est * np.exp(high * deviation)
        return np.maximum(self.t_bound, ends[0]), ends[1]

    def device(self, kernel: int) -> Array:
        """Seconds [P] for which all kernels at this place in `columns.kernels` keep the device."""
        return self._gathered(kernel, self.seconds[kernel].device)

    def terms(self, kernel: int) -> dict[str, Array]:
        """Seconds [P] of the kernels at this place by regime, as in `Timing.terms`."""
        seconds = self.seconds[kernel]
        terms = (seconds.compute, seconds.hbm, seconds.network, seconds.gap)
        return {
            name: self._gathered(kernel, term)
            for name, term in zip(timings.REGIMES, terms, strict=True)
        }

    def _gathered(self, kernel: int, amount: Array) -> Array:
        told = at_points(np.atleast_1d(amount), self.columns.kernels[kernel].at)
        return np.broadcast_to(told, (self.columns.points,))


def time_columns(step: PlanColumns, chip: Chip) -> BatchTimes:
    """Seconds of a step at all of its points; at each of them those of `time_plan`.

    Raises MissingPeakError where the chip has no rate for a precision that the plan computes in.
    """
    heads = _headline(step, chip)
    if step.execution.utilization.eta_scalar is not None and len(heads.rates) > 1:
        # The rate of vector work follows the point: kernels with vector work need one for each.
        step = replace(step, kernels=tuple(kernel.written_out() for kernel in step.kernels))
    knobs = step.execution.knobs_on(chip)
    moved = sum(float(np.sum(kernel.link)) for kernel in step.kernels)
    link = engines.link_bandwidth(moved, chip)
    pairs = [_kernel_seconds(kernel, step, chip, knobs, heads, link) for kernel in step.kernels]
    single = [real for _, real in pairs]
    whole = [real.times(k.times) for k, real in zip(step.kernels, single, strict=True)]

    def summed(amounts: Sequence[Amount]) -> Array:
        return total(step.kernels, amounts, step.points)

    t_serial = summed([seconds.device for seconds in whole])
    ends = queue_ends(step, [seconds.device for seconds in single], t_serial, chip)
    t_est = np.maximum(ends, t_serial)
    by_regime = [seconds.by_regime for seconds in whole]
    regimes = {name: summed([part[name] for part in by_regime]) for name in timings.REGIMES}
    regimes["launch"] += t_est - t_serial
    network = summed([seconds.network for seconds in whole])
    return BatchTimes(
        columns=step,
        chip=chip,
        knobs=knobs,
        t_comp=summed([seconds.compute for seconds in whole]),
        t_hbm=summed([seconds.hbm for seconds in whole]),
        t_net=network,
        t_bound=np.maximum(_least(step, pairs), network),
        t_serial=t_serial,
        t_est=t_est,
        regime_seconds=regimes,
        variance=None if knobs is None else _variance(step, whole, t_serial, knobs),
        peak=np.array(heads.rates)[heads.place],
        peak_precisions=heads.precisions,
        peak_place=heads.place,
        seconds=tuple(whole),
    )


def _kernel_seconds(
    kernel: KernelColumns,
    step: PlanColumns,
    chip: Chip,
    knobs: Knobs | None,
    heads: _Headline,
    link: float,
) -> tuple[_Seconds, _Seconds]:
    """One kernel at the datasheet's rates, and by knobs; without these the same twice."""
    headline = heads.rates[0] if len(heads.rates) == 1 else np.array(heads.rates)[heads.place]
    peak = columns.peak_seconds(kernel, chip, step.execution, headline)
    network = np.atleast_1d(kernel.link / link)
    bandwidth = chip.memory_bandwidth.value
    none = np.zeros(1)
    fast = _Seconds(
        peak, np.atleast_1d(kernel.bytes / bandwidth), network, none + chip.kernel_gap.value, none
    )
    if knobs is None:
        return fast, fast
    own, layouts = knobs, step.copies_layouts
    if kernel.eager:
        own, layouts = step.execution.outside.knobs_on(chip) or knobs, True
    rows = columns.knob_seconds(kernel, own, chip, step.execution, layouts)
    more = np.maximum(0.0, rows.device - np.maximum(rows.compute, rows.memory))
    return fast, _Seconds(rows.compute, rows.memory, network, none + knobs.launch_on(chip), more)


def _least(step: PlanColumns, pairs: Sequence[tuple[_Seconds, _Seconds]]) -> Array:
    """Seconds [P] of computing or of HBM, as `timings.lower_bound` has them."""
    kernels = step.kernels
    both = list(zip(kernels, pairs, strict=True))
    compute = [k.times * np.minimum(fast.compute, real.compute) for k, (fast, real) in both]
    hbm = [k.times * np.minimum(fast.hbm, real.hbm) for k, (fast, real) in both]
    return np.maximum(total(kernels, compute, step.points), total(kernels, hbm, step.points))


def _variance(step: PlanColumns, whole: Sequence[_Seconds], t_serial: Array, knobs: Knobs) -> Array:
    """The relative variance [P] of a step: the mean of those of its kernels, by their time."""
    weighted = []
    for kernel, seconds in zip(step.kernels, whole, strict=True):
        spread = knobs.share(kernel.spread_kind or kernel.kind).spread or knobs.spread
        weighted.append(seconds.device * spread**2)
    with np.errstate(invalid="ignore"):
        return total(step.kernels, weighted, step.points) / t_serial


@dataclass(frozen=True, slots=True, eq=False)
class _Headline:
    """The engines that run most of the matrix FLOPs at some point."""

    rates: tuple[float, ...]
    precisions: tuple[str, ...]
    place: Places  # which of them at each point


def _headline(step: PlanColumns, chip: Chip) -> _Headline:
    """The engine and precision that run most of the matrix FLOPs of each point."""
    flops: dict[tuple[str, str], list[Amount]] = {}
    for number, kernel in enumerate(step.kernels):
        for work in kernel.works:
            if work.operation in MATRIX and np.any(work.flop):
                engine = engines.engine_of(work.key, chip, step.execution)
                sums = flops.setdefault(engine, [0.0] * len(step.kernels))
                sums[number] = sums[number] + kernel.times * work.flop
    place = np.zeros(step.points, dtype=np.int8)
    most = np.zeros(step.points)
    for number, sums in enumerate(flops.values(), start=1):
        amount = total(step.kernels, sums, step.points)
        larger = amount > most
        place[larger], most[larger] = number, amount[larger]
    names = [("vector", "fp32"), *flops]
    used, places = np.unique(place, return_inverse=True)
    return _Headline(
        tuple(chip.peak(*names[number]) for number in used),
        tuple(compute_family(names[number][1]) for number in used),
        places.astype(np.int8),
    )
