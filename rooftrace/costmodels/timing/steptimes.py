"""A step on a chip in seconds, at one point or at many: the kernels, and the end of the step.

Per kernel  t_device = max(t_comp, t_hbm, t_net) + kernel gap.
Per step    t_bound  = max of the totals at the datasheet's rates (perfect overlap),
            t_serial = sum of t_device,
            t_est    = end of a two-track queue: host enqueues in order, device runs in order.
So t_bound <= t_serial <= t_est, and t_launch = t_est - t_serial.

Of a step of several processes, t_serial is the sum over the main stream, with what it waits for
(t_exposed): what runs on other streams meanwhile is hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.costs import MATRIX, Work
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.kernels.seconds import peak_seconds, seconds_by_knobs
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.disturbed import expert_factors, wait_for_stragglers
from rooftrace.costmodels.timing.exchanges import Communication, ExchangeSeconds, communication_of
from rooftrace.costmodels.timing.queue import host_seconds, leading_seconds, schedule
from rooftrace.costmodels.timing.steps import Part, StepAmounts, at_points
from rooftrace.costmodels.timing.streams import Walk, walk
from rooftrace.costmodels.timing.timings import REGIMES, StepTimes, Timing
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import compute_family
from rooftrace.hardware.systems import System

if TYPE_CHECKING:
    from rooftrace._amounts import Array, Places

_QUEUED, _STREAMED = 16_384, 2_048
"""Points that are run at once, each launch with an array of so many starts; and on streams."""


@dataclass(frozen=True, slots=True, eq=False)
class EntrySeconds:
    """Seconds of kernels: arrays over the N entries of a step."""

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

    def times(self, count: Array) -> EntrySeconds:
        """The seconds of `count` times as many kernels."""
        return replace(self.slowed(count), gap=count * self.gap)

    def slowed(self, factor: Array) -> EntrySeconds:
        """The seconds of so much more work in as many kernels."""
        terms = (self.compute, self.hbm, self.network)
        compute, hbm, network = (factor * term for term in terms)
        return EntrySeconds(compute, hbm, network, self.gap, factor * self.more)

    @property
    def by_regime(self) -> Mapping[str, Array]:
        """Seconds by regime: those of the largest term, the first of equal ones; gaps: launch."""
        work = self.work
        compute = work == self.compute
        hbm = ~compute & (work == self.hbm)
        busy = work + self.more
        terms = (
            np.where(compute, busy, 0.0),
            np.where(hbm, busy, 0.0),
            np.where(compute | hbm, 0.0, busy),
            self.gap,
        )
        return dict(zip(REGIMES, terms, strict=True))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TimesOverPoints:
    """Seconds of a step on a chip at P points: arrays of length P, as in `StepTimes`."""

    knobs: Knobs | None  # what they were computed with; None: the datasheet's peaks
    t_comp: Array
    t_hbm: Array
    t_net: Array
    t_bound: Array
    t_serial: Array
    t_est: Array
    t_exposed: Array
    regime_seconds: Mapping[str, Array]  # by name in REGIMES; they add up to t_est
    variance: Array | None  # relative, of steps; None without knobs, nan where nothing takes time
    peak: Array  # FLOP/s, dense, of the engine that runs most of the matrix FLOPs
    peak_precisions: tuple[str, ...]  # what engines compute in that do so at some point
    peak_place: Places  # which of them at each point

    def at(self, point: int) -> StepTimes:
        """The times at one point."""
        names = ("t_comp", "t_hbm", "t_net", "t_bound", "t_serial", "t_est", "t_exposed")
        return StepTimes(
            **{name: float(getattr(self, name)[point]) for name in names},
            regime_seconds={n: float(s[point]) for n, s in self.regime_seconds.items()},
        )

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


def time_step(step: StepAmounts, chip: Chip) -> TimesOverPoints:
    """Seconds of a step at all of its points.

    Collectives take what the system of the chip says, or its own link where it has none.  Raises
    MissingPeakError where the chip has no rate for a precision that the step computes in.
    """
    heads = _headline(step, chip)
    keys: list[Any] = []
    if step.execution.utilization.eta_scalar is not None and len(heads.rates) > 1:
        keys.append(heads.place)  # the rate of vector work follows it
    if step.structure is not None:
        keys += [count for count in step.counts if np.size(count) > 1]
    if not keys:
        return timed(step, chip, heads)[0]
    _, place = np.unique(np.stack(keys), axis=1, return_inverse=True)
    apart = [np.flatnonzero(np.ravel(place) == n) for n in range(int(place.max()) + 1)]
    return _joined(heads, [(at, time_step(step.where(at), chip)) for at in apart])


def _joined(heads: Headline, parts: Sequence[tuple[Places, TimesOverPoints]]) -> TimesOverPoints:
    """The times of all points from those of some and of others."""
    first = parts[0][1]

    def over(arrays: Sequence[Array]) -> Array:
        result = np.zeros(len(heads.place))
        for (at, _), array in zip(parts, arrays, strict=True):
            result[at] = array
        return result

    changes: dict[str, Any] = {
        item.name: over([getattr(times, item.name) for _, times in parts])
        for item in fields(TimesOverPoints)
        if isinstance(getattr(first, item.name), np.ndarray)
    }
    changes["regime_seconds"] = {
        name: over([times.regime_seconds[name] for _, times in parts]) for name in REGIMES
    }
    changes |= {"peak_precisions": heads.precisions, "peak_place": heads.place}
    return replace(first, **changes)


@dataclass(frozen=True, slots=True, eq=False)
class Headline:
    """The engines that run most of the matrix FLOPs at some point."""

    rates: tuple[float, ...]
    precisions: tuple[str, ...]
    place: Places  # which of them at each point


def _headline(step: StepAmounts, chip: Chip) -> Headline:
    """The engine and precision that run most of the matrix FLOPs of each point."""
    flops: dict[tuple[str, str], Any] = defaultdict(float)
    for (operation, precision), flop in step.products.items():
        flops[engines.engine_of(Work(operation, precision), chip, step.execution)] += flop
    place, most = np.zeros(step.points, dtype=np.int8), np.zeros(step.points)
    for number, amount in enumerate(flops.values(), start=1):
        larger = amount > most
        place[larger], most = number, np.maximum(most, amount)
    names = [("vector", "fp32"), *flops]
    used, places = np.unique(place, return_inverse=True)
    return Headline(
        tuple(chip.peak(*names[number]) for number in used),
        tuple(compute_family(names[number][1]) for number in used),
        places.astype(np.int8),
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepRun:
    """A step that ran.  end: seconds [P]; waited: of them, for exchanges.

    starts, exposed: at one point, by part: when its first kernel starts, and how long computing
    waits for its kernels.
    """

    end: Any
    waited: Any = 0.0
    starts: Sequence[float] = ()
    exposed: Sequence[float] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Detail:
    """What the seconds of a step are made of: all kernels of each entry, exchanges, the run."""

    kernels: EntrySeconds
    exchanges: Mapping[int, ExchangeSeconds]
    run: StepRun


def timed(
    step: StepAmounts, chip: Chip, heads: Headline | None = None
) -> tuple[TimesOverPoints, Detail]:
    """The seconds of a step whose points have one headline and run alike; see `time_step`."""
    heads = heads or _headline(step, chip)
    knobs = step.execution.knobs_on(chip)
    exchanges = _exchanges(step, chip)
    fast = real = _at_peaks(step, chip, heads.rates[0], exchanges)
    if knobs is not None:
        real = _by_knobs(step, chip, knobs, fast.network, exchanges)
    factors = expert_factors(step)
    real = real if factors is None else real.slowed(factors)
    run = _run(step, chip, real, _main(step, real.times(step.times).device))
    times = times_of(step, (fast, real), exchanges, run, knobs, heads)
    return times, Detail(real.times(step.times), exchanges, run)


def times_of(
    step: StepAmounts,
    seconds: tuple[EntrySeconds, EntrySeconds],
    exchanges: Mapping[int, ExchangeSeconds],
    run: StepRun,
    knobs: Knobs | None,
    heads: Headline,
) -> TimesOverPoints:
    """The totals of a step that ran.

    seconds: of one kernel of each entry, at the datasheet's rates and as expected.  The work of a
    kernel belongs to its largest term, all gaps and waiting to launch, and what the main stream
    waits for to the network.
    """
    fast, real = seconds
    every = real.times(step.times)
    exposed = np.zeros(step.points) + run.waited
    t_serial = _main(step, every.device) + exposed
    t_est = np.maximum(run.end, t_serial)  # equal but for rounding when the host is never late
    regimes = {name: _main(step, part) for name, part in every.by_regime.items()}
    regimes["network"] = exposed + regimes["network"]
    regimes["launch"] = regimes["launch"] + (t_est - t_serial)
    return TimesOverPoints(
        knobs=knobs,
        t_comp=_main(step, every.compute),
        t_hbm=_main(step, every.hbm),
        t_net=step.total(every.network),
        t_bound=_bound(step, fast, real, exchanges),
        t_serial=t_serial,
        t_est=t_est,
        t_exposed=exposed,
        regime_seconds=regimes,
        variance=_variance(step, every, t_serial, knobs),
        peak=np.array(heads.rates)[heads.place],
        peak_precisions=heads.precisions,
        peak_place=heads.place,
    )


def _main(step: StepAmounts, entries: Array) -> Array:
    """The sum [P] over what computes on the main stream; all where there is one."""
    return step.total(entries, None if step.structure is None else _on_main)


def _on_main(part: Part) -> bool:
    return part.exchange is None and not part.aside


def _variance(
    step: StepAmounts, every: EntrySeconds, t_serial: Array, knobs: Knobs | None
) -> Array | None:
    """The relative variance [P] of a step: the mean of those of its kernels, by their time."""
    if knobs is None or any(part.spread_kind is None for part in step.parts):
        return None
    spreads = np.zeros(len(step.row))
    for part in step.parts:
        spreads[part.where] = (knobs.share(str(part.spread_kind)).spread or knobs.spread) ** 2
    with np.errstate(invalid="ignore"):
        return step.total(every.device * spreads) / t_serial


# -- one kernel of each entry ----------------------------------------------------------------------


def _exchanges(step: StepAmounts, chip: Chip) -> dict[int, ExchangeSeconds]:
    """One call of each part that exchanges with other processes."""
    talking = [(number, part) for number, part in enumerate(step.parts) if part.exchange]
    if not talking:
        return {}
    system, how = chip.system or System.of_chip(chip), step.execution.exchange
    factor = step.execution.disturbances.expert_imbalance
    return {
        number: part.exchange.seconds(system, how).unevenly(factor)
        for number, part in talking
        if part.exchange is not None
    }


def _at_peaks(
    step: StepAmounts, chip: Chip, headline: float, exchanges: Mapping[int, ExchangeSeconds]
) -> EntrySeconds:
    """One kernel of each entry at the datasheet's rates."""
    row = step.row
    compute = peak_seconds(step.kernels, chip, step.execution, headline)[row]
    hbm = (step.kernels.bytes / chip.memory_bandwidth.value)[row]
    sent = step.kernels.link[row]
    gap, more = np.full(len(row), chip.kernel_gap.value), np.zeros(len(row))
    for number in exchanges:
        where = step.parts[number].where
        sent[where] = compute[where] = hbm[where] = gap[where] = 0.0
    network = sent / engines.link_bandwidth(float(np.sum(sent * step.times)), chip)
    for number, exchange in exchanges.items():
        network[step.parts[number].where] = exchange.least
    return EntrySeconds(compute, hbm, network, gap, more)


def _by_knobs(
    step: StepAmounts,
    chip: Chip,
    knobs: Knobs,
    network: Array,
    exchanges: Mapping[int, ExchangeSeconds],
) -> EntrySeconds:
    """One kernel of each entry by knobs, with the overlap of engines that they have.

    The memory traffic of an exchange is in the seconds that were measured; one that computes a
    product meanwhile takes the longer time.
    """
    row, execution = step.row, step.execution
    rows = seconds_by_knobs(step.kernels, chip, knobs, execution, step.copies_layouts)
    compute, hbm, device = rows.compute[row], rows.memory[row], rows.device[row]
    more = np.maximum(0.0, device - np.maximum(compute, hbm))
    gap, network = np.full(len(row), knobs.launch_on(chip)), network.copy()
    multiplies = np.zeros(len(step.kernels), dtype=bool)
    for work in step.kernels.works if exchanges else ():
        multiplies[work.row] |= work.key.operation in MATRIX
    for number, exchange in exchanges.items():
        where = step.parts[number].where
        network[where] = exchange.taken.seconds
        compute[where] *= multiplies[row[where]]
        hbm[where] = gap[where] = more[where] = 0.0
    return EntrySeconds(compute, hbm, network, gap, more)


def _bound(
    step: StepAmounts,
    fast: EntrySeconds,
    real: EntrySeconds,
    exchanges: Mapping[int, ExchangeSeconds],
) -> Array:
    """Seconds [P] that a step takes at least: perfect overlap of engines at the datasheet's rates.

    A kernel that is faster by knobs, because a cache feeds it, counts with that time.  The
    exchanges of one group follow each other; those of different groups may overlap.
    """

    def alone(part: Part) -> bool:
        return part.exchange is None

    bound = step.total(step.times * np.minimum(fast.compute, real.compute), alone)
    for term in (np.minimum(fast.hbm, real.hbm), fast.network):
        bound = np.maximum(bound, step.total(step.times * term, alone))
    groups: dict[str, Any] = defaultdict(float)
    for number, exchange in exchanges.items():
        part = step.parts[number]
        assert part.exchange is not None
        seconds = step.times[part.where] * exchange.least
        groups[part.exchange.group] = groups[part.exchange.group] + at_points(seconds, part.at)
    for seconds in groups.values():
        bound = np.maximum(bound, seconds)
    return bound


# -- the end of the step ---------------------------------------------------------------------------


def _run(step: StepAmounts, chip: Chip, real: EntrySeconds, device: Array) -> StepRun:
    """Run kernels of these seconds in the order of the host; device: [P] of the main stream."""
    durations = real.device
    if step.structure is not None:
        return _on_streams(step, chip, durations)
    host = host_seconds(step.execution, chip)
    before = leading_seconds(step.launches, host, chip.host_waits)
    starts: Sequence[float] = ()
    ends = []
    for points in () if before is not None and step.points > 1 else step.cuts(_QUEUED):
        seconds, counts = step.launched(durations, points), step.counted(points)
        starts, end = schedule(seconds, step.launches, host, counts, chip.host_waits)
        ends.append(end + np.zeros(points.stop - points.start))
    if before is not None:  # exact also where a kernel of a repeat stands for fewer iterations
        return StepRun(before + device, starts=starts)
    return StepRun(np.concatenate(ends) if ends else np.zeros(0), starts=starts)


def _on_streams(step: StepAmounts, chip: Chip, durations: Array) -> StepRun:
    """Run a step whose collectives run beside what it computes."""
    assert step.structure is not None
    planned, host = step.structure(), host_seconds(step.execution, chip)
    ends, waited = np.zeros(step.points), np.zeros(step.points)
    walked = Walk([], [])
    for points in step.cuts(_STREAMED):
        seconds, counts = step.launched(durations, points), step.counted(points)
        walked = walk(planned, seconds, host, counts, chip.host_waits)
        wait_for_stragglers(walked, step)
        ends[points], waited[points] = walked.end, sum(walked.exposed)
    return StepRun(ends, waited, walked.starts, walked.exposed)


# -- a plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """Seconds of a plan on a chip, or on a system of them."""

    groups: tuple[Timing, ...]  # of each kernel group, over all kernels that it stands for
    knobs: Knobs | None  # what they were computed with; None: the datasheet's peaks
    step: StepTimes
    peak: float  # FLOP/s, dense, of the engine that runs most of the matrix FLOPs
    peak_precision: str  # what that engine computes in
    exchanges: tuple[Communication, ...] = ()  # with other processes


def time_plan(planned: Plan, chip: Chip) -> PlanTimes:
    """Seconds of each kernel group of a plan, and of the step; see `time_step`."""
    knobs = planned.execution.knobs_on(chip)
    step = StepAmounts.of(planned, chip if knobs is not None and knobs.cache != 1 else None)
    times, detail = timed(step, chip)
    kernels, run = detail.kernels, detail.run
    terms = (kernels.compute, kernels.hbm, kernels.network, kernels.gap)
    columns = (*(term.tolist() for term in terms), run.starts, kernels.more.tolist())
    exchanges = tuple(
        communication_of(number, planned.groups[number].times, exchange, taken, run.exposed[number])
        for number, taken in detail.exchanges.items()
        if (exchange := step.parts[number].exchange) is not None
    )
    return PlanTimes(
        groups=tuple(map(Timing, *columns)),
        knobs=times.knobs,
        step=times.at(0),
        peak=float(times.peak[0]),
        peak_precision=times.peak_precisions[0],
        exchanges=exchanges,
    )
