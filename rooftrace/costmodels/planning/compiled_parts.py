"""What of a step the script itself compiles: the rest of it runs eager."""

from __future__ import annotations

from dataclasses import replace

from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import OpGraph


def as_written(graph: OpGraph, model: ExecutionModel) -> tuple[OpGraph, ExecutionModel]:
    """A graph as an execution model runs it, and that model.

    The one for mixed steps is that for eager ones where the script compiles nothing of the step,
    and that for compiled ones where it compiles all; else breaks stand where compiled code begins
    and ends.
    """
    if model.dispatch != "mixed":
        return graph, model
    inside = {marks.COMPILED in op.facts for op in graph.ops if op.kind == "kernel"}
    if len(inside) < 2:
        preset = execution_model("compiled" if inside == {True} else "eager")
        same = {name: getattr(preset, name) for name in ("name", "fusion", "dispatch", "kv_append")}
        return graph, replace(model, **same)
    return marks.with_breaks(graph, marks.compiled_cuts(graph.ops)), model
