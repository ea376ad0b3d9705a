"""Bytes through HBM: what a kernel group moves once its internal values stay on the chip.

A storage that only the group itself writes and reads never reaches HBM; one that several of its ops
read is read once.  The compulsory floor is what any execution has to move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rooftrace.costmodels.cost import Access, Cost, Work
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fuse import FusionGroup
from rooftrace.tracer.graph import ROLES, Op, OpGraph


def group_costs(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    op_costs: Sequence[Cost],
    execution: ExecutionModel,
) -> tuple[Cost, ...]:
    """One cost per group: work added up, traffic without internal values, factors applied."""
    merger = _Merger(graph, groups, op_costs)
    scale = _Factors(graph, execution)
    results = []
    for index, group in enumerate(groups):
        cost = op_costs[group.ops[0]] if len(group.ops) == 1 else merger.merged(index)
        results.append(scale(cost, group, op_costs))
    return tuple(results)


class _Merger:
    """Adds up the ops of a group, knowing which storages later groups and the caller read."""

    def __init__(
        self, graph: OpGraph, groups: Sequence[FusionGroup], op_costs: Sequence[Cost]
    ) -> None:
        self.graph, self.groups, self.op_costs = graph, groups, op_costs
        self.sizes = storage_sizes(graph)
        self.last_reader: dict[int, int] = {}
        for index, group in enumerate(groups):
            for op in group.ops:
                for access in op_costs[op].traffic:
                    if not access.write:
                        self.last_reader[access.storage] = index
        values = graph.values
        self.kept = {values[i].storage for i in (*graph.outputs, *graph.external)}
        # The host reads from memory, too.
        self.kept.update(
            values[i].storage for op in graph.ops if op.kind == "sync" for i in op.inputs
        )

    def merged(self, index: int) -> Cost:
        """The cost of one group of several ops."""
        work: dict[Work, int] = defaultdict(int)
        parts = _Parts(self.graph, self.sizes)
        for number in self.groups[index].ops:
            cost = self.op_costs[number]
            for key, flop in cost.work.items():
                work[key] += flop
            parts.add(self.graph.ops[number], cost)
        traffic = {}
        for access, size in parts.totals():
            leaves = access.storage in self.kept or self.last_reader.get(access.storage, -1) > index
            if leaves or not access.write:
                traffic[access] = size
        return Cost(dict(work), traffic)


class _Parts:
    """Which bytes of which storage a group reads from outside, and which it writes.

    Ops that touch the same value touch the same bytes, which move once; other views of a storage
    are taken as other bytes of it, all together at most the whole.
    """

    def __init__(self, graph: OpGraph, sizes: Sequence[int]) -> None:
        self.graph, self.sizes = graph, sizes
        self.moved: dict[Access, dict[frozenset[int], int]] = {}
        self.same: dict[int, int] = {}

    def add(self, op: Op, cost: Cost) -> None:
        """One more op of the group, in execution order."""
        read, written = self._touched(op)
        # Reads first: what an op writes is not there yet when it reads.
        for access, size in sorted(cost.traffic.items(), key=lambda item: item[0].write):
            touched = frozenset((written if access.write else read).get(access.storage, ()))
            if not access.write:
                size = self._from_outside(access, touched, size)
            if size:
                parts = self.moved.setdefault(access, {})
                parts[touched] = max(parts.get(touched, 0), size)

    def _touched(self, op: Op) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
        """The values through which an op reads and writes each storage.

        An in-place result stands as the operand that it overwrites.
        """
        values = self.graph.values
        read: dict[int, set[int]] = defaultdict(set)
        written: dict[int, set[int]] = defaultdict(set)
        overwritten: dict[tuple[Any, ...], int] = {}
        for i in op.inputs:
            first = self.same.get(i, i)
            value = values[i]
            read[value.storage].add(first)
            overwritten.setdefault((value.storage, value.shape, value.stride), first)
        for i in op.outputs:
            value = values[i]
            first = overwritten.get((value.storage, value.shape, value.stride), i)
            self.same[i] = first
            written[value.storage].add(first)
        return read, written

    def _from_outside(self, read: Access, touched: frozenset[int], size: int) -> int:
        """Bytes of a read that no earlier op of the group wrote: those are still on the chip."""
        write = Access(read.storage, True, read.wire)
        written = self.moved.get(write)
        if written is None:
            return size
        if touched in written:
            return max(0, size - written[touched])
        return min(size, max(0, self.sizes[read.storage] - self._total(write)))

    def _total(self, access: Access) -> int:
        sizes = self.moved[access].values()
        if access.wire != "hbm":
            return sum(sizes)
        return max(max(sizes), min(sum(sizes), self.sizes[access.storage]))

    def totals(self) -> list[tuple[Access, int]]:
        """Bytes by access."""
        return [(access, self._total(access)) for access in self.moved]


class _Factors:
    """The seed's byte factors: weight residency by family, activation fusion, elementwise."""

    def __init__(self, graph: OpGraph, execution: ExecutionModel) -> None:
        residency = execution.weight_residency
        self.graph, self.execution = graph, execution
        self.active = execution.fusion == "factor" or any(
            getattr(residency, family) != 1 for family in ("attention", "dense", "moe")
        )

    def __call__(self, cost: Cost, group: FusionGroup, op_costs: Sequence[Cost]) -> Cost:
        if not self.active:
            return cost
        lead = max(group.ops, key=lambda op: op_costs[op].bytes())
        residency = self.execution.weight_residency.of(self.graph.ops[lead].family)
        traffic = {}
        for access, size in cost.traffic.items():
            role = self.graph.values[access.storage].role
            if role == "weights" and not access.write:
                size = round(size / residency)
            elif role == "activations":
                size = round(size * self.execution.activation_fusion)
            elif role == "temporary":
                size = round(size * self.execution.elementwise)
            traffic[access] = size
        return Cost(cost.work, traffic)


def storage_sizes(graph: OpGraph) -> list[int]:
    """Bytes by value id of an owner: a storage is as large as its largest view."""
    sizes = [0] * len(graph.values)
    known: dict[tuple[Any, ...], int] = {}  # few sizes, many values
    for tensor in graph.values:
        form = (tensor.shape, tensor.stride, tensor.dtype)
        size = known.get(form)
        if size is None:
            size = known[form] = tensor.nbytes
        if size > sizes[tensor.storage]:
            sizes[tensor.storage] = size
    return sizes


def bytes_by_role(graph: OpGraph, cost: Cost) -> dict[str, int]:
    """HBM bytes of a bound cost by the role of the storage; every role is there."""
    sums = dict.fromkeys(ROLES, 0)
    for access, size in cost.traffic.items():
        if access.wire == "hbm":
            sums[graph.values[access.storage].role] += size
    return sums


def compulsory_bytes(graph: OpGraph, op_costs: Sequence[Cost]) -> int:
    """Bytes that any execution moves, each counted once.

    Those are what the step reads from outside (weights, states, inputs) before it overwrites it,
    and what it leaves behind (outputs, states).
    """
    outside = {graph.values[i].storage for i in graph.external}
    results = outside | {graph.values[i].storage for i in graph.outputs}
    reads: dict[int, int] = defaultdict(int)
    writes: dict[int, int] = defaultdict(int)
    overwritten: dict[int, int] = defaultdict(int)
    for cost in op_costs:
        for access, size in cost.traffic.items():
            if access.wire == "hbm" and not access.write and access.storage in outside:
                fresh = size - overwritten[access.storage]
                reads[access.storage] = max(reads[access.storage], fresh)
        for access, size in cost.traffic.items():
            if access.wire == "hbm" and access.write and access.storage in results:
                writes[access.storage] = max(writes[access.storage], size)
                overwritten[access.storage] += size
    return sum(reads.values()) + sum(writes.values())
