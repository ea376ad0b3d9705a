"""Results of a report: estimates by phase, execution and chip, sums over kernels, JSON of steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeAlias, TypedDict, TypeVar

from rooftrace._plain import Plain, Share
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.estimates import Estimate, Row, rows as estimate_rows
from rooftrace.costmodels.estimates.rows import BreakdownRow
from rooftrace.costmodels.memory import LargestBatch, Memory, Reserved
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.graph import Assumption, OpGraph, pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_time
from rooftrace.studies.advice import Headroom, Saving

if TYPE_CHECKING:
    import pandas

    from rooftrace.costmodels.fusion import Unsupported
    from rooftrace.studies.advice import Guidance, WhatIf

# -- tallies ---------------------------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Tally(Generic[Key]):
    """Kernels with one key: how many, FLOP (dense and computed), HBM bytes, device seconds."""

    key: Key
    calls: int = 0
    flops: int = 0
    flops_causal: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def intensity(self) -> float | None:
        """Computed FLOP per HBM byte."""
        return self.flops_causal / self.bytes if self.bytes else None

    @property
    def rate(self) -> float | None:
        """Computed FLOP per device second."""
        return self.flops_causal / self.seconds if self.seconds else None


def tally(rows: Iterable[Row], key: Callable[[Row], Key]) -> list[Tally[Key]]:
    """Sums of kernels by any key, most seconds first; ties by key, so the order is stable."""
    sums: dict[Key, list[float]] = {}
    for row in rows:
        entry = sums.setdefault(key(row), [0, 0, 0, 0, 0.0])
        entry[0] += row.count
        entry[1] += row.flops
        entry[2] += row.flops_causal
        entry[3] += row.bytes
        entry[4] += row.timing.t_device
    tallies = [
        Tally(name, int(n), int(flops), int(causal), int(size), seconds)
        for name, (n, flops, causal, size, seconds) in sums.items()
    ]
    return sorted(tallies, key=lambda entry: (-entry.seconds, str(entry.key)))


def ratio(part: float, total: float) -> float | None:
    """A part of a total; None where that is 0."""
    return part / total if total else None


# -- results ---------------------------------------------------------------------------------------

COUNTS = ("params", "params_trainable")
"""Counts of a model that add up over the stages of a pipeline."""


@dataclass(frozen=True, repr=False)
class Results(Shown):
    """Estimates by phase, execution and chip name, in the order they were asked for.

    The first chip is the one that tables show; `main` is the execution that they break down.
    """

    estimates: Mapping[str, Mapping[str, Mapping[str, Estimate]]]
    memory: Mapping[str, Memory]  # by phase
    graphs: Mapping[str, OpGraph]  # by phase
    # The largest batch that fits, by phase and chip, if requested.
    largest: Mapping[str, Mapping[str, LargestBatch]] = field(default_factory=dict)
    # Changes after which a phase fits the first chip, by phase, where it does not.
    fitting: Mapping[str, tuple[WhatIf, ...]] = field(default_factory=dict)

    def __repr__(self) -> str:
        name = self.model.get("name") or "model"
        steps = (
            f"{estimate.step} {'expected' if estimate.expected else 'bound'} "
            f"{format_time(estimate.t_est)}"
            for estimate in self.broken_down()
        )
        chips = ", ".join(chip.name for chip in self.chips)
        return short(self, f"{name} on {chips}, {self.main}: {some(steps, 6)}")

    @property
    def phases(self) -> tuple[str, ...]:
        """Names of the phases."""
        return tuple(self.estimates)

    @property
    def executions(self) -> tuple[str, ...]:
        """Names of the execution models."""
        return tuple(next(iter(self.estimates.values())))

    @property
    def main(self) -> str:
        """The execution that breakdowns show: efficient where it was asked for, else the last."""
        return "efficient" if "efficient" in self.executions else self.executions[-1]

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips."""
        by_execution = next(iter(self.estimates.values()))
        by_chip = next(iter(by_execution.values()))
        return tuple(estimate.chip for estimate in by_chip.values())

    def reserved(self, phase: str, chip: Chip) -> Reserved | None:
        """The allocator's memory of a phase under the main execution; None on a CPU."""
        return self.estimates[phase][self.main][chip.name].reserved

    @property
    def model(self) -> Mapping[str, Any]:
        """Name and parameter counts; of a pipeline, those of all its stages."""
        graphs = list(self.graphs.values())
        first = graphs[0]
        if "stages" not in first.workload:
            return first.model
        sums = {
            name: sum(graph.model[name] * len(graph.workload["stages"]) for graph in graphs)
            for name in COUNTS
            if name in first.model
        }
        return {**first.model, **sums}

    @property
    def workload(self) -> dict[str, Any]:
        """The workload that all phases share; keys whose values differ are left out."""
        shared: dict[str, Any] = {}
        differing = set()
        for graph in self.graphs.values():
            for key, value in graph.workload.items():
                if value is not None and shared.setdefault(key, value) != value:
                    differing.add(key)
        return {key: value for key, value in shared.items() if key not in differing}

    @property
    def assumptions(self) -> tuple[tuple[str, Assumption], ...]:
        """(phase, assumption) for every assumption that the traces, and their times, rest on.

        Routing of the prompt, whose cache a decode step starts with, is no part of that step.
        """
        return tuple(
            (phase, assumption)
            for phase, graph in self.graphs.items()
            for rested in [_rested_on(graph)]
            for assumption in (*graph.assumptions, *self._borrowed(phase))
            if not assumption.facts or assumption.id in rested
        )

    def _borrowed(self, phase: str) -> Iterator[Assumption]:
        """Assumptions for times of a phase by constants that were measured on other chips."""
        borrowed = {
            estimate.borrowed: estimate.knobs
            for by_chip in self.estimates[phase].values()
            for estimate in by_chip.values()
            if estimate.borrowed
        }
        first = len(self.graphs[phase].assumptions)
        for number, (text, knobs) in enumerate(borrowed.items(), start=first):
            of = ", ".join(knobs.fitted_on) if knobs is not None else ""
            yield Assumption(id=number, kind="knobs", where="", text=text, value=of)

    @property
    def unrecorded(self) -> list[Assumption]:
        """Ops of every phase that ran out of sight of the traces."""
        return [item for graph in self.graphs.values() for item in graph.unrecorded]

    def resting_share(self, phase: str, assumption: int) -> float:
        """Share of t_est in kernels that rest on an assumption, main execution, first chip."""
        estimate = self.estimate(phase)
        if assumption >= len(self.graphs[phase].assumptions):  # one of times, not of the graph
            return 1.0 if estimate.borrowed else 0.0
        seconds = estimate.assumption_seconds.get(assumption, 0.0)
        return seconds / estimate.t_est if estimate.t_est else 0.0

    def parameters(self, phase: str) -> dict[str, int]:
        """Parameters by module pattern, from the names of the weights that the step touches."""
        counts: dict[str, int] = {}
        graph = self.estimate(phase).graph
        for index in graph.external:
            tensor = graph.values[index]
            if tensor.role == "weights" and tensor.storage == index and tensor.name:
                key = pattern_of(tensor.name.rpartition(".")[0])
                counts[key] = counts.get(key, 0) + graph.times(tensor) * tensor.elements
        return counts

    def estimate(
        self, phase: str, execution: str | None = None, chip: str | None = None
    ) -> Estimate:
        """One estimate; by default of the main execution on the first chip."""
        by_chip = self.estimates[phase][execution or self.main]
        return by_chip[chip] if chip else next(iter(by_chip.values()))

    @cached_property
    def guidance(self) -> Mapping[str, Guidance]:
        """Suggestions for each phase, best first: main execution, first chip."""
        from rooftrace.studies.advice import guidance

        return {
            phase: replace(guidance(self.estimate(phase)), fitting=self.fitting.get(phase, ()))
            for phase in self.phases
        }

    @cached_property
    def headroom(self) -> Mapping[str, Headroom]:
        """Savings by fusing, by phase: main execution, first chip."""
        return {phase: self.estimate(phase).headroom() for phase in self.phases}

    def of_first_chip(self) -> Iterator[tuple[str, str, Estimate]]:
        """(phase, execution, estimate) on the first chip, in order."""
        for phase, executions in self.estimates.items():
            for execution, by_chip in executions.items():
                yield phase, execution, next(iter(by_chip.values()))

    def broken_down(self) -> list[Estimate]:
        """The estimate of each phase under the main execution on the first chip."""
        return [self.estimate(phase) for phase in self.phases]

    def unsupported_ops(self) -> list[tuple[str, Unsupported]]:
        """(phase, op without a rule) over every execution, each op once a phase, most bytes
        first."""
        ops: dict[tuple[str, str], Unsupported] = {}
        for phase, _, estimate in self.of_first_chip():
            for entry in estimate.unsupported_ops():
                ops.setdefault((phase, entry.target), entry)
        ranked = sorted(ops.items(), key=lambda pair: (-pair[1].bytes, pair[0]))
        return [(phase, entry) for (phase, _), entry in ranked]

    def frames(self) -> Iterator[pandas.DataFrame]:
        """Rows of kernels as `Estimate.to_frame` has them, a frame for each phase and execution."""
        import pandas

        for records in self.records():
            yield pandas.DataFrame.from_records(records)

    def records(self) -> Iterator[list[dict[str, Any]]]:
        """The rows of `frames` as plain records, for each phase and execution."""
        for phase, execution, estimate in self.of_first_chip():
            head = {"phase": phase, "execution": execution, "chip": estimate.chip.name}
            yield [head | row for row in estimate_rows.records_of(estimate.plan, estimate.rows)]


def _rested_on(graph: OpGraph) -> frozenset[int]:
    """The ids of the assumptions that ops rest on, in every iteration of a repeat."""
    shown = {number for op in graph.ops for number in op.assumptions}
    for repeat in graph.repeats:
        shown.update(n for numbers in repeat.assumptions.values() for n in numbers)
    return frozenset(shown)


# -- The records of a step in report.json: costs and times, savings by fusing, memory --------------

SAVINGS = 10
"""Savings of each kind in report.json: those that save most time."""

Regime: TypeAlias = Annotated[str, ("enum", REGIMES)]


@dataclass(frozen=True)
class Times(Plain):
    """The times of a step on one chip."""

    step: Estimate

    KEYS = (
        "peak=step.peak ridge=step.ridge flops_realizable=step.flops_realizable "
        "t_comp=step.times.t_comp t_hbm=step.times.t_hbm t_net=step.times.t_net "
        "t_launch=step.times.t_launch t_bound=step.t_bound t_serial=step.times.t_serial "
        "t_est=step.t_est t_is knobs t_interval=step.t_interval "
        "interval_grounds=step.interval_grounds regime "
        "regime_shares regime_next regime_margin mfu=step.mfu "
        "hfu=step.hfu items_per_s=step.items_per_s"
    )

    @property
    def t_is(self) -> Literal["expected", "bound"]:
        """The kind of all times but t_bound: expected, by knobs, or bounds, by datasheet rates."""
        return "expected" if self.step.expected else "bound"

    @property
    def knobs(self) -> str | None:
        """Title of the knobs that give the expected times; null for bounds."""
        return None if self.step.knobs is None else self.step.knobs.title

    @property
    def regime(self) -> Regime:
        """The regime with the largest share of t_est."""
        return self.step.times.regime

    @property
    def regime_shares(self) -> Mapping[str, Share]:
        """Share of t_est by regime."""
        return self.step.times.regime_shares

    @property
    def regime_next(self) -> Regime:
        """The regime with the second largest share."""
        return self.step.times.next_regime

    @property
    def regime_margin(self) -> float | None:
        """Largest regime over the next; null where nothing else takes time."""
        return self.step.times.margin


@dataclass(frozen=True)
class ModuleSums(Plain):
    """The sums of the kernels of equal modules."""

    row: BreakdownRow

    KEYS = "module=row.key **row"


@dataclass(frozen=True)
class OperatorSums(Plain):
    """The sums of the kernels of an operator."""

    row: BreakdownRow

    KEYS = "operator=row.key **row"


@dataclass(frozen=True)
class Costs(Times):
    """The costs of a step on one chip."""

    KEYS = (
        "flops=step.flops flops_causal=step.flops_causal flops_recompute=step.flops_recompute "
        "flops_matrix=step.flops_matrix macs=step.macs precision=step.plan.precision "
        "bytes=step.plan.bytes bytes_hbm=step.bytes_hbm bytes_net=step.bytes_net "
        "bytes_compulsory=step.bytes_compulsory below_floor=step.below_floor "
        "ai_hbm=step.ai_hbm ai_total=step.ai_total kernels=step.kernels item=step.item "
        "items=step.items by_family by_part by_module by_operator "
        f"{Times.KEYS}"
    )

    @property
    def by_family(self) -> Mapping[str, BreakdownRow]:
        """Sums by family of ops."""
        return self.step.by_family()

    @property
    def by_part(self) -> Mapping[str, BreakdownRow]:
        """Sums by part of the step."""
        return self.step.by_part()

    @property
    def by_module(self) -> list[ModuleSums]:
        """Sums by module path with starred indices."""
        return list(map(ModuleSums, self.step.by_pattern().values()))

    @property
    def by_operator(self) -> list[OperatorSums]:
        """Sums by kernel name."""
        return list(map(OperatorSums, self.step.by_operator().values()))


@dataclass(frozen=True)
class PhaseStep(Plain):
    """A step under one execution model: on the first chip, and its times on every chip."""

    by_chip: Mapping[str, Estimate]

    KEYS = "**costs chips"

    @property
    def costs(self) -> Costs:
        """The costs on the first chip."""
        return Costs(next(iter(self.by_chip.values())))

    @property
    def chips(self) -> Annotated[Mapping[str, Times], ("minProperties", 1)]:
        """The time fields on every chip."""
        return {name: Times(step) for name, step in self.by_chip.items()}


# -- savings by fusing -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused(Plain):
    """A step before or after fusing."""

    step: Estimate

    KEYS = (
        "bytes_hbm=step.bytes_hbm kernels=step.kernels t_serial=step.times.t_serial "
        "t_est=step.t_est"
    )


@dataclass(frozen=True)
class Savings(Plain):
    """The savings of fusing in a phase."""

    of: Headroom

    KEYS = "execution=of.after.execution.name before after beyond fused left"

    @property
    def before(self) -> Fused:
        """Every op a kernel."""
        return Fused(self.of.before)

    @property
    def after(self) -> Fused:
        """With the fusion groups."""
        return Fused(self.of.after)

    @property
    def beyond(self) -> Fused:
        """With larger kernels than those: a bound."""
        return Fused(self.of.beyond)

    @property
    def fused(self) -> tuple[Saving, ...]:
        """Those of most time."""
        return self.of.fused[:SAVINGS]

    @property
    def left(self) -> tuple[Saving, ...]:
        """Those of most time."""
        return self.of.left[:SAVINGS]


# -- memory ----------------------------------------------------------------------------------------


class OnChip(TypedDict):
    """The memory of a phase on one chip."""

    fits: bool  # the peak, and on a GPU the context of a process
    chips_needed: int
    reserved: Reserved | None  # on a GPU, as the main execution runs; null: no GPU
    max_batch: LargestBatch | None  # the largest batch that fits; null: not looked for


@dataclass(frozen=True)
class PhaseMemory(Plain):
    """The live bytes of a phase, and whether they fit each chip."""

    results: Results
    phase: str

    KEYS = "**need fits chips"

    @property
    def need(self) -> Memory:
        """The live bytes."""
        return self.results.memory[self.phase]

    @property
    def fits(self) -> bool:
        """Whether it fits one of the first chip."""
        return self.need.fits(self.results.chips[0])

    @property
    def chips(self) -> Annotated[Mapping[str, OnChip], ("minProperties", 1)]:
        """The memory of the phase on each chip, by its name."""
        batches = self.results.largest.get(self.phase, {})
        return {
            chip.name: OnChip(
                fits=self.need.fits(chip),
                chips_needed=self.need.chips_needed(chip),
                reserved=self.results.reserved(self.phase, chip),
                max_batch=batches.get(chip.name),
            )
            for chip in self.results.chips
        }
