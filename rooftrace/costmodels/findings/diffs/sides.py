"""One side of a diff: an estimate with the dataflow of its kernels, and where each op is priced."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from rooftrace.costmodels.costs import COMPUTED, MATRIX, AttentionSizes, Cost, Work
from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.findings.diffs.flow import Flow, Read
from rooftrace.costmodels.findings.diffs.matching import Matching, match
from rooftrace.costmodels.fusion import runs
from rooftrace.costmodels.kernels import engines
from rooftrace.tracer.changes import Change
from rooftrace.tracer.graph import Op, OpGraph
from rooftrace.tracer.paths import pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFacts:
    """What an op exchanges with other processes, without the name of their group."""

    kind: str
    axis: str  # of the mesh; the name of the group where no mesh is known
    size: int  # processes of the group
    places: tuple[int, ...]  # its ranks, from the lowest one on
    bytes: int
    rest: tuple[Any, ...]  # precision, whether its stream waits, bytes to each process


class Side:
    """An estimate, with what a comparison looks up."""

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

    def cost(self, op: int) -> Cost:
        """What an op costs by itself."""
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
        """What an op exchanges, and with which others; None for an op that works alone."""
        together = self.graph.ops[op].collective
        if together is None:
            return None
        group = self.graph.groups[together.group]
        return ExchangeFacts(
            kind=together.kind,
            axis=group.axis or together.group,
            size=group.size,
            places=tuple(rank - min(group.ranks) for rank in group.ranks),
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


class Sides:
    """The two sides of a diff, and which of their kernels are the same."""

    def __init__(self, before: Estimate, after: Estimate) -> None:
        self.before, self.after = Side(before), Side(after)
        self.matching: Matching = match(self.before.flow, self.after.flow)

    def __getitem__(self, number: int) -> Side:
        return self.after if number else self.before

    def costs(self, before: Iterable[int], after: Iterable[int]) -> dict[str, Change]:
        """What rows of the two sides cost together, by the names of the fields of a `DiffRow`."""
        rows = [
            [self[number].estimate.rows[row] for row in numbers]
            for number, numbers in enumerate((before, after))
        ]
        return {
            "time": Change(*(sum(row.timing.t_device for row in side) for side in rows)),
            "bytes": Change(*(sum(row.bytes for row in side) for side in rows)),
            "flops": Change(*(sum(row.flops for row in side) for side in rows)),
            "kernels": Change(*(sum(row.count for row in side) for side in rows)),
        }

    def reads(self, before: int, after: int) -> Iterator[tuple[Read, Read]]:
        """What a kernel of either side reads, argument by argument."""
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
