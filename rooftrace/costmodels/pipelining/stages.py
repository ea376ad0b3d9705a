"""What the stages of a pipeline cost, and the pipeline that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.estimating import Estimate, Row
from rooftrace.costmodels.network import collective_seconds
from rooftrace.costmodels.pipelining.walking import (
    PipelineTimes,
    live_microbatches,
    moments,
    walk_table,
)
from rooftrace.hardware.systems import System
from rooftrace.tracer.pipelines import SCHEDULES, table_of

SAVED = "saved"
"""The kind of memory that forward makes and backward reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage with one microbatch: seconds and bytes."""

    forward: float
    backward: float  # with what is computed again
    weights: float  # of the backward, what only gradients of weights need
    once: float  # what is done once a step: the optimizer
    saved: int  # bytes of a microbatch that forward makes and backward reads
    peak: int  # bytes with one microbatch

    @staticmethod
    def of(estimate: Estimate) -> StageCost:
        """The cost of a stage, from the estimate of a training step of it."""
        parts = dict.fromkeys(("forward", "backward", "recompute", "optimizer"), 0.0)
        for row in estimate.rows:
            if not (estimate.graph.ops[row.ops[0]].stream or row.bytes_net):
                parts[row.part] += row.timing.t_device
        weights = sum(row.timing.t_device for row in rows_for_weights(estimate))
        alone = sum(parts.values())
        scale = estimate.t_est / alone if alone else 0.0  # what is exposed belongs to all parts
        timeline = estimate.memory.timeline
        return StageCost(
            forward=scale * parts["forward"],
            backward=scale * (parts["backward"] + parts["recompute"]),
            weights=scale * weights,
            once=scale * parts["optimizer"],
            saved=max((moment.by_kind[SAVED] for moment in timeline.moments), default=0),
            peak=estimate.memory.peak,
        )

    def seconds(self, kind: str) -> float:
        """Seconds of an action of this kind."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.backward - self.weights,
            "backward_weight": self.weights,
        }[kind]


def rows_for_weights(estimate: Estimate) -> list[Row]:
    """The kernels of backward that only gradients of weights need: products that read no weight
    and make something of the shape of one.

    A kernel that makes the gradients of its input as well (a convolution's) is none of them.
    """
    graph = estimate.graph
    shapes = {
        tuple(sorted(value.shape))
        for value in graph.values
        if value.role == "weights" and len(value.shape) > 1
    }
    made = {
        row.index: {
            tuple(sorted(graph.values[value].shape))
            for op in row.ops
            for value in graph.ops[op].outputs
        }
        for row in estimate.rows
        if row.part == "backward" and row.flops and not row.bytes_by_role.get("weights")
    }
    return [row for row in estimate.rows if shapes & made.get(row.index, set())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """A step of a pipeline."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    times: PipelineTimes
    once: float  # seconds of the optimizer, of the slowest process
    transfer: float  # seconds of one transfer between stages
    live: Mapping[int, Mapping[int, float]]  # microbatches alive at most, by rank and stage
    peaks: tuple[int, ...]  # bytes of each process at its peak

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.times.seconds + self.once

    @property
    def bubble(self) -> float:
        """Share of the step in which processes wait for each other."""
        return self.times.bubble


def pipelined(
    stages: Mapping[int, StageCost],
    schedule: str,
    microbatches: int,
    handed: int,
    system: System,
    apart: int = 1,
) -> Pipelined:
    """The pipeline of these stages, by their number.

    handed: bytes of one microbatch that a stage hands to the next.  apart: how far the ranks of
    neighbouring processes are from each other.  Raises RequestError for a schedule that there is
    not, or that refuses so many microbatches.
    """
    ranks = len(stages) // SCHEDULES[schedule][1]
    table = table_of(schedule, ranks, microbatches)
    transfer = 0.0
    if ranks > 1:
        transfer = collective_seconds(system, "send", handed, (0, apart)).seconds
    times = walk_table(table, lambda stage, kind: stages[stage].seconds(kind), transfer)
    own = {rank: sorted({a.stage for a in actions}) for rank, actions in table.items()}
    return Pipelined(
        schedule=schedule,
        ranks=ranks,
        stages=len(stages),
        microbatches=microbatches,
        times=times,
        once=max(sum(stages[s].once for s in some) for some in own.values()),
        transfer=transfer,
        live=live_microbatches(times),
        peaks=_peaks(times, stages, own),
    )


def _peaks(
    times: PipelineTimes, stages: Mapping[int, StageCost], own: Mapping[int, Sequence[int]]
) -> tuple[int, ...]:
    """Bytes of each process at its peak: what a step of one microbatch takes, and those saved."""
    fixed = {}
    for rank, some in own.items():
        working = max(stages[s].peak for s in some)
        others = sum(stages[s].peak for s in some) - working
        fixed[rank] = working + others - sum(stages[s].saved for s in some)
    most = dict.fromkeys(own, 0.0)
    for rank, alive in moments(times):
        held = sum(count * stages[stage].saved for stage, count in alive.items())
        most[rank] = max(most[rank], held)
    return tuple(fixed[rank] + round(most[rank]) for rank in own)
