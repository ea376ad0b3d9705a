"""A trace matched with a graph: the measured seconds and DRAM bytes of each op, and stray calls."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rooftrace.errors import ProfileError
from rooftrace.graph import OpGraph
from rooftrace.hardware import units
from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.alignment.keys import Key, OpCall, base_name, common
from rooftrace.measured.profiles import KernelCounters, Trace, TraceStep, records

_LONGEST = 40
"""Letters of the name of a kernel in a note."""


@dataclass(frozen=True, slots=True)
class Stray:
    """Calls of a trace that have no op in the graph: totals of one step."""

    name: str
    shapes: tuple[records.Shape, ...]
    count: float  # calls
    seconds: float  # s, all calls together


@dataclass(frozen=True, slots=True)
class OpMeasurement:
    """The measured seconds of one op of the graph: medians over the steps."""

    op: int  # its id
    seconds: tuple[float, ...]  # s of each iteration; of the host in a trace without kernels
    kernels: float = 0.0  # launched by an iteration; 0 without any in the trace
    start: float | None = None  # s from the beginning of the step to that of the first

    @property
    def total(self) -> float:
        """Seconds of all iterations."""
        return sum(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """A trace matched with a graph."""

    trace: Trace
    graph: OpGraph
    how: str  # "annotations" or "order"
    measured: Mapping[int, OpMeasurement]  # by op id, of ops that the trace has
    coverage: float  # share of the measured seconds that belong to an op
    only_in_trace: tuple[Stray, ...]  # most seconds first
    only_in_graph: tuple[int, ...]  # ids of kernels of which the trace has no iteration
    step: TraceStep  # the step of median length, for pictures
    # (op id, iteration) by the index of the call
    places: Mapping[int, tuple[int, int]] = field(default_factory=dict, repr=False)
    first_difference: str = ""  # between the two sequences, in words
    reshaped: int = 0  # calls that pair by looser shapes
    # Share of the measured seconds that is in no step, where steps were cut by their period.
    outside: float | None = None

    @property
    def seconds(self) -> dict[int, float]:
        """Measured seconds of a step by op id, all iterations together."""
        return {op: measurement.total for op, measurement in self.measured.items()}

    @cached_property
    def owners(self) -> Mapping[int, tuple[int, int]]:
        """(op id, iteration) that each call of `step`, or the one around it, was matched to."""
        parents = self.trace.ops.parent
        owner: dict[int, tuple[int, int]] = {}
        for op in self.step.ops:
            above = op
            while above != records.NONE and above not in self.places:
                above = parents[above]
            if above != records.NONE:
                owner[op] = self.places[above]
        return owner

    @property
    def ops_matched_share(self) -> float:
        """Share of the graph's kernels that the trace has; every iteration counts."""
        graph = self.graph
        kernels = sum(graph.times(op) for op in graph.ops if op.kind == "kernel")
        matched = sum(len(measurement.seconds) for measurement in self.measured.values())
        return matched / kernels if kernels else 1.0

    @property
    def score(self) -> float:
        """The smaller of the shares of seconds and of kernels that match."""
        return min(self.coverage, self.ops_matched_share)

    def notes(self) -> list[str]:
        """Sentences on how steps were separated, and on kernels without a launch."""
        trace = self.trace
        count = units.plural(len(trace.steps), "step")
        notes: list[str] = []
        if self.outside is not None:
            notes.append(
                "no ProfilerStep in the trace: the ops of the graph come again, which makes "
                f"{count}; {format_share(self.outside)} of the measured time is in none of them"
            )
        elif len(trace.steps) == 1 and trace.steps[0].name == records.WHOLE:
            notes.append("no ProfilerStep in the trace: all of it counts as one step")
        elif trace.marked_by and trace.marked_by != records.PROFILER_STEP:
            notes.append(
                f"no ProfilerStep in the trace: the ranges {trace.marked_by!r} are its steps"
            )
        for placed in trace.placements:
            if placed.how not in (records.LAUNCH, records.OP):
                count = units.plural(placed.kernels, "kernel")
                if placed.copies:
                    count += f" and {units.plural(placed.copies, 'memory operation')}"
                names = ", ".join(base_name(name)[:_LONGEST] for name in placed.names)
                notes.append(
                    f"{count} of the trace ({format_time(placed.seconds)}) {placed.how} ({names})"
                )
        if trace.damage:
            notes.append(trace.damage)
        waited = [step.waited for step in trace.steps if step.waited]
        if waited:
            notes.append(
                f"{format_time(sum(waited))} in which the host waited for work from before the "
                "trace begins are left out of the step"
            )
        return notes


class CallSums:
    """Adds up the calls of each step, by op and iteration."""

    def __init__(self, trace: Trace, graph: OpGraph) -> None:
        self.trace, self.graph = trace, graph
        self.steps = 0
        self.matched = self.total = 0.0
        self.seconds: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.kernels: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.starts: dict[int, list[float]] = defaultdict(list)
        self.strays: dict[tuple[str, Key], list[float]] = {}
        self.places: dict[int, tuple[int, int]] = {}
        self._step: dict[tuple[int, int], list[Any]] = {}

    def add(self, step: TraceStep, call: OpCall, target: tuple[int, int] | None) -> None:
        """Count one call for an (op, iteration), or as a stray where `target` is None."""
        self.total += call.seconds
        if target is None:
            entry = self.strays.setdefault((call.name, call.key), [0, 0.0])
            entry[0] += 1
            entry[1] += call.seconds
            return
        self.matched += call.seconds
        now = self._step.setdefault(target, [0.0, 0, None])
        now[0] += call.seconds
        now[1] += len(call.kernels)
        if call.op != records.NONE:
            self.places[call.op] = target
        if now[2] is None:
            table = self.trace.kernels if call.kernels else self.trace.ops
            first = min(call.kernels, key=table.start.__getitem__) if call.kernels else call.op
            now[2] = table.start[first] - step.start

    def end(self) -> None:
        """End the step."""
        self.steps += 1
        for target, (seconds, kernels, start) in self._step.items():
            self.seconds[target].append(seconds)
            self.kernels[target].append(kernels)
            self.starts[target[0]].append(start)
        self._step = {}

    def alignment(self, how: str, first: str = "") -> Alignment:
        """The alignment of all steps."""
        iterations: dict[int, list[int]] = defaultdict(list)
        for op, iteration in sorted(self.seconds):
            iterations[op].append(iteration)
        median = statistics.median
        measured = {
            op: OpMeasurement(
                op,
                tuple(median(self.seconds[op, i]) for i in numbers),
                statistics.fmean(median(self.kernels[op, i]) for i in numbers),
                min(self.starts[op]),
            )
            for op, numbers in iterations.items()
        }
        strays = [
            Stray(name, key[1], count / self.steps, seconds / self.steps)
            for (name, key), (count, seconds) in self.strays.items()
            if seconds > 0
        ]
        steps = sorted(self.trace.steps, key=lambda step: step.seconds)
        return Alignment(
            trace=self.trace,
            graph=self.graph,
            how=how,
            measured=measured,
            coverage=self.matched / self.total if self.total else 0.0,
            only_in_trace=tuple(sorted(strays, key=lambda stray: (-stray.seconds, stray.name))),
            only_in_graph=tuple(
                op.id for op in self.graph.ops if op.kind == "kernel" and op.id not in measured
            ),
            step=steps[(len(steps) - 1) // 2],
            places=self.places,
            first_difference=first,
        )


# -- counters --------------------------------------------------------------------------------------
# A trace and counters of the same step, run twice, have two sequences of kernels (name, blocks),
# matched in order.  ncu empties the caches before each kernel (unless --cache-control none), so a
# tensor that is in L2 in the real run counts as read here.

_KERNEL = records.KINDS.index("kernel")
_LEAST = 0.5
"""Share of a step's kernels that must have counters."""


@dataclass(frozen=True)
class Counted:
    """The DRAM bytes of the ops of a step."""

    bytes: Mapping[int, float]  # byte by op id, all iterations; ops with every kernel counted
    kernels: int  # that the step launched
    with_counters: int  # kernels that have counters


def counted(alignment: Alignment, counters: Sequence[KernelCounters], source: str = "") -> Counted:
    """The bytes of each op of `alignment.graph`, in the step of median length.

    counters: of that step, in order; other steps before and after are ignored.  Raises ProfileError
    for a trace without kernels, and where less than half of the step's kernels have counters.
    """
    kernels = alignment.trace.kernels
    in_step = [index for index in alignment.step.kernels if kernels.kind[index] == _KERNEL]
    if not in_step:
        raise ProfileError(
            f"{alignment.trace.source}: no kernels in the trace to set counters beside; profile "
            "with ProfilerActivity.CUDA"
        )
    have = [_key(kernels[index].name, kernels[index].grid) for index in in_step]
    wanted = [_key(launch.name, launch.grid) for launch in counters]
    pairs = common(have, wanted)
    if len(pairs) < _LEAST * len(in_step):
        taken = {i for i, _ in pairs}
        first = next(i for i in range(len(in_step)) if i not in taken)
        raise ProfileError(
            f"{source or 'the counters'}: {format_share(len(pairs) / len(in_step))} of the "
            f"{len(in_step):,} kernels of {alignment.step.name!r} are there in order; the first "
            f"that is not: {have[first][0]}: count the step that the trace has"
        )
    moved = {in_step[i]: float(counters[j].bytes) for i, j in pairs}
    return Counted(bytes=_by_op(alignment, moved), kernels=len(in_step), with_counters=len(pairs))


def _by_op(alignment: Alignment, moved: Mapping[int, float]) -> dict[int, float]:
    """Bytes by op; an op with a kernel (or a copy) that was not counted has none."""
    kernels, owners = alignment.trace.kernels, alignment.owners
    sums: dict[int, float] = defaultdict(float)
    unknown: set[int] = set()
    for index in alignment.step.kernels:
        call = kernels.op[index]
        target = owners.get(call) if call != records.NONE else None
        if target is None:
            continue
        if index in moved:
            sums[target[0]] += moved[index]
        else:
            unknown.add(target[0])
    return {op: size for op, size in sums.items() if op not in unknown}


def _key(name: str, grid: tuple[int, ...] | None) -> Key:
    """The key of a launch: the bare name of the function, and the number of blocks."""
    return base_name(name), () if grid is None else ((math.prod(grid),),)
