"""Variants of a step: named numbers, and one change at a time; savings by fusing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from msgspec import structs

from rooftrace._plain import Positive
from rooftrace._shown import short
from rooftrace.costmodels.estimates import Estimate, Row, estimate
from rooftrace.costmodels.fusion import ExecutionModel, Plan, beyond, fuse, plan, waits
from rooftrace.costmodels.kernels import Knobs, attention_knobs, numbers
from rooftrace.costmodels.rewrites import reprice
from rooftrace.errors import RequestError, hint
from rooftrace.graph import Op, OpGraph, pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import FACT_UNITS, Fact
from rooftrace.hardware.units import format_share, format_time, format_traffic

if TYPE_CHECKING:
    import pandas

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
            (planned,) = Plan.each(source, [execution], savings=False, known=base)
            return planned
        if execution.dispatch != base.execution.dispatch:
            return base.as_run(execution)
        return replace(base, execution=execution)


def _same_kernels(model: ExecutionModel, other: ExecutionModel) -> bool:
    """Whether two execution models make the same kernels of a graph, with the same bytes."""
    return replace(other, name=model.name, dispatch=model.dispatch).untimed == model.untimed


def most_saved(step: Estimate, graph: OpGraph) -> float:
    """An upper bound of the share of a step that another graph of it saves, without a plan of that.

    It is the share of kernels that go or change, and of the host for ops that go; where the host no
    longer waits it is all that the device is idle.  A kernel of ops that stay can only be spared
    the bytes of values that other ops make then; one of ops that rewriting put there can go with
    the ops around it.
    """
    source, planned, gone, idles = step.plan.source, step.plan.graph, 0, False

    def key(op: Op) -> tuple[Any, ...]:
        return op.target, op.inputs, op.outputs

    there, kept = set(map(key, source.ops)), {key(op): op.arguments for op in graph.ops}
    changed = {place for place, old in enumerate(source.values) if graph.values[place] != old}
    around = set[int]()
    for op in source.ops:
        if key(op) not in kept:
            gone += source.times(op)
            idles |= waits(source, op)
            changed.update(op.outputs)
            around.update(op.inputs)

    def spared(row: Row) -> float:
        ops = [planned.ops[i] for i in row.ops]
        values = {value for op in ops for value in (*op.inputs, *op.outputs)}
        near = changed if there.issuperset(map(key, ops)) else changed | around
        if values.isdisjoint(near):
            return 0.0
        same = all(kept.get(key(op)) is op.arguments for op in ops)
        pairs = ((graph.values[i], planned.values[i]) for i in values)
        if not same or any(structs.replace(a, storage=b.storage) != b for a, b in pairs):
            return 1.0
        storages = {planned.values[value].storage for value in values & changed}
        traffic = step.plan.costs[row.index].traffic
        moved = sum(size for access, size in traffic.items() if access.storage in storages)
        return moved / max(sum(traffic.values()), 1)

    shares = [(row, spared(row)) for row in step.rows]
    kernels = sum(row.count for row, share in shares if share)
    times, enqueued = step.times, sum(map(source.times, source.ops))
    launched = max(kernels / max(step.kernels, 1), gone / max(enqueued, 1))
    idle = min(launched * step.t_est, times.t_launch)  # the host takes the entire step at most
    idle = times.t_launch + times.t_exposed if idles else idle
    return (idle + sum(share * row.timing.t_device for row, share in shares)) / step.t_est


# -- savings ---------------------------------------------------------------------------------------
# Savings by fusing: by the kernels of a plan, and by larger ones beyond that.
#
# Both are differences between two estimates of one graph on one chip.  The first compares a kernel
# for every op with the kernels of the plan.  The second compares these with the larger kernels that
# the joins that are off would make.  So the savings add up to the difference of the totals.

EPILOGUE, ATTENTION, CHAIN = BEYOND = ("epilogue", "attention", "chain")
"""The joins that are off by default (docs/fusion.md), which would make larger kernels."""


@dataclass(frozen=True, slots=True)
class Saving:
    """The saving by putting these ops into one kernel, over all `count` equal groups.

    kind: fused (a kernel of several ops), unread (results of one op that nobody reads, and a
    compiler leaves out), or one of EPILOGUE, ATTENTION, CHAIN.  ops: their names.
    module: path with starred indices.  launches: kernels that are not launched.  bytes: through
    HBM.  seconds: of the device.  share: seconds over t_est of the step without it.
    """

    kind: str
    name: str
    ops: tuple[str, ...]
    module: str
    part: str
    count: Positive
    launches: Positive
    bytes: int
    seconds: float
    share: float

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        times = f", {self.count:,} times" if self.count > 1 else ""
        return (
            f"{self.name}{where}: {len(self.ops)} ops{times}, {format_traffic(self.bytes)} less, "
            f"{format_time(self.seconds)}, {format_share(self.share)}"
        )


@dataclass(frozen=True)
class Headroom:
    """An estimate after fusing, before it (every op a kernel), and with larger kernels beyond that.

    The host dispatches in all three as the execution model says.
    """

    after: Estimate

    @cached_property
    def before(self) -> Estimate:
        """The step with a kernel for every op."""
        return estimate(self.after.plan.unfused, self.after.chip)

    @cached_property
    def beyond(self) -> Estimate:
        """The step with the kernels that the joins that are off would make."""
        plan = self.after.plan
        groups = beyond(plan.graph, plan.groups, plan.op_costs, plan.costs)
        return estimate(plan.regrouped(groups), self.after.chip)

    @cached_property
    def fused(self) -> tuple[Saving, ...]:
        """Savings by the kernels of the plan, most seconds first."""
        return _savings(self.before, self.after)

    @cached_property
    def left(self) -> tuple[Saving, ...]:
        """Savings by larger kernels beyond them, most seconds first.

        An upper bound: work of one kernel is added up as if its engines did not overlap, and no
        kernel is slower for doing more.
        """
        return _savings(self.after, self.beyond)

    def to_frame(self) -> pandas.DataFrame:
        """One row per saving: those of the plan, then those that are left."""
        import pandas

        return pandas.DataFrame.from_records(
            [
                {name: getattr(saving, name) for name in Saving.__slots__}
                | {"ops": " ".join(saving.ops)}
                for saving in (*self.fused, *self.left)
            ],
            columns=list(Saving.__slots__),
        )

    def __repr__(self) -> str:
        after = self.after
        seconds = [each.times.t_serial for each in (self.before, after, self.beyond)]
        return short(
            self,
            f"{after.graph.title} on {after.chip.name}, {after.execution.name}: kernels take "
            f"{format_time(seconds[0])} unfused, {format_time(seconds[1])} fused, "
            f"{format_time(seconds[2])} with all larger kernels",
        )

    def __str__(self) -> str:
        lines = [*map(str, self.fused[:10])]
        lines += ["left:", *map(str, self.left[:5])] if self.left else []
        return "\n".join(lines)


def headroom(
    graph: OpGraph | Plan | Estimate,
    chip: str | Chip | None = None,
    execution: str | ExecutionModel | None = None,
) -> Headroom:
    """Savings by fusing a step on `chip` (an Estimate has its chip and execution).

    If the execution model does not fuse, the ops of its graph are fused nevertheless.  Factors on
    bytes describe the same effect and are left out.
    """
    if isinstance(graph, Estimate):
        return headroom(graph.plan, graph.chip)
    planned = (graph if isinstance(graph, Plan) else plan(graph, execution)).by_rules
    model = planned.execution
    if model.fusion != "detected":
        model = replace(model, fusion="detected", activation_fusion=1.0, elementwise=1.0)
        planned = replace(planned, execution=model).regrouped(fuse(planned.graph, model))
    return Headroom(estimate(planned, chip))


def _savings(before: Estimate, after: Estimate) -> tuple[Saving, ...]:
    """The saving of each kernel of `after` that replaces several of `before`; equal ones as one."""
    row_of = {op: row for row in before.rows for op in row.ops}
    kernels: dict[tuple[str, ...], list[tuple[Row, int, int, float]]] = defaultdict(list)
    ops = after.graph.ops
    for row in after.rows:
        parts = list({row_of[op].index: row_of[op] for op in row.ops}.values())
        if len(parts) == 1 and parts[0].bytes == row.bytes:
            continue
        # A group stands for as many kernels as its first op, also if it crosses iterations.
        size = sum(part.bytes // part.count for part in parts) * row.count - row.bytes
        seconds = sum(part.timing.t_device / part.count for part in parts) * row.count
        seconds -= row.timing.t_device
        names = [ops[op].name for op in row.ops]
        key = (row.pattern, row.name, pattern_of(row.module), row.part, *names)
        kernels[key].append((row, (len(parts) - 1) * row.count, size, seconds))
    savings = []
    for (pattern, name, module, part, *members), entries in kernels.items():
        seconds = sum(entry[3] for entry in entries)
        savings.append(
            Saving(
                # A compiler leaves out results of one op that nobody reads.
                kind=pattern if pattern in BEYOND else ("fused" if members[1:] else "unread"),
                name=name,
                ops=tuple(members),
                module=module,
                part=part,
                count=sum(entry[0].count for entry in entries),
                launches=sum(entry[1] for entry in entries),
                bytes=sum(entry[2] for entry in entries),
                seconds=seconds,
                share=seconds / before.t_est if before.t_est else 0.0,
            )
        )
    return tuple(sorted(savings, key=lambda s: (-s.seconds, -s.bytes, s.module, s.name, s.ops)))
