"""A compiled step matched with its graph: measured kernels, and kernels that we detect."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb
from pathlib import Path
from typing import Protocol

from rooftrace._shown import short
from rooftrace.costmodels.fusion import FusionGroup, Plan, bytes_by_role, execution_model, plan
from rooftrace.errors import ProfileError
from rooftrace.graph import OpGraph
from rooftrace.hardware.units import format_share, format_time, format_traffic, plural
from rooftrace.measured.alignment import keys
from rooftrace.measured.alignment.compiled import KernelTime, is_launched
from rooftrace.measured.alignment.naming import times_by_names
from rooftrace.measured.profiles import KernelCounters, Trace, read_trace

_BY = {"provenance": "as the compiler noted", "names": "inferred by the names of kernels"}
"""The origin of the ops of each kernel, in words."""


class _KernelRow(Protocol):
    """A measured step with the times of its kernels."""

    @property
    def key(self) -> str: ...

    @property
    def note(self) -> str: ...

    @property
    def kernels(self) -> tuple[KernelTime, ...]: ...


@dataclass(frozen=True, slots=True)
class FusionDifference:
    """Ops that a compiler has put into other kernels than we do."""

    kind: str  # "more": it fused more than we do; "less"; "otherwise": neither contains the other
    ops: tuple[int, ...]  # ids in the plan's graph
    names: tuple[str, ...]  # of the measured kernels
    detected: int  # number of our kernels
    measured: int  # number of its kernels
    bytes_detected: int  # byte through HBM by our kernels
    bytes_measured: int  # byte through HBM by its kernels, by the same rules
    seconds: float  # s that its kernels took

    def __str__(self) -> str:
        saved = self.bytes_measured - self.bytes_detected
        return (
            f"fused {self.kind}: {plural(len(self.ops), 'op')} in "
            f"{plural(self.measured, 'kernel')}, not {self.detected}; "
            f"{'+' if saved > 0 else '-' if saved < 0 else ''}{format_traffic(abs(saved))}, "
            f"{format_time(self.seconds)}: {', '.join(self.names[:2])}"
            f"{', ...' if len(self.names) > 2 else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class FusedStep:
    """The kernels of a measured compiled step, and those that we detect in its graph."""

    detected: Plan  # as the execution model `compiled` groups it
    kernels: tuple[KernelTime, ...]  # in launch order
    by: str = "provenance"  # noted by the compiler; "names": inferred from the names of kernels

    @property
    def seconds(self) -> float:
        """Seconds of all calls of the step."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def coverage(self) -> float:
        """Share of these seconds that belongs to ops of the graph."""
        matched = sum(kernel.seconds for kernel in self.kernels if kernel.ops or kernel.parts)
        return matched / self.seconds if self.seconds else 0.0

    @property
    def unplaced(self) -> tuple[int, ...]:
        """Ids of ops that launch a kernel by our rules, and are in no kernel of the step."""
        placed = {op for kernel in self.kernels for op in kernel.ops}
        return tuple(
            op.id for op in self.detected.graph.ops if is_launched(op) and op.id not in placed
        )

    @cached_property
    def measured(self) -> Plan:
        """The plan of the step in the measured kernels; ops without a kernel stand alone."""
        graph = self.detected.graph
        groups = [FusionGroup.of(graph, kernel.ops) for kernel in self.kernels if kernel.ops]
        groups += [FusionGroup.of(graph, (op,)) for op in self.unplaced]
        regrouped = self.detected.regrouped(tuple(_in_order(graph, groups)))
        return replace(regrouped, execution=replace(self.detected.execution, name="measured"))

    @property
    def unfused(self) -> Plan:
        """The plan of the step with a kernel for each op."""
        return self.detected.unfused

    @property
    def group_seconds(self) -> list[float | None]:
        """Seconds of each group of `measured`; None where no kernel of the step computes it.

        The parts of an op that a compiler decomposed count for the group that has the op.
        """
        sums: dict[int, float] = defaultdict(float)
        for kernel, group in zip(self.kernels, self._group_numbers, strict=True):
            if group is not None:
                sums[group] += kernel.seconds
        return [sums.get(number) for number in range(len(self.measured.groups))]

    @cached_property
    def _group_numbers(self) -> list[int | None]:
        """The group of `measured` that each kernel belongs to; None of a call without ops."""
        groups = enumerate(self.measured.groups)
        group_of = {op: number for number, group in groups for op in group.ops}
        firsts = (next(iter(kernel.ops or kernel.parts), None) for kernel in self.kernels)
        return [None if op is None else group_of[op] for op in firsts]

    def counted(
        self, counters: Sequence[KernelCounters], source: str = "the counters"
    ) -> list[float | None]:
        """DRAM bytes of each group of `measured`, by a profiler's counters of the same step.

        None of a group with a kernel that was not counted.  Raises ProfileError where less than
        half of the compiler's kernels have counters.
        """
        moved = counted_kernels(self.kernels, counters, source)
        sums: dict[int, float] = defaultdict(float)
        for number, group in enumerate(self._group_numbers):
            if group is not None:  # not a number where a kernel of the group was not counted
                sums[group] += moved.get(number, math.nan)
        counted = {group: size for group, size in sums.items() if not math.isnan(size)}
        return [counted.get(number) for number in range(len(self.measured.groups))]

    @property
    def activation_fusion(self) -> float:
        """Bytes of activations through HBM in the measured kernels, over those of the unfused step.

        It is the factor `ExecutionModel.activation_fusion`, of this step on this device, without
        its optimizer, which is not compiled.
        """
        return self._share("activations")

    @property
    def elementwise(self) -> float:
        """Bytes of temporaries in the measured kernels, over those of the unfused step.

        It is the factor `ExecutionModel.elementwise`, of this step on this device, without its
        optimizer.
        """
        return self._share("temporary")

    def _share(self, role: str) -> float:
        fused, unfused = (_bytes_of(role, plan) for plan in (self.measured, self.unfused))
        return fused / unfused if unfused else 1.0

    @cached_property
    def agreement(self) -> Agreement:
        """The agreement of the kernels that we detect with those of the compiler."""
        return Agreement.of(*self._partitions())

    @cached_property
    def differences(self) -> tuple[FusionDifference, ...]:
        """The differences of the two, most seconds first."""
        ours, theirs = self._partitions()
        measured = self.measured
        size_of = {
            group.ops: cost.bytes()
            for group, cost in zip(measured.groups, measured.costs, strict=True)
        }
        both = [
            FusionDifference(
                kind=_kind(len(left), len(right)),
                ops=tuple(sorted(op for kernel in right for op in self.kernels[kernel].ops)),
                names=tuple(self.kernels[kernel].name for kernel in right),
                detected=len(left),
                measured=len(right),
                bytes_detected=sum(self.detected.costs[kernel].bytes() for kernel in left),
                bytes_measured=sum(size_of[self.kernels[kernel].ops] for kernel in right),
                seconds=sum(self.kernels[kernel].seconds for kernel in right),
            )
            for left, right in tangles(ours, theirs)
            if len(left) > 1 or len(right) > 1
        ]
        return tuple(sorted(both, key=lambda difference: -difference.seconds))

    @cached_property
    def joins(self) -> tuple[JoinCheck, ...]:
        """The joins by which detected kernels grew, and how often the compiler made them too.

        Joins that it makes least often are first.
        """
        return join_checks(self.detected.groups, self._partitions()[1])

    def _partitions(self) -> tuple[dict[int, int], dict[int, int]]:
        """(our kernel, their kernel) by op, of the ops in kernels that the compiler wrote."""
        ours = {op: place for place, group in enumerate(self.detected.groups) for op in group.ops}
        theirs = {
            op: place
            for place, kernel in enumerate(self.kernels)
            if kernel.generated
            for op in kernel.ops
            if op in ours
        }
        return ours, theirs

    def __repr__(self) -> str:
        return short(self, self._verdict())

    def __str__(self) -> str:
        unlike = [check for check in self.joins if check.made < check.ours]
        return "\n".join((self._verdict(), *map(str, self.differences[:10]), *map(str, unlike)))

    def _verdict(self) -> str:
        score, written = self.agreement, sum(kernel.generated for kernel in self.kernels)
        return (
            f"{self.detected.source.title}, compiled: {plural(len(self.kernels), 'call')} "
            f"({written} of kernels that the compiler wrote) in {format_time(self.seconds)}, "
            f"{format_share(self.coverage)} of it in ops of the graph, {_BY[self.by]}; detected "
            f"kernels agree by F1 {score.f1:.2f}, adjusted Rand index {score.rand:.2f} over "
            f"{plural(score.ops, 'op')}; {format_traffic(self.measured.bytes.total)} of HBM in the "
            f"measured kernels, {format_traffic(self.detected.bytes.total)} in the detected ones, "
            f"{format_traffic(self.unfused.bytes.total)} unfused (activations "
            f"{self.activation_fusion:.2f}, temporaries {self.elementwise:.2f})"
        )


def fused(step: _KernelRow | Trace | str | Path, graph: OpGraph) -> FusedStep:
    """The kernels of a measured compiled step, matched with the graph of the same step.

    step: a row of `rooftrace.measure(..., compiled=True)`, for which the compiler noted the ops of
    each kernel; or a trace of torch.profiler, or the path of its file: ops are then inferred from
    the names and the order of kernels, or left out.  graph: of `rooftrace.trace` with the same
    arguments.  Raises ProfileError for a row without kernels, for the graph of another step, and
    for a trace in which no kernel has an op of the graph.
    """
    detected = plan(graph.expand(), execution_model("compiled"))
    if isinstance(step, (str, Path)):
        step = read_trace(step)
    if isinstance(step, Trace):
        return FusedStep(detected=detected, kernels=times_by_names(step, detected), by="names")
    _check(step, detected)
    return FusedStep(detected=detected, kernels=step.kernels)


def _check(row: _KernelRow, detected: Plan) -> None:
    """Raise ProfileError for a row without kernels, or of another graph."""
    if not row.kernels:
        raise ProfileError(
            f"{row.key}: {row.note or 'no kernels were measured'}; measure with "
            "rooftrace.measure(module, ..., compiled=True), under torch 2.11 or later"
        )
    ops = detected.graph.ops
    for kernel in row.kernels:
        for op, target in zip(kernel.ops, kernel.targets, strict=True):
            there = ops[op].target if op < len(ops) else "no op"
            if there != target:
                raise ProfileError(
                    f"{row.key}: not a run of this graph: op {op} is {target} in the run and "
                    f"{there} in the graph; trace the module, the sizes and the phase that were "
                    "measured, with the same release of rooftrace"
                )


def _bytes_of(role: str, planned: Plan) -> int:
    """Bytes through HBM of one role, without those of the optimizer's kernels."""
    graph, total = planned.graph, 0
    for group, cost in zip(planned.groups, planned.costs, strict=True):
        if graph.ops[group.ops[0]].part != "optimizer":
            total += group.times * bytes_by_role(graph, cost).get(role, 0)
    return total


def _kind(ours: int, theirs: int) -> str:
    return "more" if theirs == 1 else "less" if ours == 1 else "otherwise"


def _in_order(graph: OpGraph, groups: Sequence[FusionGroup]) -> list[FusionGroup]:
    """Groups in an order in which each stands after the groups that it reads from.

    A compiler may run an op before one that is earlier in the graph.  Where kernels read from each
    other in a circle, as parts of ops were computed twice, the order of first ops decides.
    """
    group_of = {op: number for number, group in enumerate(groups) for op in group.ops}
    writer: dict[int, int] = {}
    waits: dict[int, set[int]] = defaultdict(set)
    for op in graph.ops:
        number = group_of.get(op.id)
        for value in (*op.inputs, *op.outputs):
            storage = graph.values[value].storage
            before = writer.get(storage)
            if number is not None and before is not None and before != number:
                waits[number].add(before)
        if number is not None:
            writer.update((graph.values[value].storage, number) for value in op.outputs)
    done: list[FusionGroup] = []
    left = sorted(range(len(groups)), key=lambda number: groups[number].ops[0])
    placed: set[int] = set()
    while left:
        ready = next((n for n in left if waits[n] <= placed), left[0])
        left.remove(ready)
        placed.add(ready)
        done.append(groups[ready])
    return done


# -- joins that a compiler made too ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinCheck:
    """How often a join of the table in docs/fusion.md was made by us, and by a compiler."""

    join: str  # its name in the table
    ours: int  # steps by which our kernels grew, of ops in kernels that the compiler wrote
    made: int  # number of these steps that it made too

    def __str__(self) -> str:
        return f"{self.join}: the compiler made {self.made:,} of {plural(self.ours, 'step')}"


def join_checks(groups: Iterable[FusionGroup], theirs: Mapping[int, int]) -> tuple[JoinCheck, ...]:
    """The joins that made `groups`, most steps that the compiler did not make first.

    theirs: the compiler's kernel by op.  The compiler made a step too if it has an op that the step
    added in one kernel with an op that was there before.
    """
    ours: dict[str, int] = {}
    made: dict[str, int] = {}
    for group in groups:
        came = {op for merge in group.merges for op in merge.ops}
        there = {theirs[op] for op in group.ops if op not in came and op in theirs}
        for merge in group.merges:
            kernels = {theirs[op] for op in merge.ops if op in theirs}
            if kernels and there:
                ours[merge.join] = ours.get(merge.join, 0) + 1
                made[merge.join] = made.get(merge.join, 0) + (not kernels.isdisjoint(there))
            there |= kernels
    checks = (JoinCheck(name, count, made[name]) for name, count in ours.items())
    return tuple(sorted(checks, key=lambda check: (check.made - check.ours, check.join)))


# -- counters --------------------------------------------------------------------------------------

_LEAST = 0.5
"""Share of the compiler's kernels that must have counters."""


def counted_kernels(
    calls: Sequence[KernelTime], counters: Sequence[KernelCounters], source: str
) -> dict[int, float]:
    """The bytes of each call of a step by its number; calls without counters are left out.

    source: the file of the counters.  Kernels that the compiler wrote are matched in order by name.
    A library call has the launches between two of them, if it is the only call there, or if there
    are as many launches as calls.  Raises ProfileError where less than half of the compiler's
    kernels have counters.
    """
    have = [(keys.base_name(kernel.name), ()) for kernel in calls]
    wanted = [(keys.base_name(launch.name), ()) for launch in counters]
    pairs = keys.common(have, wanted)
    written = [number for number, kernel in enumerate(calls) if kernel.generated]
    matched = {a for a, _ in pairs} & set(written)
    if len(matched) < _LEAST * len(written):
        first = next(calls[number].name for number in written if number not in matched)
        raise ProfileError(
            f"{source}: {format_share(len(matched) / len(written))} of the {len(written):,} "
            f"kernels that the compiler wrote are there in order; the first that is not: {first}: "
            "count the step that was measured"
        )
    moved: dict[int, float] = {a: float(counters[b].bytes) for a, b in pairs}
    for between, launches in keys.gaps(pairs, len(calls), len(counters)):
        sizes = [float(counters[j].bytes) for j in launches]
        if len(between) == 1:
            moved[between[0]] = sum(sizes)
        elif len(between) == len(sizes):
            moved.update(zip(between, sizes, strict=True))
    return moved


# -- agreement -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of two partitions of the same ops into kernels, ours and theirs.

    precision, recall: of pairs of ops in one kernel; theirs are the truth.  rand: the adjusted Rand
    index (Hubert and Arabie 1985), 1 for equal partitions and about 0 for independent ones.
    """

    ops: int  # that both partitions have
    precision: float
    recall: float
    rand: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0

    @staticmethod
    def of(ours: Mapping[int, int], theirs: Mapping[int, int]) -> Agreement:
        """The agreement of two mappings of op to kernel, over the ops of `theirs`."""
        both = Counter((ours[op], theirs[op]) for op in theirs)
        same = sum(comb(n, 2) for n in both.values())
        a = sum(comb(n, 2) for n in Counter(ours[op] for op in theirs).values())
        b = sum(comb(n, 2) for n in Counter(theirs.values()).values())
        expected = a * b / max(comb(len(theirs), 2), 1)
        spread = (a + b) / 2 - expected
        return Agreement(
            len(theirs),
            same / a if a else 1.0,
            same / b if b else 1.0,
            (same - expected) / spread if spread else 1.0,
        )


def tangles(
    ours: Mapping[int, int], theirs: Mapping[int, int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(kernels of ours, kernels of theirs) that share ops with each other and with no others.

    One of each where the two agree; (1, n) where theirs fused less, (n, 1) where it fused more.
    """
    joined: dict[int, set[int]] = defaultdict(set)
    back: dict[int, set[int]] = defaultdict(set)
    for op, kernel in theirs.items():
        joined[kernel].add(ours[op])
        back[ours[op]].add(kernel)
    seen: set[int] = set()
    for first in joined:
        if first in seen:
            continue
        left: set[int] = set()
        right, waiting = {first}, [first]
        while waiting:
            for kernel in joined[waiting.pop()] - left:
                left.add(kernel)
                new = back[kernel] - right
                right |= new
                waiting += new
        seen |= right
        yield tuple(sorted(left)), tuple(sorted(right))
