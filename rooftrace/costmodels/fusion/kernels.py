"""A kernel as the conditions of joins see it, and facts of its graph.

Conditions see ops, tensors and sizes; repeats and the order of launches are the business of the
code that applies joins (`grouping`, `partition`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rooftrace.costmodels.fusion.index_space import (
    dependencies,
    index_space,
    long_chains,
    needed_by,
    stored,
    stored_wide,
)
from rooftrace.costmodels.fusion.runs import listed
from rooftrace.costmodels.ops import MATRIX, Cost, find_rule, op_cost
from rooftrace.graph import Op, OpGraph, Tensor, marks

MAX_GROUP = 64
"""The most ops that one kernel holds (Inductor's limit, config.max_fusion_size)."""

SMALL = 4096
"""A producer of at most this many elements is computed inside its consumer, whatever it reads."""

FEW_READS = 4
"""A larger producer is also computed inside its consumer if it is broadcast and reads at most this
many tensors (realize_reads_threshold).

Inductor computes it again in every consumer; here it stands in the first, which writes it.
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
        """For each op the kernels that have to run before it."""
        return dependencies(self.graph, self.classes)

    @cached_property
    def needed_by(self) -> list[list[int]]:
        """For each op the ops that need it."""
        return needed_by(self.needs)

    @cached_property
    def stored(self) -> set[int]:
        """Ops whose results a library kernel, a wait or the caller reads."""
        return stored(self.graph, self.classes, self.needs, self.segments)

    @cached_property
    def long(self) -> set[int]:
        """Ops that end a LONG_CHAIN."""
        return long_chains(self.graph, self.classes, self.needs, self.segments)

    @cached_property
    def wide(self) -> set[int]:
        """Activations whose input is stored in place of their result."""
        return set(stored_wide(self.graph))

    @cached_property
    def listed(self) -> dict[int, dict[int, int]]:
        """By op: storages of which it takes or makes all copies, and the number of copies."""
        return listed(self.graph)

    def space(self, number: int) -> tuple[int, int | None]:
        """The size of an op's iteration space, and the elements that its reduction leaves."""
        return index_space(self.graph, self.graph.ops[number], self.classes[number])

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
