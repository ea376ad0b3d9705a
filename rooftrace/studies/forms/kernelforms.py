"""Kernels of a plan as formulas for any sizes, records of its numbers, and points of sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct, structs

from rooftrace.costmodels.estimates import rows
from rooftrace.costmodels.fusion import ExecutionModel, Launch, Plan, traffic
from rooftrace.costmodels.kernels import group_class
from rooftrace.costmodels.kernels.instructions import Issued, group_issued
from rooftrace.costmodels.kernels.knobs import CLASSES
from rooftrace.costmodels.kernels.works import KernelAmounts, Works
from rooftrace.costmodels.memory import Memory
from rooftrace.costmodels.ops import COMPUTED, WIRES, Access, AttentionSizes, Cost, Work
from rooftrace.costmodels.timing import queue, streams
from rooftrace.costmodels.timing.queue import KernelExchange, exchanges_of
from rooftrace.costmodels.timing.steps import Part
from rooftrace.graph import pattern_of
from rooftrace.graph.formulas import Formula, leaves

Array = np.ndarray[Any, np.dtype[Any]]
Places = np.ndarray[Any, np.dtype[np.integer[Any]]]


class Points:
    """P points, each with an integer for every size.

    columns: an integer array of length P for each name.  apart: whether each point counts as
    different from all others.
    """

    def __init__(
        self, columns: Mapping[str, Sequence[int] | Array], *, apart: bool = False
    ) -> None:
        self.names = tuple(columns)
        self.columns = [np.asarray(column, dtype=np.int64) for column in columns.values()]
        self._apart = apart
        self._parts: dict[frozenset[int], tuple[list[Array], Places | None]] = {}

    def __len__(self) -> int:
        return len(self.columns[0]) if self.columns else 1

    def part(self, sizes: frozenset[int]) -> tuple[list[Array], Places | None]:
        """The distinct points of some sizes, by their indices, and the index of each point there.

        Columns of other sizes hold one number.  The second is None where all points differ, or all
        are equal.
        """
        if self._apart:
            return self.columns, None
        if sizes not in self._parts:
            self._parts[sizes] = self._different(sizes)
        return self._parts[sizes]

    def _different(self, sizes: frozenset[int]) -> tuple[list[Array], Places | None]:
        keys, span = np.zeros(len(self), dtype=np.int64), 1
        for place in sorted(sizes):
            values, inverse = np.unique(self.columns[place], return_inverse=True)
            if span * len(values) > 1 << 62:
                return self.columns, None
            keys = keys * len(values) + inverse
            span *= len(values)
        _, first, at = np.unique(keys, return_index=True, return_inverse=True)
        if len(first) == len(self):
            return self.columns, None
        columns = [
            column[first] if place in sizes else column[first[:1]]
            for place, column in enumerate(self.columns)
        ]
        return columns, at.astype(np.int32) if len(first) > 1 else None

    def apart(self) -> Points:
        """These points, each of which counts as different from all others."""
        return Points(dict(zip(self.names, self.columns, strict=True)), apart=True)

    def where(self, chosen: Places) -> Points:
        """Some of the points."""
        return Points({name: c[chosen] for name, c in zip(self.names, self.columns, strict=True)})


# -- planrecords -----------------------------------------------------------------------------------


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
    """A kernel: its ops and class, how often it runs, and its cost once."""

    ops: tuple[int, ...]
    name: str
    kind: str
    spread_kind: str
    module: str  # indices starred
    times: int
    work: tuple[tuple[Work, int], ...]  # the entries of `Cost.work`
    traffic: tuple[AccessNumbers, ...]
    issued: Issued
    eager: bool  # whether a mixed step does not compile it
    exchange: KernelExchange | None  # with other processes
    of_experts: bool  # whether it is work of experts
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
    stream_order: streams.StreamOrder | None  # None: of one stream, without other processes
    phase: str


def numbers_of(planned: Plan, with_memory: bool = True) -> PlanNumbers:
    """The numbers of a plan; with_memory: also the bytes that are alive."""
    numbers = _numbers_of(planned)
    return remembering(numbers, planned) if with_memory else numbers


def remembering(numbers: PlanNumbers, planned: Plan) -> PlanNumbers:
    """The numbers of a plan with the bytes that are alive."""
    memory = planned.memory
    return structs.replace(numbers, alive=_alive(memory), weights=memory.weights, kv=memory.kv)


def _numbers_of(planned: Plan) -> PlanNumbers:
    graph, costs = planned.graph, planned.costs
    scales = traffic.access_scales(graph, planned.groups, planned.op_costs, planned.execution)
    if any(scales):
        plain = _without_factors(planned.execution)
        costs = traffic.group_costs(graph, planned.groups, planned.op_costs, plain)
    exchanges = exchanges_of(planned)
    return PlanNumbers(
        groups=tuple(
            _group(planned, index, cost, scales[index], exchanges.get(index))
            for index, cost in enumerate(costs)
        ),
        launches=planned.launches,
        counts=tuple(repeat.count for repeat in graph.repeats),
        alive=(),
        weights=0,
        kv=0,
        items=graph.workload.get("items") or 1,
        copies_layouts=planned.copies_layouts,
        stream_order=streams.StreamOrder.of(planned) if streams.has_streams(planned) else None,
        phase=graph.phase,
    )


def _alive(memory: Memory) -> tuple[int, ...]:
    """Bytes in memory as each op runs, in the iteration in which there are most."""
    different = {(moment.op, id(moment.sizes)): moment for moment in memory.timeline.moments}
    most: dict[int, int] = {}
    for moment in different.values():
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
    modules = {pattern_of(graph.ops[number].module) for number in group.ops}
    if len(modules) > 1:  # else no size decides
        modules = {pattern_of(rows.lead_op(planned, group).module)}
    kind = group_class(graph, group.ops, planned.lays_out(index), planned.op_costs)
    return GroupNumbers(
        ops=group.ops,
        name=group.name,
        kind=kind,
        spread_kind=queue.spread_kind(planned, index, kind),
        module=modules.pop(),
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
        issued=group_issued(planned, index, kind),
        eager=index in planned.eager,
        exchange=exchange,
        of_experts=queue.computes_experts(planned, index),
        aside=queue.runs_aside(planned, index),
    )


# -- kernelforms -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amount:
    """A number of a plan: a formula, or a draw of one.

    formula: of a plain number; else of the factor or dividend of the draw.
    """

    kind: str
    formula: Formula
    draw: leaves.Draw | None = None
    constant: float | None = None  # a fractional number, in place of the formula

    @property
    def sizes(self) -> frozenset[int]:
        """The indices of the sizes that it depends on."""
        draw = self.draw
        if draw is None:
            return self.formula.symbols
        parts = (self.formula, *draw.parts)
        return frozenset().union(*(part.symbols for part in parts))

    def over(self, columns: Sequence[Array]) -> Array:
        """The numbers at points."""
        if self.constant is not None:
            return np.array([self.constant])
        if self.draw is None:
            return self.formula.over(columns)
        reached = self.draw.over(columns)
        value = None if self.kind == leaves.REACHED else self.formula.over(columns)
        number: Array = leaves.Varying((), self.kind).number(value, reached)
        return number

    def written(self, names: Sequence[str]) -> str:
        """The amount in symbols."""
        if self.constant is not None:
            return f"{self.constant:g}"
        if self.draw is None:
            return self.formula.written(names)
        draw, formula = self.draw.written(names), self.formula.written(names)
        return {
            leaves.REACHED: draw,
            leaves.TOUCHED: f"({formula}) {draw}",
            leaves.EACH: f"({formula}) / {draw}",
        }[self.kind]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one access, with the factor that the execution has on them."""

    access: AccessNumbers
    amount: Amount

    def over(self, columns: Sequence[Array]) -> Array:
        """Bytes at points, rounded as in a plan."""
        size = self.amount.over(columns)
        factor, copies = self.access.factor, self.access.copies
        if factor == 1:
            return size
        return copies * np.rint(size / copies * factor).astype(np.int64)


@dataclass(frozen=True)
class WorkForm:
    """Work of one key, with its FLOP and sizes as amounts.

    key: without its sizes.  sizes: its rows, columns and inner.  attention: the sizes of
    `AttentionSizes`, in their order; none of other work.
    """

    key: Work
    flop: Amount
    sizes: tuple[Amount | None, ...]
    attention: tuple[Amount, ...]

    def named(self, attention: bool) -> dict[str, Amount]:
        """The sizes by name: those of attention, or of the product."""
        if attention:
            return dict(zip(AttentionSizes.__struct_fields__, self.attention, strict=True))
        pairs = zip(("rows", "columns", "inner"), self.sizes, strict=True)
        return {name: size for name, size in pairs if size is not None}

    @property
    def product(self) -> tuple[Formula, ...]:
        """M, N and K; none unless all are formulas."""
        formulas = [size.formula for size in self.sizes if size is not None and size.draw is None]
        return tuple(formulas) if len(formulas) == len(self.sizes) else ()


@dataclass(frozen=True, kw_only=True)
class KernelForm:
    """A kernel of a plan, its numbers as amounts."""

    numbers: GroupNumbers
    times: Amount
    works: tuple[WorkForm, ...]
    traffic: tuple[Traffic, ...]
    issued: tuple[Amount, ...]  # as in `Issued`
    exchanged: tuple[Amount, ...]  # `nbytes` of its exchange, then those that experts get, and rows

    @property
    def key(self) -> Any:
        """Equal for kernels of equal columns."""
        numbers = self.numbers
        exchange = numbers.exchange
        with_experts = exchange and exchange.experts and exchange.experts.way
        talks = exchange and (exchange.kind, exchange.group, with_experts)
        return (numbers.kind, numbers.spread_kind, numbers.eager, numbers.of_experts, numbers.aside,
                self.works, self.traffic, self.issued, talks, self.exchanged)  # fmt: skip

    @cached_property
    def depends(self) -> frozenset[int]:
        """The indices of the sizes that its numbers depend on, `times` apart."""
        amounts = [*self.issued, *self.exchanged, *(item.amount for item in self.traffic)]
        for work in self.works:
            amounts += [work.flop, *(size for size in work.sizes if size), *work.attention]
        return frozenset().union(*(amount.sizes for amount in amounts))


def flops_of(kernels: Iterable[KernelForm]) -> Iterator[tuple[Amount, Amount]]:
    """The dense FLOP of each work, with how often it is done."""
    for kernel in kernels:
        for work in kernel.works:
            if work.key.is_dense:
                yield kernel.times, work.flop


def bytes_of(
    kernels: Iterable[KernelForm], wire: str = "hbm", role: str | None = None
) -> Iterator[tuple[Amount, Traffic]]:
    """The accesses over a wire, each with how often it is done."""
    for kernel in kernels:
        for item in kernel.traffic:
            if item.access.wire == wire and role in (None, item.access.role):
                yield kernel.times, item


class KernelRows:
    """Kernels at points, as rows of the sizes that each has; parts of them are equal kernels."""

    def __init__(self, points: Points) -> None:
        self.points = points
        self.parts: list[Part] = []
        self.length = 0
        self._columns: dict[str, list[Array]] = defaultdict(list)
        self._works: list[Works] = []
        self._attention: list[Works] = []

    def add(self, kernels: Sequence[KernelForm], warm: Array | float = 0.0) -> None:
        """Add equal kernels as one part.  warm: bytes that the last cache still holds."""
        kernel = kernels[0]
        numbers = kernel.numbers
        times = Amount(leaves.PLAIN, Formula.total((1, each.times.formula) for each in kernels))
        columns, at = self.points.part(kernel.depends | times.sizes)
        size = max(map(len, columns), default=1)
        where = slice(self.length, self.length + size)
        self.length += size

        def over(amount: Amount | Traffic) -> Any:
            numbers = amount.over(columns).astype(float)
            return float(numbers[0]) if len(numbers) == 1 else numbers

        self._works += _works_of(_together(kernel.works, _product), where, over)
        attention = _together((w for w in kernel.works if w.attention), lambda w: w.attention)
        self._attention += _works_of(attention, where, over, attention=True)
        bytes_ = [(item.access, over(item)) for item in kernel.traffic]
        hbm = [(access, amount) for access, amount in bytes_ if access.wire == "hbm"]
        amounts = {
            "kind": CLASSES.index(numbers.kind),
            "bytes": sum((amount for _, amount in hbm), 0.0),
            "warm": warm,
            "instructions": over(kernel.issued[0]),
            "trips": over(kernel.issued[1]),
            "after": over(kernel.issued[2]),
            "turned": over(kernel.issued[3]),
            **{
                wire: sum((amount for access, amount in bytes_ if access.wire == wire), 0.0)
                for wire in WIRES[1:]
            },
            "eager": numbers.eager,
            "times": over(times),
        }
        for name, amount in amounts.items():
            self._columns[name].append(np.broadcast_to(amount, (size,)))
        self.parts.append(
            Part(
                where=where,
                at=at,
                spread_kind=numbers.spread_kind,
                exchange=_exchange_of(kernel, over),
                of_experts=numbers.of_experts,
                aside=numbers.aside,
            )
        )

    def kernels(self) -> tuple[KernelAmounts, Array]:
        """All rows, and how many kernels each stands for."""
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        times: Array = columns.pop("times")
        works, attention = tuple(self._works), tuple(self._attention)
        return KernelAmounts(**columns, works=works, attention=attention), times


def _exchange_of(kernel: KernelForm, over: Callable[[Amount], Any]) -> KernelExchange | None:
    exchange = kernel.numbers.exchange
    if exchange is None:
        return None
    nbytes, *others = map(over, kernel.exchanged)
    experts = exchange.experts
    if experts is not None:
        experts = structs.replace(experts, nbytes=others[0], rows=others[1])
    return replace(exchange, nbytes=nbytes, experts=experts)


def _product(work: WorkForm) -> Hashable:
    """Equal for works that are one product, whatever they count as."""
    key = work.key if None in work.sizes else structs.replace(work.key, count="useful")
    return key, work.sizes, work.attention


def _together(
    works: Iterable[WorkForm], alike: Callable[[WorkForm], Hashable]
) -> Iterator[tuple[WorkForm, list[Amount]]]:
    """The last of those works that take time and are alike, with the FLOP of all of them."""
    groups: dict[Hashable, list[WorkForm]] = {}
    for work in works:
        if work.key.count in COMPUTED:
            groups.setdefault(alike(work), []).append(work)
    for members in groups.values():
        yield members[-1], [work.flop for work in members]


def _works_of(
    works: Iterable[tuple[WorkForm, list[Amount]]],
    where: slice,
    over: Callable[[Amount], Any],
    *,
    attention: bool = False,
) -> Iterator[Works]:
    """Works as arrays over rows, without those of no FLOP.

    attention: whether to take the sizes of attention in place of M, N and K.
    """
    for work, flops in works:
        flop = sum(map(over, flops))
        if not np.any(flop):
            continue
        sizes: dict[str, Any] = {n: over(size) for n, size in work.named(attention).items()}
        if attention:
            sizes = {"attention": sizes}
        yield Works(key=work.key, row=where, flop=flop, **sizes)
