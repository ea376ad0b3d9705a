"""A kernel as the conditions of joins see it, and facts of its graph.

Conditions see ops, tensors and sizes; repeats and the order of launches are the business of the
code that applies joins (`grouping`, `partition`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rooftrace.costmodels.fusion.index_space import (
    LONG_CHAIN,
    UNROLLED,
    computed_again,
    stored_wide,
)
from rooftrace.costmodels.fusion.runs import copies, listed
from rooftrace.costmodels.ops import MATRIX, Cost, find_rule, op_cost
from rooftrace.graph import Op, OpGraph, Ref, Tensor, marks, references

MAX_GROUP = 64
"""The most ops that one kernel holds (Inductor's limit, config.max_fusion_size)."""

SMALL = 4096
"""A producer of at most this many elements is computed inside its consumer, whatever it reads."""

FEW_READS = 4
"""A larger producer is also computed inside its consumer if it is broadcast and reads at most this
many tensors (realize_reads_threshold).

Inductor computes it again in every consumer; here it stands in the first, which writes it unless
its input takes no more bytes (`computed_again`).
"""


class Facts:
    """Facts of a graph for joins and their conditions, computed lazily.

    costs: of the graph's ops, if computed before.
    """

    def __init__(self, graph: OpGraph, costs: Sequence[Cost] | None = None) -> None:
        self.graph, self.costs = graph, costs

    @cached_property
    def classes(self) -> list[str | None]:
        """The fusion class of each op: None for views and waits, opaque without a rule."""
        memo: dict[str, str] = {}
        classes: list[str | None] = []
        for op in self.graph.ops:
            if op.kind != "kernel":
                classes.append(None)
                continue
            kind = memo.get(op.target)
            if kind is None:
                rule = find_rule(op.target)
                kind = memo[op.target] = rule.fusion if rule else "opaque"
            alone = op.stream or op.id in self.eager  # on a side stream, or not compiled
            classes.append("opaque" if alone and kind != "free" else kind)
        return classes

    @cached_property
    def segments(self) -> Sequence[int]:
        """For each op the number of graph breaks before it; empty without any."""
        breaks = [op.id for op in self.graph.ops if op.name == marks.GRAPH_BREAK]
        return [bisect_left(breaks, op.id) for op in self.graph.ops] if breaks else ()

    @cached_property
    def eager(self) -> frozenset[int]:
        """Ops between compiled graphs, which Python runs one by one."""
        return marks.eager_ops(self.graph.ops)

    @cached_property
    def needs(self) -> list[list[int]]:
        """For each op the kernels that have to run before it: writers of its operands, and earlier
        readers of a storage that it overwrites."""
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = defaultdict(list)
        needs: list[list[int]] = []
        values = self.graph.values
        for op in self.graph.ops:
            if op.kind == "view" or self.classes[op.id] == "free":
                needs.append([])
                continue
            read = {values[i].storage for i in op.inputs}
            before = {writer[s] for s in read if s in writer}
            if op.kind == "kernel":
                for storage in {values[i].storage for i in op.outputs}:
                    if storage in read or storage in writer:
                        before.update(readers.pop(storage, ()))
                        if storage in writer:
                            before.add(writer[storage])
                    writer[storage] = op.id
                for storage in read:
                    readers[storage].append(op.id)
            before.discard(op.id)
            needs.append(sorted(before))
        return needs

    @cached_property
    def needed_by(self) -> list[list[int]]:
        """For each op the ops that need it."""
        users: list[list[int]] = [[] for _ in self.needs]
        for op, before in enumerate(self.needs):
            for other in before:
                users[other].append(op)
        return users

    @cached_property
    def stored(self) -> set[int]:
        """Ops whose results a library kernel, a wait, another compiled graph or the caller reads:
        they are written to HBM."""
        values = self.graph.values
        outputs = {values[i].storage for i in self.graph.outputs}
        stored = self._leaving() if self.segments else set[int]()
        for op in self.graph.ops:
            if op.kind == "sync" or self.classes[op.id] == "opaque":
                stored.update(self.needs[op.id])
            if any(values[i].storage in outputs for i in op.outputs):
                stored.add(op.id)
        return stored

    def _leaving(self) -> set[int]:
        """Ops whose results another compiled graph reads."""
        ops, segments = self.graph.ops, self.segments
        storage = [value.storage for value in self.graph.values]
        leaves: set[tuple[int, int]] = set()  # compiled graph and storage
        for op in ops:
            read = {storage[i] for i in op.inputs}
            for other in self.needs[op.id]:
                if segments[other] != segments[op.id]:
                    made = read.intersection(storage[i] for i in ops[other].outputs)
                    leaves.update((segments[other], place) for place in made)
        return {
            op.id for op in ops if any((segments[op.id], storage[i]) in leaves for i in op.outputs)
        }

    @cached_property
    def long(self) -> set[int]:
        """Ops whose result is used several times, and takes LONG_CHAIN pointwise ops or more."""
        values, segments = self.graph.values, self.segments
        uses = Counter(
            values[i].storage for op in self.graph.ops if op.kind != "view" for i in op.inputs
        )
        lengths = [0] * len(self.graph.ops)
        long: set[int] = set()
        for op in self.graph.ops:
            if self.classes[op.id] != "pointwise":
                continue
            before = self.needs[op.id]
            if segments:  # a chain ends with its compiled graph
                before = [n for n in before if segments[n] == segments[op.id]]
            length = 1 + sum(lengths[n] for n in before)
            if length >= LONG_CHAIN and any(uses[values[i].storage] > 1 for i in op.outputs):
                long.add(op.id)
                length = 0  # it is written, and read from there
            lengths[op.id] = min(length, LONG_CHAIN)
        return long

    @cached_property
    def wide(self) -> dict[int, int]:
        """Activations whose input is stored in their stead, and how many times as wide it is."""
        return stored_wide(self.graph)

    @cached_property
    def again(self) -> set[int]:
        """Ops that are computed in each kernel that needs them, and never stored."""
        return set(computed_again(self.graph, self.wide).values())

    @cached_property
    def listed(self) -> dict[int, dict[int, int]]:
        """By op: storages of which it takes or makes all copies, and the number of copies."""
        return listed(self.graph)

    def space(self, number: int) -> tuple[int, int | None]:
        """The elements of an op's iteration space, and those that its reduction leaves, if any."""
        graph, op = self.graph, self.graph.ops[number]
        outputs = [graph.values[i].elements for i in op.outputs]
        # A batch norm in evaluation has its mean and variance: nothing is left to reduce.
        if self.classes[number] != "reduction" or op.arguments.get("training") is False:
            # A list of unequal outputs (_foreach_add) is one iteration space.
            arguments = op.arguments.values()
            if len(outputs) > 1 and any(type(x) is tuple and references(x) for x in arguments):
                sizes = (copies(graph, op, i) * graph.values[i].elements for i in op.outputs)
                return sum(sizes), None
            return max(outputs, default=0), None
        target = op.arguments.get("target")
        if isinstance(target, Ref) and self.has_trait(number, "picks"):
            return graph.values[target.id].elements, 1
        inputs = [graph.values[i].elements for i in op.inputs]
        size = max([*inputs, *outputs], default=0)
        smallest = min((n for n in outputs if n), default=1)
        if smallest < size:
            if size < UNROLLED * smallest and max(outputs) == smallest:
                return smallest, None
            return size, smallest
        # Writes full rows back (softmax): the reduction runs along `dim`, or the last dimension.
        shape = graph.values[op.inputs[0]].shape if op.inputs else ()
        dim, rank = op.arguments.get("dim", -1), len(shape)
        axis = dim if isinstance(dim, int) and -rank <= dim < rank else -1
        length = shape[axis] if shape else 1
        return size, size // max(length, 1)

    def cost(self, number: int) -> Cost:
        """The cost of an op."""
        if self.costs is not None:
            return self.costs[number]
        return op_cost(self.graph, self.graph.ops[number])

    def storages(self, number: int, values: Sequence[int]) -> set[int]:
        """Storages of an op's inputs or outputs.

        Where it takes or makes all copies of one, a negative number is added for each further copy,
        up to FEW_READS.
        """
        tensors = self.graph.values
        storages = {tensors[i].storage for i in values}
        for storage, count in self.listed.get(number, {}).items():
            if storage in storages:
                more = range(min(count - 1, FEW_READS))
                storages.update(-1 - storage * FEW_READS - copy for copy in more)
        return storages

    def has_trait(self, number: int, trait: str) -> bool:
        """Whether the rule of an op has this trait."""
        rule = find_rule(self.graph.ops[number].target)
        return rule is not None and trait in rule.traits


@dataclass(slots=True, kw_only=True)
class KernelView:
    """Ops that share a kernel, or a single op that may join one.

    Conditions read `names`, `kinds`, `classes`, `ops`, `inputs`, `results`, `size` and `reduced`;
    the rest is bookkeeping.
    """

    facts: Facts
    members: list[int]  # numbers of its ops in the graph
    size: int  # of its iteration space
    reduced: int | None = None  # elements that its reduction leaves, None without one
    fusable: bool = True  # whether a compiler writes it, and no library
    reads: set[int] = field(default_factory=set)  # storages
    made: set[int] = field(default_factory=set)  # storages
    stored: bool = False  # whether a library kernel or the caller reads a result of it
    long: bool = False  # whether a result larger than SMALL ends a LONG_CHAIN
    split: bool = False  # whether it reads the result of a split reduction from HBM
    down: bool = False  # whether it reduces columns (see DOWN)
    late: set[int] = field(default_factory=set)  # ops whose results exist only after its end

    @property
    def ops(self) -> tuple[Op, ...]:
        """Its ops, as records of the graph."""
        return tuple(self.facts.graph.ops[number] for number in self.members)

    @property
    def names(self) -> frozenset[str]:
        """The names of its ops, without overloads: {"aten.gelu"}."""
        return frozenset(op.name for op in self.ops)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of its ops: {"mm"}, {"softmax", "elementwise"}; see docs/rules.md."""
        rules = ((n, find_rule(self.facts.graph.ops[n].target)) for n in self.members)
        return frozenset(
            rule.kind_of(self.facts.cost(n)) if rule else "elementwise" for n, rule in rules
        )

    @property
    def labels(self) -> frozenset[str]:
        """The labels in their rules of kernels that they lead: {"softmax"}, {"activation"}."""
        rules = (find_rule(op.target) for op in self.ops)
        return frozenset(rule.fused for rule in rules if rule is not None and rule.fused)

    @property
    def classes(self) -> frozenset[str]:
        """The fusion classes of its ops: {"pointwise"}; "opaque" is a library kernel."""
        return frozenset(self.facts.classes[n] or "free" for n in self.members)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that it reads and does not make."""
        return self._tensors(self.reads - self.made)

    @property
    def results(self) -> tuple[Tensor, ...]:
        """The tensors that it makes."""
        return self._tensors(self.made)

    def _tensors(self, storages: set[int]) -> tuple[Tensor, ...]:
        values = self.facts.graph.values
        return tuple(values[storage] for storage in sorted(storages) if storage >= 0)

    @property
    def is_product(self) -> bool:
        """Whether it is a library kernel with work for the matrix engine."""
        if "opaque" not in self.classes:
            return False
        return any(self.facts.cost(n).flops(MATRIX) for n in self.members)

    @property
    def goes_over_lists(self) -> bool:
        """Whether an op iterates over a list of tensors (an optimizer's step)."""
        return any(isinstance(op.arguments.get("self"), tuple) for op in self.ops)


def single(facts: Facts, number: int, fusable: bool = True) -> KernelView:
    """A kernel of one op; one of a library (not `fusable`) has no iteration space."""
    op, values = facts.graph.ops[number], facts.graph.values
    size, reduced = facts.space(number) if fusable else (0, None)
    return KernelView(
        facts=facts,
        members=[number],
        size=size,
        reduced=reduced,
        fusable=fusable,
        reads=facts.storages(number, op.inputs),
        made=facts.storages(number, op.outputs),
        stored=number in facts.stored,
        long=number in facts.long and any(values[i].elements > SMALL for i in op.outputs),
    )


THROUGH_LIBRARIES: Mapping[str, int] = {
    "conv": 6,
    "attention": 4,
    "mm": 2,
    "bmm": 2,
    "grouped mm": 2,
    "batch norm": 1,
    "layer norm": 1,
    "group norm": 1,
    "rnn": 3,
}
"""Host time of ops beyond that of a plain op, in plain ops, by kind.

A plain op is one dispatch, one allocation and one launch.  cuBLAS also looks up a kernel and sets
its attributes; cuDNN describes every tensor and looks up a plan; norms allocate two more results;
attention chooses a backend, and calls into each.  From median host times of ops in torch.profiler
traces of TraceLens (MIT, ViT and BERT on H100 and MI300X), without what the profiler takes for each
nested op: 8 us an elementwise op, 24 a product, 19 a norm, 45 attention, 60 a convolution.  A step
of a recurrent layer: 19 to 32 us on H100, cuDNN 9.19, 2026-11-27 (benchmarks/kernels).
"""


def library_calls(op: Op, graph: OpGraph, kind: str) -> int:
    """How often an op of this kind goes through a library on the host.

    cuDNN enqueues every step of every recurrent layer: a product, and a kernel of its gates.  What
    goes back does twice as often, for two gradients.  A cell goes through none.
    """
    twice = 2 if "backward" in op.name or "grad_output" in op.arguments else 1
    if kind != "rnn":
        return twice if kind == "conv" else 1
    if "num_layers" not in op.arguments:
        return 0
    x = graph.values[op.inputs[0]].shape
    state = graph.values[next(references(op.arguments["hx"])).id].shape
    steps = math.prod(x[:-1]) // (state[-2] if len(state) > 1 else 1)
    layers = int(op.arguments["num_layers"]) * (1 + bool(op.arguments.get("bidirectional")))
    calls = twice * steps * layers
    number = int(calls)
    return number if calls == number else 0  # compared: a plan by formulas holds for these only
