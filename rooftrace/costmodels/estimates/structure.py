"""The anatomy of a model, read from its traced graph: modules, attention, kernels, and wiring.

Nothing is taken from a template or from the name of a model.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from rooftrace.costmodels.estimates.estimates import Estimate
from rooftrace.costmodels.estimates.moduletree import around
from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.ops import find_rule
from rooftrace.graph import Op, OpGraph, Tensor, pattern_of

ATTENTION = "attention"
"""The kind of kernels that compute scores and weigh values with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePattern:
    """Modules that own parameters and whose paths differ in indices alone."""

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
    queries: int  # positions
    keys: int  # positions
    useful: float  # share of the scores that the mask lets through
    latent: int = 0  # numbers of the latent that keys and values are made of; 0: of the input
    count: int  # kernels of a step

    @property
    def kind(self) -> str:
        """Latent, or the sharing of keys and values: multi-head, grouped-query or multi-query."""
        if self.latent:
            return f"latent (MLA), rank {self.latent:,}"
        if self.heads_kv == self.heads:
            return "multi-head"
        return "multi-query" if self.heads_kv == 1 else "grouped-query"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKind:
    """Kernels of one kind: that of their rule, or the name of their fused pattern."""

    kind: str
    count: int  # of a step
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The parts of a traced model in one phase, most of each first."""

    traits: tuple[tuple[str, str], ...]  # what it has, and of which kind
    families: tuple[tuple[str, int], ...]  # parameters by the family of the op that reads them
    patterns: tuple[ModulePattern, ...]
    classes: tuple[tuple[str, int], ...]  # of modules that ran with none inside, and how many
    attention: tuple[AttentionCalls, ...]
    kernels: tuple[KernelKind, ...]
    wirings: tuple[Wiring, ...]  # the stack, then its blocks


def anatomy(estimate: Estimate) -> Anatomy:
    """The parts of an estimate's model, by the graph as its execution runs it."""
    attention = tuple(_attention(estimate.plan))
    return Anatomy(
        traits=tuple(_traits(estimate, attention)),
        families=tuple(_families(estimate.plan)),
        patterns=tuple(_patterns(estimate.plan.source)),
        classes=tuple(_classes(estimate.plan.source)),
        attention=attention,
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


def _families(planned: Plan) -> list[tuple[str, int]]:
    """Parameters by the family of the first op that reads them, casts and scales looked through."""
    graph, families = planned.graph, dict[int, str]()
    origin = {i: i for i in graph.external if graph.values[i].role == "weights"}  # of a storage
    for op in graph.ops:
        read = [graph.values[index].storage for index in op.inputs]
        own = [origin[storage] for storage in read if storage in origin]
        if op.family != "elementwise":
            families |= {index: op.family for index in own if index not in families}
        elif len(own) == len(read):
            origin |= {graph.values[index].storage: own[0] for index in op.outputs if own}
    counts: Counter[str] = Counter()
    for index in graph.external:
        tensor = graph.values[index]
        if tensor.role == "weights" and tensor.storage == index and tensor.name:
            counts[families.get(index, "other")] += graph.times(tensor) * tensor.elements
    return counts.most_common()


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
    made = _makers(graph)
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
        sizes = (
            query[1],
            key[1],
            query[3],
            value[3],
            query[2],
            key[2],
            useful,
            _latent(graph, op, made),
        )
        counts[sizes] += graph.times(op)
    for (
        heads,
        heads_kv,
        width,
        wide,
        queries,
        keys,
        useful,
        latent,
    ), count in counts.most_common():
        yield AttentionCalls(
            heads=int(heads),
            heads_kv=int(heads_kv),
            width=int(width),
            width_values=int(wide),
            queries=int(queries),
            keys=int(keys),
            useful=useful,
            latent=int(latent),
            count=count,
        )


# -- what a latent is, and the traits of a model ---------------------------------------------------

_PRODUCTS = ("mm", "bmm")
"""Kinds of ops that multiply matrices."""
_POSITIONS = re.compile(r"(^|[._])(wpe|pos|position|relative)([._]|$)")
"""Names of weights that stand for positions."""


def _makers(graph: OpGraph) -> Mapping[int, Sequence[Op]]:
    """The ops that write into each storage."""
    made: dict[int, list[Op]] = defaultdict(list)
    for op in graph.ops:
        for index in op.outputs:
            made[graph.values[index].storage].append(op)
    return made


def _is_product(op: Op, graph: OpGraph) -> bool:
    """Whether an op multiplies by weights."""
    rule = find_rule(op.target)
    return (
        rule is not None
        and rule.kind in _PRODUCTS
        and any(graph.values[index].role == "weights" for index in op.inputs)
    )


def _products(
    graph: OpGraph, made: Mapping[int, Sequence[Op]], indices: Sequence[int], module: str
) -> list[Op]:
    """The last products with weights, inside of a module, that values are made by."""
    products, seen, waiting = {}, set[int](), [graph.values[index].storage for index in indices]
    while waiting:
        storage = waiting.pop()
        if storage in seen:
            continue
        seen.add(storage)
        for op in made.get(storage, ()):
            if module and not f"{op.module}.".startswith(f"{module}."):
                continue
            if _is_product(op, graph):
                products[op.id] = op
            else:
                waiting += [graph.values[index].storage for index in op.inputs]
    return list(products.values())


def _latent(graph: OpGraph, attention: Op, made: Mapping[int, Sequence[Op]]) -> int:
    """Numbers of the latent that the values of an attention are made of; 0: of no latent.

    A latent is what one product of the attention's module makes and a second one widens to the
    values of all heads (low-rank joint compression, DeepSeek-V2, section 2.1.2).
    """
    ranks = set()
    for op in _products(graph, made, attention.inputs[2:3], attention.module):
        read = [i for i in op.inputs if graph.values[i].role != "weights"]
        if not _products(graph, made, read, attention.module):
            return 0
        ranks |= {int(graph.values[i].shape[-1]) for i in read if graph.values[i].shape}
    return min(ranks, default=0)


def _traits(estimate: Estimate, attention: Sequence[AttentionCalls]) -> Iterator[tuple[str, str]]:
    """The kinds of a model's parts, as its ops, its fused groups and the names of classes say."""
    graph = estimate.plan.source
    yield "class", str(graph.model.get("class") or graph.modules.get("") or "not known")
    kinds = dict.fromkeys(
        f"{each.kind}{', masked' if each.useful < 1 else ''}" for each in attention
    )
    written = any(row.family == "attention" for row in estimate.rows)
    yield "attention", "; ".join(kinds) or ("written out in products" if written else "none")
    groups = {row.name for row in estimate.rows}
    classes = dict(_classes(graph))
    # Sines beside cosines alone may stand for the time of a diffusion model.
    turned = {name for name in groups if not name.startswith("rotary table")}
    rotary = any("rotary" in name.lower() for name in (*turned, *classes))
    weights = [graph.values[index] for index in graph.external]
    names = [tensor.name or "" for tensor in weights if tensor.role == "weights"]
    places = [name for name in names if _POSITIONS.search(name)]
    said = ["rotary (RoPE)"] if rotary else []
    said += [f"weights, {pattern_of(places[0])}"] if places else []
    yield "positions", "; ".join(said) or "none found"
    norms = [f"{name} x {count:,}" for name, count in classes.items() if "norm" in name.lower()]
    others = {
        n.removeprefix("aten.native_").removesuffix(" (fused)") for n in groups if "norm" in n
    }
    norms = norms or sorted({n.replace("_", " ") for n in others if "backward" not in n})
    yield "norms", ", ".join(norms) or "none"
    active = ", ".join(f"{kind} x {count:,}" for kind, count in _activations(graph).items())
    yield "activations", active or "none"
    yield "tied weights", ", ".join(_tied(graph)) or "none"


def _activations(graph: OpGraph) -> Mapping[str, int]:
    """Activations of the forward pass by op, class of module and gate, as often as they run.

    Gated: what it makes is multiplied by another tensor than the one that it reads.
    """
    factors: dict[int, set[int]] = defaultdict(set)  # by storage: those that it is multiplied by
    for op in graph.ops:
        if op.target.startswith("aten.mul."):
            read = {graph.values[index].storage for index in op.inputs}
            for storage in read:
                factors[storage] |= read - {storage}
    counts: Counter[str] = Counter()
    for op in graph.ops:
        rule = find_rule(op.target)
        if op.part == "forward" and rule is not None and rule.fused == "activation":
            own = {graph.values[index].storage for index in op.inputs}
            gated = any(factors[graph.values[index].storage] - own for index in op.outputs)
            name = op.target.split(".")[1].rstrip("_")
            kind = graph.modules.get(op.module) or "functions"
            counts[f"{'gated ' if gated else ''}{name} in {kind}"] += graph.times(op)
    return counts


def _tied(graph: OpGraph) -> list[str]:
    """Weights that rows are looked up in and that are a matrix of a product too."""
    used: dict[int, set[str]] = defaultdict(set)
    for op in graph.ops:
        rule = find_rule(op.target)
        if rule is None or op.part != "forward":
            continue
        use = "rows" if rule.fused == "embedding" else "product" if rule.kind in _PRODUCTS else ""
        for index in op.inputs if use else ():
            tensor = graph.values[index]
            if tensor.role == "weights":
                used[tensor.storage].add(use)
    return [graph.values[s].name or "" for s, uses in used.items() if uses == {"rows", "product"}]


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


# -- wiring ----------------------------------------------------------------------------------------
# How the modules of a model are wired, as its forward pass ran: a picture for each distinct block.
#
# A node is a module, or an op that the block's code runs, as the sum of a residual.  An edge is
# data that one makes and the other reads; views are looked through.

INPUT, OUTPUT = "input", "output"
MOST_NODES = 40
MOST_BLOCKS = 4
LARGE = 0.25  # share of the forward pass: blocks with more of it get a picture
SPREAD = 0.6  # share: a module with more of it is looked into, unless it is a block of a stack
_LISTS = ("ModuleList", "ModuleDict")
"""Classes of torch that hold modules and are never called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WiredNode:
    """A module, an op of the block's code, or the input or output of the block."""

    path: str  # of the module; of an op its name
    kind: str  # name of the module's class; "" for an op
    count: int = 1  # equal ones that follow each other
    output: Tensor | None = None  # the last value that others read; None: there is none
    share: float = 0.0  # of the seconds of the forward pass

    def named(self, path: str) -> str:
        """Its name inside of the block at `path`, with a star for the number of a stack."""
        inner = self.path.removeprefix(f"{path}.") if path else self.path
        return pattern_of(inner) if self.count > 1 else inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The picture of one block: its nodes in the order in which they ran, and their edges."""

    path: str  # "" is the model
    kind: str
    count: int  # equal blocks that it stands for
    nodes: tuple[WiredNode, ...]
    edges: tuple[tuple[int, int], ...]  # indices in `nodes`: of the maker and of the reader


def wirings(estimate: Estimate) -> tuple[Wiring, ...]:
    """The model, then its blocks, most time first; blocks of more than 40 nodes are left out."""
    graph, seconds = estimate.graph, _seconds(estimate)
    total = seconds.get("", 0.0)
    if not total:
        return ()
    shares = {path: value / total for path, value in seconds.items()}
    drawn: list[Wiring] = []
    waiting = [WiredNode(path="", kind=graph.modules.get("", ""), share=1.0)]
    while waiting and len(drawn) <= MOST_BLOCKS:
        block = waiting.pop(0)
        made = _wired(estimate.plan, block, shares)
        if len(made.nodes) > MOST_NODES:
            continue
        drawn.append(made)
        inner = [n for n in made.nodes if n.kind and n.share >= LARGE and _is_around(graph, n.path)]
        waiting += sorted(inner, key=lambda node: -node.share)
    return tuple(drawn)


def _seconds(estimate: Estimate) -> Mapping[str, float]:
    """Seconds of the forward pass by module, those inside included."""
    seconds: dict[str, float] = defaultdict(float)
    for row in estimate.rows:
        if row.part == "forward":
            for path in around(estimate.graph.ops[row.ops[0]].module):
                seconds[path] += row.timing.t_device
    return seconds


def _is_around(graph: OpGraph, path: str) -> bool:
    """Whether ops run in modules inside of this one."""
    return any(op.module.startswith(f"{path}.") for op in graph.ops)


@dataclass(slots=True)
class _Drawing:
    """A wiring while its ops are gone through."""

    nodes: dict[str, WiredNode] = field(default_factory=dict)
    edges: dict[tuple[str, str], None] = field(default_factory=dict)
    makers: dict[int, frozenset[str]] = field(default_factory=dict)  # of each value
    alike: Mapping[str, str] = field(default_factory=dict)  # of modules: the first such one
    counted: dict[str, int] = field(default_factory=dict)  # modules that each one stands for

    def read_by(self, name: str, op: Op) -> None:
        """Edges to a node from whatever made the inputs of one of its ops."""
        for value in op.inputs:
            for maker in sorted(self.makers.get(value, ())):
                if maker != name:
                    self.edges.setdefault((maker, name))


def _wired(planned: Plan, block: WiredNode, shares: Mapping[str, float]) -> Wiring:
    """The picture of a block: of the first of equal ones, with the shares of them all."""
    graph, drawing, path = planned.graph, _Drawing(), block.path
    inside = [op for op in graph.ops if op.part == "forward" and _is_in(op.module, path)]
    made = {value for op in inside for value in op.outputs}
    for op in inside:
        for value in op.inputs:
            if value not in made and graph.values[value].role not in ("weights", "buffer"):
                drawing.makers[value] = frozenset({INPUT})
    opened = _opened(graph, path, shares)
    units = {op.id: _unit(op.module, path, opened) for op in inside}
    drawing.alike = _alike(graph, inside, units)
    kernels = _own_kernels(planned, opened)
    for op in inside:
        _draw(drawing, graph, op, units[op.id], kernels, shares)
    _ends(drawing, graph, inside)
    all_of_them = block.share / shares[path] if shares.get(path) else 1.0
    index = {name: number for number, name in enumerate(drawing.nodes)}
    return Wiring(
        path=path,
        kind=block.kind,
        count=block.count,
        nodes=tuple(
            replace(node, share=node.share * all_of_them) for node in drawing.nodes.values()
        ),
        edges=tuple((index[a], index[b]) for a, b in drawing.edges),
    )


def _is_in(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def _opened(graph: OpGraph, path: str, shares: Mapping[str, float]) -> frozenset[str]:
    """Modules that are opened: the block, lists in it, and of a model the one with most time."""
    opened = {path}
    for module in graph.modules:
        parent = module.rpartition(".")[0]
        if not module or parent not in opened or module == path:
            continue
        is_in_stack = module.rpartition(".")[2].isdigit()
        large = not path and not is_in_stack and shares.get(module, 0.0) >= SPREAD
        if graph.modules[module] in _LISTS or (large and _is_around(graph, module)):
            opened.add(module)
    return frozenset(opened)


def _own_kernels(planned: Plan, opened: frozenset[str]) -> dict[int, tuple[str, str]]:
    """By op: the kernel that only code of the opened modules shares, as a key and a name."""
    kernels: dict[int, tuple[str, str]] = {}
    for number, group in enumerate(planned.groups):
        ops = [planned.graph.ops[place] for place in group.ops]
        if len(ops) > 1 and all(op.module in opened for op in ops):
            kernels |= {op.id: (f"kernel {number}", group.name) for op in ops}
    return kernels


def _draw(
    drawing: _Drawing,
    graph: OpGraph,
    op: Op,
    unit: str | None,
    kernels: Mapping[int, tuple[str, str]],
    shares: Mapping[str, float],
) -> None:
    """Draw one op: in its module's node, as a node, or looked through."""
    if unit is None and op.kind != "kernel":
        through = frozenset().union(
            *(drawing.makers.get(value, frozenset()) for value in op.inputs)
        )
        for value in op.outputs:
            drawing.makers[value] = through
        return
    if unit is None:
        name, shown = kernels.get(op.id, (f"op {op.id}", op.name))
        node = drawing.nodes.get(name) or WiredNode(path=shown, kind="", count=graph.times(op))
    else:
        name = drawing.alike.get(unit, unit)
        node = drawing.nodes.get(name) or WiredNode(
            path=name, kind=graph.modules.get(name, ""), count=0
        )
        counted = drawing.counted.get(unit, 0)
        if not counted:
            node = replace(node, share=node.share + shares.get(unit, 0.0))
        drawing.counted[unit] = max(counted, _stands_for(graph, op, unit))
        node = replace(node, count=node.count + drawing.counted[unit] - counted)
    if op.outputs:
        node = replace(node, output=graph.values[op.outputs[0]])
    drawing.nodes[name] = node
    drawing.read_by(name, op)
    for value in op.outputs:
        drawing.makers[value] = frozenset({name})


def _stands_for(graph: OpGraph, op: Op, unit: str) -> int:
    """Number of modules of a stack that the one at `unit` represents for this op."""
    repeats = (graph.repeats[number] for number in op.repeats)
    return prod(repeat.count for repeat in repeats if repeat.path(unit, 1) != unit)


def _alike(graph: OpGraph, inside: Sequence[Op], units: Mapping[int, str | None]) -> dict[str, str]:
    """Modules after each other that run the same ops to the same shape: the first of them.

    Their paths differ in numbers alone.
    """
    ran: dict[str, list[tuple[str, str]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for op in inside:
        unit = units[op.id]
        if unit is not None:
            ran[unit].append((op.module.removeprefix(unit), op.target))
            if op.outputs:
                shapes[unit] = graph.values[op.outputs[0]].shape
    first: dict[str, str] = {}
    before: tuple[object, str] = (None, "")
    for unit, ops in ran.items():
        look = (pattern_of(unit), graph.modules.get(unit), shapes.get(unit), tuple(ops))
        first[unit] = before[1] if look == before[0] else unit
        before = (look, first[unit])
    return first


def _unit(module: str, block: str, opened: frozenset[str]) -> str | None:
    """The module whose node an op belongs to; None for the code of a module that is looked into."""
    if module in opened:
        return None
    names = module.split(".")
    for place in range(len(block.split(".")) if block else 0, len(names) + 1):
        path = ".".join(names[:place])
        if path and path not in opened:
            return path
    return None


def _ends(drawing: _Drawing, graph: OpGraph, inside: Sequence[Op]) -> None:
    """Put the input before all nodes and the output after them."""
    read = {value for op in inside for value in op.inputs}
    ends = [
        maker
        for op in inside
        for value in op.outputs
        if value not in read or value in graph.outputs
        for maker in sorted(drawing.makers.get(value, ()))
    ]
    last = ends[-1] if ends else None
    if last is not None and last != INPUT:
        drawing.edges.setdefault((last, OUTPUT))
    drawing.nodes = {
        INPUT: WiredNode(path=INPUT, kind=""),
        **drawing.nodes,
        OUTPUT: WiredNode(path=OUTPUT, kind=""),
    }
