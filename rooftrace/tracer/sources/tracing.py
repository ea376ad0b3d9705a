"""The graphs of a job, by phase, whatever its source is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftrace.errors import RequestError
from rooftrace.tracer.asking import Job
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.graphfiles import GraphFileError, load_graphs
from rooftrace.tracer.sources.apart import Traced
from rooftrace.tracer.sources.modules import ModuleSource, StepSource, collector_paused
from rooftrace.tracer.sources.running import script_graphs
from rooftrace.tracer.sources.targets import TargetSource

if TYPE_CHECKING:
    from rooftrace.tracer.inputs import Loaded


def source_of(job: Job) -> GraphSource | ScriptSource | TargetSource | StepSource | ModuleSource:
    """The source of a job, by its kind."""
    if job.is_graph:
        return GraphSource(job)
    if job.is_script:
        return ScriptSource(job)
    if job.is_named:
        return TargetSource(job)
    if job.is_step:
        return StepSource(job.source, job.args, job.kwargs, job.options)
    return ModuleSource(job)


def traced(job: Job) -> Traced:
    """The graphs of a job, and the files that they were traced from.

    The default phases are forward and training for a module with arguments (forward alone where no
    parameter asks for a gradient), and those that fit for a target.  Raises RequestError for an
    argument that the source has no use for; TargetError; TraceError.
    """
    made = source_of(job).traced()
    job.check_used(made.graphs)
    return made


def loaded(job: Job) -> Loaded:
    """The module of a job, which is a module or names one, with the inputs of its call.

    What a target imports later belongs inside the same `isolation.own_imports`.
    """
    source = source_of(job)
    if isinstance(source, (TargetSource, ModuleSource)):
        return source.loaded()
    name = job.name
    if isinstance(source, ScriptSource):
        raise RequestError(
            f"{name}: a script is no module that can be called; name the module in it "
            f"({name.split()[0]}:NAME), or use a command that takes the graphs of its steps"
        )
    raise RequestError(f"{name} is no module that can be called; give the module, or a target")


@dataclass(frozen=True, slots=True)
class GraphSource:
    """A graph, graphs by phase, or a file of them."""

    job: Job

    def traced(self) -> Traced:
        """The graphs of the phases that are asked for."""
        job, source, name = self.job, self.job.source, "the graphs that were given"
        if job.is_named:
            graphs, name = load_graphs(source), job.name
        elif isinstance(source, OpGraph):
            graphs = {source.phase: source}
        else:
            graphs = dict(source)
            for phase, graph in graphs.items():
                if not isinstance(graph, OpGraph):
                    raise RequestError(
                        f"{phase!r}: expected an OpGraph, got {type(graph).__name__}; trace it "
                        "first"
                    )
        return Traced(job.of_phases(graphs, GraphFileError, name))


@dataclass(frozen=True, slots=True)
class ScriptSource:
    """A script with its command line."""

    job: Job

    def traced(self) -> Traced:
        """The graphs of its steady steps."""
        from rooftrace.tracer.patches import contexts
        from rooftrace.tracer.targets import isolation

        with collector_paused(), contexts.apart(), isolation.own_imports():
            return Traced(script_graphs(self.job), isolation.source_files())
