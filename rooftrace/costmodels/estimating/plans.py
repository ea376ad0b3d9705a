"""From an op graph to a plan: price every op, group, add up traffic; still without a chip.

A plan is made once per execution model; `estimate` puts it on chips.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from rooftrace._extensions import failures
from rooftrace.costmodels.costs import MATRIX, Cost
from rooftrace.costmodels.estimating.advice import (
    cache_products,
    given_formulas,
    joined_by_users,
    unknown_groups,
)
from rooftrace.costmodels.estimating.executions import ExecutionModel, execution_model
from rooftrace.costmodels.fusion import FusionGroup, fuse
from rooftrace.costmodels.pricing import price_ops, unknown_bytes, with_families
from rooftrace.costmodels.rewriting import rewrite
from rooftrace.costmodels.timing import Launch
from rooftrace.costmodels.traffic import bytes_by_role, compulsory_bytes, group_costs, layouts
from rooftrace.tracer.asking import check_graph
from rooftrace.tracer.graph import ROLES, OpGraph, pattern_of


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes through HBM in one step, by role (see rooftrace.tracer.graph.graph.ROLES)."""

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


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An op without a rule: no FLOP of it is counted.

    bytes: what the totals have (see `price.without_rule`).  bytes_least, bytes_most: bounds, if it
    touches no byte twice (see `price.unknown_bytes`).
    """

    target: str
    count: int
    bytes: int
    shapes: str
    modules: tuple[str, ...]
    bytes_least: int = 0
    bytes_most: int | None = None

    @property
    def most(self) -> int:
        """The upper bound; `bytes` where none is known."""
        return self.bytes if self.bytes_most is None else self.bytes_most

    @property
    def stub(self) -> str:
        """A rule to paste and fill in."""
        name = self.target.rsplit(".", 1)[0]
        function = name.replace(".", "_").strip("_")
        return (
            f'@rooftrace.rule("{name}")\ndef {function}(op):\n'
            f"    return rooftrace.Cost.of(vector=...) + op.streamed()"
        )


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a total rests on explicit rules."""

    ops: int
    ops_with_rule: int
    bytes: int
    bytes_with_rule: int
    unsupported: tuple[Unsupported, ...]

    @property
    def bytes_with_rule_share(self) -> float:
        """Share of the priced bytes that a rule accounts for (1 when nothing moves)."""
        return self.bytes_with_rule / self.bytes if self.bytes else 1.0


@dataclass(frozen=True)
class Plan:
    """A graph priced under one execution model; still without a chip.

    source: the graph as captured.  graph: after rewriting (naive attention stands as its matrix
    products).  op_costs: one per op, bound to storages.  groups and costs: kernels in launch order
    and what each costs, once.  launches: what the host does.  compulsory: bytes that any execution
    moves.  notes: what was rewritten, and what about the structure is worth knowing, a sentence
    each.
    """

    source: OpGraph
    graph: OpGraph
    execution: ExecutionModel
    op_costs: tuple[Cost, ...]
    groups: tuple[FusionGroup, ...]
    costs: tuple[Cost, ...]
    launches: tuple[Launch, ...]
    coverage: Coverage
    compulsory: int
    notes: tuple[str, ...] = ()

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
    def channels_last(self) -> bool:
        """Whether a compiler lays out images with channels last."""
        return self.execution.fusion == "detected" and layouts.keeps_channels_last(self.graph)

    @cached_property
    def precision(self) -> str:
        """The precision that most matrix FLOPs compute in ("fp32" where there are none)."""
        flops: Counter[str] = Counter()
        for work, flop in self.total.work.items():
            if work.operation in MATRIX:
                flops[work.precision] += flop
        return flops.most_common(1)[0][0] if flops else "fp32"


def plan(graph: OpGraph, execution: str | ExecutionModel = "efficient") -> Plan:
    """Price `graph` under an execution model: rewrite, price each op, fuse, add up traffic.

    Raises ExecutionError for a preset that does not exist.
    """
    check_graph(graph, "plan")
    model = execution_model(execution)
    op_costs, known = price_ops(graph)
    classified = with_families(graph, op_costs)
    rewritten, notes = rewrite(classified, model)
    if rewritten is not classified:
        op_costs, known = price_ops(rewritten)
    groups = fuse(rewritten, model, op_costs)
    costs = group_costs(rewritten, groups, op_costs, model)
    return Plan(
        graph,
        rewritten,
        model,
        op_costs,
        groups,
        costs,
        _launches(rewritten, groups, model),
        _coverage(rewritten, op_costs, known),
        compulsory_bytes(rewritten, op_costs),
        (
            *notes,
            *given_formulas(rewritten),
            *joined_by_users(groups),
            *unknown_groups(rewritten, op_costs),
            *cache_products(rewritten, op_costs),
            *failures("rooftrace.rules", "rooftrace.joins"),
        ),
    )


def regrouped(planned: Plan, groups: tuple[FusionGroup, ...], generated: bool = True) -> Plan:
    """The same step in other groups, which are in an order that every dependency allows.

    generated: whether a compiler writes their kernels, if it does in `planned`.
    """
    graph, model = planned.graph, planned.execution
    costing = model if generated else replace(model, fusion="none")
    costs = group_costs(graph, groups, planned.op_costs, costing)
    launches = _launches(graph, groups, model)
    return replace(planned, groups=groups, costs=costs, launches=launches)


def _launches(
    graph: OpGraph, groups: Sequence[FusionGroup], execution: ExecutionModel
) -> tuple[Launch, ...]:
    """What the host does, in order: it enqueues groups, and waits at syncs.

    eager: every op of the graph is dispatched, views too.  compiled: every group.  graph:
    everything up to the next wait at once.  A wait stands before the first group with an op that
    comes after it.
    """
    dispatch = execution.dispatch
    syncs = deque(op for op in graph.ops if op.kind == "sync")
    launches: list[Launch] = []
    done = 0  # ops dispatched so far

    def enqueue(last: int, repeats: tuple[int, ...] | None) -> int:
        """Dispatches for what is next; those in other repeats are launches of their own."""
        nonlocal done
        if dispatch == "graph":
            if repeats and not launches:
                launches.append(Launch(1, on_device=False))
            return 1 if not launches or launches[-1].sync else 0
        if dispatch == "compiled":
            return 1
        ops, done = graph.ops[done : last + 1], max(done, last + 1)
        for inside, members in groupby(ops, lambda op: op.repeats):
            launches.append(Launch(len(list(members)), on_device=False, repeats=inside))
        if ops and ops[-1].repeats == repeats:
            return launches.pop().dispatches
        return 0

    def wait() -> None:
        sync = syncs.popleft()
        count = enqueue(sync.id, sync.repeats) if dispatch == "eager" else 0
        launches.append(Launch(count, on_device=False, sync=True, repeats=sync.repeats))

    for group in groups:
        while syncs and syncs[0].id < group.ops[-1]:
            wait()
        count = enqueue(group.ops[-1], group.repeats)
        launches.append(Launch(count, on_device=True, repeats=group.repeats))
    while syncs:
        wait()
    if dispatch == "eager" and done < len(graph.ops):
        enqueue(len(graph.ops) - 1, None)
    return tuple(launches)


def _coverage(graph: OpGraph, costs: Sequence[Cost], known: Sequence[bool]) -> Coverage:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    least: Counter[str] = Counter()
    most: Counter[str] = Counter()
    where: dict[str, dict[str, None]] = defaultdict(dict)
    shapes: dict[str, str] = {}
    ops = total = 0
    for op, cost, has_rule in zip(graph.ops, costs, known, strict=True):
        if op.kind != "kernel":
            continue
        times = graph.times(op)
        size = times * (cost.bytes() + cost.bytes("link"))
        ops += times
        total += size
        if not has_rule:
            counts[op.target] += times
            sizes[op.target] += size
            low, high = unknown_bytes(graph, op)
            least[op.target] += times * low
            most[op.target] += times * high
            where[op.target][pattern_of(op.module)] = None
            shapes.setdefault(op.target, _shapes(graph, op.inputs[:3]))
    unsupported = tuple(
        Unsupported(
            target,
            counts[target],
            sizes[target],
            shapes[target],
            tuple(where[target]),
            least[target],
            most[target],
        )
        for target in sorted(counts, key=lambda t: (-sizes[t], t))
    )
    return Coverage(ops, ops - counts.total(), total, total - sizes.total(), unsupported)


def _shapes(graph: OpGraph, inputs: Sequence[int]) -> str:
    """ "bf16[8, 2048], int64[8]"."""
    tensors = (graph.values[i] for i in inputs)
    return ", ".join(f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in tensors)
