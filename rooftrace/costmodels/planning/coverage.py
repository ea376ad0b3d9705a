"""How much of a plan's totals rests on rules, and which ops have none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rooftrace._plain import Share
from rooftrace.costmodels.costs import Cost
from rooftrace.costmodels.pricing import unknown_bytes
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.paths import pattern_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """An op without a rule: no FLOP of it is counted."""

    target: str
    count: int
    bytes: int  # the bytes in the totals, see `price.without_rule`
    shapes: str  # "bf16[8, 2048], int64[8]"
    modules: tuple[str, ...]
    bytes_least: int = 0  # bounds, if it touches no byte twice: see `price.unknown_bytes`
    bytes_most: int | None = None

    @property
    def most(self) -> int:
        """The upper bound; `bytes` where none is known."""
        return self.bytes if self.bytes_most is None else self.bytes_most

    @property
    def stub(self) -> str:
        """A rule to paste and fill in."""
        name = self.target.rsplit(".", 1)[0]
        function = name.replace(".", "_").strip("_")
        return (
            f'@rooftrace.rule("{name}")\ndef {function}(op):\n'
            f"    return rooftrace.Cost.of(vector=...) + op.streamed()"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How much of a total rests on explicit rules."""

    ops: int
    ops_with_rule: int
    bytes: int
    bytes_with_rule: int
    unsupported: tuple[Unsupported, ...]

    @property
    def bytes_with_rule_share(self) -> Share:
        """Share of the priced bytes that a rule accounts for (1 when nothing moves)."""
        return self.bytes_with_rule / self.bytes if self.bytes else 1.0


def coverage_of(graph: OpGraph, costs: Sequence[Cost], known: Sequence[bool]) -> Coverage:
    """The coverage of a graph.  costs, known: the cost of each op, and whether it has a rule."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    least: Counter[str] = Counter()
    most: Counter[str] = Counter()
    where: dict[str, dict[str, None]] = defaultdict(dict)
    shapes: dict[str, str] = {}
    ops = total = 0
    for op, cost, has_rule in zip(graph.ops, costs, known, strict=True):
        if op.kind != "kernel":
            continue
        times = graph.times(op)
        size = times * (cost.bytes() + cost.bytes("link"))
        ops += times
        total += size
        if not has_rule:
            counts[op.target] += times
            sizes[op.target] += size
            low, high = unknown_bytes(graph, op)
            least[op.target] += times * low
            most[op.target] += times * high
            where[op.target][pattern_of(op.module)] = None
            shapes.setdefault(op.target, _shapes(graph, op.inputs[:3]))
    unsupported = tuple(
        Unsupported(
            target=target,
            count=counts[target],
            bytes=sizes[target],
            shapes=shapes[target],
            modules=tuple(where[target]),
            bytes_least=least[target],
            bytes_most=most[target],
        )
        for target in sorted(counts, key=lambda t: (-sizes[t], t))
    )
    return Coverage(
        ops=ops,
        ops_with_rule=ops - counts.total(),
        bytes=total,
        bytes_with_rule=total - sizes.total(),
        unsupported=unsupported,
    )


def _shapes(graph: OpGraph, inputs: Sequence[int]) -> str:
    """The types and shapes of values as text: "bf16[8, 2048], int64[8]"."""
    tensors = (graph.values[i] for i in inputs)
    return ", ".join(f"{t.dtype}[{', '.join(map(str, t.shape))}]" for t in tensors)
