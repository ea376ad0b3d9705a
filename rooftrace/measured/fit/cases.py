"""The cases of a fit, measured times with their kernels, and the measured bytes of kernels."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace._plain import Plain
from rooftrace.costmodels.fusion import ExecutionModel, Plan, plan
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.intervals import Behind, StepCell
from rooftrace.costmodels.kernels.seconds import KernelTable, clock_of, kernel_table, rest_of
from rooftrace.costmodels.timing.queue import HostSeconds, host_seconds
from rooftrace.costmodels.timing.steps import time_plan
from rooftrace.errors import RequestError, UnusedError
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip
from rooftrace.measured.alignment import Alignment, FusedStep, MeasuredStep, counted, fused, keys
from rooftrace.measured.bench import ModelRow, OpTime, Run
from rooftrace.measured.fit.byfactors import SHORTEST, Measured, StepBytes, step_bytes
from rooftrace.measured.profiles import KernelCounters, MemoryCount, counts_of, source_of

if TYPE_CHECKING:
    from rooftrace._amounts import Array

# -- cases -----------------------------------------------------------------------------------------
# A step is one case.  A kernel of a step, or an operation alone, is a case with one row of the
# table, so that a fit sees the speed of each class.

MAPPED = 32 * 2**20
"""Bytes: glibc maps a larger block anew at every call (the highest M_MMAP_THRESHOLD), and its first
use is a page fault every 4 KiB."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured time, and the kernels that took it."""

    name: str
    table: KernelTable  # the kernels
    seconds: float  # s, of a step, or of these kernels alone
    dispatches: int = 0  # that the host enqueued; 0 where the host does not matter
    layouts: bool = False  # whether hidden layout copies count; see `KernelTable.seconds`
    cell: StepCell = field(default_factory=StepCell)  # where it is among measured steps
    behind: Behind = field(default_factory=Behind)  # where its host is
    group: str = ""  # cases of one group are left out together when a fit is checked
    dispatch: float | None = None  # s of each dispatch; None: the knob of this name
    host: float = 0.0  # other s of the host: views, calls of modules
    # Of a kernel of one step: its share of the seconds times the kernels that count; None: 1.
    weight: float | None = None


@dataclass(frozen=True, kw_only=True)
class Errors(Plain):
    """Relative errors of predictions: (predicted - measured) / measured."""

    count: int  # predictions
    bias: float  # mean, with its sign
    mean: float  # mean size
    median: float  # median size
    p90: float  # size that 90 % are below
    worst: float  # the largest, with its sign
    worst_case: str  # its name


def step_case(
    name: str,
    graph: OpGraph | Plan,
    chip: Chip,
    execution: str | ExecutionModel,
    seconds: float,
    group: str = "",
) -> Case:
    """The case of a measured step.  Raises RequestError for a time of 0 or below."""
    if not (isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0):
        raise RequestError(f"{name}: {seconds!r} seconds: expected a time above 0")
    planned = graph if isinstance(graph, Plan) else plan(graph, execution)
    table, _ = kernel_table(planned, chip)
    model, step = planned.execution, time_plan(planned, chip).step
    each, dispatches, other = _host(model, chip), 0, 0.0
    for launch in planned.launches:
        times = math.prod(planned.graph.repeats[r].count for r in launch.repeats)
        dispatches += times * launch.dispatches
        other += times * (launch.views * each.view + launch.calls * each.call)
        if model.dispatch == "eager" and each.library:
            dispatches += times * launch.library
        else:
            other += times * launch.library * each.library
    return Case(
        name=name,
        table=table,
        seconds=seconds,
        dispatches=dispatches,
        layouts=planned.copies_layouts,
        group=group,
        dispatch=None if model.dispatch == "eager" else each.dispatch,
        host=other,
        cell=step.cell,
        behind=step.behind,
    )


def _host(model: ExecutionModel, chip: Chip) -> HostSeconds:
    """Host seconds at a pace of 1: predictions multiply by the pace."""
    knobs = model.knobs_on(chip)
    if knobs is not None and knobs.pace != 1:
        model = replace(model, knobs=replace(knobs, pace=1.0))
    return host_seconds(model, chip)


def alone_case(name: str, planned: Plan, chip: Chip, seconds: float) -> Case | None:
    """The case of an operation that was timed alone, on cold caches.

    None if its time tells little about its kernel: it is too short, or its result is mapped anew.
    """
    values, waits = planned.graph.values, chip.host_waits
    largest = max((values[i].nbytes for op in planned.graph.ops for i in op.outputs), default=0)
    if seconds < SHORTEST or (waits and largest >= MAPPED):
        return None
    table, _ = kernel_table(planned, chip, cold=True)
    count = len(planned.graph.ops) if waits else 0
    return Case(
        name=name,
        table=table,
        seconds=seconds,
        dispatches=count,
        layouts=planned.copies_layouts,
        dispatch=_host(planned.execution, chip).dispatch,
    )


def kernel_cases(
    planned: Plan, chip: Chip, seconds: Sequence[float | None], name: str, group: str = ""
) -> list[Case]:
    """A case for each kernel that was measured.

    seconds: of each group of the plan, all iterations together; None: unknown.
    """
    table, row_of = kernel_table(planned, chip)
    made = _KernelCases(planned, chip, table, name, group)
    for index, measured in enumerate(seconds):
        if measured is not None:
            made.add([index], row_of, measured)
    return made.cases


def profiled_cases(
    planned: Plan, chip: Chip, ops: Sequence[OpTime], name: str, group: str = ""
) -> list[Case]:
    """A case for all equal kernels of one op, if the profile has as many calls as the graph.

    Calls and ops are compared by name and input shapes.  Where counts differ, the profile may hide
    the inner calls of an op, or another step ran in between.
    """
    calls: dict[keys.Key, list[float]] = defaultdict(lambda: [0, 0.0])
    for op in ops:
        entry = calls[keys.key_of_call(op.target, op.shapes)]
        entry[0] += op.count
        entry[1] += op.inclusive
    alike: dict[keys.Key, list[int]] = defaultdict(list)
    for index, kernel in enumerate(planned.groups):
        if len(kernel.ops) == 1:
            alike[keys.key_of_op(planned.graph, planned.graph.ops[kernel.ops[0]])].append(index)
    table, row_of = kernel_table(planned, chip)
    made = _KernelCases(planned, chip, table, name, group)
    for key, groups in alike.items():
        count, seconds = calls.get(key, (0, 0.0))
        if count == sum(planned.groups[i].times for i in groups):
            made.add(groups, row_of, seconds)
    return made.cases


class _KernelCases:
    """Cases of kernels of one step."""

    def __init__(
        self, planned: Plan, chip: Chip, table: KernelTable, name: str, group: str
    ) -> None:
        self.planned, self.chip, self.table = planned, chip, table
        self.name, self.group = name, group
        self.layouts = planned.copies_layouts
        self.cases: list[Case] = []

    def add(self, groups: Sequence[int], row_of: Sequence[int], seconds: float) -> None:
        """Add a case: the seconds of these groups together."""
        waits = self.chip.host_waits
        count = sum(self.planned.groups[index].times for index in groups)
        if seconds <= 0 or (waits and seconds < count * SHORTEST):
            return
        rows = [row_of[index] for index in groups]
        data = {name: column[rows] for name, column in self.table.data.items()}
        data["count"] = np.array([float(self.planned.groups[i].times) for i in groups])
        lead = self.planned.graph.ops[self.planned.groups[groups[0]].ops[0]]
        self.cases.append(
            Case(
                name=f"{self.name}: {lead.name.removeprefix('aten.')} of {lead.module or '(root)'}",
                table=KernelTable(self.chip, self.table.kind[rows], data),
                seconds=seconds,
                dispatches=count if waits else 0,
                layouts=self.layouts,
                group=self.group,
                dispatch=_host(self.planned.execution, self.chip).dispatch,
            )
        )


# -- predictions of cases --------------------------------------------------------------------------


def predict(cases: Sequence[Case], knobs: Knobs) -> list[float]:
    """Seconds of each case with these knobs."""
    return [float(t) for t in Stack(cases, knobs).predict(knobs)]


def errors(
    names: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[float],
    weights: Sequence[float] | None = None,
) -> Errors:
    """The errors of predictions; weights: of these in the means.

    Raises RequestError without any.
    """
    if not names:
        raise RequestError("no predictions to compare with measurements")
    off = np.array(predicted) / np.array(measured) - 1
    size = np.abs(off)
    worst = int(size.argmax())
    return Errors(
        count=len(names),
        bias=float(np.average(off, weights=weights)),
        mean=float(np.average(size, weights=weights)),
        median=float(np.median(size)),
        p90=float(np.quantile(size, 0.9)),
        worst=float(off[worst]),
        worst_case=names[worst],
    )


def by_seconds(cases: Sequence[Case]) -> list[Case]:
    """Kernels of one step with weights by their seconds: a step is their sum.

    The weights add up to (sum of seconds)^2 / (sum of squares), the kernels that count (Kish,
    "Survey Sampling", 1965).
    """
    total = sum(case.seconds for case in cases)
    squares = sum(case.seconds**2 for case in cases)
    return [replace(case, weight=case.seconds * total / squares) for case in cases]


def weights_of(cases: Sequence[Case]) -> list[float]:
    """The weight of each case in a fit."""
    return [1.0 if case.weight is None else case.weight for case in cases]


class Stack:
    """Many cases as one table, so that a prediction of all is a few operations on arrays."""

    def __init__(self, cases: Sequence[Case], knobs: Knobs) -> None:
        self.measured = np.array([case.seconds for case in cases])
        self.weights = np.array(weights_of(cases))
        self.dispatches = np.array([case.dispatches for case in cases], dtype=float)
        self.dispatch = np.array([math.nan if c.dispatch is None else c.dispatch for c in cases])
        self.host = np.array([case.host for case in cases])
        self.serial = np.array([case.table.chip.host_waits for case in cases])
        self.parts: list[tuple[bool, KernelTable, Any]] = []
        for layouts in (False, True):
            chosen = [(i, case.table) for i, case in enumerate(cases) if case.layouts is layouts]
            if chosen:
                owner = np.concatenate([np.full(len(t), i) for i, t in chosen])
                self.parts.append((layouts, _joined([t for _, t in chosen]), owner))
        self._tiling = knobs.tiling
        self._terms = [t.tiles(knobs) for _, t, _ in self.parts]
        self._last: tuple[Knobs, Array] | None = None

    def predict(self, knobs: Knobs) -> Array:
        """Seconds of every case."""
        plain = replace(knobs, pace=1.0)
        if self._last is None or self._last[0] != plain:
            self._last = plain, self._at_full_pace(plain)
        return self._last[1] / knobs.pace

    def _at_full_pace(self, knobs: Knobs) -> Array:
        total = np.zeros(len(self.measured))
        for (layouts, table, owner), at_start in zip(self.parts, self._terms, strict=True):
            terms = at_start if knobs.tiling == self._tiling else table.tiles(knobs)
            full = table.at_full_clock(knobs, layouts, terms)
            device = full.device + knobs.launch_on(table.chip)
            sums: list[Array] = [
                np.bincount(owner, table.data["count"] * each, len(total)).astype(float)
                for each in (full.busy, full.paced, device)
            ]
            busy, paced, device = sums
            clock = clock_of(busy, paced, device, knobs.power, rest_of(table.chip))
            total += device + paced * (1 / clock - 1)
        dispatch = knobs.dispatch
        if dispatch is None and self.parts:
            dispatch = self.parts[0][1].chip.dispatch_eager.value
        each = np.where(np.isnan(self.dispatch), dispatch or 0.0, self.dispatch)
        host = self.dispatches * each + self.host
        # A CPU runs an op when it is called; a GPU while the host goes on.
        seconds: Array = np.where(self.serial, total + host, np.maximum(total, host))
        return seconds


def _joined(tables: Sequence[KernelTable]) -> KernelTable:
    data = {name: np.concatenate([t.data[name] for t in tables]) for name in tables[0].data}
    return KernelTable(tables[0].chip, np.concatenate([t.kind for t in tables]), data)


# -- measured bytes --------------------------------------------------------------------------------

_STREAMS = ("copy", "elementwise")
"""Kinds of operations that only move bytes."""
_LARGE = 2**25
"""Bytes of an operation that no cache holds."""
_FLUSHES = "counters"
"""The source whose profiler empties the caches before each kernel (ncu, by default)."""


@dataclass(frozen=True)
class Counts:
    """The counts of a hardware profiler in one step."""

    source: str = ""  # path of the file
    kernels: tuple[KernelCounters, ...] = ()  # in order
    flushed: bool = False  # whether the caches were emptied before each kernel
    total: float | None = None  # byte of one step, where the file has only this

    @staticmethod
    def of(path: str | os.PathLike[str] | None, steps: int | None = None) -> Counts:
        """The counts in a file; a total is of `steps` steps, or of as many as the file says.

        Raises ProfileError for a file without counts, and RequestError for a total of an
        unknown number of steps.
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
        """Raise RequestError for counters that are not of this run."""
        if not self.source:
            return
        if steps != 1:
            raise RequestError(
                f"{self.source}: counters are of one step, and the run has {steps} with the times "
                "of single kernels; measure one phase of one model (--phase)"
            )
        kind, name = str(run.device.get("type", "")), run.device.get("name", "")
        if bool(self.kernels) != (kind == "cuda"):
            counts = "kernels of a GPU" if self.kernels else "memory controllers of a CPU"
            raise RequestError(
                f"{self.source}: counts {counts}, and the run is of a {kind.upper()} ({name}); "
                "count the device that was measured"
            )
        counted = {launch.capability for launch in self.kernels if launch.capability}
        measured = str(run.device.get("capability", ""))
        if counted and measured and counted != {measured}:
            raise RequestError(
                f"{self.source}: kernels of a device of compute capability "
                f"{', '.join(sorted(counted))}, and {name} has {measured}; count the device that "
                "was measured"
            )


def _each(path: str, counts: Sequence[MemoryCount], steps: int | None) -> float:
    """The bytes of one step in a file of totals."""
    if len(counts) > 1:
        names = ", ".join(repr(count.name) for count in counts)
        raise RequestError(
            f"{path}: {len(counts)} regions ({names:.200}): expected one, around the step alone"
        )
    calls = steps if steps is not None else counts[0].calls
    if steps is not None and (isinstance(steps, bool) or steps < 1):
        raise RequestError(f"counted_steps={steps!r}: expected a number of at least 1")
    if not calls:
        raise RequestError(
            f"{path}: it does not say how many steps it counts: say so with --counted-steps (in "
            "Python: counted_steps=)"
        )
    return counts[0].bytes / calls


@dataclass(frozen=True)
class ByteSources:
    """The sources of measured bytes: the chip with its bandwidth, the start of a fit, counters."""

    chip: Chip
    knobs: Knobs
    bandwidth: float  # byte/s that the device sustains
    counted: Counts = Counts()


@dataclass(frozen=True)
class SteppedPlan:
    """A measured step in the kernels that ran, with the seconds of each."""

    ran: Plan
    detected: Plan
    seconds: Sequence[float | None]  # by group of `ran`, all its launches
    compiled: FusedStep | None = None

    def bytes(self, ground: ByteSources) -> StepBytes:
        """The bytes of its kernels."""
        by_kernel: Sequence[float | None] = ()
        counted = ground.counted
        if counted.kernels and self.compiled is not None:
            by_kernel = self.compiled.counted(counted.kernels, counted.source)
        return self.counted(ground, by_kernel)

    def counted(self, ground: ByteSources, by_kernel: Sequence[float | None] = ()) -> StepBytes:
        """The bytes of its kernels; by_kernel: by counters, of each group, all its launches."""
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

    planned: the graph under the execution model of the step.  Raises ProfileError for kernels of
    another graph.
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


def of_alignment(alignment: Alignment, planned: Plan, ground: ByteSources) -> StepBytes:
    """The bytes of the kernels of an eager trace, with counters where there are any."""
    step = SteppedPlan(planned, planned, of_ops(planned, alignment.seconds))
    counters = ground.counted
    if not counters.kernels:
        return step.counted(ground)
    moved = counted(alignment, counters.kernels, counters.source).bytes
    return step.counted(ground, of_ops(planned, moved))


def of_ops(planned: Plan, amounts: Mapping[int, float]) -> list[float | None]:
    """Sums by group of a plan of amounts by op; None where the amount of an op is missing."""
    return [
        sum(amounts[op] for op in group.ops) if all(op in amounts for op in group.ops) else None
        for group in planned.groups
    ]


def seconds_by_op(row: ModelRow) -> dict[int, float]:
    """The seconds of each op of a replay, by its id."""
    return {op.id: op.seconds for op in row.ops if op.id is not None}


def sustained(run: Run | None, chip: Chip, knobs: Knobs) -> float:
    """Byte/s that the device sustained in a run, by its quickest operation beyond the caches.

    Without one it is the chip's bandwidth times the share `knobs.memory`.
    """
    streams = [
        row.bytes / row.median
        for row in (run.micro if run is not None else ())
        if row.kind in _STREAMS and row.bytes is not None and row.bytes >= _LARGE
    ]
    return max(streams, default=chip.memory_bandwidth.value * knobs.memory)


def on_its_kernels(step: SteppedPlan, knobs: Knobs) -> Plan:
    """The kernels that ran, with the bytes that they move by these knobs."""
    traffic = knobs.traffic
    if traffic is None:
        return step.ran
    ungrouped = {kind: replace(f, grouping=1.0) for kind, f in traffic.factors.items()}
    knobs = replace(knobs, traffic=replace(traffic, factors=ungrouped))
    return step.ran.as_run(replace(step.ran.execution, knobs=knobs))
