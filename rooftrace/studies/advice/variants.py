"""Variants of a step: named numbers of a chip or execution, and one change at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import ExecutionModel, Plan
from rooftrace.costmodels.kernels import Knobs, attention_knobs, numbers
from rooftrace.costmodels.rewrites import reprice
from rooftrace.errors import RequestError, hint
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import FACT_UNITS, Fact

if TYPE_CHECKING:
    from rooftrace.studies.forms import Conditions
    from rooftrace.studies.sweeps import Form

# -- named numbers ---------------------------------------------------------------------------------
# By dotted names:
# "chip.memory_bandwidth", "chip.matrix.bf16", "chip.link.intra.bandwidth"; "execution.elementwise",
# "execution.weight_residency.moe"; "knobs.launch", "knobs.share.mm.compute".  The beginning of
# names up to a dot stands for all of them: "chip.matrix" is every rate of the matrix engine.

OWNERS = ("chip", "execution", "knobs")


class UnknownNumberError(RequestError):
    """A name that no number of a chip or an execution has, or a value that it cannot take."""


@dataclass(frozen=True)
class NamedNumbers:
    """A chip and an execution, and their numbers by name.

    Typical knobs are written out, so that each has a number; a mixed step has two of each, and so
    no numbers for them.
    """

    chip: Chip
    execution: ExecutionModel

    @staticmethod
    def of(chip: Chip, execution: ExecutionModel) -> NamedNumbers:
        """The numbers of an execution on a chip, with the constants for its times."""
        if isinstance(execution.knobs, str) and execution.dispatch != "mixed":
            execution = replace(execution, knobs=execution.knobs_on(chip))
        knobs = execution.knobs
        if isinstance(knobs, Knobs) and isinstance(knobs.attention, str):
            attention = attention_knobs(knobs.attention, chip, execution.attention_kernels)
            execution = replace(execution, knobs=replace(knobs, attention=attention))
        return NamedNumbers(chip, execution)

    @cached_property
    def facts(self) -> Mapping[str, Fact]:
        """Facts of the chip by name, without unknown ones."""
        return {f"chip.{name}": fact for name, fact in self.chip.facts_by_name().items()}

    @cached_property
    def knobs(self) -> Mapping[str, float]:
        """Numbers of the execution and its knobs by name."""
        values = {
            f"execution.{name}": value
            for name, value in numbers.numbers_of(replace(self.execution, knobs=None)).items()
        }
        if isinstance(self.execution.knobs, Knobs):
            knobs = numbers.numbers_of(replace(self.execution.knobs, residuals={}))
            if knobs["pace"] == 1:
                del knobs["pace"]  # a factor on everything explains nothing
            for name, value in knobs.items():
                part, dot, rest = name.partition(".")
                values[f"knobs.{'share' if part == 'shares' else part}{dot}{rest}"] = value
        return values

    @cached_property
    def values(self) -> Mapping[str, float]:
        """All numbers by name, in SI units."""
        return {**{name: fact.value for name, fact in self.facts.items()}, **self.knobs}

    def named(self, name: str) -> tuple[str, ...]:
        """The numbers that a name stands for.

        Raises UnknownNumberError where there is none: it says the nearest.
        """
        names = tuple(n for n in self.values if n == name or n.startswith(f"{name}."))
        if names:
            return names
        beginnings = {n.rsplit(".", part)[0] for n in self.values for part in (1, 2)}
        every = [n for n in (*self.values, *beginnings) if n not in OWNERS]
        owner = name.partition(".")[0]
        owned = [n for n in self.values if n.startswith(f"{owner}.")]
        text = hint(name, every)
        if not text and owned:
            text = f"; {owner} has {', '.join(owned[:12])}" + (", ..." if len(owned) > 12 else "")
        elif owner == "knobs" and not owned:
            text = "; no knobs are in use"
        raise UnknownNumberError(
            f"{name!r}: no number of {self.chip.name} or of {self.execution.name} has this name"
            f"{text}"
        )

    def unit(self, name: str) -> str:
        """The unit of a number; "" of factors and shares."""
        if name.startswith("chip."):
            parts = name.split(".")
            if parts[1] in ("matrix", "vector"):
                return "FLOP/s"
            if parts[1] == "link":
                return "byte/s" if parts[-1] == "bandwidth" else "second"
            return FACT_UNITS[parts[1]]
        knobs = self.execution.knobs
        of_knob = name.startswith("knobs.") and isinstance(knobs, Knobs)
        facts = numbers.facts_of(knobs, _path(name)) if of_knob else None
        return facts.unit if facts else ""

    def is_count(self, name: str) -> bool:
        """Whether a number is an integer: multiprocessors, bits of a bus."""
        return self.unit(name) == "count"

    def changed(self, values: Mapping[str, float]) -> NamedNumbers:
        """A chip and an execution with other numbers.

        Raises UnknownNumberError for a number that the record refuses, and for a name that is none.
        """
        chip, execution = self.chip, self.execution
        for name, value in values.items():
            if name not in self.values:
                self.named(name)
                raise UnknownNumberError(f"{name!r}: it stands for several numbers; name each")
            if name.startswith("chip."):
                if not 0 < value < math.inf:
                    raise UnknownNumberError(f"{name}={value!r}: expected a number above 0")
                chip = chip.with_facts({name.removeprefix("chip."): value})
                continue
            path = {_path(name): value}
            try:
                if name.startswith("knobs."):
                    knobs = numbers.with_numbers(execution.knobs, path)
                    execution = replace(execution, knobs=knobs)
                else:
                    execution = numbers.with_numbers(execution, path)
            except ValueError as error:
                raise UnknownNumberError(f"{name}={value:g}: {error}") from None
        return NamedNumbers(chip, execution)


def _path(name: str) -> str:
    """The path of a number in its record: "shares.mm.compute" of "knobs.share.mm.compute"."""
    path = name.partition(".")[2]
    return f"shares.{path.removeprefix('share.')}" if path.startswith("share.") else path


# -- variants --------------------------------------------------------------------------------------
# One thing is changed, and the step is planned and timed again; a plan is kept where the change
# cannot touch its kernels.  What-ifs, graph breaks, scaling tests and elasticities are lists of
# variants, and views of their estimates.


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A change of a step; fields that are not set stay as they are.

    name, change: the changed thing and the change, in words.  graph: as captured.  sizes: of the
    form of the study.  precisions: by the names of `reprice`.  numbers: of the chip, the execution
    and its knobs, by the names of `NamedNumbers`.
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
        """The study of the same step with its knobs written out."""
        execution = self.numbers.execution
        planned = replace(self.step.plan, execution=execution)
        return replace(self, step=estimate(planned, self.step.chip))

    def planned(self, variant: Variant) -> tuple[Plan, Chip]:
        """The plan of a variant, and the chip that it runs on.

        Raises UnknownNumberError for an unknown or refused number, and as `Form.graph` does.
        """
        chip, execution = self.step.chip, variant.execution
        if variant.numbers:
            other = self.numbers.changed(variant.numbers)
            chip, execution = other.chip, other.execution
        if self.form is not None and self.conditions and (variant.sizes or variant.precisions):
            changes: dict[str, Any] = dict(variant.precisions)
            changes["execution"] = execution or self.conditions.execution
            graph = self.form.graph(**{**self.sizes, **variant.sizes})
            return replace(self.conditions, **changes).plan(graph), chip
        return self._plan(self._source(variant), execution or self.step.execution), chip

    def estimate(self, variant: Variant) -> Estimate:
        """The estimate of a variant.

        Raises all that `planned` raises, and MissingPeakError where the chip has no rate for a
        precision that it computes in.
        """
        return estimate(*self.planned(variant))

    def tried(
        self, variants: Iterable[Variant], refusals: tuple[type[Exception], ...]
    ) -> Iterator[VariantOutcome]:
        """The outcome of each variant; refusals: exceptions where there is no such step."""
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
        # The quantization_config of the model was decided on when the step was priced.
        model = {**source.model, "priced_dtype": self.priced_precision(source)}
        return reprice(source.replace(model=model), **variant.precisions)

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
