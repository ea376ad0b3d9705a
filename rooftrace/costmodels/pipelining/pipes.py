"""A pipeline as it is priced: its stages' estimates, its step, and what all processes reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.pipelining.stages import Pipelined, StageCost, pipelined
from rooftrace.hardware.systems import System


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipeline on one chip, with the estimates of its stages."""

    phase: str
    made: Pipelined
    stages: Mapping[int, Estimate]  # by number; alike ones share an estimate

    @staticmethod
    def of(stages: Mapping[int, Estimate]) -> Pipe:
        """The pipeline of these stages, as their graphs say that it is run."""
        facts = stages[0].graph.workload
        chip, mesh = stages[0].chip, stages[0].graph.mesh
        axes = list(mesh)
        apart = 1
        for axis in axes[axes.index("pp") + 1 :] if "pp" in axes else ():
            apart *= mesh[axis]
        made = pipelined(
            {number: StageCost.of(estimate) for number, estimate in sorted(stages.items())},
            str(facts["schedule"]),
            int(facts["microbatches"]),
            int(facts["handed"]),
            chip.system or System.of_chip(chip),
            apart,
        )
        return Pipe(stages[0].phase, made, stages)

    @property
    def first(self) -> Estimate:
        """The first stage."""
        return self.stages[0]

    @property
    def items_per_s_per_chip(self) -> float | None:
        """Items of all microbatches and replicas per second and chip."""
        estimate = self.first
        if estimate.replicas is None:
            return None
        items = estimate.items * self.made.microbatches * estimate.replicas
        return items / (self.made.seconds * estimate.processes)

    @property
    def mfu(self) -> float | None:
        """The mean of the stages' own MFU, by the share of the step in which they work."""
        flops = sum((e.mfu or 0.0) * e.t_est * e.peak for e in self.stages.values())
        total = flops * self.made.microbatches
        ranks = self.made.ranks
        return total / (ranks * self.made.seconds * self.first.peak) if self.made.seconds else None
