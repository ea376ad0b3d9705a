"""The graphs of a job, by phase, whatever its source is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rooftrace._progress import tell
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.asking import Job, names
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import GraphFileError, load_graphs
from rooftrace.tracer.sources.apart import Traced, can_go_apart, trace_apart

if TYPE_CHECKING:
    from rooftrace.tracer.inputs import Loaded


def traced(job: Job) -> Traced:
    """The graphs of a job, and the files that they were traced from.

    The default phases are forward and training for a module with arguments (forward alone where no
    parameter asks for a gradient), and those that fit for a target.  Raises RequestError for an
    argument that the source has no use for; TargetError; TraceError.
    """
    if job.is_graph:
        made = Traced(_graphs_there(job))
    elif job.is_named:
        made = traced_target(job)
    else:
        made = Traced(_graph_of_step(job) if job.is_step else _graphs_of_module(job))
    job.check_used(made.graphs)
    return made


def loaded(job: Job) -> Loaded:
    """The module of a job, which is a module or names one, with the inputs of its call.

    What a target imports later belongs inside the same `isolation.own_imports`.
    """
    from rooftrace.tracer.inputs import Loaded, call_inputs, module_inputs
    from rooftrace.tracer.targets import load_target

    if job.is_named:
        tell("building the model")
        return load_target(job.name, job.request)
    if job.is_sized and not job.is_called:
        return Loaded(job.source, module_inputs(job.source, job.request), "")
    job.check_call()
    return Loaded(job.source, call_inputs(job.source, job.args, job.kwargs), "")


def _graphs_there(job: Job) -> dict[str, OpGraph]:
    """The graphs that a job brings or names; only those of its phases."""
    source, name = job.source, job.name
    if job.is_named:
        graphs = load_graphs(source)
    elif isinstance(source, OpGraph):
        graphs, name = {source.phase: source}, "the graphs that were given"
    else:
        graphs, name = dict(source), "the graphs that were given"
        for phase, graph in graphs.items():
            if not isinstance(graph, OpGraph):
                raise RequestError(
                    f"{phase!r}: expected an OpGraph, got {type(graph).__name__}; trace it first"
                )
    for phase in job.phases or ():
        if phase not in graphs:
            raise GraphFileError(
                f"{name}: no graph of phase {phase!r}; it holds {', '.join(graphs)}"
            )
    return graphs if job.phases is None else {phase: graphs[phase] for phase in job.phases}


def traced_target(job: Job) -> Traced:
    """Trace a job on a target here, or in another process if its code cannot run here.

    Code is imported afresh each time; some code allows only one import in a process.
    """
    from rooftrace.tracer.patches import contexts
    from rooftrace.tracer.phases import trace_phases
    from rooftrace.tracer.targets import isolation

    name = job.name
    with collector_paused(), contexts.apart(), isolation.own_imports():
        try:
            made = loaded(job)
        except TargetError:
            if not (job.is_code and isolation.imported_again() and can_go_apart(job)):
                raise
        else:
            graphs = trace_phases(made.module, made.inputs, job.phases, job.options, name)
            files = isolation.source_files()
            if not job.is_code and os.path.isfile(name):
                files[os.path.realpath(name)] = isolation.digest(name)
            return Traced(graphs, files)
    return trace_apart(job)


def _graph_of_step(job: Job) -> dict[str, OpGraph]:
    """The graph of the user's own step, under the phase that its run showed."""
    from torch import inference_mode

    from rooftrace.tracer.patches import contexts
    from rooftrace.tracer.phases import trace_step

    with collector_paused(), contexts.apart(), inference_mode(False):
        graph = trace_step(job.source, job.args, job.kwargs, job.options)
    return {graph.phase: graph}


def _graphs_of_module(job: Job) -> dict[str, OpGraph]:
    """The graphs of a module; each phase has arguments of its own, which its run may change."""
    from torch import inference_mode

    from rooftrace.tracer.patches import contexts
    from rooftrace.tracer.phases import trace_phases

    graphs: dict[str, OpGraph] = {}
    sized = job.is_sized and not job.is_called
    with collector_paused(), contexts.apart(), inference_mode(False):
        for phases in (
            [job.phases] if sized else [(p,) for p in job.phases or names.usual(job.source)]
        ):
            made = loaded(job)
            graphs |= trace_phases(made.module, made.inputs, phases, job.options)
    return graphs


@contextmanager
def collector_paused(keep: bool = False) -> Iterator[None]:
    """No garbage collection inside: tracing and pricing make many objects that all stay.

    keep: exclude all objects from later collections too (gc.freeze).  That is for a program that
    ends soon: garbage made inside is never freed.
    """
    from rooftrace.tracer.patches import shared

    enabled = gc.isenabled()
    with shared.collector_off.used():
        try:
            yield
        finally:
            if enabled and keep:
                gc.freeze()
