"""How far two ways to group the ops of a graph agree; no Inductor needed here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import comb

from msgspec.structs import replace

import rooftrace as rt
from rooftrace.costmodels.execution.executions import execution_model
from rooftrace.costmodels.planning.plans import plan
from rooftrace.costmodels.registry.lookup import find_rule
from rooftrace.costmodels.rewriting.rewrites import rewrite
from rooftrace.tracer.graph.graph import OpGraph


@dataclass(frozen=True)
class Agreement:
    """precision, recall: of pairs of ops in one kernel, ours against theirs.

    rand: the adjusted Rand index, 1 for equal partitions and about 0 for independent ones.
    """

    precision: float
    recall: float
    rand: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        both = self.precision + self.recall
        return 2 * self.precision * self.recall / both if both else 0.0


def compiled_graph(case: tuple, phase: str = "forward") -> OpGraph:
    """A pass of (model, arguments, keyword arguments) as a compiler sees it, without an optimizer.

    What a module asks of its data stays outside a compiled graph, and so does what leads there.
    """
    model, args, kwargs = case
    graph = rt.trace(model, *args, phase=phase, **kwargs).expand()
    kept = [op for op in graph.ops if op.kind != "sync" and op.part != "optimizer"]
    graph = graph.replace(ops=tuple(replace(op, id=i) for i, op in enumerate(kept)))
    return rewrite(graph, execution_model("efficient"))[0]


def our_groups(graph: OpGraph) -> tuple[dict[int, int], list[int]]:
    """Our kernel by op, and HBM bytes by kernel."""
    planned = plan(graph)
    groups = {op: i for i, group in enumerate(planned.groups) for op in group.ops}
    return groups, [cost.bytes() for cost in planned.costs]


def is_kernel(graph: OpGraph, op: int) -> bool:
    """Whether the op runs on the device at all."""
    rule = find_rule(graph.ops[op].target)
    return graph.ops[op].kind == "kernel" and (rule is None or rule.fusion != "free")


def agreement(ours: Mapping[int, int], theirs: Mapping[int, int]) -> Agreement:
    """Of two kernels-by-op over the ops of `theirs`."""
    both = Counter((ours[op], theirs[op]) for op in theirs)
    same = sum(comb(n, 2) for n in both.values())
    a = sum(comb(n, 2) for n in Counter(ours[op] for op in theirs).values())
    b = sum(comb(n, 2) for n in Counter(theirs.values()).values())
    expected = a * b / max(comb(len(theirs), 2), 1)
    spread = (a + b) / 2 - expected
    return Agreement(
        same / a if a else 1.0,
        same / b if b else 1.0,
        (same - expected) / spread if spread else 1.0,
    )
