"""A plan on a chip in seconds: every kernel group, and the end of the step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rooftrace.costmodels.costs import MATRIX
from rooftrace.costmodels.kernels import engines, tables
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.queue import host_seconds, schedule
from rooftrace.costmodels.timing.timings import (
    StepTimes,
    Timing,
    lower_bound,
    step_times,
)
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import compute_family


@dataclass(frozen=True, slots=True)
class PlanTimes:
    """Seconds of a plan on a chip."""

    groups: tuple[Timing, ...]  # of each kernel group, over all kernels that it stands for
    knobs: Knobs | None  # what they were computed with; None: the datasheet's peaks
    step: StepTimes
    peak: float  # FLOP/s, dense, of the engine that runs most of the matrix FLOPs
    peak_precision: str  # what that engine computes in


def time_plan(planned: Plan, chip: Chip) -> PlanTimes:
    """Seconds of each kernel group of a plan, and of the step.

    Raises MissingPeakError where the chip has no rate for a precision that the plan computes in.
    """
    engine, precision = _headline(planned, chip)
    peak = chip.peak(engine, precision)
    knobs = planned.execution.knobs_on(chip)
    ceilings = _ceilings(planned, chip, peak)
    single = ceilings if knobs is None else _expected(planned, knobs, chip)
    starts, end = schedule(
        [timing.t_device for timing in single],
        planned.launches,
        host_seconds(planned.execution, chip),
        [repeat.count for repeat in planned.graph.repeats],
        chip.host_waits,
    )
    groups = tuple(
        timing.of(group.times, start)
        for group, timing, start in zip(planned.groups, single, starts, strict=True)
    )
    bound = lower_bound(
        (group.times, fast, timing)
        for group, fast, timing in zip(planned.groups, ceilings, single, strict=True)
    )
    step = step_times(groups, end, bound)
    return PlanTimes(groups, knobs, step, peak, compute_family(precision))


def _ceilings(planned: Plan, chip: Chip, headline: float) -> list[Timing]:
    """What one kernel of each group takes at the datasheet's rates; equal work is done once."""
    bandwidth, gap, link = (
        chip.memory_bandwidth.value,
        chip.kernel_gap.value,
        engines.link_bandwidth(planned.total.bytes("link"), chip),
    )
    memo: dict[tuple[Any, ...], float] = {}
    timings = []
    for cost in planned.costs:
        key = tuple(cost.work.items())
        t_comp = memo.get(key)
        if t_comp is None:
            t_comp = memo[key] = engines.compute_seconds(cost, chip, planned.execution, headline)
        timings.append(Timing(t_comp, cost.bytes() / bandwidth, cost.bytes("link") / link, gap))
    return timings


def _expected(planned: Plan, knobs: Knobs, chip: Chip) -> list[Timing]:
    """Timings from knobs: equal kernels at once, with the overlap of engines that they have."""
    link = engines.link_bandwidth(planned.total.bytes("link"), chip)
    rows, place = tables.kernel_table(planned, chip, reuse=knobs.cache != 1)
    seconds = rows.seconds(knobs, planned.copies_layouts)
    gap = knobs.launch_on(chip)
    compute, memory, device = (
        part.tolist() for part in (seconds.compute, seconds.memory, seconds.device)
    )
    timings = []
    for row, cost in zip(place, planned.costs, strict=True):
        t_net = cost.bytes("link") / link
        more = max(0.0, device[row] - max(compute[row], memory[row]))
        timings.append(Timing(compute[row], memory[row], t_net, gap, more=more))
    return timings


def _headline(planned: Plan, chip: Chip) -> tuple[str, str]:
    """The engine and precision that run most of the matrix FLOPs; theirs is the headline peak."""
    flops: Counter[tuple[str, str]] = Counter()
    for work, flop in planned.total.work.items():
        if work.operation in MATRIX:
            flops[engines.engine_of(work, chip, planned.execution)] += flop
    return flops.most_common(1)[0][0] if flops else ("vector", "fp32")
