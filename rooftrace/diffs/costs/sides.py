"""Both sides of a diff: dataflow between kernels, and the matching of kernels of two graphs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.fusion import runs, waits
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.ops import COMPUTED, MATRIX, AttentionSizes, Cost, Work, find_rule
from rooftrace.diffs import Change
from rooftrace.diffs.changes import Pairing
from rooftrace.graph import Op, OpGraph, Tensor, pattern_of, references

# -- dataflow --------------------------------------------------------------------------------------
# Views, which move nothing, are looked through.

Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""Precision and shape of some tensors."""


@dataclass(frozen=True, slots=True)
class Read:
    """One tensor that a kernel reads.

    origin: the kernel that made it, or -1 - v for value v, which is there before the step.  value:
    the tensor as the kernel sees it, after any views.
    """

    origin: int
    value: int


class Flow:
    """The kernels of a graph in order, the reads of each, and the readers of its outputs."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.kernels = tuple(op.id for op in graph.kernels())

    @cached_property
    def origins(self) -> Sequence[int]:
        """By value, the kernel that made it, or -1 - v for value v from before the step."""
        origins = [-1 - value for value in range(len(self.graph.values))]
        for op in self.graph.ops:
            is_kernel = op.kind == "kernel"
            for value in op.outputs:
                if is_kernel:
                    origins[value] = op.id
                elif op.inputs:
                    origins[value] = origins[op.inputs[0]]
        return origins

    @cached_property
    def reads(self) -> Mapping[int, tuple[Read, ...]]:
        """By kernel, its reads, in the order of its arguments."""
        reads: dict[int, tuple[Read, ...]] = {}
        for number in self.kernels:
            read = []
            for ref in references(self.graph.ops[number].arguments):
                read.append(Read(self.origins[ref.id], ref.id))
                if ref.then is not None:
                    read.append(Read(self.origins[ref.then.value], ref.then.value))
            reads[number] = tuple(read)
        return reads

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """By kernel (or outside value, as in `Read.origin`), the kernels that read its outputs."""
        readers: dict[int, dict[int, None]] = {}
        for number, read in self.reads.items():
            for each in read:
                readers.setdefault(each.origin, {})[number] = None
        return {origin: tuple(ops) for origin, ops in readers.items()}

    def signature(self, op: Op) -> tuple[Signature, Signature]:
        """Precisions and shapes of the inputs and of the outputs of an op.

        They are sorted where the order does not matter.  A list with an item for each iteration of
        a repeat has all of its items.
        """
        read: list[Tensor] = []
        for ref in op.reads:
            read += self._copies(op, ref.id, ref.every)
        made = [tensor for value in op.outputs for tensor in self._copies(op, value, True)]
        if in_any_order(op):
            return tuple(sorted(_sizes(read))), tuple(sorted(_sizes(made)))
        return _sizes(read), _sizes(made)

    def _copies(self, op: Op, value: int, every: bool) -> list[Tensor]:
        tensor = self.graph.values[value]
        return [tensor] * (runs.copies(self.graph, op, value) if every else 1)

    def exact(self, number: int) -> Hashable:
        """Key of kernels that do the same to tensors of the same sizes."""
        op = self.graph.ops[number]
        return op.name, op.part, self.signature(op)

    def loose(self, number: int) -> Hashable:
        """Key of kernels that do the same to tensors of any sizes."""
        op = self.graph.ops[number]
        return op.name, op.part

    def outside(self, origin: int, exact: bool) -> Hashable:
        """Key of equal tensors from before the step."""
        tensor = self.graph.values[-1 - origin]
        return (tensor.role, tensor.dtype, tensor.shape) if exact else tensor.role


def in_any_order(op: Op) -> bool:
    """Whether the cost of an op does not depend on the order of the tensors that it reads: it is
    pointwise, or takes a list of them."""
    rule = find_rule(op.target)
    if rule is not None and rule.fusion == "pointwise":
        return True
    return any(type(a) is tuple and any(references(a)) for a in op.arguments.values())


def _sizes(tensors: Sequence[Tensor]) -> Signature:
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)


# -- sides -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """The exchange of an op with other processes, without the name of their group."""

    kind: str
    axis: str  # of the mesh; without a mesh the name of the group
    size: int  # processes of the group
    ranks: tuple[int, ...]  # of the group, relative to the lowest
    bytes: int
    rest: tuple[Any, ...]  # precision, whether its stream waits, bytes to each process


class Side:
    """An estimate with the dataflow of its kernels, and the rows of each op."""

    def __init__(self, estimate: Estimate) -> None:
        self.estimate = estimate
        self.flow = Flow(estimate.graph)

    @property
    def graph(self) -> OpGraph:
        """The graph that was priced."""
        return self.estimate.graph

    @cached_property
    def rows_of(self) -> Mapping[int, tuple[int, ...]]:
        """By op, the rows (kernel groups) that it is in."""
        rows: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(self.estimate.rows):
            for op in row.ops:
                rows[op].append(number)
        return {op: tuple(numbers) for op, numbers in rows.items()}

    @cached_property
    def waits(self) -> Mapping[int, int]:
        """The ops at which the host waits for a value, by the kernel that makes the value."""
        origins, graph = self.flow.origins, self.graph
        return {
            origins[op.inputs[0]] if op.kind == "sync" and op.inputs else op.id: op.id
            for op in graph.ops
            if waits(graph, op)
        }

    def cost(self, op: int) -> Cost:
        """The cost of an op alone."""
        return self.estimate.plan.op_costs[op]

    def paths(self, op: Op) -> tuple[str, ...]:
        """The modules in which an op runs, as often in each."""
        return runs.kernel_modules(self.graph, (op.id,), op)

    def product(self, op: int) -> Work | None:
        """The matrix work that an op does most of; None where it does none."""
        work = {
            each: flop
            for each, flop in self.cost(op).work.items()
            if each.operation in MATRIX and each.count in COMPUTED
        }
        if not work:
            return None
        most = max(work, key=work.__getitem__)
        return replace(most, precision=engines.precision_on(self.estimate.chip, most.precision))

    def attention(self, op: int) -> AttentionSizes | None:
        """The sizes of the attention that an op is; None for another op."""
        return next((work.attention for work in self.cost(op).work if work.attention), None)

    def engine(self, work: Work) -> tuple[str, float]:
        """The engine that runs some work, and its peak in FLOP/s."""
        name, precision = engines.engine_of(work, self.estimate.chip, self.estimate.execution)
        return name, self.estimate.chip.peak(name, precision)

    def exchange(self, op: int) -> ExchangeFacts | None:
        """The exchange of an op with other processes; None without one."""
        together = self.graph.ops[op].collective
        if together is None:
            return None
        group = self.graph.groups[together.group]
        return ExchangeFacts(
            kind=together.kind,
            axis=group.axis or together.group,
            size=group.size,
            ranks=tuple(rank - min(group.ranks) for rank in group.ranks),
            bytes=together.bytes,
            rest=(together.dtype, together.waits, together.splits),
        )

    def seconds(self, op: int) -> float:
        """Device seconds of the kernels that an op is in."""
        return sum(self.estimate.rows[row].timing.t_device for row in self.rows_of.get(op, ()))

    def rate(self, op: int) -> float | None:
        """FLOP/s that the kernels of an op reach; None where they take no time."""
        rows = [self.estimate.rows[row] for row in self.rows_of.get(op, ())]
        seconds = sum(row.timing.t_device for row in rows)
        return sum(row.flops for row in rows) / seconds if seconds else None


@dataclass(frozen=True, slots=True)
class LayerCount:
    """Equal modules of which one side has more; alone: the paths that only that side has."""

    pattern: str
    counts: tuple[int, int]
    alone: tuple[str, ...]


ROUNDING = 1e-9
"""Share of a step: parts of it are sums of floats, in another order on either side."""


class Sides:
    """The two sides of a diff, and which of their kernels are the same."""

    def __init__(self, before: Estimate, after: Estimate) -> None:
        self.before, self.after = Side(before), Side(after)
        self.matching = match(self.before.flow, self.after.flow)

    def __getitem__(self, number: int) -> Side:
        return self.after if number else self.before

    def costs(self, before: Iterable[int], after: Iterable[int]) -> dict[str, Change]:
        """The costs of rows of the two sides, by the names of the fields of a `DiffRow`."""
        rows = [
            [self[number].estimate.rows[row] for row in numbers]
            for number, numbers in enumerate((before, after))
        ]
        return {
            "time": self.seconds(*(sum(row.timing.t_device for row in side) for side in rows)),
            "bytes": Change(*(sum(row.bytes for row in side) for side in rows)),
            "flops": Change(*(sum(row.flops for row in side) for side in rows)),
            "kernels": Change(*(sum(row.count for row in side) for side in rows)),
        }

    def seconds(self, before: float, after: float) -> Change:
        """Seconds of a part of either step; no change where the steps' rounding explains it."""
        steps = self.before.estimate.t_est, self.after.estimate.t_est
        return Change(before, before if abs(after - before) <= ROUNDING * max(steps) else after)

    def made(self, before: int, after: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The outputs of a pair of kernels, one by one."""
        first, second = self.before.graph, self.after.graph
        for a, b in zip(first.ops[before].outputs, second.ops[after].outputs, strict=False):
            yield first.values[a], second.values[b]

    def reads(self, before: int, after: int) -> Iterator[tuple[Read, Read]]:
        """The reads of a pair of kernels, argument by argument."""
        return zip(self.before.flow.reads[before], self.after.flow.reads[after], strict=False)

    @cached_property
    def partners(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """By kernel of either side, the kernel of the other one that most of its runs are."""
        best: tuple[dict[int, tuple[int, int]], dict[int, tuple[int, int]]] = {}, {}
        for pair in self.matching.pairs:
            ops = pair.before, pair.after
            for number in range(2):
                runs_of = best[number].get(ops[number], (0, 0))[0]
                if pair.times > runs_of:
                    best[number][ops[number]] = pair.times, ops[1 - number]
        first, second = ({op: partner for op, (_, partner) in side.items()} for side in best)
        return first, second

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        """Pattern of a module's path in the second graph, by that in the first where it differs."""
        votes: dict[str, Counter[str]] = defaultdict(Counter)
        graphs = self.before.graph, self.after.graph
        for pair in self.matching.pairs:
            old, new = graphs[0].ops[pair.before].module, graphs[1].ops[pair.after].module
            votes[pattern_of(old)][pattern_of(new)] += pair.times
        first = {old: counts.most_common(1)[0][0] for old, counts in votes.items()}
        return {old: new for old, new in first.items() if old != new and old}

    def modules(self, number: int, op: Op) -> tuple[str, ...]:
        """The modules in which an op of either side runs, as often in each, by their paths in the
        second side.

        A matched op of the first side is where its partner is, another one where most of the
        matched ops of its module are.
        """
        paths = self[number].paths(op)
        if number:
            return paths
        partner = self.partners[0].get(op.id)
        if partner is not None:
            other = self.after.graph.ops[partner]
            same = pattern_of(other.module) == pattern_of(op.module)
            return paths if same else self.after.paths(other)
        return tuple(dict.fromkeys(map(self._renamed, paths)))

    def _renamed(self, path: str) -> str:
        """The path of a module of the first side in the second one."""
        new = self.renamed.get(pattern_of(path))
        if new is None or path in self.after.graph.modules:
            return path
        numbers = iter([part for part in path.split(".") if part.isdigit()])
        return ".".join(next(numbers, "*") if part == "*" else part for part in new.split("."))

    def left(self, number: int, op: Op, times: int) -> tuple[str, ...]:
        """The modules of those runs of an op that have no partner: new paths, else the last."""
        paths = self.modules(number, op)
        each = max(1, self[number].graph.times(op) // len(paths))
        count = max(1, -(-times // each))
        if count >= len(paths):
            return paths
        there = self[1 - number].graph.modules
        alone = [path for path in paths if path not in there]
        return tuple(alone[:count]) if len(alone) >= count else paths[-count:]

    @cached_property
    def layer_counts(self) -> tuple[LayerCount, ...]:
        """Lists of equal modules that are longer on one side."""
        graphs = self.before.graph, self.after.graph
        counts = [Counter(map(pattern_of, graph.modules)) for graph in graphs]
        lists = []
        for number in range(2):
            here, there = graphs[number].modules, graphs[1 - number].modules
            patterns = {path: pattern_of(path) for path in here if path not in there}
            only = {p: pattern for p, pattern in patterns.items() if pattern in counts[1 - number]}
            alone: dict[str, list[str]] = defaultdict(list)
            for path, pattern in only.items():
                if path.rpartition(".")[0] not in only and pattern.endswith("*"):
                    alone[pattern].append(path)
            lists += [
                LayerCount(pattern, (counts[0][pattern], counts[1][pattern]), tuple(paths))
                for pattern, paths in alone.items()
            ]
        return tuple(lists)


# -- matching --------------------------------------------------------------------------------------
# Each kernel gets a label for every radius: radius 0 is its function, radius k + 1 is its label of
# radius k with those of its neighbours (the refinement of Weisfeiler and Leman).  Kernels are
# matched from the largest radius to the smallest, so the order of independent kernels, the names of
# modules and the lines of the code do not matter.  First come kernels that do the same to tensors
# of the same sizes: in the same module, then in modules that are alike, then anywhere.  Those that
# do the same to other sizes follow.


RADIUS = 6
"""Kernels around a kernel that tell it from others that do the same."""
_ANCHORS = 2
"""The fewest matched neighbours that two kernels of different sizes in different modules share."""
_ELSEWHERE = 1
_RESIZED_ELSEWHERE = 2
"""The least radius at which kernels of different modules are the same, and are so resized."""

Labels = list[Mapping[int, int]]
"""By radius, the label of each kernel."""


def match(before: Flow, after: Flow) -> Pairing[int]:
    """Match the kernels of two graphs; every run of a kernel is in one pair or left over."""
    flows = before, after
    runs_of = ({n: flow.graph.times(flow.graph.ops[n]) for n in flow.kernels} for flow in flows)
    pairing = Pairing(*runs_of)
    for exact, elsewhere in ((True, _ELSEWHERE), (False, _RESIZED_ELSEWHERE)):
        if not pairing.is_left:
            break
        labels = _labels(before, after, exact)
        for place, least in (((lambda path: path), 0), (pattern_of, 0), (_anywhere, elsewhere)):
            for radius in range(RADIUS, least - 1, -1):
                if pairing.is_left:
                    first, second = (
                        partial(_key, flow, side[radius], place)
                        for flow, side in zip(flows, labels, strict=True)
                    )
                    pairing.by(first, second)
    _by_anchors(pairing, flows)
    return pairing


def _anywhere(_: str) -> str:
    return ""


def _key(
    flow: Flow, labels: Mapping[int, int], place: Callable[[str], str], number: int
) -> Hashable:
    """The key of matched kernels: a label, and `place` of the paths of their modules."""
    return labels[number], place(flow.graph.ops[number].module)


def _by_anchors(pairing: Pairing[int], flows: tuple[Flow, Flow]) -> None:
    """Match the rest by the matched kernels around it: most of these in common first."""
    anchors = [
        {op: Anchors(flow, left).around(op) for op in left}
        for flow, left in zip(flows, pairing.left, strict=True)
    ]
    partners = {pair.before: pair.after for pair in pairing.pairs}
    scores = []
    for a, around in anchors[0].items():
        there = {_translated(anchor, partners) for anchor in around}
        for b, others in anchors[1].items():
            same = flows[0].loose(a) == flows[1].loose(b)
            if same and (score := len(there & others)) >= _ANCHORS:
                scores.append((-score, a + b, a, b))
    for _, _, a, b in sorted(scores):
        if a in pairing.left[0] and b in pairing.left[1]:
            pairing.pair(a, b)


def _translated(anchor: Anchor, partners: Mapping[int, int]) -> Anchor:
    """An anchor of the first graph as one of the second."""
    kind, where = anchor
    return (kind, partners.get(where, -1)) if isinstance(where, int) else anchor


def _labels(before: Flow, after: Flow, exact: bool) -> list[Labels]:
    """Labels of the kernels of both graphs; equal ones in the two are equal numbers."""
    numbers: dict[Hashable, int] = {}
    labels: list[Labels] = [[], []]
    for side, flow in enumerate((before, after)):
        key = flow.exact if exact else flow.loose
        labels[side].append({n: numbers.setdefault(key(n), len(numbers)) for n in flow.kernels})
    for _ in range(RADIUS):
        for side, flow in enumerate((before, after)):
            labels[side].append(_wider(flow, labels[side][-1], numbers, exact))
    return labels


def _wider(
    flow: Flow, labels: Mapping[int, int], numbers: dict[Hashable, int], exact: bool
) -> dict[int, int]:
    """Labels of the next radius."""
    wider: dict[int, int] = {}
    for number in flow.kernels:
        inputs: Sequence[Hashable] = [
            labels[read.origin] if read.origin >= 0 else flow.outside(read.origin, exact)
            for read in flow.reads[number]
        ]
        if in_any_order(flow.graph.ops[number]):
            inputs = sorted(inputs, key=repr)
        readers = tuple(sorted(labels[reader] for reader in flow.readers.get(number, ())))
        key = (labels[number], tuple(inputs), readers)
        wider[number] = numbers.setdefault(key, len(numbers))
    return wider


# -- anchors ---------------------------------------------------------------------------------------
# Fixed points around a kernel without a partner: matched kernels, named tensors, results.


Anchor = tuple[str, int | str]
"""The relation of a kernel to its anchor, and the anchor: the number of a kernel, or a name."""
_DEPTH = 3
"""Kernels without a partner that may stand between a kernel and its anchor."""


class Anchors:
    """The anchors of the kernels of a graph; left: runs without a partner, by kernel."""

    def __init__(self, flow: Flow, left: Mapping[int, int]) -> None:
        self.flow, self.left = flow, left

    def around(self, op: int) -> set[Anchor]:
        """Matched kernels (or named tensors) that it reads from, and that read from it."""
        values = self.flow.graph.values
        anchors: set[Anchor] = set()
        for origin in self._reached(op, back=True):
            if origin >= 0:
                anchors.add(("reads", origin))
            elif name := values[-1 - origin].name:
                anchors.add(("named", name))
        anchors |= {("read by", reader) for reader in self._reached(op, back=False)}
        made = set(self.flow.graph.ops[op].outputs)
        for position, value in enumerate(self.flow.graph.outputs):
            if value in made or self.flow.origins[value] == op:
                anchors.add(("result", str(position)))
        return anchors

    def _reached(self, op: int, back: bool) -> set[int]:
        """The nearest kernels with a partner, or tensors from outside, in one direction."""
        reached: set[int] = set()
        front = [op]
        for _ in range(_DEPTH + 1):
            after: list[int] = []
            for number in front:
                near = (
                    [read.origin for read in self.flow.reads[number]]
                    if back
                    else self.flow.readers.get(number, ())
                )
                after += [other for other in near if self.left.get(other)]
                reached |= {other for other in near if not self.left.get(other)}
            front = after
        return reached
