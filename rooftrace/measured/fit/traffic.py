"""Factors on bytes from whatever was measured of kernels: seconds, or counters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan, plan
from rooftrace.errors import ProfileError
from rooftrace.hardware import Chip
from rooftrace.measured.alignment import Alignment, counted
from rooftrace.measured.factors import (
    Measured,
    MeasuredFactors,
    StepBytes,
    byte_factors,
    step_bytes,
)
from rooftrace.measured.fit.counting import counted_kernels
from rooftrace.measured.fused import FusedStep, fused
from rooftrace.measured.pairing import MeasuredRequestError, MeasuredStep
from rooftrace.measured.runs import ModelRow, Run
from rooftrace.measured.sources import source_of
from rooftrace.measured.tables import KernelCounters
from rooftrace.tracer.graph import OpGraph

_STREAMS = ("copy", "elementwise")
"""Kinds of operations that only move bytes."""
_LARGE = 2**25
"""Bytes of an operation that no cache holds."""


@dataclass(frozen=True)
class Counts:
    """What a hardware profiler counted of one step."""

    source: str = ""  # path of the file
    kernels: tuple[KernelCounters, ...] = ()  # in order
    total: float | None = None  # byte of one step, where the file tells only this

    @staticmethod
    def of(path: str | os.PathLike[str] | None, steps: int | None = None) -> Counts:
        """The counts in a file; a total is of `steps` steps.

        Raises ProfileError for a file that holds no counts, and MeasuredRequestError for a total
        of nobody knows how many steps.
        """
        if path is None:
            return Counts()
        path = os.fspath(path)
        kind = source_of(path)
        if kind.gives == "counters":
            return Counts(path, tuple(kind.read(path)))
        raise ProfileError(f"{path}: {kind.about}, and no counters of a hardware profiler")

    def check(self, run: Run, steps: int) -> None:
        """Raise MeasuredRequestError for counters that are not of this run."""
        if not self.source:
            return
        if steps != 1:
            raise MeasuredRequestError(
                f"{self.source}: counters are of one step, and the run has {steps} with the times "
                "of single kernels; measure one phase of one model (--phase)"
            )
        if self.kernels and run.device.get("type") != "cuda":
            raise MeasuredRequestError(
                f"{self.source}: kernels of a GPU, and the run is of a "
                f"{run.device.get('type', 'device').upper()} ({run.device.get('name', '')}); count "
                "the device that was measured"
            )


@dataclass(frozen=True)
class Ground:
    """What measured bytes are compared on: the chip, the start of a fit, and its bandwidth."""

    chip: Chip
    model: ExecutionModel  # how the steps ran
    knobs: Knobs
    bandwidth: float  # byte/s that the device sustains
    counted: Counts = Counts()


@dataclass(frozen=True)
class SteppedPlan:
    """A measured step in the kernels that ran, with the seconds of each."""

    ran: Plan
    detected: Plan
    seconds: Sequence[float | None]  # by group of `ran`, all times that it ran
    row: ModelRow | None = None

    def bytes(self, name: str, ground: Ground) -> StepBytes:
        """The bytes of its kernels."""
        by_kernel: Sequence[float | None] = ()
        if ground.counted.kernels and self.row is not None:
            by_kernel = counted_kernels(self.row, self.ran, ground.counted.kernels)
        return self.counted(name, ground, by_kernel)

    def counted(
        self, name: str, ground: Ground, by_kernel: Sequence[float | None] = ()
    ) -> StepBytes:
        """The bytes of its kernels; by_kernel: by counters, of each group, all times."""
        measured = Measured(
            seconds=self.seconds,
            counted=by_kernel,
            flushed=bool(by_kernel),
            total=ground.counted.total,
        )
        return step_bytes(
            name,
            self.ran,
            self.detected,
            measured,
            ground.chip,
            ground.knobs,
            ground.bandwidth,
        )


def stepped(step: MeasuredStep, graph: OpGraph, model: ExecutionModel) -> SteppedPlan | None:
    """The kernels of a measured step; None where the row has no seconds of single kernels.

    Raises ProfileError for kernels of another graph.
    """
    row = step.row
    if row is None:
        return None
    if row.kernels and model.fusion != "none":
        return of_fused(fused(row, graph), row)
    if row.source != "replay" or model.fusion != "none":
        return None
    planned = plan(graph, model)
    return SteppedPlan(planned, planned, of_ops(planned, seconds_by_op(row)), row)


def of_fused(step: FusedStep, row: ModelRow | None = None) -> SteppedPlan:
    """The kernels of a compiled step."""
    return SteppedPlan(step.measured, step.detected, step.group_seconds, row)


def of_alignment(alignment: Alignment, planned: Plan, ground: Ground) -> StepBytes:
    """The bytes of the kernels of an eager trace, with counters where there are any."""
    step = SteppedPlan(planned, planned, of_ops(planned, alignment.seconds))
    title, counters = planned.source.title, ground.counted
    if not counters.kernels:
        return step.counted(title, ground)
    moved = counted(alignment, counters.kernels, counters.source).bytes
    return step.counted(title, ground, of_ops(planned, moved))


def of_ops(planned: Plan, amounts: Mapping[int, float]) -> list[float | None]:
    """Sums by group of a plan of what is known by op; None where an op of it is not known."""
    sums: list[float | None] = []
    for group in planned.groups:
        known = [amounts[op] for op in group.ops if op in amounts]
        sums.append(sum(known) if len(known) == len(group.ops) else None)
    return sums


def seconds_by_op(row: ModelRow) -> dict[int, float]:
    """The seconds of each op of a replay, by its id."""
    return {op.id: op.seconds for op in row.ops if op.id is not None}


def sustained(run: Run | None, chip: Chip, knobs: Knobs) -> float:
    """Byte/s that the device sustained in a run: its quickest stream that no cache holds.

    Without one it is the chip's bandwidth times the share that `knobs` say it sustains.
    """
    streams = [
        row.bytes / row.median
        for row in (run.micro if run is not None else ())
        if row.kind in _STREAMS and row.bytes is not None and row.bytes >= _LARGE
    ]
    return max(streams, default=chip.memory_bandwidth.value * knobs.memory)


def measured_factors(
    steps: Sequence[StepBytes], model: ExecutionModel, label: str, by_layer: bool = False
) -> MeasuredFactors | None:
    """The factors of these steps for executions that fuse as `model`; None without steps."""
    if not steps:
        return None
    return byte_factors(steps, label, model.fusion, by_layer)


def on_its_kernels(step: SteppedPlan, knobs: Knobs) -> Plan:
    """The kernels that ran, with the bytes that these knobs say they move."""
    traffic = knobs.traffic
    if traffic is None:
        return step.ran
    alone = {kind: replace(f, grouping=1.0) for kind, f in traffic.factors.items()}
    own = replace(knobs, traffic=replace(traffic, factors=alone))
    execution = replace(step.ran.execution, knobs=own)
    return replace(step.ran, execution=execution).regrouped(step.ran.groups)
