"""The records of a step in report.json: costs and times, savings by fusing, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias, TypedDict

from rooftrace._plain import Plain, Share
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.estimates.rows import BreakdownRow
from rooftrace.costmodels.memory import LargestBatch, Memory, Reserved
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.reporting.sections.results import Results
from rooftrace.studies.advice import Headroom, Saving

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
        "t_est=step.t_est t_is knobs t_interval=step.t_interval regime "
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
