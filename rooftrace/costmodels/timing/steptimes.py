"""A plan on a chip in seconds: its one point as a step, and its kernels one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from rooftrace.costmodels.costs import MATRIX
from rooftrace.costmodels.kernels import group_class
from rooftrace.costmodels.kernels.works import plan_kernels
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.timing.exchanges import Communication, communication_of, exchanges_of
from rooftrace.costmodels.timing.steps import Part, StepAmounts, timed
from rooftrace.costmodels.timing.streams import has_streams
from rooftrace.costmodels.timing.timings import StepTimes, Timing
from rooftrace.hardware import Chip


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
        structure=(lambda: planned) if has_streams(planned) else None,
    )


def spread_kind(planned: Plan, kernel: int, kind: str) -> str:
    """The class whose spread holds for a kernel of this class: that without a compiler's layout."""
    if not planned.lays_out(kernel):
        return kind
    ops = planned.groups[kernel].ops
    return group_class(planned.graph, ops, costs=planned.op_costs)


def computes_experts(planned: Plan, kernel: int) -> bool:
    """Whether a kernel of a plan computes what experts do."""
    return any(planned.graph.ops[op].family == "moe" for op in planned.groups[kernel].ops)


def runs_aside(planned: Plan, kernel: int) -> bool:
    """Whether a kernel of a plan runs on another stream than the main one."""
    return bool(planned.graph.ops[planned.groups[kernel].ops[0]].stream)
