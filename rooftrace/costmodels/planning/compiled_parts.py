"""What of a step the script itself compiles: the rest of it runs eager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rooftrace._reading import beginning
from rooftrace.costmodels.execution import ExecutionModel, execution_model
from rooftrace.errors import RequestError
from rooftrace.tracer.asking import Job
from rooftrace.tracer.collectives import marks
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import looks_saved

_HEAD = 20_000
"""Bytes at the beginning of a saved graph in which it says what it is of."""


def usual_execution(*sources: Any) -> str:
    """How steps run where nobody says: those of a script as it compiles them, others efficiently.

    Sources are what `estimate` takes; None is none.  Raises RequestError for sources of both kinds.
    """
    of_scripts = [_is_of_script(source) for source in sources if source is not None]
    if len(set(of_scripts)) > 1:
        raise RequestError(
            "steps of scripts are priced as mixed and others as efficient, and here are both: say "
            "one for all as execution= (--execution)"
        )
    return "mixed" if any(of_scripts) else "efficient"


def _is_of_script(source: Any) -> bool:
    """Whether a source is a script, or what was recorded of one."""
    if isinstance(source, OpGraph):
        return bool(source.provenance.get("script"))
    if isinstance(source, Mapping):
        return any(map(_is_of_script, source.values()))
    job = source if isinstance(source, Job) else Job(source=source)
    if job.source is not source:
        return _is_of_script(job.source)
    if job.is_named and looks_saved(job.name):
        return b'"script":true' in beginning(job.name, _HEAD)
    return job.is_script


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
