"""What a model is made of, read from its traced graph: modules, attention, kernels, and how blocks
are wired.  Nothing is taken from a template or from the name of a model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rooftrace.costmodels.anatomy.wiring import Wiring, wirings
from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.planning import Plan
from rooftrace.costmodels.registry import find_rule
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.paths import pattern_of

ATTENTION = "attention"
"""The kind of kernels that compute scores and weigh values with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePattern:
    """Modules with parameters of their own whose paths differ in indices alone."""

    pattern: str  # path with starred indices
    kind: str  # name of the class of the first of them
    count: int
    params: int  # numbers in all of them
    bytes: int  # in all of them, as they are stored


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCalls:
    """Attention kernels of equal sizes."""

    heads: int  # of queries
    heads_kv: int  # of keys and values, as the kernel gets them
    width: int  # numbers of a query and of a key, each head
    width_values: int
    queries: int  # positions that ask
    keys: int  # positions that are asked
    useful: float  # share of the scores that the mask lets through
    count: int  # kernels of a step

    @property
    def kind(self) -> str:
        """How heads share keys and values: multi-head, grouped-query or multi-query."""
        if self.heads_kv == self.heads:
            return "multi-head"
        return "multi-query" if self.heads_kv == 1 else "grouped-query"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKind:
    """Kernels of one kind: that of their rule, or the name of what was fused."""

    kind: str
    count: int  # of a step
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a traced model in one phase, most of each first."""

    patterns: tuple[ModulePattern, ...]
    classes: tuple[tuple[str, int], ...]  # of modules that ran with none inside, and how many
    attention: tuple[AttentionCalls, ...]
    kernels: tuple[KernelKind, ...]
    wirings: tuple[Wiring, ...]  # the stack, then its blocks


def anatomy(estimate: Estimate) -> Anatomy:
    """What the model of an estimate is made of, by the graph as its execution runs it."""
    return Anatomy(
        patterns=tuple(_patterns(estimate.plan.source)),
        classes=tuple(_classes(estimate.plan.source)),
        attention=tuple(_attention(estimate.plan)),
        kernels=tuple(_kernels(estimate)),
        wirings=wirings(estimate),
    )


def _patterns(graph: OpGraph) -> list[ModulePattern]:
    owners: dict[str, dict[str, int]] = defaultdict(dict)  # pattern: {path: how often it stands}
    params: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.role != "weights" or tensor.storage != index or not tensor.name:
            continue
        path = tensor.name.rpartition(".")[0]
        pattern, times = pattern_of(path), graph.times(tensor)
        owners[pattern][path] = max(times, owners[pattern].get(path, 0))
        params[pattern] += times * tensor.elements
        sizes[pattern] += times * tensor.nbytes
    patterns = [
        ModulePattern(
            pattern=pattern,
            kind=graph.modules.get(next(iter(paths)), ""),
            count=sum(paths.values()),
            params=params[pattern],
            bytes=sizes[pattern],
        )
        for pattern, paths in owners.items()
    ]
    return sorted(patterns, key=lambda entry: (-entry.params, entry.pattern))


def _classes(graph: OpGraph) -> list[tuple[str, int]]:
    """Classes of the modules that have no others inside, as often as they run."""
    around = {path.rpartition(".")[0] for path in graph.modules if path}
    times: dict[str, int] = {}
    for op in graph.ops:
        if op.part == "forward":
            times[op.module] = max(graph.times(op), times.get(op.module, 0))
    counts: Counter[str] = Counter()
    for path, kind in graph.modules.items():
        if path not in around and path in times:
            counts[kind] += times[path]
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def _attention(planned: Plan) -> Iterator[AttentionCalls]:
    graph, counts = planned.graph, Counter[tuple[int | float, ...]]()
    for op, cost in zip(graph.ops, planned.op_costs, strict=True):
        rule = find_rule(op.target)
        if op.part != "forward" or rule is None or rule.kind_of(cost) != ATTENTION:
            continue
        shapes = [graph.values[index].shape for index in op.inputs[:3]]
        if len(shapes) < 3 or any(len(shape) != 4 for shape in shapes):
            continue  # packed or ragged: their lengths are no sizes of a tensor
        query, key, value = shapes
        dense = cost.flops()
        useful = cost.flops(counts=("useful",)) / dense if dense else 1.0
        sizes = (query[1], key[1], query[3], value[3], query[2], key[2], useful)
        counts[sizes] += graph.times(op)
    for (heads, heads_kv, width, wide, queries, keys, useful), count in counts.most_common():
        yield AttentionCalls(
            heads=int(heads),
            heads_kv=int(heads_kv),
            width=int(width),
            width_values=int(wide),
            queries=int(queries),
            keys=int(keys),
            useful=useful,
            count=count,
        )


def _kernels(estimate: Estimate) -> Sequence[KernelKind]:
    planned = estimate.plan
    counts: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    for row in estimate.rows:
        kind = row.name
        if len(row.ops) == 1:
            op = planned.graph.ops[row.ops[0]]
            rule = find_rule(op.target)
            kind = rule.kind_of(planned.op_costs[row.ops[0]]) if rule is not None else "no rule"
        counts[kind] += row.count
        seconds[kind] += row.timing.t_device
    kinds = [KernelKind(kind=k, count=counts[k], seconds=seconds[k]) for k in counts]
    return sorted(kinds, key=lambda entry: (-entry.seconds, entry.kind))
