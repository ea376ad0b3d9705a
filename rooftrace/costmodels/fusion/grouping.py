"""Which ops share a kernel, and which join made it so.

`fuse` partitions the kernels of a graph: every kernel op is in exactly one group, and contracting
the groups leaves no cycle.  Which ops may fuse comes from their rules (pointwise, reduction,
gather); why they do is the table in `joins`; what a group is called is the table in `labels`.

The graph shows one iteration of a repeat between two equal neighbours.  A kernel that joins it to a
neighbour does so between every two iterations, and never spans more than two (see `Neighbourhood`).
Inductor, which sees the loop unrolled, would put as many iterations into one kernel as MAX_GROUP
has room for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fusion.finished import larger_groups, with_apart
from rooftrace.costmodels.fusion.groups import FusionGroup
from rooftrace.costmodels.fusion.growing import grow
from rooftrace.costmodels.fusion.joins import own_joins
from rooftrace.costmodels.fusion.kernels import Facts
from rooftrace.costmodels.fusion.merging import merge_kernels
from rooftrace.costmodels.fusion.partition import Open, Partition
from rooftrace.costmodels.fusion.runs import Neighbourhood
from rooftrace.costmodels.pricing import price_ops
from rooftrace.costmodels.traffic import moved
from rooftrace.tracer.graph import OpGraph


def fuse(
    graph: OpGraph, execution: ExecutionModel, op_costs: Sequence[Cost] | None = None
) -> tuple[FusionGroup, ...]:
    """The kernels of `graph` in launch order under this execution model.

    op_costs: those of the graph's ops, where they are known; joins of users may ask for them.
    """
    if execution.fusion != "detected":
        classes = Facts(graph).classes
        launched = (op for op in graph.ops if classes[op.id] not in (None, "free"))
        return tuple(FusionGroup.of(graph, [op.id], op.repeats) for op in launched)
    grown = _grown(graph)
    groups = tuple(FusionGroup.of(graph, k.members, k.repeats, k.merges) for k in grown)
    if not _adds_up(graph, groups):
        groups = tuple(FusionGroup.of(graph, k.members, None, k.merges) for k in grown)
    return _with_own_joins(graph, groups, op_costs, execution) if own_joins() else groups


def _with_own_joins(
    graph: OpGraph,
    groups: tuple[FusionGroup, ...],
    op_costs: Sequence[Cost] | None,
    execution: ExecutionModel,
) -> tuple[FusionGroup, ...]:
    """The groups that joins of users leave, applied until they make no larger one."""
    op_costs = price_ops(graph)[0] if op_costs is None else op_costs
    before, costs_before = groups, moved.group_costs(graph, groups, op_costs, execution)
    costs = costs_before
    while True:
        larger = larger_groups(graph, groups, op_costs, costs, own_joins())
        if len(larger) == len(groups):
            break
        groups = larger
        costs = moved.group_costs(graph, groups, op_costs, execution)
    return with_apart(graph, before, op_costs, costs_before, own_joins(), groups)


def _adds_up(graph: OpGraph, groups: Sequence[FusionGroup]) -> bool:
    """Whether the launches of each kind of kernel add up to the number of such kernels."""
    if not graph.repeats:
        return True
    left: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        launched = math.prod(graph.repeats[r].count for r in group.repeats)
        left[tuple(graph.ops[i].target for i in group.ops)] += group.times - launched
    return not any(left.values())


def _grown(graph: OpGraph) -> list[Open]:
    """Kernels by rank, equal between every two iterations of a repeat."""
    facts, around = Facts(graph), Neighbourhood(graph)
    while True:
        partition = Partition(facts, around)
        grow(partition)
        merge_kernels(partition)
        kernels = [kernel for kernel in partition.kernels if kernel.members]
        if not around.sites or not around.bar_uneven([kernel.members for kernel in kernels]):
            return kernels
