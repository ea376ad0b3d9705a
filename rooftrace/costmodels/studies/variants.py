"""Variants of a step: one thing is changed, and the step is planned and timed again.

In: the estimate of a step, and what to change of it.  Out: the estimate of each variant.  A plan is
kept where the change cannot touch its kernels.  What-ifs, graph breaks, scaling tests and
elasticities are lists of variants, and views of their estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.rewriting import reprice
from rooftrace.costmodels.studies.namednumbers import NamedNumbers
from rooftrace.hardware import Chip
from rooftrace.tracer.graph import OpGraph

if TYPE_CHECKING:
    from rooftrace.costmodels.planforms import Conditions
    from rooftrace.costmodels.sweeping import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A change of a step; what it leaves out stays as it is.

    name, change: what is changed, and how, in words.  graph: as captured.  sizes: of the form of
    the study.  precisions: by the names of `reprice`.  execution: how the step is run.  numbers: of
    the chip, the execution and its knobs, by the names of `NamedNumbers`.
    """

    name: str = ""
    change: str = ""
    graph: OpGraph | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)
    execution: ExecutionModel | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VariantOutcome:
    """The estimate of a variant; None where there is none, with the reason."""

    variant: Variant
    estimate: Estimate | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A step before and after a change; both are estimates."""

    before: Estimate
    after: Estimate

    @property
    def t_before(self) -> float:
        """Seconds of the step without the change."""
        return self.before.t_est

    @property
    def t_after(self) -> float:
        """Seconds of the step with it."""
        return self.after.t_est

    @property
    def gain(self) -> float:
        """Seconds that the step gets shorter."""
        return self.t_before - self.t_after

    @property
    def share(self) -> float:
        """The gain over the seconds of the step without the change."""
        return self.gain / self.t_before if self.t_before else 0.0

    @property
    def kernels(self) -> int:
        """Kernels that go."""
        return self.before.kernels - self.after.kernels

    @property
    def bytes(self) -> int:
        """Bytes that no longer go through HBM."""
        return self.before.bytes_hbm - self.after.bytes_hbm

    @property
    def regime_seconds(self) -> dict[str, float]:
        """Seconds that each regime loses: compute, hbm, network, launch."""
        before, after = self.before.times.regime_seconds, self.after.times.regime_seconds
        return {name: before[name] - after[name] for name in before}


@dataclass(frozen=True)
class Study:
    """A step, and its variants.

    form, sizes, conditions: of a step of a form, where it is and how it is priced, so that variants
    may have other sizes.
    """

    step: Estimate
    form: Form | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    conditions: Conditions | None = None

    @staticmethod
    def of_form(form: Form, sizes: Mapping[str, int], chip: Chip, conditions: Conditions) -> Study:
        """The study of a step of a form at one place."""
        planned = conditions.plan(form.graph(**sizes))
        return Study(estimate(planned, chip), form, sizes, conditions)

    @cached_property
    def numbers(self) -> NamedNumbers:
        """The numbers of the chip and of the execution by name."""
        return NamedNumbers.of(self.step.chip, self.step.execution)

    @property
    def written_out(self) -> Study:
        """The study of the same step with the knobs that it has, each a number of its own."""
        execution = self.numbers.execution
        planned = replace(self.step.plan, execution=execution)
        return replace(self, step=estimate(planned, self.step.chip))

    def planned(self, variant: Variant) -> tuple[Plan, Chip]:
        """The plan of a variant, and the chip that it runs on.

        Raises UnknownNumberError for a number that there is not or that is refused, and what
        `Form.graph` raises.
        """
        chip, execution = self.step.chip, variant.execution
        if variant.numbers:
            other = self.numbers.changed(variant.numbers)
            chip, execution = other.chip, other.execution
        if self.form is not None and self.conditions and (variant.sizes or variant.precisions):
            asked: dict[str, Any] = dict(variant.precisions)
            asked["execution"] = execution or self.conditions.execution
            return replace(self.conditions, **asked).plan(
                self.form.graph(**{**self.sizes, **variant.sizes})
            ), chip
        return self._plan(self._source(variant), execution or self.step.execution), chip

    def estimate(self, variant: Variant) -> Estimate:
        """The estimate of a variant.

        Raises what `planned` raises, and MissingPeakError where the chip has no rate for a
        precision that it computes in.
        """
        return estimate(*self.planned(variant))

    def tried(
        self, variants: Iterable[Variant], refusals: tuple[type[Exception], ...]
    ) -> Iterator[VariantOutcome]:
        """The outcome of each variant; refusals: what says that there is no such step."""
        for variant in variants:
            try:
                yield VariantOutcome(variant, self.estimate(variant))
            except refusals as error:
                yield VariantOutcome(variant, None, str(error))

    def _source(self, variant: Variant) -> OpGraph:
        """The graph of a variant as captured, in its precisions."""
        source = variant.graph or self.step.plan.source
        if not variant.precisions:
            return source
        # A model's own quantization_config was decided on when the step was priced.
        known = {**source.model, "priced_dtype": self.priced_precision(source)}
        return reprice(source.replace(model=known), **variant.precisions)

    @staticmethod
    def priced_precision(graph: OpGraph) -> str:
        """The precision that a graph is priced in; weights or a cache alone may have another."""
        return str(graph.model.get("priced_dtype") or graph.model.get("dtype") or "fp32")

    def _plan(self, source: OpGraph, execution: ExecutionModel) -> Plan:
        base = self.step.plan
        if source is base.source and execution is base.execution:
            return base
        if source is not base.source or not _same_kernels(base.execution, execution):
            (planned,) = Plan.each(source, [execution], savings=False)
            return planned
        if execution.dispatch != base.execution.dispatch:
            return base.as_run(execution)
        return replace(base, execution=execution)


def _same_kernels(model: ExecutionModel, other: ExecutionModel) -> bool:
    """Whether two execution models make the same kernels of a graph, with the same bytes."""
    return replace(other, name=model.name, dispatch=model.dispatch).untimed == model.untimed
