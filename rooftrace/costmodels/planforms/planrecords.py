"""The numbers of a plan that times and totals are computed from, as one record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from msgspec import Struct

from rooftrace.costmodels.costs import Access, Cost, Work
from rooftrace.costmodels.estimating import rows
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.kernels import group_class
from rooftrace.costmodels.memory import Memory
from rooftrace.costmodels.planning import Launch, Plan
from rooftrace.costmodels.timing import steptimes, streams
from rooftrace.costmodels.timing.exchanges import KernelExchange, exchanges_of
from rooftrace.costmodels.traffic import moved
from rooftrace.tracer.paths import pattern_of


class AccessNumbers(Struct, frozen=True):
    """An entry of `Cost.traffic`: `size` bytes before the factor of the execution on them.

    copies: how many equal storages it stands for; the factor is on each.
    """

    role: str
    write: bool
    wire: str
    size: int
    copies: int = 1
    factor: float = 1.0


class GroupNumbers(Struct, frozen=True):
    """A kernel: what it is, how often it runs, and what it costs once."""

    ops: tuple[int, ...]
    name: str
    kind: str
    spread_kind: str
    module: str  # indices starred
    times: int
    work: tuple[tuple[Work, int], ...]  # the entries of `Cost.work`
    traffic: tuple[AccessNumbers, ...]
    eager: bool  # whether it runs outside of what a mixed step compiles
    exchange: KernelExchange | None  # with other processes
    of_experts: bool  # whether it computes what experts do
    aside: bool  # whether it runs on another stream than the main one


class PlanNumbers(Struct, frozen=True):
    """A plan in numbers.

    alive: bytes in memory as each op runs, at the most.  weights, kv: the most bytes of these
    roles.  counts: iterations by repeat.
    """

    groups: tuple[GroupNumbers, ...]
    launches: tuple[Launch, ...]
    counts: tuple[int, ...]
    alive: tuple[int, ...]
    weights: int
    kv: int
    items: int
    copies_layouts: bool
    streamed: bool  # whether it works on several streams, or with other processes


def numbers_of(planned: Plan, with_memory: bool = True) -> PlanNumbers:
    """The numbers of a plan; with_memory: also the bytes that are alive."""
    graph, costs = planned.graph, planned.costs
    scales = moved.access_scales(graph, planned.groups, planned.op_costs, planned.execution)
    if any(scales):
        plain = _without_factors(planned.execution)
        costs = moved.group_costs(graph, planned.groups, planned.op_costs, plain)
    memory, exchanges = planned.memory if with_memory else None, exchanges_of(planned)
    return PlanNumbers(
        groups=tuple(
            _group(planned, index, cost, scales[index], exchanges.get(index))
            for index, cost in enumerate(costs)
        ),
        launches=planned.launches,
        counts=tuple(repeat.count for repeat in graph.repeats),
        alive=_alive(memory) if memory else (),
        weights=memory.weights if memory else 0,
        kv=memory.kv if memory else 0,
        items=int(graph.workload.get("items") or 1),
        copies_layouts=planned.copies_layouts,
        streamed=streams.has_streams(planned),
    )


def _alive(memory: Memory) -> tuple[int, ...]:
    """Bytes in memory as each op runs, in the iteration in which there are most."""
    most: dict[int, int] = {}
    for moment in memory.timeline.moments:
        most[moment.op] = max(most.get(moment.op, 0), moment.total)
    return tuple(most[op] for op in sorted(most))


def _without_factors(execution: ExecutionModel) -> ExecutionModel:
    """The execution in the same kernels, with bytes as rules count them."""
    plain = execution.by_rules
    residency = replace(plain.weight_residency, attention=1.0, dense=1.0, moe=1.0)
    return replace(plain, weight_residency=residency, activation_fusion=1.0, elementwise=1.0)


def _group(
    planned: Plan,
    index: int,
    cost: Cost,
    scales: Mapping[Access, tuple[int, float]],
    exchange: KernelExchange | None,
) -> GroupNumbers:
    graph, group = planned.graph, planned.groups[index]
    modules = runs.kernel_modules(graph, group.ops, rows.lead_op(planned, group))
    kind = group_class(graph, group.ops, planned.lays_out(index), planned.op_costs)
    return GroupNumbers(
        ops=group.ops,
        name=group.name,
        kind=kind,
        spread_kind=steptimes.spread_kind(planned, index, kind),
        module=pattern_of(modules[0]),
        times=group.times,
        work=tuple(cost.work.items()),
        traffic=tuple(
            AccessNumbers(
                graph.values[access.storage].role,
                access.write,
                access.wire,
                size,
                *scales.get(access, (1, 1.0)),
            )
            for access, size in cost.traffic.items()
        ),
        eager=index in planned.eager,
        exchange=exchange,
        of_experts=steptimes.computes_experts(planned, index),
        aside=steptimes.runs_aside(planned, index),
    )
