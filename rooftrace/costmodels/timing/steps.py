"""Seconds of a step on a chip, at one point or at many: its kernels, its end, and plans as steps.

Per kernel  t_device = max(t_comp, t_hbm, t_net) + kernel gap.
Per step    t_bound  = max of the totals at the datasheet's rates (perfect overlap),
            t_serial = sum of t_device,
            t_est    = end of a two-track queue: host enqueues in order, device runs in order.
So t_bound <= t_serial <= t_est, and t_launch = t_est - t_serial.

Of a step of several processes, t_serial is the sum over the main stream, with its waits for
exchanges (t_exposed); work of other streams meanwhile is hidden.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.fusion import ExecutionModel, Launch, Plan
from rooftrace.costmodels.kernels import Knobs, engines
from rooftrace.costmodels.kernels.intervals import WORKS, StepCell
from rooftrace.costmodels.kernels.knobs import CLASSES
from rooftrace.costmodels.kernels.seconds import clock_of, peak_seconds, rest_of, seconds_by_knobs
from rooftrace.costmodels.kernels.works import KernelAmounts, plan_kernels
from rooftrace.costmodels.ops import MATRIX, Work
from rooftrace.costmodels.timing import streams
from rooftrace.costmodels.timing.queue import (
    Communication,
    ExchangeSeconds,
    KernelExchange,
    communication_of,
    computes_experts,
    exchanges_of,
    host_seconds,
    host_time,
    leading_seconds,
    runs_aside,
    schedule,
    spread_kind,
)
from rooftrace.costmodels.timing.streams import StreamOrder, Walk
from rooftrace.costmodels.timing.timings import (
    REGIMES,
    Cells,
    Clocked,
    EntrySeconds,
    Headline,
    StepTimes,
    TimesOverPoints,
    Timing,
    at_points,
)
from rooftrace.hardware import Chip, host_spread_of
from rooftrace.hardware.precisions import compute_family
from rooftrace.hardware.systems import System

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array, Places

_QUEUED, _STREAMED = 16_384, 2_048
"""Points that are run at once: each launch has an array of so many starts; and on streams."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """Kernels of a step that are equal at every point.

    where: their entries in the step, one for each of U sizes.  at: the index among the U of each
    point; None where U is 1, or there is one for each point.  spread_kind: the class whose spread
    holds.  of_experts: whether they are work of experts.  aside: whether they run on another
    stream than the main one.
    """

    where: slice
    at: Places | None = None
    spread_kind: str
    exchange: KernelExchange | None = None
    of_experts: bool = False
    aside: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepAmounts:
    """A plan reduced to the amounts that times depend on, at P points of one structure.

    kernels: their amounts, in rows.  row, times: of each of N entries its row, and how many kernels
    it stands for.  parts: the entries of equal kernels; of a plan each of its groups.  order: by
    launch on the device, its index in `parts`.  counts: iterations of each repeat that launches
    name, at least 1: numbers, or arrays of length P.
    copies_layouts: see `Plan.copies_layouts`.  products: matrix FLOP by operation and precision.
    stream_order: of the plan, where it has streams.  phase: of the graph.
    Raises ValueError where these contradict each other.
    """

    points: int
    execution: ExecutionModel
    kernels: KernelAmounts
    row: Places
    times: Array
    parts: Sequence[Part]
    order: Sequence[int]
    launches: tuple[Launch, ...]
    counts: Sequence[Any] = ()
    copies_layouts: bool = False
    products: Mapping[tuple[str, str], Amount]
    stream_order: StreamOrder | None = None
    phase: str = ""

    def __post_init__(self) -> None:
        placed = sum(launch.on_device for launch in self.launches)
        if placed != len(self.order):
            raise ValueError(f"order has {len(self.order)} kernels, launches have {placed}")
        for number, part in enumerate(self.parts):
            size, at = part.where.stop - part.where.start, part.at
            if at is None and size not in (1, self.points):
                raise ValueError(
                    f"kernel {number} has {size} sizes for {self.points} points: expected 1, one "
                    "for each point, or `at`"
                )
            if at is not None and at.shape != (self.points,):
                raise ValueError(
                    f"kernel {number}: at has shape {at.shape}, expected ({self.points},)"
                )

    # -- amounts over points -----------------------------------------------------------------------

    def by_part(self, entries: Array) -> list[Amount]:
        """A number, or an array over its sizes, for each part."""
        if len(entries) == len(self.parts):
            numbers: list[Amount] = entries.tolist()
            return numbers
        return [
            entries[part.where] if part.where.stop - part.where.start > 1
            else float(entries[part.where.start])
            for part in self.parts
        ]  # fmt: skip

    def total(self, entries: Array | Clocked, keep: Callable[[Part], bool] | None = None) -> Array:
        """The sum [P] of an amount of all entries, or of those of the parts that `keep` wants.

        Parts with the same `at` are added up first, in their order.
        """
        if isinstance(entries, Clocked):
            sums = self.total(entries.entries, keep)
            more = entries.slower.any() and self.total(entries.paced, keep)
            return sums + entries.slower * more
        pairs = list(zip(self.parts, self.by_part(entries), strict=True))
        if self.points == 1:
            kept = (amount for part, amount in pairs if keep is None or keep(part))
            return np.array([sum(kept)], dtype=float)
        alike: dict[int, tuple[Places | None, Amount]] = {}
        for part, amount in pairs:
            if keep is None or keep(part):
                at, before = alike.get(id(part.at), (part.at, 0.0))
                alike[id(part.at)] = at, before + amount
        result = np.zeros(self.points)
        for at, amount in alike.values():
            result += at_points(amount, at)
        return result

    def launched(self, each: Clocked, points: slice) -> list[Any]:
        """Seconds of each launch on the device at some points: a number where all are equal."""
        amounts = self.by_part(each.entries)
        more = self.by_part(each.paced) if each.slower.any() else [0.0] * len(amounts)
        seconds: dict[int, Any] = {}
        for number in self.order:
            if number not in seconds:
                at = self.parts[number].at
                seconds[number] = at_points(amounts[number], at, points)
                if np.any(more[number]):
                    paced = at_points(more[number], at, points)
                    seconds[number] = seconds[number] + each.slower[points] * paced
        return [seconds[number] for number in self.order]

    def counted(self, points: slice) -> list[Any]:
        """Iterations of each repeat at some points: an integer, or an array of them."""
        return [
            int(np.ravel(n)[0]) if np.size(n) == 1 else np.asarray(n)[points].astype(np.int64)
            for n in self.counts
        ]

    def cuts(self, length: int) -> list[slice]:
        """The points in parts of at most this length."""
        starts = range(0, self.points, length)
        return [slice(start, min(start + length, self.points)) for start in starts]

    def where(self, chosen: Places) -> StepAmounts:
        """The step at some of its points."""

        def at(part: Part) -> Places | None:
            if part.where.stop - part.where.start == 1:
                return None
            return chosen if part.at is None else part.at[chosen]

        counts = [n if np.size(n) == 1 else np.asarray(n)[chosen] for n in self.counts]
        return replace(
            self,
            points=len(chosen),
            parts=[replace(part, at=at(part)) for part in self.parts],
            counts=counts,
            products={
                key: flop if np.size(flop) == 1 else np.asarray(flop)[chosen]
                for key, flop in self.products.items()
            },
        )


# -- seconds ---------------------------------------------------------------------------------------


def time_step(step: StepAmounts, chip: Chip) -> TimesOverPoints:
    """Seconds of a step at all of its points.

    Collectives use the system of the chip, or else its link.  Raises MissingPeakError where the
    chip has no rate for a precision that the step computes in.
    """
    heads = _headline(step, chip)
    keys: list[Any] = []
    if step.execution.utilization.eta_scalar is not None and len(heads.rates) > 1:
        keys.append(heads.place)  # the rate of vector work follows it
    if step.stream_order is not None:
        keys += [count for count in step.counts if np.size(count) > 1]
    if not keys:
        return timed(step, chip, heads)[0]
    _, place = np.unique(np.stack(keys), axis=1, return_inverse=True)
    apart = [np.flatnonzero(np.ravel(place) == n) for n in range(int(place.max()) + 1)]
    return TimesOverPoints.joined(heads, [(at, time_step(step.where(at), chip)) for at in apart])


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
    used, at = np.unique(place, return_inverse=True)
    return Headline(
        tuple(chip.peak(*names[number]) for number in used),
        tuple(compute_family(names[number][1]) for number in used),
        at.astype(np.int8),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Detail:
    """The parts of the seconds of a step: all kernels of each entry, exchanges, the run."""

    kernels: EntrySeconds
    exchanges: Mapping[int, ExchangeSeconds]
    run: Walk


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
    factors = _expert_factors(step)
    real = real if factors is None else real.slowed(factors)
    clock = np.ones(step.points) if knobs is None else _clock(step, chip, knobs, real)
    slower = 1 / clock - 1
    if step.points == 1:
        real, slower = real.held(float(slower[0])), np.zeros(1)
    run = _run(step, chip, real, slower)
    cell = StepCell.at(chip, step.phase, step.execution.fusion, step.execution.dispatch)
    times = times_of(step, (fast, real), exchanges, run, knobs, heads, cell, slower)
    host = host_time(step.launches, host_seconds(step.execution, chip), step.counts)
    times = replace(
        times, t_host=times.t_host + host, host_spread=host_spread_of(chip), clock=clock
    )
    return times, Detail(real.times(step.times), exchanges, run)


def times_of(
    step: StepAmounts,
    seconds: tuple[EntrySeconds, EntrySeconds],
    exchanges: Mapping[int, ExchangeSeconds],
    run: Walk,
    knobs: Knobs | None,
    heads: Headline,
    cell: StepCell | None = None,
    slower: Array | None = None,
) -> TimesOverPoints:
    """The totals of a step that ran.

    seconds: of one kernel of each entry, at the datasheet's rates and as expected.  slower: [P],
    what the clock adds to the seconds that follow it.  The work of a kernel belongs to its largest
    term, all gaps and waiting to launch, and the main stream's waits for exchanges to the network.
    """
    fast, real = seconds
    every = real.times(step.times)
    device = every.at(np.zeros(step.points) if slower is None else slower)
    exposed = np.zeros(step.points) + run.waited
    t_serial = _main(step, device) + exposed
    t_est = np.maximum(run.end, t_serial)  # equal but for rounding when the host is never late
    regimes = {name: _main(step, part) for name, part in every.by_regime(device).items()}
    regimes["network"] = exposed + regimes["network"]
    cell, busy = cell or StepCell(), dict(regimes)  # without waiting, which `Behind` has
    regimes["launch"] = regimes["launch"] + (t_est - t_serial)
    once = 1 / np.maximum(step.times, 1.0)
    squares = step.total(device.of(every.device * once))
    squares += device.slower * step.total(device.of(device.paced * once))
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
        variance=_variance(step, device, t_serial, knobs),
        heads=heads,
        cells=_cells(step, device, regimes if cell.kind == "cpu" else busy, heads, cell),
        alone=np.minimum(1.0, np.sqrt(squares) / np.maximum(t_est, 1e-30)),
        t_host=np.zeros(step.points),
        clock=np.ones(step.points),
    )


def _main(step: StepAmounts, entries: Array | Clocked) -> Array:
    """The sum [P] over the kernels of the main stream; over all where there is one stream."""
    return step.total(entries, None if step.stream_order is None else _on_main)


def _on_main(part: Part) -> bool:
    return part.exchange is None and not part.aside


def _variance(
    step: StepAmounts, device: Clocked, t_serial: Array, knobs: Knobs | None
) -> Array | None:
    """The relative variance [P] of a step: the mean of those of its kernels, by their time."""
    if knobs is None:
        return None
    spreads = np.zeros(len(step.row))
    for part in step.parts:
        spreads[part.where] = (knobs.share(part.spread_kind).spread or knobs.spread) ** 2
    with np.errstate(invalid="ignore"):
        if step.points == 1:  # rounded as shares of kernels are
            return step.total(device.of(spreads / t_serial))
        return step.total(device.of(spreads)) / t_serial


def _cells(
    step: StepAmounts,
    device: Clocked,
    regimes: Mapping[str, Array],
    heads: Headline,
    cell: StepCell,
) -> Cells:
    """Where each point is among measured steps; device: seconds of all kernels of each entry."""
    latent, kinds = step.kernels.latent[step.row], np.empty(len(step.row), dtype=np.int8)
    for part in step.parts:
        work = StepCell.work_of(part.spread_kind, part.of_experts, bool(latent[part.where.start]))
        kinds[part.where] = WORKS.index(work)
    works = [step.total(device.of(kinds == number)) for number in range(len(WORKS))]
    narrow, flops = (step.total(flop[step.row] * step.times) for flop in step.kernels.products)
    return Cells.of(cell, works, narrow > flops / 2, [regimes[name] for name in REGIMES], heads)


# -- one kernel of each entry ----------------------------------------------------------------------


def _exchanges(step: StepAmounts, chip: Chip) -> dict[int, ExchangeSeconds]:
    """One call of each part that exchanges with other processes."""
    talking = [(number, part.exchange) for number, part in enumerate(step.parts) if part.exchange]
    if not talking:
        return {}
    system, execution = chip.system or System.of_chip(chip), step.execution
    factor = execution.disturbances.expert_imbalance
    return {number: each.seconds(system, execution).unevenly(factor) for number, each in talking}


def _at_peaks(
    step: StepAmounts, chip: Chip, headline: float, exchanges: Mapping[int, ExchangeSeconds]
) -> EntrySeconds:
    """One kernel of each entry at the datasheet's rates."""
    row, sent = step.row, step.kernels.link[step.row]
    compute = peak_seconds(step.kernels, chip, step.execution, headline)[row]
    hbm = (step.kernels.bytes / chip.memory_bandwidth.value)[row]
    gap, more = np.full(len(row), chip.kernel_gap.value), np.zeros(len(row))
    for number in exchanges:
        where = step.parts[number].where
        sent[where] = compute[where] = hbm[where] = gap[where] = 0.0
    network = sent / engines.link_bandwidth(float(np.sum(sent * step.times)), chip)
    network += step.kernels.host[row] / chip.host_link
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
    none = np.zeros(len(step.kernels))
    busy, paced = ((each + none)[row] for each in (rows.busy, rows.paced))
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
        paced[where] *= multiplies[row[where]]
    return EntrySeconds(compute, hbm, network, gap, more, busy=busy, paced=paced)


def _clock(step: StepAmounts, chip: Chip, knobs: Knobs, real: EntrySeconds) -> Array:
    """The share of its clock that the chip holds at each point; see `clock_of`."""
    every = real.times(step.times)
    if knobs.power >= 1 or not np.any(every.busy):
        return np.ones(step.points)
    busy, paced = (step.total(np.asarray(each)) for each in (every.busy, every.paced))
    here = step.total(every.device, lambda part: not part.aside)
    return clock_of(busy, paced, here, knobs.power, rest_of(chip))


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


def _expert_factors(step: StepAmounts) -> Array | None:
    """Factors on the time of each entry for the busiest process, whose experts have more tokens.

    None where that makes no difference.
    """
    factor = step.execution.disturbances.expert_imbalance
    if factor == 1 or all(part.exchange is None for part in step.parts):
        return None
    factors = np.ones(len(step.row))
    for part in step.parts:
        if part.of_experts and part.exchange is None:
            factors[part.where] = factor
    return factors


# -- the end of the step ---------------------------------------------------------------------------


def _run(step: StepAmounts, chip: Chip, real: EntrySeconds, slower: Array) -> Walk:
    """Run kernels of these seconds in the order of the host; slower: see `times_of`."""
    durations = real.at(slower)
    if step.stream_order is not None:
        return _on_streams(step, step.stream_order, chip, durations)
    host = host_seconds(step.execution, chip)
    before = leading_seconds(step.launches, host, chip.host_waits)
    starts, ends = list[float](), []
    for points in () if before is not None and step.points > 1 else step.cuts(_QUEUED):
        seconds, counts = step.launched(durations, points), step.counted(points)
        starts, end = schedule(seconds, step.launches, host, counts, chip.host_waits)
        ends.append(end + np.zeros(points.stop - points.start))
    if before is not None:  # exact also where a kernel of a repeat stands for fewer iterations
        device = step.total(real.times(step.times).at(slower))
        return Walk(starts, [], before + device)
    return Walk(starts, [], np.concatenate(ends) if ends else np.zeros(0))


def _on_streams(step: StepAmounts, order: StreamOrder, chip: Chip, durations: Clocked) -> Walk:
    """Run a step whose collectives overlap with computing."""
    host, disturbed = host_seconds(step.execution, chip), step.execution.disturbances
    calls = {
        number: float(step.times[number])
        for number, part in enumerate(step.parts)
        if part.exchange is not None and part.exchange.members.size > 1
    }
    ends, waited = np.zeros(step.points), np.zeros(step.points)
    walked = Walk([], [])
    for points in step.cuts(_STREAMED):
        seconds, counts = step.launched(durations, points), step.counted(points)
        walked = streams.walk(order, seconds, host, counts, disturbed.interference, chip.host_waits)
        streams.wait_for_stragglers(walked, order.processes, disturbed.stragglers, calls)
        ends[points], waited[points] = walked.end, walked.waited
    return walked if step.points == 1 else Walk([], [waited], ends)


# -- steptimes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """Seconds of a plan on a chip, or on a system of them."""

    groups: tuple[Timing, ...]  # of each kernel group, over all kernels that it stands for
    knobs: Knobs | None  # None: the datasheet's peaks
    step: StepTimes
    peak: float  # FLOP/s, dense, of the engine that runs most of the matrix FLOPs
    peak_precision: str  # of that engine
    exchanges: tuple[Communication, ...] = ()  # with other processes


def time_plan(planned: Plan, chip: Chip) -> PlanTimes:
    """Seconds of each kernel group of a plan, and of the step; see `time_step`."""
    knobs = planned.execution.knobs_on(chip)
    step = step_of(planned, chip if knobs is not None and knobs.cache != 1 else None)
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
        peak=times.heads.rates[0],
        peak_precision=times.heads.precisions[0],
        exchanges=exchanges,
    )


def step_of(planned: Plan, chip: Chip | None) -> StepAmounts:
    """The one point of a plan.  chip: whose last cache holds bytes; None: none does."""
    kernels, row = plan_kernels(planned, chip)
    exchanges = exchanges_of(planned)
    products: Counter[tuple[str, str]] = Counter()
    for work, flop in planned.total.work.items():
        if work.operation in MATRIX:
            products[work.operation, work.precision] += flop
    return StepAmounts(
        points=1,
        execution=planned.execution,
        kernels=kernels,
        row=np.array(row, dtype=np.int64),
        times=np.array([group.times for group in planned.groups], dtype=float),
        parts=[
            Part(
                where=slice(number, number + 1),
                spread_kind=spread_kind(planned, number, CLASSES[kernels.kind[row[number]]]),
                exchange=exchanges.get(number),
                of_experts=computes_experts(planned, number),
                aside=runs_aside(planned, number),
            )
            for number in range(len(planned.groups))
        ],
        order=range(len(planned.groups)),
        launches=planned.launches,
        counts=[repeat.count for repeat in planned.graph.repeats],
        copies_layouts=planned.copies_layouts,
        products=products,
        stream_order=StreamOrder.of(planned) if streams.has_streams(planned) else None,
        phase=planned.graph.phase,
    )
