"""Seconds from costs: what each kernel takes on a chip, and when the step ends.

Per kernel group  t_device = max(t_comp, t_hbm, t_net) + kernel gap.
Per step          t_bound  = max of the model totals (a lower bound: perfect overlap),
                  t_serial = sum of t_device,
                  t_est    = end of a two-track queue: host enqueues in order, device runs in order.
So t_bound <= t_serial <= t_est, and t_launch = t_est - t_serial.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.costs import COMPUTED, Cost, Work
from rooftrace.costmodels.estimating import ExecutionModel
from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.timing.utilization import LEAST, matrix_engine, tile_efficiency
from rooftrace.hardware import Chip, compute_family, precision

REGIMES = ("compute", "hbm", "network", "launch")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a kernel group, over all kernels that it stands for: three terms, and the gaps.

    start: when the first of them starts.  more: what imperfect overlap adds to the largest term.
    """

    t_comp: float
    t_hbm: float
    t_net: float
    gap: float
    start: float = 0.0
    more: float = 0.0

    @property
    def t_device(self) -> float:
        """How long the device is busy with the group, gaps included."""
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


@dataclass(frozen=True, slots=True)
class Launch:
    """What the host does next: `dispatches` enqueues, of which the last is one kernel group if
    `on_device`; then it waits for the device if `sync`.  Once in every iteration of `repeats`."""

    dispatches: int
    on_device: bool
    sync: bool = False
    repeats: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step on one chip, and which regime they belong to."""

    t_comp: float
    t_hbm: float
    t_net: float
    t_bound: float
    t_serial: float
    t_est: float
    regime_seconds: Mapping[str, float]

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


def engine_of(work: Work, chip: Chip, execution: ExecutionModel) -> tuple[str, str]:
    """The (engine, precision) that runs this work.

    fp32 matmul runs on the vector engine and fp32 convolution on TF32, as torch's defaults are on a
    chip that has TF32; `tf32` sends matmul there too.  Complex products run as those of their
    parts.  fp64 products use the matrix engine where the chip has an fp64 rate for it.
    """
    if work.operation == "vector":
        return "vector", work.precision
    family = compute_family(work.precision)
    if family == "fp32":
        wants_tf32 = work.operation == "convolution" or execution.tf32
        if wants_tf32 and chip.has_peak("matrix", "tf32"):
            return "matrix", "tf32"
        return "vector", "fp32"
    if family == "fp64" and not chip.has_peak("matrix", "fp64"):
        return "vector", "fp64"
    return "matrix", work.precision


def compute_seconds(cost: Cost, chip: Chip, execution: ExecutionModel, headline: float) -> float:
    """Seconds of the work of one group.

    Matrix and vector work of one kernel are added: engines are not assumed to overlap inside it.
    Raises MissingPeakError where the chip lacks a rate.
    """
    seconds = 0.0
    utilization = execution.utilization
    for work, flop in cost.work.items():
        if work.count not in COMPUTED:
            continue
        if work.operation == "vector" and utilization.eta_scalar is not None:
            rate = utilization.eta_scalar * headline
        else:
            # eta() is 1 for vector work: it has no rows.
            tiles = utilization.tiles
            engine = (product_engine if tiles else engine_of)(work, chip, execution)
            rate = chip.peak(*engine) * utilization.eta(work.rows)
            if tiles:
                rate *= _tile_share(work, flop, chip, rate, engine[0] == "matrix")
        seconds += flop / rate
    return seconds


def product_engine(work: Work, chip: Chip, execution: ExecutionModel) -> tuple[str, str]:
    """The (engine, precision) of a product on a GPU; as `engine_of` where it is not a small one.

    A product of fewer rows or columns than a matrix instruction has streams one matrix past a few
    vectors.  It runs on the vector engine where that is faster than mostly empty instructions.
    """
    engine = engine_of(work, chip, execution)
    if engine[0] == "vector" or work.operation != "matmul" or work.shape is None:
        return engine
    few = min(work.shape[:2])
    if chip.kind != "gpu" or not 0 < few < LEAST or not chip.has_peak("vector", "fp32"):
        return engine
    streaming = chip.peak("vector", "fp32") / few > chip.peak(*engine) / LEAST
    return ("vector", "fp32") if streaming else engine


def stored_widths(work: Work) -> tuple[float, float]:
    """Bytes of an element of A and of B of a product, as they are stored."""
    computed = float(precision(work.precision).bits / 8)
    return work.widths or (computed, computed)


def _tile_share(work: Work, flop: int, chip: Chip, rate: float, whole: bool) -> float:
    """Share of the rate that whole tiles in whole waves leave to these products; 1 if not known."""
    engine, shape = matrix_engine(chip, rate), work.shape
    if engine is None or shape is None or 0 in shape:
        return 1.0
    products = max(1, round(flop / (2 * math.prod(shape))))
    return tile_efficiency(*shape, products, stored_widths(work), engine, whole)


def host_waits(chip: Chip) -> bool:
    """Whether an op has run when its call returns: a CPU computes in the thread that calls."""
    return chip.kind == "cpu"


def schedule(
    durations: Sequence[float],
    launches: Sequence[Launch],
    dispatch: float,
    counts: Sequence[int] = (),
    waits: bool = False,
) -> tuple[list[float], float]:
    """Start of each group on the device (the first time), and when the step ends.

    The host enqueues `dispatches` times (`dispatch` seconds each); the device starts a group when
    it is enqueued and the one before has ended, and is busy for its duration; after a sync the host
    goes on only when the device is idle.  counts: how many iterations each repeat has.  waits:
    whether it does so after every launch (see `host_waits`).
    """
    placed = sum(launch.on_device for launch in launches)
    if placed != len(durations):
        raise ValueError(f"{len(durations)} durations for {placed} groups on the device")
    times = iter(durations)
    steps = [
        _Step(one.dispatches * dispatch, next(times) if one.on_device else None, one.sync or waits)
        for one in launches
    ]
    queue = _Queue(steps, [launch.repeats for launch in launches], counts)
    host, device = queue.run(range(len(steps)), 0, (0.0, 0.0))
    return queue.starts, max(host, device)


@dataclass(frozen=True, slots=True)
class _Step:
    """A launch in seconds: of the host, and of the device (None where it has nothing to do)."""

    host: float
    device: float | None
    sync: bool


_Clocks = tuple[float, float]
"""When the host and the device are done with what was enqueued so far."""
_Shift = tuple[float, float, float, float]
"""What an iteration does to the clocks (h, d): (max(h + a, d + b), max(h + c, d + e))."""
_NEVER = -math.inf


class _Queue:
    """The two tracks.  Launches shift and join two clocks, and so do all iterations of a repeat."""

    def __init__(
        self, steps: Sequence[_Step], repeats: Sequence[tuple[int, ...]], counts: Sequence[int]
    ) -> None:
        self.steps, self.repeats, self.counts = steps, repeats, counts
        self.starts: list[float] = []

    def run(self, part: range, depth: int, clocks: _Clocks) -> _Clocks:
        """Run these launches once, first iterations one by one; remember when groups start."""
        for repeat, inside in runs.segments(self.repeats, part, depth):
            if repeat is None:
                host, device = clocks
                for step in self.steps[inside.start : inside.stop]:
                    host += step.host
                    if step.device is not None:
                        start = max(host, device)
                        self.starts.append(start)
                        device = start + step.device
                    if step.sync:
                        host = max(host, device)
                clocks = host, device
            else:
                host, device = self.run(inside, depth + 1, clocks)
                a, b, c, e = _power(self._shift(inside, depth + 1), self.counts[repeat] - 1)
                clocks = max(host + a, device + b), max(host + c, device + e)
        return clocks

    def _shift(self, part: range, depth: int) -> _Shift:
        """What these launches do to any clocks."""
        total = _NO_SHIFT
        for repeat, inside in runs.segments(self.repeats, part, depth):
            if repeat is not None:
                inner = self._shift(inside, depth + 1)
                total = _after(total, _power(inner, self.counts[repeat]))
                continue
            for step in self.steps[inside.start : inside.stop]:
                busy = step.device
                shift: _Shift = (step.host, _NEVER, _NEVER, 0.0)
                if busy is not None:
                    shift = (step.host, _NEVER, step.host + busy, busy)
                if step.sync:
                    shift = (max(shift[0], shift[2]), shift[3], shift[2], shift[3])
                total = _after(total, shift)
        return total


_NO_SHIFT: _Shift = (0.0, _NEVER, _NEVER, 0.0)


def _after(first: _Shift, then: _Shift) -> _Shift:
    """One shift after the other: a product of matrices whose sum is max and whose product is +."""
    a, b, c, e = first
    p, q, r, s = then
    return max(p + a, q + c), max(p + b, q + e), max(r + a, s + c), max(r + b, s + e)


def _power(shift: _Shift, count: int) -> _Shift:
    """The same shift `count` times."""
    result = _NO_SHIFT
    while count:
        if count & 1:
            result = _after(result, shift)
        shift, count = _after(shift, shift), count >> 1
    return result


def step_times(timings: Iterable[Timing], t_est: float) -> StepTimes:
    """Totals and regime seconds of a step that ends at `t_est`.

    The work of a group belongs to its largest term, all gaps and waiting to launch.
    """
    timings = list(timings)
    t_comp = sum(t.t_comp for t in timings)
    t_hbm = sum(t.t_hbm for t in timings)
    t_net = sum(t.t_net for t in timings)
    t_serial = sum(t.t_device for t in timings)
    seconds = dict.fromkeys(REGIMES, 0.0)
    for t in timings:
        seconds["launch"] += t.gap
        work = max(t.t_comp, t.t_hbm, t.t_net)
        regime = "compute" if work == t.t_comp else "hbm" if work == t.t_hbm else "network"
        seconds[regime] += work + t.more
    t_est = max(t_est, t_serial)  # equal but for rounding when the host is never late
    seconds["launch"] += t_est - t_serial
    return StepTimes(t_comp, t_hbm, t_net, max(t_comp, t_hbm, t_net), t_serial, t_est, seconds)
