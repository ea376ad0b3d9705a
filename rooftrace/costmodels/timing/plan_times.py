"""A plan on a chip in seconds: every kernel group, and the end of the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooftrace.costmodels.costs import MATRIX, Cost
from rooftrace.costmodels.kernels import engines, tables
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.disturbed import (
    unevenly,
    wait_for_stragglers,
    with_busiest_experts,
)
from rooftrace.costmodels.timing.exchanges import Communication, exchanges_of, least_network
from rooftrace.costmodels.timing.queue import host_seconds, leading_seconds, schedule
from rooftrace.costmodels.timing.streams import has_streams, walk
from rooftrace.costmodels.timing.timings import (
    StepTimes,
    Timing,
    lower_bound,
    step_times,
)
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import compute_family
from rooftrace.hardware.systems import System


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
    """Seconds of each kernel group of a plan, and of the step.

    Collectives take what the system of the chip says, or its own link where it has none.  Raises
    MissingPeakError where the chip has no rate for a precision that the plan computes in.
    """
    engine, precision = _headline(planned, chip)
    peak = chip.peak(engine, precision)
    knobs = planned.execution.knobs_on(chip)
    network = exchanges_of(planned, chip.system or System.of_chip(chip))
    network = unevenly(network, planned.execution.disturbances.expert_imbalance)
    ceilings = _ceilings(planned, chip, peak, network)
    single = ceilings if knobs is None else _expected(planned, knobs, chip, network)
    single = with_busiest_experts(planned, single, network)
    if has_streams(planned):
        return _on_streams(planned, chip, single, ceilings, network)
    host = host_seconds(planned.execution, chip)
    starts, end = schedule(
        [timing.t_device for timing in single],
        planned.launches,
        host,
        [repeat.count for repeat in planned.graph.repeats],
        chip.host_waits,
    )
    groups = _placed(planned, single, starts)
    before = leading_seconds(planned.launches, host, chip.host_waits)
    if before is not None:  # exact also where a kernel of a repeat stands for fewer iterations
        end = before + sum(timing.t_device for timing in groups)
    step = step_times(groups, end, lower_bound(_pairs(planned, ceilings, single)))
    return PlanTimes(groups, knobs, step, peak, compute_family(precision))


def _on_streams(
    planned: Plan,
    chip: Chip,
    single: Sequence[Timing],
    ceilings: Sequence[Timing],
    network: Mapping[int, Communication],
) -> PlanTimes:
    """Seconds of a plan whose collectives run beside what it computes."""
    engine, precision = _headline(planned, chip)
    walked = walk(
        planned,
        [timing.t_device for timing in single],
        host_seconds(planned.execution, chip),
        chip.host_waits,
    )
    wait_for_stragglers(walked, planned, network)
    groups = _placed(planned, single, walked.starts)
    main = [
        timing
        for number, (group, timing) in enumerate(zip(planned.groups, groups, strict=True))
        if number not in network and not planned.graph.ops[group.ops[0]].stream
    ]
    alone = [pair for n, pair in enumerate(_pairs(planned, ceilings, single)) if n not in network]
    bound = max(lower_bound(alone), least_network(network))
    step = step_times(main, walked.end, bound, sum(walked.exposed))
    step = replace(step, t_net=sum(t.t_net for t in groups))
    exchanges = tuple(
        replace(exchange, exposed=walked.exposed[number]) for number, exchange in network.items()
    )
    peak = chip.peak(engine, precision)
    knobs = planned.execution.knobs_on(chip)
    return PlanTimes(groups, knobs, step, peak, compute_family(precision), exchanges)


def _placed(planned: Plan, single: Sequence[Timing], starts: Sequence[float]) -> tuple[Timing, ...]:
    return tuple(
        timing.of(group.times, start)
        for group, timing, start in zip(planned.groups, single, starts, strict=True)
    )


def _pairs(
    planned: Plan, ceilings: Sequence[Timing], single: Sequence[Timing]
) -> list[tuple[int, Timing, Timing]]:
    """How often each kernel runs, and its seconds by the datasheet and by knobs."""
    times = (group.times for group in planned.groups)
    return list(zip(times, ceilings, single, strict=True))


def _ceilings(
    planned: Plan, chip: Chip, headline: float, network: Mapping[int, Communication]
) -> list[Timing]:
    """What one kernel of each group takes at the datasheet's rates; equal work is done once."""
    bandwidth, gap = chip.memory_bandwidth.value, chip.kernel_gap.value
    link = _other_links(planned, chip, network)
    memo: dict[tuple[Any, ...], float] = {}
    timings = []
    for number, cost in enumerate(planned.costs):
        if number in network:
            timings.append(_exchanged(cost, network[number].least))
            continue
        key = tuple(cost.work.items())
        t_comp = memo.get(key)
        if t_comp is None:
            t_comp = memo[key] = engines.compute_seconds(cost, chip, planned.execution, headline)
        timings.append(Timing(t_comp, cost.bytes() / bandwidth, cost.bytes("link") / link, gap))
    return timings


def _other_links(planned: Plan, chip: Chip, network: Mapping[int, Communication]) -> float:
    """byte/s of the chip's link, for what is sent by ops that name no group."""
    moved = sum(
        group.times * cost.bytes("link")
        for number, (group, cost) in enumerate(zip(planned.groups, planned.costs, strict=True))
        if number not in network
    )
    return engines.link_bandwidth(moved, chip)


def _expected(
    planned: Plan, knobs: Knobs, chip: Chip, network: Mapping[int, Communication]
) -> list[Timing]:
    """Timings from knobs: equal kernels at once, with the overlap of engines that they have."""
    link = _other_links(planned, chip, network)
    rows, place = tables.kernel_table(planned, chip, reuse=knobs.cache != 1)
    parts = [
        tuple(each.tolist() for each in (part.compute, part.memory, part.device))
        for part in tables.seconds_by_part(planned, chip, knobs, rows)
    ]
    gap = knobs.launch_on(chip)
    timings = []
    for number, (row, cost) in enumerate(zip(place, planned.costs, strict=True)):
        compute, memory, device = parts[number in planned.eager]
        if number in network:
            exchange = network[number]
            timings.append(_exchanged(cost, exchange.seconds, compute[row]))
            continue
        t_net = cost.bytes("link") / link
        more = max(0.0, device[row] - max(compute[row], memory[row]))
        timings.append(Timing(compute[row], memory[row], t_net, gap, more=more))
    return timings


def _exchanged(cost: Cost, seconds: float, computing: float = 0.0) -> Timing:
    """The timing of a collective; one that computes a product meanwhile takes the longer time.

    Its memory traffic is in the seconds that were measured.
    """
    products = any(work.operation in MATRIX for work in cost.work)
    return Timing(computing if products else 0.0, 0.0, seconds, 0.0)


def _headline(planned: Plan, chip: Chip) -> tuple[str, str]:
    """The engine and precision that run most of the matrix FLOPs; theirs is the headline peak."""
    flops: Counter[tuple[str, str]] = Counter()
    for work, flop in planned.total.work.items():
        if work.operation in MATRIX:
            flops[engines.engine_of(work, chip, planned.execution)] += flop
    return flops.most_common(1)[0][0] if flops else ("vector", "fp32")
