"""From an op graph to a plan: price every op, group, add up traffic; still without a chip.

A plan is made once per execution model; `estimate` puts it on chips.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rooftrace._extensions import failures
from rooftrace._shown import short
from rooftrace.costmodels.costs import MATRIX, Cost
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.costmodels.fusion import FusionGroup, fuse
from rooftrace.costmodels.memory import Memory, memory
from rooftrace.costmodels.planning.advice import (
    attention_apart,
    cache_products,
    given_formulas,
    joined_by_users,
    rules_of_no_op,
    unknown_groups,
)
from rooftrace.costmodels.planning.compiled_parts import as_written, usual_execution
from rooftrace.costmodels.planning.coverage import Coverage, coverage_of
from rooftrace.costmodels.planning.launches import Launch, launches_of
from rooftrace.costmodels.pricing import price_ops, with_families
from rooftrace.costmodels.rewriting import reprice, rewrite
from rooftrace.costmodels.traffic import bytes_by_role, layouts, moved
from rooftrace.hardware.units import format_flops, format_traffic
from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.vocabulary import ROLES


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes through HBM in one step, by role (see rooftrace.tracer.vocabulary.ROLES)."""

    weights: int = 0
    activations: int = 0
    kv: int = 0
    gradients: int = 0
    optimizer: int = 0
    temporary: int = 0
    constants: int = 0

    @property
    def total(self) -> int:
        """All roles together: bytes_hbm."""
        return sum(self.to_dict().values())

    def to_dict(self) -> dict[str, int]:
        """Bytes by role name."""
        return {role: getattr(self, role) for role in ROLES}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A graph priced under one execution model; still without a chip."""

    source: OpGraph  # as captured
    graph: OpGraph  # after rewriting: naive attention stands as its matrix products
    execution: ExecutionModel
    op_costs: tuple[Cost, ...]  # one per op of `graph`, bound to storages
    groups: tuple[FusionGroup, ...]  # kernels in launch order
    costs: tuple[Cost, ...]  # what each of them costs, once
    launches: tuple[Launch, ...]  # what the host does
    coverage: Coverage
    compulsory: int  # bytes that any execution moves
    notes: tuple[str, ...] = ()  # what was rewritten or is worth knowing, a sentence each
    own_notes: tuple[str, ...] = ()  # those of them on rules and joins that users and packages add

    def __repr__(self) -> str:
        return short(
            self,
            f"{self.source.title}, {self.execution.name}: {sum(g.times for g in self.groups):,} "
            f"kernels, {format_flops(self.total.flops())}, {format_traffic(self.bytes.total)} "
            "of HBM; no chip yet",
        )

    @staticmethod
    def each(
        graph: OpGraph, executions: Sequence[str | ExecutionModel], *, savings: bool = True
    ) -> list[Plan]:
        """A plan under each execution model, as `plan` makes it; what they share is priced once.

        savings: whether the notes on rewrites say what these save.
        """
        OpGraph.check(graph, "plan")
        written = [as_written(graph, execution_model(execution)) for execution in executions]
        priced = {}
        for marked, _ in written:
            if id(marked) not in priced:
                costs = price_ops(marked)
                priced[id(marked)] = with_families(marked, costs[0]), costs
        plans = []
        for marked, model in written:
            classified, costs = priced[id(marked)]
            plans.append(_planned(graph, classified, costs, model, savings))
        return plans

    @cached_property
    def total(self) -> Cost:
        """Work and traffic of all groups."""
        work: Counter[Any] = Counter()
        traffic: Counter[Any] = Counter()
        for group, cost in zip(self.groups, self.costs, strict=True):
            for sums, amounts in ((work, cost.work), (traffic, cost.traffic)):
                for key, amount in amounts.items():
                    sums[key] += group.times * amount
        return Cost(work, traffic)

    def why(self, kernel: int) -> str:
        """Why the ops of a kernel are one: a line for each step by which it grew.

        kernel: its place in `groups`, which is the `index` of its row in an Estimate.
        """
        return self.groups[kernel].why(self.graph)

    @cached_property
    def bytes(self) -> Bytes:
        """HBM bytes by role."""
        return Bytes(**bytes_by_role(self.graph, self.total))

    @cached_property
    def memory(self) -> Memory:
        """Bytes alive over the step as it is run: what stays inside of a kernel takes none."""
        return memory(self.graph, self.unmade)

    @cached_property
    def unmade(self) -> frozenset[int]:
        """Storages that stay inside of the kernels that write them, and so never are in memory."""
        return _unmade(self)

    @cached_property
    def channels_last(self) -> bool:
        """Whether a compiler lays out images with channels last."""
        return self.execution.fusion == "detected" and layouts.keeps_channels_last(self.graph)

    @cached_property
    def eager(self) -> frozenset[int]:
        """The kernels of a mixed step that run outside of what is compiled, by their places."""
        if self.execution.dispatch != "mixed":
            return frozenset()
        ops = marks.eager_ops(self.graph.ops)
        return frozenset(n for n, group in enumerate(self.groups) if group.ops[0] in ops)

    def lays_out(self, kernel: int) -> bool:
        """Whether the compiler that writes a kernel lays out images with channels last."""
        return self.channels_last and kernel not in self.eager

    @property
    def copies_layouts(self) -> bool:
        """Whether convolutions copy what they read and write into another memory layout.

        They do where channels come first, as in eager mode; a compiler chooses a layout once.
        """
        return not self.channels_last and self.execution.fusion != "factor"

    @cached_property
    def precision(self) -> str:
        """The precision that most matrix FLOPs compute in ("fp32" where there are none)."""
        flops: Counter[str] = Counter()
        for work, flop in self.total.work.items():
            if work.operation in MATRIX:
                flops[work.precision] += flop
        return flops.most_common(1)[0][0] if flops else "fp32"

    @cached_property
    def unfused(self) -> Plan:
        """The plan of this step with a kernel for each op."""
        none = fuse(self.graph, replace(self.execution, fusion="none"), self.op_costs)
        return self.regrouped(none, generated=False)

    @property
    def by_rules(self) -> Plan:
        """The plan with bytes as rules count them: without measured factors."""
        return self.as_run(self.execution.by_rules)

    def as_run(self, execution: ExecutionModel) -> Plan:
        """The plan in the same kernels, with the knobs and dispatch of another execution model."""
        if execution is self.execution:
            return self
        return replace(self, execution=execution).regrouped(self.groups)

    def regrouped(self, groups: tuple[FusionGroup, ...], generated: bool = True) -> Plan:
        """The plan of this step with other groups, given in an order that every dependency allows.

        generated: whether a compiler writes their kernels, if it does in this plan.
        """
        costing = self.execution if generated else replace(self.execution, fusion="none")
        return replace(
            self,
            groups=groups,
            costs=moved.group_costs(self.graph, groups, self.op_costs, costing),
            launches=launches_of(self.graph, groups, self.execution),
        )


def plan(graph: OpGraph, execution: str | ExecutionModel | None = None) -> Plan:
    """Price `graph` under an execution model: rewrite, price each op, fuse, add up traffic.

    execution: default mixed for the step of a script, else efficient.  Weights and caches have the
    precision that the graph was priced in, else the declared one.
    Raises ExecutionError for a preset that does not exist.
    """
    OpGraph.check(graph, "plan")
    model = usual_execution(graph) if execution is None else execution
    return Plan.each(reprice(graph), [model])[0]


def _planned(
    graph: OpGraph,
    classified: OpGraph,
    priced: tuple[tuple[Cost, ...], tuple[bool, ...]],
    model: ExecutionModel,
    savings: bool,
) -> Plan:
    """classified: the graph with the family of each op.  priced: the costs of its ops."""
    op_costs, known = priced
    last: tuple[OpGraph, tuple[Cost, ...]] = classified, op_costs

    def costs_of(other: OpGraph) -> tuple[Cost, ...]:
        nonlocal last
        if last[0] is not other:
            last = other, price_ops(other)[0]
        return last[1]

    rewritten, notes = rewrite(classified, model, costs_of if savings else None)
    if rewritten is not classified:
        op_costs, known = price_ops(rewritten)
    groups = fuse(rewritten, model, op_costs)
    costs = moved.group_costs(rewritten, groups, op_costs, model)
    own_notes = (
        *rules_of_no_op(rewritten),
        *joined_by_users(groups),
        *failures("rooftrace.rules", "rooftrace.joins"),
    )
    return Plan(
        source=graph,
        graph=rewritten,
        execution=model,
        op_costs=op_costs,
        groups=groups,
        costs=costs,
        launches=launches_of(rewritten, groups, model),
        coverage=coverage_of(rewritten, op_costs, known),
        compulsory=moved.compulsory_bytes(rewritten, op_costs),
        notes=(
            *notes,
            *attention_apart(rewritten),
            *given_formulas(rewritten),
            *unknown_groups(rewritten, op_costs),
            *cache_products(rewritten, op_costs),
            *own_notes,
        ),
        own_notes=own_notes,
    )


def _unmade(planned: Plan) -> frozenset[int]:
    """Storages that stay inside of the kernels that write them, and so never are in memory."""
    graph = planned.graph
    inside = {
        access.storage
        for group in planned.groups
        if len(group.ops) > 1
        for op in group.ops
        for access in planned.op_costs[op].traffic
        if access.write
    }
    outside = {access.storage for cost in planned.costs for access in cost.traffic}
    kept = {graph.values[i].storage for i in (*graph.outputs, *graph.external)}
    return frozenset(inside - outside - kept)
