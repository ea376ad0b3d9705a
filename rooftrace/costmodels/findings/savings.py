"""What fusing saves: what the groups found in a graph saved, and what could be saved beyond them.

Both are differences of two estimates of one graph on one chip: of every op a kernel and the groups
as found, and of those and larger ones that take more than a compiler's usual rules.  So what the
groups save adds up to the difference of the totals.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from rooftrace.costmodels.estimating import Estimate, Row, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.fusion import FusionGroup, fuse
from rooftrace.costmodels.planning import Plan, plan
from rooftrace.costmodels.pricing import MATRIX, find_rule
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_share, format_time, format_traffic
from rooftrace.tracer.graph import OpGraph, pattern_of

if TYPE_CHECKING:
    import pandas

EPILOGUE, ATTENTION, CHAIN = "epilogue", "attention", "chain"
"""What could be one kernel beyond the groups found.

epilogue: a matrix product and the element-by-element work that alone reads its result.  attention:
products of queries with keys and of probabilities with values, and the softmax between them, where
no pattern knew them for attention.  chain: two groups of which only the second reads the first.
"""

SOFTMAX = frozenset(("aten._softmax", "aten._safe_softmax"))


@dataclass(frozen=True, slots=True)
class Saving:
    """What putting these ops into one kernel saves, over all `count` groups that are alike.

    kind: fused (a group that was found), unread (results of one op that nobody reads, and a
    compiler leaves out), or one of EPILOGUE, ATTENTION, CHAIN.  ops: their names.
    module: path with starred indices.  launches: kernels that are not launched.  bytes: through
    HBM.  seconds: of the device.  share: seconds over t_est of the step without it.
    """

    kind: str
    name: str
    ops: tuple[str, ...]
    module: str
    part: str
    count: int
    launches: int
    bytes: int
    seconds: float
    share: float

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        times = f", {self.count:,} times" if self.count > 1 else ""
        return (
            f"{self.name}{where}: {len(self.ops)} ops{times}, {format_traffic(self.bytes)} less, "
            f"{format_time(self.seconds)}, {format_share(self.share)}"
        )


@dataclass(frozen=True)
class Headroom:
    """Estimates before fusing (every op a kernel), after (groups as found), and beyond that.

    The host dispatches in all three as the execution model says.
    """

    before: Estimate
    after: Estimate
    beyond: Estimate

    @cached_property
    def fused(self) -> tuple[Saving, ...]:
        """What the groups that were found save, most seconds first."""
        return _savings(self.before, self.after)

    @cached_property
    def left(self) -> tuple[Saving, ...]:
        """What larger kernels would save beyond them, most seconds first.

        An upper bound: work of one kernel is added up as if its engines did not overlap, and no
        kernel is slower for doing more.
        """
        return _savings(self.after, self.beyond)

    def to_frame(self) -> pandas.DataFrame:
        """One row per saving, those that were found first."""
        import pandas

        return pandas.DataFrame.from_records(
            [
                {name: getattr(saving, name) for name in Saving.__slots__}
                | {"ops": " ".join(saving.ops)}
                for saving in (*self.fused, *self.left)
            ],
            columns=list(Saving.__slots__),
        )

    def __str__(self) -> str:
        lines = [*map(str, self.fused[:10])]
        lines += ["left:", *map(str, self.left[:5])] if self.left else []
        return "\n".join(lines)


def headroom(
    graph: OpGraph | Plan | Estimate,
    chip: str | Chip = "h200-sxm",
    execution: str | ExecutionModel = "efficient",
) -> Headroom:
    """What fusion saves in a step on `chip` (an Estimate has its own chip and execution).

    Where the execution model does not find groups, they are found all the same in the graph that it
    runs; its factors for bytes, which describe the same effect, are left out.
    """
    if isinstance(graph, Estimate):
        return headroom(graph.plan, graph.chip)
    planned = graph if isinstance(graph, Plan) else plan(graph, execution)
    model = planned.execution
    if model.fusion != "detected":
        model = replace(model, fusion="detected", activation_fusion=1.0, elementwise=1.0)
        planned = replace(planned, execution=model).regrouped(fuse(planned.graph, model))
    alone = fuse(planned.graph, replace(model, fusion="none"))
    return Headroom(
        estimate(planned.regrouped(alone, generated=False), chip),
        estimate(planned, chip),
        estimate(planned.regrouped(_Further(planned).groups()), chip),
    )


def _savings(before: Estimate, after: Estimate) -> tuple[Saving, ...]:
    """What each kernel of `after` saves that is several of `before`; alike ones together."""
    row_of = {op: row for row in before.rows for op in row.ops}
    found: dict[tuple[str, ...], list[tuple[Row, int, int, float]]] = defaultdict(list)
    ops = after.graph.ops
    for row in after.rows:
        parts = list({row_of[op].index: row_of[op] for op in row.ops}.values())
        if len(parts) == 1 and parts[0].bytes == row.bytes:
            continue
        # A group stands for as many kernels as its first op; what it crosses into is alike.
        size = sum(part.bytes // part.count for part in parts) * row.count - row.bytes
        seconds = sum(part.timing.t_device / part.count for part in parts) * row.count
        seconds -= row.timing.t_device
        names = [ops[op].name for op in row.ops]
        key = (row.pattern, row.name, pattern_of(row.module), row.part, *names)
        found[key].append((row, (len(parts) - 1) * row.count, size, seconds))
    savings = []
    for (pattern, name, module, part, *members), entries in found.items():
        seconds = sum(entry[3] for entry in entries)
        savings.append(
            Saving(
                pattern if pattern in (EPILOGUE, ATTENTION, CHAIN) else _how(members),
                name,
                tuple(members),
                module,
                part,
                sum(entry[0].count for entry in entries),
                sum(entry[1] for entry in entries),
                sum(entry[2] for entry in entries),
                seconds,
                seconds / before.t_est if before.t_est else 0.0,
            )
        )
    return tuple(sorted(savings, key=lambda s: (-s.seconds, -s.bytes, s.module, s.name, s.ops)))


def _how(members: Sequence[str]) -> str:
    """What a compiler did: to one op, it left out results that nobody reads."""
    return "fused" if len(members) > 1 else "unread"


class _Further:
    """Larger kernels than the groups of a plan: each group goes into one of them at most.

    A group moves to the first one that reads what it writes, so only where nothing on the way
    waits for the device or overwrites what it reads.
    """

    def __init__(self, planned: Plan) -> None:
        self.graph, self.found, self.costs = planned.graph, planned.groups, planned.costs
        self.reads = [self._storages(i, write=False) for i in range(len(self.found))]
        self.writes = [self._storages(i, write=True) for i in range(len(self.found))]
        self.sources: list[list[int]] = []
        self.readers: dict[tuple[int, int], set[int]] = defaultdict(set)
        self._read()
        self.syncs = [op.id for op in self.graph.ops if op.kind == "sync"]
        self.taken: set[int] = set()

    def groups(self) -> tuple[FusionGroup, ...]:
        """All groups in launch order, the larger ones in the place of their last part."""
        merged: dict[int, FusionGroup] = {}
        for kind, chains in (
            (ATTENTION, self._attentions()),
            (EPILOGUE, self._pairs(self._is_epilogue)),
            (CHAIN, self._pairs(self._is_chain)),
        ):
            for chain in chains:
                if self.taken.isdisjoint(chain):
                    self.taken.update(chain)
                    merged[chain[-1]] = self._merged(kind, chain)
        return tuple(
            merged.get(i, group)
            for i, group in enumerate(self.found)
            if i in merged or i not in self.taken
        )

    def _merged(self, kind: str, chain: Sequence[int]) -> FusionGroup:
        groups = [self.found[i] for i in chain]
        ops = tuple(sorted(op for group in groups for op in group.ops))
        names = " + ".join(group.name.removeprefix("aten.") for group in groups)
        name = "attention written by hand" if kind == ATTENTION else names
        known = all(group.known for group in groups)
        return replace(groups[0], ops=ops, pattern=kind, name=name, known=known)

    def _attentions(self) -> Iterator[tuple[int, ...]]:
        """A product, the group with the softmax of its result, and the product that takes that."""
        for i, group in enumerate(self.found):
            if not any(self.graph.ops[op].name in SOFTMAX for op in group.ops):
                continue
            last = self._next(i)
            firsts = [j for j in self._producers(i) if self._is_product(j)]
            if firsts and last is not None and self._is_product(last):
                yield firsts[-1], i, last

    def _pairs(self, fits: Callable[[int, int], bool]) -> Iterator[tuple[int, int]]:
        """Groups that could be one with the group that alone reads what they write."""
        for i in range(len(self.found)):
            pairs = [j for j in self._producers(i) if fits(j, i)]
            if pairs:
                yield max(pairs, key=lambda j: self._shared(j, i)), i

    def _is_epilogue(self, first: int, second: int) -> bool:
        """Whether the second goes over no more than the elements that the product writes."""
        if not self._is_product(first) or self._classes(second) != {"pointwise"}:
            return False
        elements = [
            max((self.graph.values[s].elements for s in self.writes[group]), default=0)
            for group in (first, second)
        ]
        return elements[1] <= elements[0] and not self._is_of_lists(second)

    def _is_chain(self, first: int, second: int) -> bool:
        opaque = "opaque" in self._classes(first) | self._classes(second)
        return not (opaque or self._is_of_lists(first) or self._is_of_lists(second))

    def _is_of_lists(self, group: int) -> bool:
        """Whether it goes over many tensors one after the other (an optimizer's step)."""
        names = (self.graph.ops[op].name for op in self.found[group].ops)
        return any(name.startswith("aten._foreach") for name in names)

    def _is_product(self, group: int) -> bool:
        return bool(self.costs[group].flops(MATRIX)) and "opaque" in self._classes(group)

    def _classes(self, group: int) -> set[str]:
        rules = (find_rule(self.graph.ops[op].target) for op in self.found[group].ops)
        return {rule.fusion if rule else "opaque" for rule in rules}

    def _shared(self, first: int, second: int) -> int:
        """Bytes that the second group reads of what the first one writes."""
        return sum(
            size
            for access, size in self.costs[second].traffic.items()
            if not access.write and access.storage in self.writes[first]
        )

    def _producers(self, group: int) -> list[int]:
        """Groups that only this one reads from, and that may move to it."""
        return [j for j in self.sources[group] if self._next(j) == group]

    def _next(self, first: int) -> int | None:
        """The only group that reads what this one writes, if the two may be one kernel."""
        readers = set().union(*(self.readers[first, s] for s in self.writes[first]))
        if len(readers) != 1:
            return None
        (second,) = readers
        one, other = self.found[first], self.found[second]
        if (one.times, one.repeats) != (other.times, other.repeats):
            return None
        waits = bisect_left(self.syncs, one.ops[0]) != bisect_left(self.syncs, other.ops[-1])
        between = range(first + 1, second)
        touched = self.reads[first] | self.writes[first]
        if waits or any(not touched.isdisjoint(self.writes[m]) for m in between):
            return None
        return second

    def _storages(self, group: int, write: bool) -> set[int]:
        traffic = self.costs[group].traffic
        return {access.storage for access in traffic if access.write == write}

    def _read(self) -> None:
        """Fill `sources`, the groups that each one reads from, and `readers` of what each wrote."""
        writer: dict[int, int] = {}
        for i in range(len(self.found)):
            read = [s for s in self.reads[i] if s in writer]
            for storage in read:
                self.readers[writer[storage], storage].add(i)
            self.sources.append(sorted({writer[storage] for storage in read}))
            writer.update(dict.fromkeys(self.writes[i], i))
