"""Elasticities of a step at some sizes: by the sizes, by the facts of the chip, and by knobs.

FLOPs and bytes by sizes are exact, from formulas.  Times are compared after finite steps, which
show cliffs: sizes through the form, facts and knobs by timing the same plan again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from rooftrace.costmodels.elasticity import slopes
from rooftrace.costmodels.elasticity.namednumbers import NamedNumbers, UnknownNumberError
from rooftrace.costmodels.elasticity.responses import Elasticities, Elasticity, FiniteStep
from rooftrace.costmodels.elasticity.slopes import Slope
from rooftrace.costmodels.elasticity.watching import watched
from rooftrace.costmodels.explaining import plan_at
from rooftrace.costmodels.kernels import group_class
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import LAST
from rooftrace.costmodels.planforms import Conditions, PlanForm, Points
from rooftrace.costmodels.planning import Plan, plan
from rooftrace.costmodels.rewriting import reprice
from rooftrace.costmodels.sweeping import Form, evaluated
from rooftrace.costmodels.timing.steptimes import time_plan
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import MissingPeakError

FACTORS: Mapping[str, float] = {"-1 %": 0.99, "+1 %": 1.01, "x1.1": 1.1, "x2": 2.0, "x0.5": 0.5}
"""Steps of facts and knobs."""
NOT_READ, NO_KERNEL, NOT_HERE = "not read", "no such kernel", "not what takes time here"
ONLY_INTERVAL = "of the interval alone"


def elasticities(
    form: Form,
    sizes: Mapping[str, int],
    chip: Chip,
    conditions: Conditions,
    others: Sequence[Form] = (),
    refusals: tuple[type[Exception], ...] = (RequestError,),
) -> Elasticities:
    """How a step answers to each of its sizes, chip facts and knobs, ranked.

    sizes: a value for each size of the form.  others: forms of the same step over further sizes,
    whose values are in `sizes` too.  refusals: what tracing raises at sizes that the model does not
    take.  Raises RequestError for sizes that the form does not have, and
    MissingPeakError where the chip has no rate for a precision of the step.
    """
    further = {name for other in others for name in other.names}
    numbers = form.numbers({name: n for name, n in sizes.items() if name not in further})
    graph = reprice(
        form.graph(**dict(zip(form.names, numbers, strict=True))),
        conditions.dtype,
        conditions.weights_dtype,
        conditions.kv_dtype,
    )
    conditions = replace(conditions, execution=plan(graph, conditions.execution).execution)
    named = NamedNumbers.of(chip, conditions.execution)
    base = _Timed.of(plan(graph, named.execution), named.chip)
    rows = []
    for each in (form, *others):
        here = each.numbers({name: sizes[name] for name in each.names})
        own = plan_at(each, here, conditions)
        rows += [
            _by_size(each, own, here, place, base, chip, conditions, refusals)
            for place in range(len(each.names))
        ]
    rows += _by_numbers(named, base, graph)
    return Elasticities(
        title=form.title,
        phase=form.phase,
        sizes=dict(sizes),
        chip=chip.name,
        execution=conditions.execution.name,
        knobs=knobs.title if isinstance(knobs := named.execution.knobs, Knobs) else "",
        flops=base.plan.total.flops(),
        bytes=base.plan.bytes.total,
        peak_memory=base.plan.memory.peak,
        t_est=base.t_est,
        t_bound=base.t_bound,
        rows=tuple(sorted(rows, key=lambda row: (-row.effect, row.is_zero))),
    )


@dataclass(frozen=True, slots=True)
class _Timed:
    """A plan and its seconds."""

    plan: Plan
    t_est: float
    t_bound: float

    @property
    def bytes(self) -> int:
        return self.plan.bytes.total

    @staticmethod
    def of(planned: Plan, chip: Chip) -> _Timed:
        step = time_plan(planned, chip).step
        return _Timed(planned, step.t_est, step.t_bound)


# -- sizes -----------------------------------------------------------------------------------------


def _by_size(
    form: Form,
    own: PlanForm,
    numbers: Sequence[int],
    place: int,
    base: _Timed,
    chip: Chip,
    conditions: Conditions,
    refusals: tuple[type[Exception], ...],
) -> Elasticity:
    size = numbers[place]
    wanted = {"+1": size + 1, "x1.1": round(size * 1.1), "x2": 2 * size, "x0.5": size / 2}
    steps, tables = [], {}
    for change, value in wanted.items():
        if change == "x1.1" and value <= size + 1:
            continue
        if value != int(value):
            continue
        try:
            table = _at(form, numbers, place, int(value), chip, conditions)
        except refusals as error:
            note = f"the model does not take it: {str(error).splitlines()[0]:.120}"
            steps.append(FiniteStep(change, int(value), note=note))
            continue
        tables[change] = table
        before = (base.t_est, base.t_bound, base.bytes)
        after = (table["t_est"], table["t_bound"], table["bytes_hbm"])
        t_est, t_bound, moved = (
            _exactly(b / a) if a else None for a, b in zip(before, after, strict=True)
        )
        steps.append(FiniteStep(change, int(value), t_est, t_bound, moved))
    local = next((s for s in _local(steps) if s.t_est is not None), None)
    known = slopes.known_slope(own, place)
    exact = [
        slope(own, numbers, place) if known else _finite(name, tables, base, size)
        for name, slope in (
            ("flops", slopes.flops_slope),
            ("bytes_hbm", slopes.bytes_slope),
            ("peak_memory", slopes.peak_slope),
        )
    ]
    return Elasticity(
        name=form.names[place],
        kind="size",
        value=size,
        unit="count",
        flops=exact[0],
        bytes=exact[1],
        peak_memory=exact[2],
        t_est=None if local is None else _elasticity(local.t_est, local.value / size),
        t_bound=None if local is None else _elasticity(local.t_bound, local.value / size),
        steps=tuple(steps),
    )


def _local(steps: Sequence[FiniteStep]) -> list[FiniteStep]:
    """The steps in the order in which they say what a little more of a size does."""
    order = ("x1.1", "+1", "x2", "x0.5")
    return sorted(steps, key=lambda step: order.index(step.change))


def _at(
    form: Form, numbers: Sequence[int], place: int, value: int, chip: Chip, conditions: Conditions
) -> dict[str, float]:
    """Totals and times with another value of a size."""
    points = Points(
        {
            name: [value if other == place else number]
            for other, (name, number) in enumerate(zip(form.names, numbers, strict=True))
        }
    )
    table = evaluated(form, points, [chip], conditions)
    return {name: column[0] for name, column in table.items()}


def _finite(
    name: str, tables: Mapping[str, Mapping[str, float]], base: _Timed, size: int
) -> Slope | None:
    """The elasticity of a total by the smallest step, where no formula is proven."""
    before = {
        "flops": base.plan.total.flops(),
        "bytes_hbm": base.plan.bytes.total,
        "peak_memory": base.plan.memory.peak,
    }[name]
    factors = {"+1": (size + 1) / size, "x1.1": round(size * 1.1) / size, "x2": 2.0, "x0.5": 0.5}
    for change, table in tables.items():
        if before and table[name]:
            value = _elasticity(float(table[name]) / before, factors[change])
            return Slope(value or 0.0, finite=True)
    return None


# -- facts and knobs -------------------------------------------------------------------------------


def _by_numbers(named: NamedNumbers, base: _Timed, graph: object) -> Iterator[Elasticity]:
    """A row for each fact of the chip and each knob."""
    spy, read = watched(named.chip)
    time_plan(base.plan, spy)
    kinds = _kinds(base.plan)
    for name, value in named.values.items():
        is_fact = name.startswith("chip.")
        note = ""
        if is_fact and name not in read:
            note = NOT_READ
        elif name.endswith("spread"):
            note = ONLY_INTERVAL
        elif name.startswith("knobs.share.") and name.split(".")[2] not in kinds:
            note = NO_KERNEL
        steps = () if note else tuple(_steps(named, name, value, base, graph))
        row = _row(named, name, value, steps, note)
        if not note and row.is_zero:
            row = replace(row, note=_why_zero(value, steps))
        yield row


def _kinds(planned: Plan) -> set[str]:
    """The classes whose shares the kernels of a plan have."""
    kinds = {
        group_class(planned.graph, group.ops, layout, planned.op_costs)
        for group in planned.groups
        for layout in {False, planned.channels_last}
    }
    return kinds | {kind.removesuffix(LAST) for kind in kinds}


def _row(
    named: NamedNumbers, name: str, value: float, steps: tuple[FiniteStep, ...], note: str
) -> Elasticity:
    """The row of a fact or a knob; no fact changes FLOPs, and few knobs bytes."""
    both = [0.0 if note else _central(steps, name, value) for name in ("t_est", "t_bound")]
    nothing = Slope(0.0, Fraction(0))
    moved = _central(steps, "bytes", value)
    return Elasticity(
        name=name,
        kind="chip" if name.startswith("chip.") else "knob",
        value=value,
        unit=named.unit(name),
        flops=nothing,
        bytes=Slope(moved, finite=True) if moved else nothing,
        t_est=both[0],
        t_bound=both[1],
        steps=steps,
        note=note,
    )


def _why_zero(value: float, steps: Sequence[FiniteStep]) -> str:
    if math.isinf(value):
        return "without limit: no step"
    if value == 0:
        return "0: no step"
    return NOT_HERE if any(step.t_est is not None for step in steps) else "no step is allowed"


def _steps(
    named: NamedNumbers, name: str, value: float, base: _Timed, graph: object
) -> Iterator[FiniteStep]:
    if value == 0 or math.isinf(value):
        return
    factors = dict(FACTORS)
    if named.is_count(name):
        del factors["-1 %"], factors["+1 %"]
        factors = {"+1": (value + 1) / value, **factors}
    for change, factor in factors.items():
        number = float(round(value * factor)) if named.is_count(name) else value * factor
        if number == value:
            continue
        try:
            other = named.changed({name: number})
            after = _Timed.of(_planned(other, name, base.plan, graph), other.chip)
        except (UnknownNumberError, MissingPeakError, OverflowError) as error:
            yield FiniteStep(change, number, note=str(error))
            continue
        yield FiniteStep(
            change,
            number,
            _exactly(after.t_est / base.t_est),
            _exactly(after.t_bound / base.t_bound),
            _exactly(after.bytes / base.bytes) if base.bytes else None,
        )


def _planned(named: NamedNumbers, name: str, planned: Plan, graph: object) -> Plan:
    """The plan with other knobs; made anew where the knob changes its bytes."""
    if name.startswith("chip."):
        return planned
    if name.startswith(("execution.utilization.", "knobs.")) and not name.startswith(
        "knobs.traffic."
    ):
        return replace(planned, execution=named.execution)
    return plan(graph, named.execution)  # type: ignore[arg-type]


def _central(steps: Sequence[FiniteStep], quantity: str, value: float) -> float | None:
    """The elasticity of the smallest change in both directions, else of the smallest step."""
    by_change = {step.change: step for step in steps if getattr(step, quantity) is not None}
    if "-1 %" in by_change and "+1 %" in by_change:
        low, high = (getattr(by_change[change], quantity) for change in ("-1 %", "+1 %"))
        return _elasticity(high / low, 1.01 / 0.99)
    for change in ("+1", "+1 %", "-1 %", "x1.1", "x2", "x0.5"):
        if change in by_change:
            step = by_change[change]
            return _elasticity(getattr(step, quantity), step.value / value)
    return None if steps else 0.0


def _elasticity(ratio: float | None, factor: float) -> float | None:
    """d ln(time) / d ln(number), of a ratio of times and the factor on the number."""
    if ratio is None or ratio <= 0:
        return None
    return 0.0 if ratio == 1 else math.log(ratio) / math.log(factor)


def _exactly(ratio: float) -> float | None:
    """A ratio of times; 1 where it differs from 1 by rounding alone, None where there is none."""
    if not np.isfinite(ratio):
        return None
    return 1.0 if abs(ratio - 1) < 1e-12 else float(ratio)
