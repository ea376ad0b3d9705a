"""Bytes through HBM: what a kernel group moves once its internal values stay on the chip.

A storage that only the group itself writes and reads never reaches HBM; one that several of its ops
read is read once.  The compulsory floor is what any execution has to move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rooftrace.costmodels.cost import Access, Cost, Work
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fuse import FusionGroup
from rooftrace.tracer.graph import ROLES, OpGraph


def group_costs(graph: OpGraph, groups: Sequence[FusionGroup], op_costs: Sequence[Cost],
                execution: ExecutionModel) -> tuple[Cost, ...]:
    """One cost per group: work added up, traffic without internal values, factors applied."""
    readers: dict[int, set[int]] = defaultdict(set)
    for index, group in enumerate(groups):
        for op in group.ops:
            for access in op_costs[op].traffic:
                if not access.write:
                    readers[access.storage].add(index)
    kept = {graph.values[i].storage for i in graph.outputs}
    kept.update(graph.values[i].storage for i in graph.external)
    scale = _Factors(graph, execution)
    results = []
    for index, group in enumerate(groups):
        if len(group.ops) == 1:
            cost = op_costs[group.ops[0]]
        else:
            cost = _merged(graph, [op_costs[op] for op in group.ops], readers, kept, index)
        results.append(scale(cost, group, op_costs))
    return tuple(results)


def _merged(graph: OpGraph, costs: Sequence[Cost], readers: Mapping[int, set[int]], kept: set[int],
            group: int) -> Cost:
    work: dict[Work, int] = defaultdict(int)
    read: dict[Access, list[int]] = defaultdict(list)
    written: dict[Access, int] = {}
    for cost in costs:
        for key, flop in cost.work.items():
            work[key] += flop
        for access, size in cost.traffic.items():
            # What an earlier op of the group wrote is still on the chip.
            if not access.write and Access(access.storage, True, access.wire) not in written:
                read[access].append(size)
        for access, size in cost.traffic.items():
            if access.write:
                written[access] = max(written.get(access, 0), size)
    traffic: dict[Access, int] = {}
    for access, sizes in read.items():
        # Ops that read the same bytes share them; ops that read different slices read both.
        whole = graph.owner(access.storage).nbytes
        traffic[access] = max(max(sizes), min(sum(sizes), whole))
    for access, size in written.items():
        outside = readers.get(access.storage, set()) - {group}
        if outside or access.storage in kept:
            traffic[access] = size
    return Cost(dict(work), traffic)


class _Factors:
    """The seed's byte factors: weight residency by family, activation fusion, elementwise."""

    def __init__(self, graph: OpGraph, execution: ExecutionModel) -> None:
        residency = execution.weight_residency
        self.graph, self.execution = graph, execution
        self.active = execution.fusion == "factor" or any(
            getattr(residency, family) != 1 for family in ("attention", "dense", "moe"))

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


def bytes_by_role(graph: OpGraph, cost: Cost) -> dict[str, int]:
    """HBM bytes of a bound cost by the role of the storage; every role is there."""
    sums = dict.fromkeys(ROLES, 0)
    for access, size in cost.traffic.items():
        if access.wire == "hbm":
            sums[graph.values[access.storage].role] += size
    return sums


def compulsory_bytes(graph: OpGraph, op_costs: Sequence[Cost]) -> int:
    """Unique bytes that any execution moves: what the step reads from outside (weights, states, inputs)
    and what it leaves behind (outputs, states), each counted once."""
    outside = {graph.values[i].storage for i in graph.external}
    results = {graph.values[i].storage for i in graph.outputs}
    reads: dict[int, int] = defaultdict(int)
    writes: dict[int, int] = defaultdict(int)
    for cost in op_costs:
        for access, size in cost.traffic.items():
            if access.wire != "hbm":
                continue
            if access.write:
                if access.storage in results or access.storage in outside:
                    writes[access.storage] = max(writes[access.storage], size)
            elif access.storage in outside:
                reads[access.storage] = max(reads[access.storage], size)
    return sum(reads.values()) + sum(writes.values())
