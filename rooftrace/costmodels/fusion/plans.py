"""Plans of a step: priced and grouped ops, and launches and syncs of the host."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any

from msgspec import Struct, structs

from rooftrace._extensions import failures
from rooftrace._shown import short
from rooftrace.costmodels.fusion import traffic
from rooftrace.costmodels.fusion.execution_advice import (
    Coverage,
    as_written,
    attention_apart,
    cache_products,
    coverage_of,
    given_formulas,
    joined_by_users,
    rules_of_no_op,
    unknown_groups,
    usual_execution,
)
from rooftrace.costmodels.fusion.executions import ExecutionModel, execution_model
from rooftrace.costmodels.fusion.grouping import fuse
from rooftrace.costmodels.fusion.kernels import THROUGH_LIBRARIES, library_calls
from rooftrace.costmodels.fusion.partition import FusionGroup
from rooftrace.costmodels.fusion.traffic import bytes_by_role
from rooftrace.costmodels.memory import Memory, memory
from rooftrace.costmodels.ops import (
    MATRIX,
    Cost,
    find_rule,
    price_ops,
    with_families,
)
from rooftrace.costmodels.rewrites import reprice, rewrite
from rooftrace.graph import PARTS, ROLES, Op, OpGraph, marks, refs
from rooftrace.hardware.units import format_flops, format_traffic


class Launch(Struct, frozen=True):
    """The next action of the host, once in every iteration of `repeats`."""

    dispatches: int  # things that the host enqueues
    on_device: bool  # whether the last of them is a kernel group
    sync: bool = False  # whether the host then waits for the device
    repeats: tuple[int, ...] = ()
    views: int = 0  # that the host makes
    calls: int = 0  # of modules by Python
    singles: int = 0  # ops between compiled graphs, which Python enqueues one by one
    entries: int = 0  # compiled graphs that the host enters
    # Host time of ops through CUDA libraries beyond that of a plain op, in plain ops.
    library: int = 0


COUNTED = frozenset({
    "aten._unique", "aten._unique2", "aten.bincount", "aten.masked_select", "aten.nonzero",
    "aten.repeat_interleave", "aten.unique_consecutive", "aten.unique_dim",
    "aten.unique_dim_consecutive", "torchvision.nms",
})  # fmt: skip
"""Ops whose results are as long as values say: on a GPU the host reads a count to allocate them.

Those of aten have the tag `dynamic_output_shape` in PyTorch; the NMS of torchvision selects the
boxes that stay by a mask.
"""
_INDEXED = frozenset({"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"})
"""Ops that turn masks among their indices into positions, by `nonzero`."""
_MASKS = ("bool", "uint8")


def waits(graph: OpGraph, op: Op) -> bool:
    """Whether the host waits for the device at this op: for a value, or for the size of a result.

    A length that the caller gives (`output_size` of repeat_interleave) is not asked for.
    """
    if op.kind != "kernel":
        return op.kind == "sync"
    if op.name in _INDEXED:
        places = refs({"indices": op.arguments.get("indices")})
        return any(graph.values[place].dtype in _MASKS for place in places)
    return op.name in COUNTED and op.arguments.get("output_size") is None


def waits_at(graph: OpGraph) -> Counter[str]:
    """How many times the host waits for the device in a step, by line."""
    lines = Counter[str]()
    for op in graph.ops:
        lines[op.source] += graph.times(op) if waits(graph, op) else 0
    return lines


_GENERATED = frozenset({"batch norm", "layer norm", "group norm"})
"""Kinds that a compiler writes itself."""
_AT_ONCE = frozenset(THROUGH_LIBRARIES) - {"rnn"}
"""Kinds whose kernel starts after all of their time on the host, not while it enqueues steps."""


def launches_of(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    execution: ExecutionModel,
    costs: Sequence[Cost] = (),
) -> tuple[Launch, ...]:
    """The launches of a step in order: the host enqueues groups, and waits at syncs.

    Under eager dispatch the host enqueues every kernel of the graph, makes every view and calls
    every module; under compiled it enqueues every group; under graph everything up to the next
    wait or graph break at once.  A wait or a break stands before the first group with an op that
    comes after it.  costs: of the ops; without them no op goes through a library.
    """
    return _Host(graph, execution, costs).launches_of(groups)


class _Host:
    """Collects the launches of the host, group after group."""

    def __init__(self, graph: OpGraph, execution: ExecutionModel, costs: Sequence[Cost]) -> None:
        self.graph, self.dispatch, self.costs = graph, execution.dispatch, costs
        eager = self.dispatch == "eager"
        self.alone = range(len(graph.ops)) if eager else marks.eager_ops(graph.ops)
        # Ops that are enqueued one by one, and were not yet.
        self.singles = deque(
            op for op in graph.ops if op.id in self.alone and op.name != marks.GRAPH_BREAK
        )
        self.stops = deque(op for op in graph.ops if op.kind == "sync" or self._breaks(op))
        self.calls = calls_before(graph) if self.singles else ()
        self.launches: list[Launch] = []

    def _breaks(self, op: Op) -> bool:
        return op.name == marks.GRAPH_BREAK and self.dispatch != "eager"

    def launches_of(self, groups: Sequence[FusionGroup]) -> tuple[Launch, ...]:
        """The launches for these groups."""
        if groups and self._begins_compiled(groups[0]):
            self.launches.append(Launch(0, on_device=False, entries=1))
        for group in groups:
            while self.stops and self.stops[0].id < group.ops[-1]:
                self._stop()
            before = self._enqueue(group.ops, group.repeats)
            stops = any(waits(self.graph, self.graph.ops[place]) for place in group.ops)
            rest, at = before.library, group.repeats
            rest = rest and min(rest, self._library(group.ops, _AT_ONCE))
            library = before.library - rest
            first = structs.replace(before, library=library, repeats=at, on_device=True, sync=stops)
            self.launches.append(first)
            if rest:
                self.launches.append(Launch(0, on_device=False, library=rest, repeats=at))
        while self.stops:
            self._stop()
        if self.singles:
            self._one_by_one(len(self.graph.ops) - 1, None)
        return tuple(self.launches)

    def _begins_compiled(self, first: FusionGroup) -> bool:
        """Whether a step begins in a graph of torch.compile, whose guards the host checks.

        Engines that launch graphs of kernels which they captured check none.
        """
        if self.dispatch not in ("compiled", "mixed") or first.ops[-1] in self.alone:
            return False
        return not any(self._breaks(stop) and stop.id < first.ops[-1] for stop in self.stops)

    def _enqueue(self, ops: Sequence[int], repeats: tuple[int, ...]) -> Launch:
        """The launch for the next group; ops in other repeats get separate launches."""
        if ops[-1] in self.alone:
            return self._one_by_one(ops[-1], repeats)
        if self.dispatch in ("compiled", "mixed"):
            return Launch(1, on_device=False, library=self._library(ops, _GENERATED))
        launches = self.launches
        if repeats and not launches:
            launches.append(Launch(1, on_device=False))
        return Launch(1 if not launches or launches[-1].sync else 0, on_device=False)

    def _one_by_one(self, last: int, repeats: tuple[int, ...] | None) -> Launch:
        ops: list[Op] = []
        while self.singles and self.singles[0].id <= last:
            ops.append(self.singles.popleft())
        for inside, members in groupby(ops, lambda op: op.repeats):
            launch = _eager(each := list(members), self.calls, inside)
            launch = structs.replace(launch, library=self._library([op.id for op in each]))
            if self.dispatch != "eager":
                launch = structs.replace(launch, dispatches=0, singles=launch.dispatches)
            self.launches.append(launch)
        if ops and ops[-1].repeats == repeats:
            return self.launches.pop()
        return Launch(0, on_device=False)

    def _library(self, ops: Sequence[int], generated: Collection[str] = ()) -> int:
        """Plain ops that these take in addition."""
        total = 0
        for place in ops if self.costs else ():
            op = self.graph.ops[place]
            rule = find_rule(op.target) if op.kind == "kernel" else None
            kind = rule.kind_of(self.costs[place]) if rule else ""
            if kind not in generated:
                total += THROUGH_LIBRARIES.get(kind, 0) * library_calls(op, self.graph, kind)
        return total

    def _stop(self) -> None:
        """Wait for the device, or go on with another compiled graph or with code in Python."""
        stop = self.stops.popleft()
        before = Launch(0, on_device=False)
        if self.singles and self.singles[0].id <= stop.id:
            before = self._one_by_one(stop.id, stop.repeats)
        if stop.kind == "sync":
            if stop.id not in self.alone:  # PyTorch enqueues the copy of a value, compiled or not
                before = structs.replace(before, singles=before.singles + 1)
            self.launches.append(structs.replace(before, sync=True, repeats=stop.repeats))
            return
        if marks.is_eager(stop):
            self.launches.append(structs.replace(before, repeats=stop.repeats))
            return
        graph = 1 if self.dispatch == "graph" else 0  # a graph captured and launched separately
        self.launches.append(
            structs.replace(before, dispatches=graph, entries=1, repeats=stop.repeats)
        )


def _eager(ops: Sequence[Op], calls: Sequence[int], repeats: tuple[int, ...]) -> Launch:
    """The launch that stands for these ops in eager mode."""
    views = sum(op.kind == "view" for op in ops)
    return Launch(
        len(ops) - views,
        on_device=False,
        repeats=repeats,
        views=views,
        calls=sum(calls[op.id] for op in ops),
    )


_PYTHON = frozenset({PARTS[0], PARTS[2]})
"""Parts whose ops Python code of modules calls; autograd runs backward without it."""
_NOT_CALLED = frozenset({"ModuleList", "ModuleDict"})


def calls_before(graph: OpGraph) -> tuple[int, ...]:
    """Number of modules called between each op and the one before it."""
    counts = []
    path: list[str] = []
    call = 0
    for op in graph.ops:
        if op.part not in _PYTHON:
            counts.append(0)
            continue
        here = op.module.split(".") if op.module else []
        pairs = zip(path, here, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if here == path and op.call != call:
            shared -= 1
        entered = (".".join(here[: depth + 1]) for depth in range(max(0, shared), len(here)))
        counts.append(sum(graph.modules.get(name, "") not in _NOT_CALLED for name in entered))
        path, call = here, op.call
    return tuple(counts)


# -- plans -----------------------------------------------------------------------------------------
# A plan is made once per execution model; `estimate` puts it on chips.


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes through HBM in one step, by role (see rooftrace.graph.ROLES)."""

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
    costs: tuple[Cost, ...]  # of each of them, once
    launches: tuple[Launch, ...]  # of the host
    coverage: Coverage
    notes: tuple[str, ...] = ()  # on rewrites and the like, a sentence each
    own_notes: tuple[str, ...] = ()  # notes on rules and joins that users and packages add

    def __repr__(self) -> str:
        return short(
            self,
            f"{self.source.title}, {self.execution.name}: {sum(g.times for g in self.groups):,} "
            f"kernels, {format_flops(self.total.flops())}, {format_traffic(self.bytes.total)} "
            "of HBM; no chip yet",
        )

    @staticmethod
    def each(
        graph: OpGraph,
        executions: Sequence[str | ExecutionModel],
        *,
        savings: bool = True,
        known: Plan | None = None,
    ) -> list[Plan]:
        """A plan under each execution model, as `plan` makes it; shared graphs are priced once.

        savings: whether the notes on rewrites name their savings.  known: a plan of a graph that
        this one was rewritten from, whose costs hold for the ops of both.
        """
        OpGraph.check(graph, "plan")
        written = [as_written(graph, execution_model(execution)) for execution in executions]
        before = None if known is None else (known.graph, known.op_costs)
        priced = {}
        for marked, _ in written:
            if id(marked) not in priced:
                costs = price_ops(marked, known=before)
                priced[id(marked)] = with_families(marked, costs[0]), costs
        plans = []
        for marked, model in written:
            classified, costs = priced[id(marked)]
            plans.append(_planned(graph, classified, costs, model, savings))
        return plans

    @staticmethod
    def rewritten(graph: OpGraph, execution: ExecutionModel) -> OpGraph:
        """The graph that a plan of `graph` prices and groups."""
        marked, model = as_written(graph, execution)
        return rewrite(with_families(marked, price_ops(marked)[0]), model)[0]

    @staticmethod
    def of_rewritten(graph: OpGraph, execution: ExecutionModel) -> Plan:
        """The plan of a graph that `rewritten` gave, without notes on rewrites."""
        return _grouped(graph, graph, price_ops(graph), execution, ())

    @cached_property
    def total(self) -> Cost:
        """Work and traffic of all groups."""
        work: Counter[Any] = Counter()
        accesses: Counter[Any] = Counter()
        for group, cost in zip(self.groups, self.costs, strict=True):
            for sums, amounts in ((work, cost.work), (accesses, cost.traffic)):
                for key, amount in amounts.items():
                    sums[key] += group.times * amount
        return Cost(work, accesses)

    def why(self, kernel: int) -> str:
        """Why the ops of a kernel are one: a line for each step by which it grew.

        kernel: its place in `groups`, which is the `index` of its row in an Estimate.
        """
        return self.groups[kernel].why(self.graph)

    @cached_property
    def compulsory(self) -> int:
        """Bytes that any execution moves."""
        return traffic.compulsory_bytes(self.graph, self.op_costs)

    @cached_property
    def bytes(self) -> Bytes:
        """HBM bytes by role."""
        return Bytes(**bytes_by_role(self.graph, self.total))

    @cached_property
    def memory(self) -> Memory:
        """Bytes alive over the step as it is run, without values inside of kernels."""
        return memory(self.graph, self.unmade)

    @cached_property
    def unmade(self) -> frozenset[int]:
        """Storages that stay inside of the kernels that write them, and so never are in memory."""
        graph = self.graph
        inside = {
            access.storage
            for group in self.groups
            if len(group.ops) > 1
            for op in group.ops
            for access in self.op_costs[op].traffic
            if access.write
        }
        outside = {access.storage for cost in self.costs for access in cost.traffic}
        kept = {graph.values[i].storage for i in (*graph.outputs, *graph.external)}
        return frozenset(inside - outside - kept)

    @cached_property
    def channels_last(self) -> bool:
        """Whether a compiler lays out images with channels last."""
        return self.execution.fusion == "detected" and traffic.keeps_channels_last(self.graph)

    @cached_property
    def eager(self) -> frozenset[int]:
        """Indices of the kernels of a mixed step that are not compiled."""
        if self.execution.dispatch != "mixed":
            return frozenset()
        ops = marks.eager_ops(self.graph.ops)
        return frozenset(n for n, group in enumerate(self.groups) if group.ops[0] in ops)

    def lays_out(self, kernel: int) -> bool:
        """Whether the compiler that writes a kernel lays out images with channels last."""
        return self.channels_last and kernel not in self.eager

    @property
    def copies_layouts(self) -> bool:
        """Whether convolutions copy inputs and outputs into another memory layout.

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
            costs=traffic.group_costs(self.graph, groups, self.op_costs, costing),
            launches=launches_of(self.graph, groups, self.execution, self.op_costs),
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
    price = (lambda side, ops: price_ops(side, ops)[0]) if savings else None
    rewritten, notes = rewrite(classified, model, price)
    if rewritten is not classified:
        priced = price_ops(rewritten, known=(classified, priced[0]))
    return _grouped(graph, rewritten, priced, model, notes)


def _grouped(
    graph: OpGraph, rewritten: OpGraph, priced: tuple[tuple[Cost, ...], tuple[bool, ...]],
    model: ExecutionModel, notes: tuple[str, ...],
) -> Plan:  # fmt: skip
    """priced: the costs of the ops of `rewritten`.  notes: on its rewrites."""
    op_costs, has_rule = priced
    groups = fuse(rewritten, model, op_costs)
    costs = traffic.group_costs(rewritten, groups, op_costs, model)
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
        launches=launches_of(rewritten, groups, model, op_costs),
        coverage=coverage_of(rewritten, op_costs, has_rule),
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
