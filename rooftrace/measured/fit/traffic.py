"""Factors on bytes from whatever was measured of kernels: seconds, or counters."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.planning import Plan
from rooftrace.errors import UnusedError
from rooftrace.hardware import Chip
from rooftrace.measured.alignment import Alignment, counted
from rooftrace.measured.factors import Measured, StepBytes, step_bytes
from rooftrace.measured.fused import FusedStep, fused
from rooftrace.measured.hwcounters import MemoryCount
from rooftrace.measured.pairing import MeasuredRequestError, MeasuredStep
from rooftrace.measured.runs import ModelRow, Run
from rooftrace.measured.sources import counts_of, source_of
from rooftrace.measured.tables import KernelCounters
from rooftrace.tracer.graph import OpGraph

_STREAMS = ("copy", "elementwise")
"""Kinds of operations that only move bytes."""
_LARGE = 2**25
"""Bytes of an operation that no cache holds."""
_FLUSHES = "counters"
"""The source whose profiler empties the caches before each kernel (ncu, unless told otherwise)."""


@dataclass(frozen=True)
class Counts:
    """What a hardware profiler counted of one step."""

    source: str = ""  # path of the file
    kernels: tuple[KernelCounters, ...] = ()  # in order
    flushed: bool = False  # whether the caches were emptied before each kernel
    total: float | None = None  # byte of one step, where the file tells only this

    @staticmethod
    def of(path: str | os.PathLike[str] | None, steps: int | None = None) -> Counts:
        """The counts in a file; a total is of `steps` steps, or of as many as the file says.

        Raises ProfileError for a file that holds no counts, and MeasuredRequestError for a total
        of nobody knows how many steps.
        """
        if path is None:
            if steps is not None:
                raise UnusedError("counted_steps", repr(steps), "there are no counters")
            return Counts()
        path = os.fspath(path)
        kind = source_of(path)
        if kind.gives == "totals":
            return Counts(path, total=_each(path, counts_of(path, "totals"), steps))
        kernels = counts_of(path, "counters")
        if steps is not None:
            raise UnusedError("counted_steps", repr(steps), f"{path} has kernels of one step")
        return Counts(path, kernels, flushed=kind.name == _FLUSHES)

    def check(self, run: Run, steps: int) -> None:
        """Raise MeasuredRequestError for counters that are not of this run."""
        if not self.source:
            return
        if steps != 1:
            raise MeasuredRequestError(
                f"{self.source}: counters are of one step, and the run has {steps} with the times "
                "of single kernels; measure one phase of one model (--phase)"
            )
        kind, name = str(run.device.get("type", "")), run.device.get("name", "")
        if bool(self.kernels) != (kind == "cuda"):
            counted = "kernels of a GPU" if self.kernels else "memory controllers of a CPU"
            raise MeasuredRequestError(
                f"{self.source}: counts {counted}, and the run is of a {kind.upper()} ({name}); "
                "count the device that was measured"
            )
        known = {launch.capability for launch in self.kernels if launch.capability}
        own = str(run.device.get("capability", ""))
        if known and own and known != {own}:
            raise MeasuredRequestError(
                f"{self.source}: kernels of a device of compute capability "
                f"{', '.join(sorted(known))}, and {name} has {own}; count the device that was "
                "measured"
            )


def _each(path: str, counts: Sequence[MemoryCount], steps: int | None) -> float:
    """The bytes of one step in a file of totals."""
    if len(counts) > 1:
        names = ", ".join(repr(count.name) for count in counts)
        raise MeasuredRequestError(
            f"{path}: {len(counts)} regions ({names:.200}): expected one, around the step alone"
        )
    calls = steps if steps is not None else counts[0].calls
    if steps is not None and (isinstance(steps, bool) or steps < 1):
        raise MeasuredRequestError(f"counted_steps={steps!r}: expected a number of at least 1")
    if not calls:
        raise MeasuredRequestError(
            f"{path}: it does not say how many steps it counts: say so with --counted-steps (in "
            "Python: counted_steps=)"
        )
    return counts[0].bytes / calls


@dataclass(frozen=True)
class Ground:
    """What measured bytes are compared on: the chip, the start of a fit, and its bandwidth."""

    chip: Chip
    knobs: Knobs
    bandwidth: float  # byte/s that the device sustains
    counted: Counts = Counts()


@dataclass(frozen=True)
class SteppedPlan:
    """A measured step in the kernels that ran, with the seconds of each."""

    ran: Plan
    detected: Plan
    seconds: Sequence[float | None]  # by group of `ran`, all times that it ran
    compiled: FusedStep | None = None

    def bytes(self, ground: Ground) -> StepBytes:
        """The bytes of its kernels."""
        by_kernel: Sequence[float | None] = ()
        counted = ground.counted
        if counted.kernels and self.compiled is not None:
            by_kernel = self.compiled.counted(counted.kernels, counted.source)
        return self.counted(ground, by_kernel)

    def counted(self, ground: Ground, by_kernel: Sequence[float | None] = ()) -> StepBytes:
        """The bytes of its kernels; by_kernel: by counters, of each group, all times."""
        measured = Measured(
            seconds=self.seconds,
            counted=by_kernel,
            flushed=bool(by_kernel) and ground.counted.flushed,
            total=ground.counted.total,
        )
        return step_bytes(
            self.ran,
            self.detected,
            measured,
            ground.chip,
            ground.knobs,
            ground.bandwidth,
        )


def stepped(step: MeasuredStep, graph: OpGraph, planned: Plan) -> SteppedPlan | None:
    """The kernels of a measured step; None where the row has no seconds of single kernels.

    planned: the graph under the execution model that the step ran as.  Raises ProfileError for
    kernels of another graph.
    """
    row, fusion = step.row, planned.execution.fusion
    if row is None:
        return None
    if row.kernels and fusion != "none":
        return of_fused(fused(row, graph))
    if row.source != "replay" or fusion != "none":
        return None
    return SteppedPlan(planned, planned, of_ops(planned, seconds_by_op(row)))


def of_fused(step: FusedStep) -> SteppedPlan:
    """The kernels of a compiled step."""
    return SteppedPlan(step.measured, step.detected, step.group_seconds, step)


def of_alignment(alignment: Alignment, planned: Plan, ground: Ground) -> StepBytes:
    """The bytes of the kernels of an eager trace, with counters where there are any."""
    step = SteppedPlan(planned, planned, of_ops(planned, alignment.seconds))
    counters = ground.counted
    if not counters.kernels:
        return step.counted(ground)
    moved = counted(alignment, counters.kernels, counters.source).bytes
    return step.counted(ground, of_ops(planned, moved))


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


def on_its_kernels(step: SteppedPlan, knobs: Knobs) -> Plan:
    """The kernels that ran, with the bytes that these knobs say they move."""
    traffic = knobs.traffic
    if traffic is None:
        return step.ran
    alone = {kind: replace(f, grouping=1.0) for kind, f in traffic.factors.items()}
    own = replace(knobs, traffic=replace(traffic, factors=alone))
    return step.ran.as_run(replace(step.ran.execution, knobs=own))
