"""From forms of a graph to forms of its plan under an execution; no trace, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.planforms.planform import PlanForm
from rooftrace.costmodels.planforms.planrecords import PlanNumbers, numbers_of
from rooftrace.costmodels.planning import plan
from rooftrace.costmodels.rewriting import reprice
from rooftrace.tracer.formulas import Formula
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphforms import RecordForm, Regime, Survey, slots

Precisions = tuple[str | None, str | None, str | None]
"""Of the model's floats, its weights, its cache; None: as they were traced."""
_MOST = 400


@dataclass(frozen=True)
class Conditions:
    """What a graph is priced under, the chip apart."""

    execution: ExecutionModel
    dtype: str | None = None
    weights_dtype: str | None = None
    kv_dtype: str | None = None

    @staticmethod
    def of(execution: str | ExecutionModel, *precisions: str | None) -> Conditions:
        """The conditions of an execution by name, and precisions."""
        return Conditions(execution_model(execution), *precisions)

    def numbers(self, graph: OpGraph) -> PlanNumbers:
        """The numbers of the plan of a graph."""
        priced = reprice(graph, self.dtype, self.weights_dtype, self.kv_dtype)
        return numbers_of(plan(priced, self.execution))


def plan_forms(
    regime: Regime, levels: Sequence[Sequence[int]], conditions: Conditions
) -> Iterator[PlanForm]:
    """The forms of the plan within a regime of its graph, at these levels of each size.

    Each is proven at corners and inside, as the regime was, with plans of the graphs that the
    regime gives.
    """
    inside = [
        [level for level in values if low <= level <= high]
        for values, low, high in zip(levels, regime.low, regime.high, strict=True)
    ]
    if not all(inside):
        return
    survey = Survey(
        regime.form.sizes,
        tuple(inside),
        _numbers_at(regime.form, conditions),
        _MOST,
        RecordForm,
        tuple(draws_of(regime.form)),
        "plans",
    )
    for part in survey.regimes():
        yield PlanForm(part, conditions.execution)


def _numbers_at(
    form: RecordForm, conditions: Conditions
) -> Callable[[Sequence[slots.Numbers]], list[PlanNumbers]]:
    def numbers_at(wanted: Sequence[slots.Numbers]) -> list[PlanNumbers]:
        return [conditions.numbers(form.at(numbers)) for numbers in wanted]

    return numbers_at


def draws_of(form: RecordForm) -> Iterator[slots.Draw]:
    """What the prices of a graph may depend on: its own draws, and those of uniform indices."""
    yield from form.draws
    graph: OpGraph = form.template
    varying = {slot.path: slot for slot in form.slots}
    for op in graph.ops:
        classes = op.facts.get("uniform_over")
        if classes is None:
            continue
        for value in op.inputs:
            if graph.values[value].dtype not in ("int64", "int32"):
                continue
            elements = Formula.constant(1)
            for place, size in enumerate(graph.values[value].shape):
                slot = varying.get(("values", value, "shape", place))
                factor = Formula.constant(size)
                elements = elements * (form.formulas[slot.formulas[0]] if slot else factor)
            yield slots.Draw("distinct", elements, Formula.constant(1), Formula.constant(classes))
