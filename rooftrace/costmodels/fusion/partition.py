"""Kernel groups of a graph: their records and labels, their growth, and joins of finished ones."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec import Struct, structs

from rooftrace.costmodels.fusion.joins import JOINS, Join, because, fitting
from rooftrace.costmodels.fusion.kernels import MAX_GROUP, Facts, KernelView
from rooftrace.costmodels.fusion.runs import Neighbourhood
from rooftrace.costmodels.ops import Cost, find_rule
from rooftrace.costmodels.ops.cost import LIBRARY
from rooftrace.graph import Op, OpGraph, marks


@dataclass(frozen=True, slots=True)
class Merge:
    """One step by which a kernel grew."""

    join: str  # the name of the join
    ops: tuple[int, ...]  # that it added


@dataclass(frozen=True, slots=True)
class Apart:
    """A kernel that stays apart from others, though the condition of a user's join holds."""

    join: str  # the name of the join
    ops: tuple[int, ...]  # of the other kernels
    reason: str
    is_first: bool  # whether this kernel is the first of them


class FusionGroup(Struct, frozen=True):
    """One kernel.

    A kernel that joins the end of an iteration to the start of the next is in the list twice: once
    for the first iteration, and once for all others.
    """

    ops: tuple[int, ...]  # numbers of its ops, in execution order
    pattern: str  # the name of a fused group, "op" for a single one
    name: str  # the same, or the name of the single op
    known: bool = True  # whether every op has a rule
    times: int = 1  # launches in a step: those of its first op
    repeats: tuple[int, ...] = ()  # in whose iterations it is launched
    merges: tuple[Merge, ...] = ()  # the steps by which it grew from one op
    apart: tuple[Apart, ...] = ()  # joins of users that hold and cannot be made

    @staticmethod
    def of(
        graph: OpGraph,
        members: Iterable[int],
        repeats: tuple[int, ...] | None = None,
        merges: Sequence[Merge] = (),
    ) -> FusionGroup:
        """The kernel of these ops, named by their rules.

        repeats: in whose iterations it is launched; by default those of its first op.
        """
        numbers = sorted(members)
        ops = [graph.ops[number] for number in numbers]
        name = group_name(ops)
        return FusionGroup(
            ops=tuple(numbers),
            pattern=name if len(ops) > 1 else "op",
            name=name,
            known=all(find_rule(op.target) is not None for op in ops),
            times=graph.times(ops[0]),
            repeats=ops[0].repeats if repeats is None else repeats,
            merges=tuple(merges),
        )

    @property
    def joins(self) -> tuple[str, ...]:
        """The names of the joins that made it, each once."""
        return tuple(dict.fromkeys(merge.join for merge in self.merges))

    @property
    def own_joins(self) -> tuple[str, ...]:
        """The names of joins that a user or a third-party package registered."""
        return tuple(name for name in self.joins if all(join.name != name for join in JOINS))

    def why(self, graph: OpGraph) -> str:
        """Why these ops are one kernel: a line for each step by which it grew.

        Then the kernels for which a join of a user holds, and the reasons that keep them apart.
        """
        lines = [
            f"{_named(graph, merge.ops)}: {merge.join}: {because(merge.join)}"
            for merge in self.merges
        ]
        if not lines:
            lines = ["one op, joined by nothing" if len(self.ops) == 1 else "not said"]
        lines += [
            f"{_named(graph, other.ops)}: stays apart, though {other.join} fits: {other.reason}"
            for other in self.apart
        ]
        return "\n".join(lines)


def _named(graph: OpGraph, ops: tuple[int, ...]) -> str:
    return ", ".join(f"{graph.ops[op].name} (op {op})" for op in ops)


# -- labels ----------------------------------------------------------------------------------------
# Names of groups in reports: the label of a user's rule of one of the ops, else the first line of
# PATTERNS that fits.


@dataclass(frozen=True, slots=True)
class Pattern:
    """Arithmetic written out op by op.

    name: in reports.  has: at least one op of each of these sets is in the group; a member is the
    name of an op, or the `Rule.fused` of several ops.
    """

    name: str
    has: tuple[frozenset[str], ...]


def _any(*names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names)


# No rule can say this: several elementary ops together make a norm or a rotation.
PATTERNS: tuple[str | Pattern, ...] = (
    "optimizer step",
    "cross entropy",
    "softmax",
    "softmax backward",
    "layer norm",
    "layer norm backward",
    "group norm",
    "batch norm",
    "batch norm backward",
    Pattern(
        "rms norm",
        (_any("pow", "square", "mul"), _any("mean"), _any("rsqrt", "sqrt", "reciprocal")),
    ),
    "rms norm",
    "rms norm backward",
    Pattern("rotary embedding", (_any("cat"), _any("mul"), _any("add"), _any("neg", "sub"))),
    Pattern("rotary table", (_any("cos"), _any("sin"))),
    Pattern("gated activation", (frozenset({"activation"}), _any("mul"))),
    "activation",
    "activation backward",
    "dropout",
    "embedding",
    "gather",
    "reduction",
    "concatenation",
    "cast",
)
"""Names of groups, the first that fits first."""


def group_name(ops: Sequence[Op]) -> str:
    """The name of a group: of its op if there is one only, else of the first line that fits."""
    rules = [find_rule(op.target) for op in ops]
    if len(ops) == 1:
        label = rules[0].label if rules[0] else None
        library = ops[0].facts.get(LIBRARY)
        if label and library:
            return label.replace("flash", str(library))
        return label or ops[0].name
    of_user = next((rule.label for rule in rules if rule and rule.is_own and rule.label), "")
    if of_user:
        return f"{of_user} (fused)"
    labels = {rule.fused for rule in rules if rule and rule.fused}
    names = {op.name for op in ops}
    plain = labels | names | {name[:-1] for name in names if name.endswith("_")}
    for pattern in PATTERNS:
        if isinstance(pattern, str):
            if pattern in labels:
                return f"{pattern} (fused)"
        elif all(plain & wanted for wanted in pattern.has):
            return f"{pattern.name} (fused)"
    return "pointwise (fused)"


# -- partition -------------------------------------------------------------------------------------
# The kernels of a graph while they grow.
#
# Kernels have ranks in launch order.  An op joins only a kernel whose rank is at least that of
# every kernel it depends on, so every edge between kernels goes to a higher rank and no cycle can
# arise.


@dataclass(slots=True, kw_only=True)
class Open(KernelView):
    """A kernel with its place in the launch order."""

    rank: int
    floor: int = -1  # the highest rank of a kernel that it needs
    epoch: int = 0  # how many kernels stood before the last wait
    repeats: tuple[int, ...] = ()  # in whose iterations it is launched
    merges: list[Merge] = field(default_factory=list)


class Partition:
    """Kernels by rank, and by the ops in them."""

    def __init__(self, facts: Facts, around: Neighbourhood) -> None:
        self.facts, self.around = facts, around
        self.kernels: list[Open] = []
        self.kernel_of: dict[int, Open] = {}

    def start(self, part: KernelView, epoch: int, repeats: tuple[int, ...], late: bool) -> Open:
        """A new kernel of one op, launched after all others."""
        opened = Open(
            facts=self.facts,
            members=[],
            size=part.size,
            reduced=part.reduced,
            fusable=part.fusable,
            rank=len(self.kernels),
            epoch=epoch,
            repeats=repeats,
        )
        self.kernels.append(opened)
        self.add(part, opened, late)
        return opened

    def add(self, part: KernelView, kernel: Open, late: bool, join: Join | None = None) -> None:
        """Put an op into a kernel.  late: its result exists only after the end of the kernel."""
        (number,) = part.members
        kernel.members.append(number)
        kernel.reads |= part.reads
        kernel.made |= part.made
        kernel.stored |= part.stored
        kernel.long |= part.long
        for other in self.kernels_of(self.facts.needs[number]):
            if other is not kernel:
                kernel.floor = max(kernel.floor, other.rank)
        if late:
            kernel.late.add(number)
        if join is not None:
            kernel.merges.append(Merge(join.name, (number,)))
        self.kernel_of[number] = kernel

    def merge(self, kernel: Open, target: Open, join: Join) -> None:
        """Put all of a kernel into another one."""
        target.merges += [*kernel.merges, Merge(join.name, tuple(kernel.members))]
        target.members.extend(kernel.members)
        target.reads |= kernel.reads
        target.made |= kernel.made
        target.late |= kernel.late
        target.stored |= kernel.stored
        target.split |= kernel.split
        target.down |= kernel.down
        target.long |= kernel.long
        target.size = max(target.size, kernel.size)
        target.reduced = target.reduced if kernel.reduced is None else kernel.reduced
        self.kernel_of.update(dict.fromkeys(kernel.members, target))
        kernel.members = []
        target.floor = self.floor(target)

    def withdraw(self, numbers: Collection[int], kernel: Open) -> None:
        """Take ops out of a kernel, which keeps others."""
        kernel.members = [number for number in kernel.members if number not in numbers]
        kernel.merges = left_over(kernel.members, kernel.merges)

    def kernels_of(self, numbers: Iterable[int]) -> Iterable[Open]:
        """The kernels of these ops."""
        return (kernel for n in numbers if (kernel := self.kernel_of.get(n)) is not None)

    def floor(self, kernel: Open) -> int:
        """The highest rank among the other kernels that this one needs."""
        others = self.kernels_of(n for op in kernel.members for n in self.facts.needs[op])
        return max((other.rank for other in others if other is not kernel), default=-1)

    def joining(self, joins: Sequence[Join], kernel: Open, target: Open) -> Join | None:
        """The join by which a kernel can move into another one."""
        late = kernel.late and target.size != kernel.reduced
        if target.split or late or not self.has_room(kernel, target):
            return None
        join = fitting(joins, kernel, target)
        if (
            join is None
            or self.reads_part(target.members, kernel)
            or self.reads_part(kernel.members, target)
            or not self.may_share(kernel.members, target)
        ):
            return None
        return join

    def placing(self, joins: Sequence[Join], kernel: Open, target: Open) -> Join | None:
        """The join by which the results of a kernel are computed in place in another one."""
        join = fitting(joins, kernel, target) if self.has_room(kernel, target) else None
        return join if join is not None and self.may_share(kernel.members, target) else None

    def has_room(self, kernel: Open, target: Open) -> bool:
        """Whether a compiler writes both, and they have at most MAX_GROUP ops together."""
        count = len(target.members) + len(kernel.members)
        return kernel.fusable and target.fusable and count <= MAX_GROUP

    def reads_part(self, numbers: Iterable[int], kernel: KernelView) -> bool:
        """Whether one of these ops reads a part of something long in the kernel."""
        long = self.facts.long.intersection(kernel.members)
        if not long or kernel.reduced is not None:
            return False
        graph = self.facts.graph
        values = graph.values
        parts = {
            values[i].storage
            for number in numbers
            for i in graph.ops[number].inputs
            if values[i].storage in kernel.made
            and values[i].elements < values[values[i].storage].elements
        }
        return any(not parts.isdisjoint(graph.ops[number].outputs) for number in long)

    def may_share(self, numbers: Sequence[int], kernel: Open) -> bool:
        """Whether these ops may be in it: of one compiled graph, and without joining iterations of
        a repeat unevenly."""
        together = [*numbers, *kernel.members]
        segments = self.facts.segments
        if segments and len({segments[number] for number in together}) > 1:
            return False
        return not self.around.sites or self.around.may_share(together)


def left_over(members: Collection[int], merges: Sequence[Merge]) -> list[Merge]:
    """The merges of a kernel from which ops were taken: all but one of its members have one."""
    kept = [
        Merge(merge.join, ops)
        for merge in merges
        if (ops := tuple(n for n in merge.ops if n in members))
    ]
    for i in range(len(kept)):
        if not members or set().union(*(m.ops for m in kept)) < set(members):
            break
        rest = kept[:i] + kept[i + 1 :]
        if set().union(*(m.ops for m in rest)) < set(members):
            kept = rest
            break
    return kept


# -- finished --------------------------------------------------------------------------------------
# Joins of finished kernels: those that users register, and those of `headroom`.
#
# A kernel moves into the only kernel that reads its results, unless something in between waits for
# the device or overwrites a storage of the kernel.


def larger_groups(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    op_costs: Sequence[Cost],
    costs: Sequence[Cost],
    joins: Sequence[Join],
) -> tuple[FusionGroup, ...]:
    """The groups in launch order, with larger ones by joins in place of their last part.

    op_costs, costs: of the graph's ops, and of the groups.  Each group goes into one larger group
    at most.
    """
    return _Finished(graph, groups, op_costs, costs).joined(joins)


def with_apart(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    op_costs: Sequence[Cost],
    costs: Sequence[Cost],
    joins: Sequence[Join],
    larger: Sequence[FusionGroup],
) -> tuple[FusionGroup, ...]:
    """The larger groups that joins made, with other groups whose conditions hold and stay apart.

    groups, costs: before the joins were applied.
    """
    of = {op: number for number, group in enumerate(larger) for op in group.ops}
    apart: dict[int, list[Apart]] = defaultdict(list)
    kernels = _Finished(graph, groups, op_costs, costs)
    for join in joins:
        for row in kernels.all_rows(join.parts):
            numbers = [of[groups[i].ops[0]] for i in row]
            if len(set(numbers)) == 1:
                continue
            obstacles = (kernels.obstacle(*pair) for pair in pairwise(row))
            reason = next((text for text in obstacles if text), "")
            if not reason and any(larger[number].own_joins for number in numbers):
                reason = "one of them is joined with another kernel"
            if reason and join.when(*(kernels.kernels[i] for i in row)):
                for number in dict.fromkeys(numbers):
                    others = (i for i, at in zip(row, numbers, strict=True) if at != number)
                    ops = tuple(op for i in others for op in groups[i].ops)
                    apart[number].append(Apart(join.name, ops, reason, number == numbers[0]))
    return tuple(
        structs.replace(group, apart=tuple(apart[number])) if number in apart else group
        for number, group in enumerate(larger)
    )


def beyond(
    graph: OpGraph,
    groups: Sequence[FusionGroup],
    op_costs: Sequence[Cost],
    costs: Sequence[Cost],
) -> tuple[FusionGroup, ...]:
    """Larger groups than these, by the joins that compilers leave undone (`Join.on` is false)."""
    joins = [join for join in JOINS if not join.on]
    return larger_groups(graph, groups, op_costs, costs, joins)


class _Finished:
    """The kernels of a graph, and the readers of their results."""

    def __init__(
        self,
        graph: OpGraph,
        groups: Sequence[FusionGroup],
        op_costs: Sequence[Cost],
        costs: Sequence[Cost],
    ) -> None:
        self.groups, self.costs = groups, costs
        facts = Facts(graph, op_costs)
        self.kernels = [_kernel(facts, g, cost) for g, cost in zip(groups, costs, strict=True)]
        self.syncs = [op.id for op in graph.ops if op.kind == "sync" or op.name in marks.BOUNDARIES]
        self.sources: list[list[int]] = []  # the kernels that each one reads from
        self.readers: dict[tuple[int, int], set[int]] = defaultdict(set)  # of (kernel, storage)
        writer: dict[int, int] = {}
        for i, kernel in enumerate(self.kernels):
            read = [storage for storage in kernel.reads if storage in writer]
            for storage in read:
                self.readers[writer[storage], storage].add(i)
            self.sources.append(sorted({writer[storage] for storage in read}))
            writer.update(dict.fromkeys(kernel.made, i))

    def joined(self, joins: Sequence[Join]) -> tuple[FusionGroup, ...]:
        """All groups in launch order, after each join was applied once."""
        taken: set[int] = set()
        larger: dict[int, FusionGroup] = {}
        for join in joins:
            for row in self._rows(join):
                if taken.isdisjoint(row):
                    taken.update(row)
                    larger[row[-1]] = self._larger(join, row)
        return tuple(
            larger.get(i, group)
            for i, group in enumerate(self.groups)
            if i in larger or i not in taken
        )

    def _rows(self, join: Join) -> Iterator[tuple[int, ...]]:
        """Kernels in a row, each read by the next alone, for which a join holds."""
        for i, kernel in enumerate(self.kernels):
            before = [j for j in self.sources[i] if self._next(j) == i]
            if join.parts == 2:
                firsts = [j for j in before if join.when(self.kernels[j], kernel)]
                if firsts:
                    yield max(firsts, key=lambda j: self._shared(j, i)), i
            elif before and (last := self._next(i)) is not None:
                after = self.kernels[last]
                firsts = [j for j in before if join.when(self.kernels[j], kernel, after)]
                if firsts:
                    yield firsts[-1], i, last

    def _larger(self, join: Join, row: Sequence[int]) -> FusionGroup:
        parts = [self.groups[i] for i in row]
        merges = [
            merge for part in parts[1:] for merge in (*part.merges, Merge(join.name, part.ops))
        ]
        # As in reports, names of torch's own ops have no namespace.
        names = " + ".join(part.name.removeprefix("aten.") for part in parts)
        return structs.replace(
            parts[0],
            ops=tuple(sorted(op for part in parts for op in part.ops)),
            pattern=join.name,
            name=join.label or names,
            known=all(part.known for part in parts),
            merges=(*parts[0].merges, *merges),
        )

    def all_rows(self, parts: int) -> Iterator[tuple[int, ...]]:
        """Two or three kernels in a row, each of which reads a result of the one before."""
        for second, sources in enumerate(self.sources):
            for first in sources:
                if parts == 2:
                    yield first, second
                else:
                    yield from ((first, second, third) for third in sorted(self._readers(second)))

    def _readers(self, first: int) -> set[int]:
        return set[int]().union(*(self.readers[first, s] for s in self.kernels[first].made))

    def _next(self, first: int) -> int | None:
        """The only kernel that reads results of this one, if the two may be one kernel."""
        readers = self._readers(first)
        if len(readers) != 1:
            return None
        (second,) = readers
        return None if self.obstacle(first, second) else second

    def obstacle(self, first: int, second: int) -> str:
        """Why a kernel cannot move into one that reads its results; "" where it can."""
        if self._readers(first) != {second}:
            return "something else reads the first"
        kernel, group, other = self.kernels[first], self.groups[first], self.groups[second]
        if (group.times, group.repeats) != (other.times, other.repeats):
            return "they run in other iterations"
        if bisect_left(self.syncs, group.ops[0]) != bisect_left(self.syncs, other.ops[-1]):
            return "the host waits between them"
        touched = kernel.reads | kernel.made
        between = self.kernels[first + 1 : second]
        if any(not touched.isdisjoint(other.made) for other in between):
            return "something between them overwrites what the first touches"
        return ""

    def _shared(self, first: int, second: int) -> int:
        """Bytes that the second kernel reads of results of the first."""
        return sum(
            size
            for access, size in self.costs[second].traffic.items()
            if not access.write and access.storage in self.kernels[first].made
        )


def _kernel(facts: Facts, group: FusionGroup, cost: Cost) -> KernelView:
    """A finished kernel; the iteration space of a library kernel is its written elements."""
    values = facts.graph.values
    spaces = [facts.space(n) for n in group.ops if facts.classes[n] != "opaque"]
    made = {access.storage for access in cost.traffic if access.write}
    written = max((values[storage].elements for storage in made), default=0)
    return KernelView(
        facts=facts,
        members=list(group.ops),
        size=max((size for size, _ in spaces), default=written),
        reduced=next((reduced for _, reduced in spaces if reduced is not None), None),
        fusable=len(spaces) == len(group.ops),
        reads={access.storage for access in cost.traffic if not access.write},
        made=made,
    )
