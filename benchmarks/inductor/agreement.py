"""The graph that a compiler is given, and our kernels of it; no Inductor needed here."""

from __future__ import annotations

from msgspec.structs import replace

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.rewrites.rewrites import rewrite
from rooftrace.graph.graph import OpGraph


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
