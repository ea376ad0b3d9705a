"""Elasticities of a step at some sizes: by the sizes, by the facts of the chip, and by knobs.

FLOPs and bytes by sizes are exact, from formulas.  Times are compared after finite steps, which
show cliffs: sizes through the form, facts and knobs by timing the same plan again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.kernels import Knobs, group_class
from rooftrace.costmodels.kernels.knobs import LAST
from rooftrace.costmodels.timing.steps import time_plan
from rooftrace.errors import RequestError
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import Fact, MissingPeakError
from rooftrace.studies.advice import Study, UnknownNumberError, Variant
from rooftrace.studies.explaining import plan_at
from rooftrace.studies.forms import Conditions, PlanForm, Points
from rooftrace.studies.sensitivity import slopes
from rooftrace.studies.sensitivity.slopes import Elasticities, Elasticity, FiniteStep, Slope
from rooftrace.studies.sweeps.evaluating import Form, evaluated

Totals = Mapping[str, float]
"""t_est and t_bound in seconds, bytes_hbm; where sizes change flops and peak_memory, too."""
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
    """Elasticities of a step by each of its sizes, chip facts and knobs, ranked.

    sizes: a value for each size of the form.  others: forms of the same step over further sizes,
    whose values are in `sizes` too.  refusals: exceptions of tracing at sizes that the model does
    not take.  Raises RequestError for sizes that the form does not have, and MissingPeakError where
    the chip has no rate for a precision of the step.
    """
    further = {name for other in others for name in other.names}
    of_form = {name: n for name, n in sizes.items() if name not in further}
    numbers = dict(zip(form.names, form.numbers(of_form), strict=True))
    study = Study.of_form(form, numbers, chip, conditions)
    conditions = replace(conditions, execution=study.step.execution)
    study = study.written_out
    step = study.step
    rows = []
    for each in (form, *others):
        here = each.numbers({name: sizes[name] for name in each.names})
        planned = plan_at(each, here, conditions)
        rows += [
            _by_size(each, planned, here, place, step, conditions, refusals)
            for place in range(len(each.names))
        ]
    rows += _by_numbers(study)
    knobs = study.numbers.execution.knobs
    return Elasticities(
        title=form.title,
        phase=form.phase,
        sizes=dict(sizes),
        chip=chip.name,
        execution=step.execution.name,
        knobs=knobs.title if isinstance(knobs, Knobs) else "",
        flops=step.flops,
        bytes=step.bytes_hbm,
        peak_memory=step.memory.peak,
        t_est=step.t_est,
        t_bound=step.t_bound,
        rows=tuple(sorted(rows, key=lambda row: (-row.effect, row.is_zero))),
    )


_RATIOS = ("t_est", "t_bound", "bytes_hbm")


def _totals(step: Estimate) -> dict[str, float]:
    more = {"flops": step.flops, "peak_memory": step.memory.peak}
    return {name: getattr(step, name) for name in _RATIOS} | more


# -- finite steps ----------------------------------------------------------------------------------


def _finite_steps(
    values: Mapping[str, float],
    before: Totals,
    after: Callable[[float], Totals],
    refused: Callable[[Exception], str],
    refusals: tuple[type[Exception], ...],
) -> list[tuple[FiniteStep, Totals]]:
    """The step to each value of a number, and the totals there; none where it is refused.

    values: by the change in words.  refused: the note of a refusal.
    """
    steps: list[tuple[FiniteStep, Totals]] = []
    for change, value in values.items():
        try:
            totals = after(value)
        except refusals as error:
            steps.append((FiniteStep(change, value, note=refused(error)), {}))
            continue
        t_est, t_bound, moved = (_ratio(totals[name], before[name]) for name in _RATIOS)
        steps.append((FiniteStep(change, value, t_est, t_bound, moved), totals))
    return steps


def _ratio(after: float, before: float) -> float | None:
    """A ratio; 1 where it differs from 1 by rounding alone, None where there is none."""
    ratio = after / before if before else math.nan
    if not math.isfinite(ratio):
        return None
    return 1.0 if abs(ratio - 1) < 1e-12 else float(ratio)


_OF_SIZES = ("x1.1", "+1", "x2", "x0.5")
_OF_NUMBERS = ("+1", "+1 %", "-1 %", "x1.1", "x2", "x0.5")
"""Changes in the order in which they approximate a small change of a size, or of a number."""


def _central(
    steps: Sequence[FiniteStep], quantity: str, value: float, order: Sequence[str] = _OF_NUMBERS
) -> float | None:
    """The elasticity of the smallest change in both directions, else of the smallest step."""
    by_change = {step.change: step for step in steps if getattr(step, quantity) is not None}
    if "-1 %" in by_change and "+1 %" in by_change:
        low, high = (getattr(by_change[change], quantity) for change in ("-1 %", "+1 %"))
        return _elasticity(high / low, 1.01 / 0.99)
    for change in order:
        if change in by_change:
            step = by_change[change]
            return _elasticity(getattr(step, quantity), step.value / value)
    return None


def _elasticity(ratio: float, factor: float) -> float | None:
    """d ln(time) / d ln(number), of a ratio of times and the factor on the number."""
    if ratio <= 0:
        return None
    return 0.0 if ratio == 1 else math.log(ratio) / math.log(factor)


# -- sizes -----------------------------------------------------------------------------------------


def _by_size(
    form: Form,
    planned: PlanForm,
    numbers: Sequence[int],
    place: int,
    step: Estimate,
    conditions: Conditions,
    refusals: tuple[type[Exception], ...],
) -> Elasticity:
    size = numbers[place]
    wanted: dict[str, float] = {"+1": size + 1, "x1.1": round(size * 1.1), "x2": 2 * size}
    if wanted["x1.1"] <= size + 1:
        del wanted["x1.1"]
    if size % 2 == 0:
        wanted["x0.5"] = size // 2
    before = _totals(step)

    def after(value: float) -> Totals:
        points = {
            name: [int(value) if other == place else number]
            for other, (name, number) in enumerate(zip(form.names, numbers, strict=True))
        }
        table = evaluated(form, Points(points), [step.chip], conditions)
        return {name: table[name][0] for name in before}

    def refused(error: Exception) -> str:
        return f"the model does not take it: {str(error).splitlines()[0]:.120}"

    tried = _finite_steps(wanted, before, after, refused, refusals)
    steps = tuple(step for step, _ in tried)

    has_slope = slopes.has_slope(planned, place)
    exact = [
        slope(planned, numbers, place) if has_slope else _slope(tried, total, before, size)
        for total, slope in (
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
        t_est=_central(steps, "t_est", size, _OF_SIZES),
        t_bound=_central(steps, "t_bound", size, _OF_SIZES),
        steps=steps,
    )


def _slope(
    tried: Sequence[tuple[FiniteStep, Totals]], name: str, before: Totals, size: int
) -> Slope | None:
    """The elasticity of a total by the smallest step, where no formula is proven."""
    for step, totals in tried:
        if totals and before[name] and totals[name]:
            ratio = float(totals[name]) / before[name]
            return Slope(_elasticity(ratio, step.value / size) or 0.0, finite=True)
    return None


# -- facts and knobs -------------------------------------------------------------------------------


def _by_numbers(study: Study) -> Iterator[Elasticity]:
    """A row for each fact of the chip and each knob."""
    spy, read = watched(study.step.chip)
    time_plan(study.step.plan, spy)
    kinds = _kinds(study.step.plan)
    for name, value in study.numbers.values.items():
        note = ""
        if name.startswith("chip.") and name not in read:
            note = NOT_READ
        elif name.endswith("spread"):
            note = ONLY_INTERVAL
        elif name.startswith("knobs.share.") and name.split(".")[2] not in kinds:
            note = NO_KERNEL
        row = _by_number(study, name, value, note)
        yield replace(row, note=_why_zero(value, row.steps)) if not note and row.is_zero else row


def _kinds(planned: Plan) -> set[str]:
    """The classes whose shares the kernels of a plan have."""
    kinds = {
        group_class(planned.graph, group.ops, layout, planned.op_costs)
        for group in planned.groups
        for layout in {False, planned.channels_last}
    }
    return kinds | {kind.removesuffix(LAST) for kind in kinds}


def _by_number(study: Study, name: str, value: float, note: str) -> Elasticity:
    """The row of a fact or a knob; no fact changes FLOPs, and few knobs bytes.

    note: why nothing changes, if that is clear before a step is made.
    """
    step = study.step

    def after(number: float) -> Totals:
        planned, chip = study.planned(Variant(numbers={name: number}))
        times = time_plan(planned, chip).step
        return dict(zip(_RATIOS, (times.t_est, times.t_bound, planned.bytes.total), strict=True))

    refusals = (UnknownNumberError, MissingPeakError, OverflowError)
    values = {} if note else _values(value, study.numbers.is_count(name))
    steps = tuple(s for s, _ in _finite_steps(values, _totals(step), after, str, refusals))
    nothing = Slope(0.0, Fraction(0))
    moved = _central(steps, "bytes", value)
    return Elasticity(
        name=name,
        kind="chip" if name.startswith("chip.") else "knob",
        value=value,
        unit=study.numbers.unit(name),
        flops=nothing,
        bytes=Slope(moved, finite=True) if moved else nothing,
        t_est=_central(steps, "t_est", value) if steps else 0.0,
        t_bound=_central(steps, "t_bound", value) if steps else 0.0,
        steps=steps,
        note=note,
    )


def _values(value: float, count: bool) -> dict[str, float]:
    """The values that a number is changed to; counts stay integers."""
    if value == 0 or math.isinf(value):
        return {}
    changed = {change: value * factor for change, factor in FACTORS.items()}
    if count:
        more = {change: float(round(changed[change])) for change in ("x1.1", "x2", "x0.5")}
        changed = {"+1": float(round(value * ((value + 1) / value))), **more}
    return {change: number for change, number in changed.items() if number != value}


def _why_zero(value: float, steps: Sequence[FiniteStep]) -> str:
    if math.isinf(value):
        return "without limit: no step"
    if value == 0:
        return "0: no step"
    return NOT_HERE if any(step.t_est is not None for step in steps) else "no step is allowed"


# -- watching --------------------------------------------------------------------------------------
# A chip that records which of its facts are read: those that times depend on.


class _WatchedFact(Fact):
    """A fact that adds its name to a set when its value is read; equal to itself alone, so that no
    cache hit for an equal chip hides a read."""

    def __getattribute__(self, name: str) -> Any:
        if name == "value":
            object.__getattribute__(self, "read").add(object.__getattribute__(self, "own_name"))
        return object.__getattribute__(self, name)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def watched(chip: Chip) -> tuple[Chip, set[str]]:
    """The chip with recording facts, and the names of those that were read so far.

    Names are those of `NamedNumbers.facts`.
    """
    read: set[str] = set()

    def recording(fact: Fact, name: str) -> Fact:
        plain = {column.name: getattr(fact, column.name) for column in fields(Fact)}
        result = _WatchedFact(**plain)
        object.__setattr__(result, "read", read)
        object.__setattr__(result, "own_name", f"chip.{name}")
        return result

    facts = chip.facts_by_name()
    return chip.with_facts({name: recording(fact, name) for name, fact in facts.items()}), read
