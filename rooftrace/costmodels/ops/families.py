"""The family of each op, by its rule and by dataflow.

attention: the kernel, or a softmax between two batched products; with it the products that make
queries, keys and values and the one that reads the result, and the ops between.  All of a module
that calls attention and has no other products.  moe: everything under the smallest module with both
routing and the experts' products.  head: the product that makes the output.  All others have the
family of their rule.  No name of a model, module or op decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rooftrace.costmodels.ops.cost import Cost
from rooftrace.costmodels.ops.opview import find_rule
from rooftrace.graph import Op, OpGraph

UNDECIDED = "other"
"""The family of a traced op before `with_families` decides it."""
_STEPS_AFTER_HEAD = 16
_STEPS_TO_SOFTMAX = 16
_EXPERTS = 3
"""A module with routing and at least this many products is a mixture of experts."""
_ROOTS = frozenset({"aten.rsqrt", "aten.sqrt"})
_MOMENTS = frozenset({"aten.mean", "aten.var", "aten.var_mean"})
"""Elementary arithmetic that makes a norm written by hand: no rule of a single op can say so."""


def with_families(graph: OpGraph, costs: Sequence[Cost]) -> OpGraph:
    """Decide the family of every op that has none yet.  costs: of the graph's ops, in order."""
    if all(op.family != UNDECIDED for op in graph.ops):
        return graph
    flow = _Flow(graph, costs)
    attention = _AttentionOps(flow)
    modules = attention.modules
    moe = _moe_modules(flow, attention)
    norms = _hand_written_norms(flow)
    heads = _heads(flow)
    named: dict[str, str] = {}
    ops = []
    for op in graph.ops:
        if op.family != UNDECIDED:
            ops.append(op)
            continue
        family = "optimizer" if op.part == "optimizer" else flow.families[op.id]
        if family not in ("optimizer", "communication"):
            inside = named.get(op.module)
            if inside is None:
                inside = named[op.module] = _inside(op.module, modules, moe, norms)
            if op.id in attention.ops:
                family = "attention"
            elif inside:
                family = inside
            elif op.id in heads:
                family = "head"
        ops.append(op.relabelled(family=family))
    return graph.replace(ops=tuple(ops))


@dataclass(frozen=True)
class _Flow:
    """The kinds of the ops of a graph, and its dataflow."""

    graph: OpGraph
    costs: Sequence[Cost]

    @cached_property
    def of_forward(self) -> dict[str, list[int]]:
        """The ops of the forward pass, by module."""
        ops = defaultdict[str, list[int]](list)
        for op in self.graph.ops:
            if op.part == "forward":
                ops[op.module].append(op.id)
        return ops

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each op, "" of views, waits and ops without a rule."""
        rules = [find_rule(op.target) if op.kind == "kernel" else None for op in self.graph.ops]
        return [r.kind_of(c) if r else "" for r, c in zip(rules, self.costs, strict=True)]

    @cached_property
    def families(self) -> list[str]:
        """The family that each op has by its rule alone."""
        rules = [find_rule(op.target) if op.kind == "kernel" else None for op in self.graph.ops]
        pairs = zip(rules, self.costs, strict=True)
        return [r.family_of(c) if r else "elementwise" for r, c in pairs]

    def is_product(self, op: int) -> bool:
        """Whether an op is a matrix product, whichever rule says so."""
        return self.families[op] == "dense"

    @cached_property
    def sources(self) -> list[list[int]]:
        """By op: the producers of its operands."""
        made = self.graph.producers
        return [
            list(dict.fromkeys(p for i in op.inputs if (p := made.get(i)) is not None))
            for op in self.graph.ops
        ]

    @cached_property
    def readers(self) -> list[list[int]]:
        """By op: the readers of its results."""
        readers_of: list[list[int]] = [[] for _ in self.graph.ops]
        for op, sources in enumerate(self.sources):
            for source in sources:
                readers_of[source].append(op)
        return readers_of

    def reached(self, start: Iterable[int], up: bool, most: int | None = None) -> set[int]:
        """The ops above or below some ops, up to and with the next products.

        most: steps after which it ends without one.
        """
        edges = self.sources if up else self.readers
        seen: set[int] = set()
        front = [n for op in start for n in edges[op]]
        steps = 0
        while front and (most is None or steps < most):
            new = [n for n in dict.fromkeys(front) if n not in seen]
            seen.update(new)
            front = [n for op in new if not self._ends(op) for n in edges[op]]
            steps += 1
        return seen

    def _ends(self, op: int) -> bool:
        return self.is_product(op) or self.kinds[op] in ("attention", "softmax")


class _AttentionOps:
    """Attention by dataflow.

    cores: the ops of each attention call, by the path of the calling module.  modules: paths of
    those all of whose ops are attention.  mixed: paths of those with other products too.  ops: the
    ops of attention in the latter.
    """

    def __init__(self, flow: _Flow) -> None:
        self.flow = flow
        graph = flow.graph
        self.cores: dict[str, set[int]] = defaultdict(set)
        for op in graph.ops:
            if flow.kinds[op.id] == "attention":
                self.cores[op.module].add(op.id)
            elif flow.kinds[op.id] == "softmax":
                self.cores[op.module] |= self._by_hand(op)
        self.cores = {path: core for path, core in self.cores.items() if core}
        inner = _innermost(path for path in self.cores if path)
        self.modules = frozenset(path for path in inner if self._is_all_attention(path))
        self.mixed = frozenset(self.cores.keys() - self.modules)
        self.ops: set[int] = set()
        for path in self.mixed:
            self.ops |= self._around(self.cores[path])

    def _by_hand(self, softmax: Op) -> set[int]:
        """A softmax between two batched products, with these; nothing where it is none."""
        flow = self.flow
        above = flow.reached((softmax.id,), up=True, most=_STEPS_TO_SOFTMAX)
        below = flow.reached((softmax.id,), up=False, most=_STEPS_TO_SOFTMAX)
        first = {op for op in above if flow.kinds[op] == "bmm"}
        second = {op for op in below if flow.kinds[op] == "bmm"}
        if not first or not second:
            return set()
        ops = flow.graph.ops
        between = (above & self._reaching(first, above, up=True)) | self._reaching(
            second, below, up=False
        )
        members = {*between, *first, *second, softmax.id}
        return {op for op in members if ops[op].part == softmax.part}

    def _reaching(self, ends: Collection[int], within: Collection[int], up: bool) -> set[int]:
        """The ops of `within` on a path to one of `ends`."""
        edges = self.flow.readers if up else self.flow.sources
        reached: set[int] = set()
        stack = [n for op in ends for n in edges[op]]
        while stack:
            op = stack.pop()
            if op in within and op not in reached and op not in ends:
                reached.add(op)
                stack += edges[op]
        return reached

    def _is_all_attention(self, path: str) -> bool:
        """Whether attention depends on every product under a path, but for the first ones that
        read its result."""
        flow = self.flow
        inside = f"{path}."
        under = {
            op
            for module, ops in flow.of_forward.items()
            if module == path or module.startswith(inside)
            for op in ops
        }
        core = self.cores[path] & under
        after = {op for op in flow.reached(core, up=False) if op in under}
        wanted = core | after
        stack = list(wanted)
        while stack:
            for source in flow.sources[stack.pop()]:
                if source in under and source not in wanted:
                    wanted.add(source)
                    stack.append(source)
        return all(op in wanted for op in under if flow.is_product(op))

    def _around(self, core: set[int]) -> set[int]:
        """The core, the ops for its operands alone from the first product on, and the ops on its
        results, up to the first product."""
        after = self._after(core)
        return core | after | self._before(core | after)

    def _after(self, core: set[int]) -> set[int]:
        """The ops on results, up to the first products, or until they are joined to others."""
        flow, members = self.flow, set(core)
        front = [n for op in sorted(core) for n in flow.readers[op]]
        while front:
            op = front.pop()
            if op in members or self._joins_others(op, members):
                continue
            members.add(op)
            if not flow.is_product(op):
                front += flow.readers[op]
        ways = {op for op in members if flow.is_product(op)}
        return ways | self._reaching(ways, members, up=False)

    def _joins_others(self, op: int, members: Collection[int]) -> bool:
        """Whether an op, no product, combines results with other activations."""
        graph, flow = self.flow.graph, self.flow
        if flow.is_product(op):
            return False
        made = graph.producers
        return any(
            graph.owner(value).role == "activations" and made.get(value) not in members
            for value in graph.ops[op].inputs
        )

    def _before(self, core: set[int]) -> set[int]:
        """The ops for these alone, from the first products on."""
        flow, members = self.flow, set(core)
        front = [n for op in sorted(core) for n in flow.sources[op]]
        while front:
            op = front.pop()
            if op in members or any(user not in members for user in flow.readers[op]):
                continue
            members.add(op)
            front += flow.sources[op]
        # A norm before the first product is no attention; a cast of a weight is.
        products = {op for op in members if flow.is_product(op)} - core
        below = self._reaching(products, members, up=True) | products
        weights: set[int] = set()
        for op in sorted(members - core):
            owners = {flow.graph.owner(value).role for value in flow.graph.ops[op].inputs}
            if owners <= {"weights", "constants"} or (
                flow.sources[op] and all(source in weights for source in flow.sources[op])
            ):
                weights.add(op)
        return (below | weights) & members


def _inside(
    path: str, attention: frozenset[str], moe: frozenset[str], norms: frozenset[str]
) -> str:
    for prefix in _ancestors(path):
        if prefix in attention:
            return "attention"
        if prefix in moe:
            return "moe"
    return "norm" if path in norms else ""


def _ancestors(path: str) -> Iterable[str]:
    """The path itself and the paths above it, without the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _innermost(paths: Iterable[str]) -> set[str]:
    paths = set(paths)
    outer = {p for path in paths for p in _ancestors(path) if p != path}
    return paths - outer


def _moe_modules(flow: _Flow, attention: _AttentionOps) -> frozenset[str]:
    """Smallest modules with a top k and the expert products that it feeds."""
    calls = {*attention.modules, *attention.mixed}
    routing = {
        op.module
        for op in flow.graph.ops
        if op.part == "forward" and op.module and flow.kinds[op.id] == "sort"
    }
    products: dict[str, int] = defaultdict(int)
    for op in flow.graph.ops:
        if op.part == "forward" and flow.is_product(op.id):
            for prefix in _ancestors(op.module):
                products[prefix] += 100 if flow.kinds[op.id] == "grouped mm" else 1
    modules: set[str] = set()
    for path in routing:
        for prefix in _ancestors(path):
            if prefix in calls:
                break
            if products[prefix] >= _EXPERTS and not any(a.startswith(f"{prefix}.") for a in calls):
                modules.add(prefix)
                break
    return frozenset(modules)


def _hand_written_norms(flow: _Flow) -> frozenset[str]:
    """Modules whose direct ops are a mean (or variance), a root and no product."""
    names: Mapping[str, set[str]] = defaultdict(set)
    products = set()
    for op in flow.graph.ops:
        if op.part == "forward" and op.module:
            names[op.module].add(op.name)
            if flow.is_product(op.id):
                products.add(op.module)
    return frozenset(
        path
        for path, ops in names.items()
        if path not in products and not ops.isdisjoint(_ROOTS) and not ops.isdisjoint(_MOMENTS)
    )


def _heads(flow: _Flow) -> frozenset[int]:
    """Matrix products whose result is an output, through views, elementwise ops and a loss.

    Not through a residual connection: its operands are no head.
    """
    graph = flow.graph
    producers = graph.producers
    heads: set[int] = set()
    for value in graph.outputs:
        if graph.owner(value).role == "kv":
            continue
        index = producers.get(value)
        for _ in range(_STEPS_AFTER_HEAD):
            if index is None or graph.ops[index].part == "backward":
                break  # a gradient is not an output of the model
            op = graph.ops[index]
            if flow.is_product(index):
                heads.add(index)
                break
            family = "optimizer" if op.part == "optimizer" else flow.families[index]
            if op.kind != "view" and family not in ("elementwise", "loss"):
                break
            if family == "elementwise" and _joins(graph, op):
                break
            index = producers.get(op.inputs[0]) if op.inputs else None
    return frozenset(heads)


def _joins(graph: OpGraph, op: Op) -> bool:
    """Whether an op combines several activations, as a residual connection does."""
    return sum(graph.owner(value).role == "activations" for value in op.inputs) > 1
