"""The graphs of a job, by phase, whatever its source is."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace._progress import tell
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.asking import Job, names
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import GraphFileError, load_graphs
from rooftrace.tracer.sources.apart import Traced, can_go_apart, trace_apart
from rooftrace.tracer.sources.running import script_graphs

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

    if job.is_script:
        raise RequestError(
            f"{job.name}: a script is no module that can be called; name the module in it "
            f"({job.name.split()[0]}:NAME), or use a command that takes the graphs of its steps"
        )
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
    return job.of_phases(graphs, GraphFileError, name)


def traced_target(job: Job) -> Traced:
    """Trace a job on a target here, or in another process if its code cannot run here.

    Code is imported afresh each time; some code allows only one import in a process.
    """
    from rooftrace.tracer.patches import contexts
    from rooftrace.tracer.targets import isolation

    name = job.name
    with ExitStack() as stack:
        for context in (collector_paused(), contexts.apart(), isolation.own_imports()):
            stack.enter_context(context)
        if job.request.mesh:
            stack.enter_context(_mesh_of(job))
        if job.is_script:
            return Traced(script_graphs(job), isolation.source_files())
        try:
            made = loaded(job)
        except TargetError:
            if not (job.is_code and isolation.imported_again() and can_go_apart(job)):
                raise
        else:
            graphs = _phases_of_target(job, made)
            files = isolation.source_files()
            if not job.is_code and os.path.isfile(name):
                files[os.path.realpath(name)] = isolation.digest(name)
            return Traced(graphs, files)
    return trace_apart(job)


def _mesh_of(job: Job) -> AbstractContextManager[None]:
    """The processes that a job's mesh stands for; code names its own axes."""
    from rooftrace.tracer.sharded import fake_mesh, huggingface

    mesh = job.request.mesh
    return fake_mesh(mesh if job.is_code else huggingface.processes(mesh))


def _phases_of_target(job: Job, made: Loaded) -> dict[str, OpGraph]:
    """The graphs of a target.  A Hugging Face model over a mesh is spread for each kind of phase:
    replicas share their weights in training only."""
    from rooftrace.tracer.phases import trace_phases
    from rooftrace.tracer.sharded import huggingface

    request = job.request
    if job.is_code or not (request.mesh or request.checkpoint != "none"):
        return trace_phases(made.module, made.inputs, job.phases, job.options, job.name)
    if request.mesh.get("pp", 1) > 1:
        return _stages_of_target(job, made)
    usual = ("forward",) if made.inputs.decode is None else ("prefill", "decode")
    phases = job.phases or (*usual, "training")
    graphs: dict[str, OpGraph] = {}
    for trains in (False, True):
        some = [phase for phase in phases if names.phase_of(phase).trains is trains]
        if not some:
            continue
        spread = loaded(job) if graphs else made
        inputs, kept = spread.inputs, request.checkpoint
        if trains and job.options.loss is None:  # a module in shards cannot be asked for labels
            inputs = inputs.trained(spread.module)
        huggingface.distribute(spread.module, request.mesh, trains=trains, checkpoint=kept)
        with huggingface.divided(spread.module, request.mesh):
            graphs |= trace_phases(spread.module, inputs, some, job.options, job.name)
    return {phase: graphs[phase] for phase in phases}


def _stages_of_target(job: Job, made: Loaded) -> dict[str, OpGraph]:
    """The graphs of the distinct stages of a pipeline, each with one microbatch."""
    from rooftrace.tracer.phases import trace_phases
    from rooftrace.tracer.pipelines import splitting, stages_of, table_of
    from rooftrace.tracer.sharded import huggingface

    request = job.request
    for phase in job.phases or ():
        if not names.phase_of(phase).trains:
            raise RequestError(
                f"--phase {phase} with --mesh pp={request.mesh['pp']}: pipelines are walked for "
                "training; leave pp out, or ask for training"
            )
    ranks, schedule = request.mesh["pp"], request.schedule or "1f1b"
    count = stages_of(schedule, ranks)
    microbatches = request.microbatches or 2 * count
    table_of(schedule, ranks, microbatches)  # refused before anything is traced
    graphs: dict[str, OpGraph] = {}
    for stage in splitting.split(made.module, count):
        fresh = loaded(job) if graphs else made
        inputs = splitting.inputs_of(fresh.inputs, fresh.module, stage)
        splitting.keep(fresh.module, stage)
        kept = request.checkpoint
        huggingface.distribute(fresh.module, request.mesh, trains=True, checkpoint=kept)
        with huggingface.divided(fresh.module, request.mesh):
            made_of = trace_phases(fresh.module, inputs, ("training",), job.options, job.name)
        (graph,) = made_of.values()
        graph = splitting.with_stage(graph, stage, schedule, microbatches)
        graphs[graph.step] = graph
    return graphs


def _graph_of_call(job: Job) -> dict[str, OpGraph]:
    """The graph of a call of a function that runs backward itself, as of a step of the user's."""

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function.function(*args, **kwargs)  # so that its ops are outside of modules

    call.__name__ = type(job.source).__name__
    return _graph_of_step(replace(job, source=call, args=(job.source, *job.args)))


def _graph_of_step(job: Job) -> dict[str, OpGraph]:
    """The graph of the user's own step, under the phase that its run showed."""
    from torch import inference_mode

    from rooftrace.tracer.patches import contexts
    from rooftrace.tracer.phases import steps

    with collector_paused(), contexts.apart(), inference_mode(False):
        graph = steps.trace_step(job.source, job.args, job.kwargs, job.options)
    return {graph.phase: graph}


def _graphs_of_module(job: Job) -> dict[str, OpGraph]:
    """The graphs of a module; each phase has arguments of its own, which its run may change."""
    from torch import inference_mode

    from rooftrace.tracer.patches import contexts
    from rooftrace.tracer.phases import steps, trace_phases

    graphs: dict[str, OpGraph] = {}
    sized = job.is_sized and not job.is_called
    with collector_paused(), contexts.apart(), inference_mode(False):
        for phases in (
            [job.phases] if sized else [(p,) for p in job.phases or names.usual(job.source)]
        ):
            made = loaded(job)
            try:
                graphs |= trace_phases(made.module, made.inputs, phases, job.options)
            except RequestError as error:
                if (
                    "phases" in job.explicit
                    or not job.is_function
                    or not steps.runs_backward(error)
                ):
                    raise
                return _graph_of_call(job)
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
