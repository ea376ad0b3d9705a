"""Sources that are named: code, a config, an exported program, traced here or in another process.

A Hugging Face model over a mesh is spread for each kind of phase: replicas share their weights in
training only.  Its pipeline is traced stage by stage.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooftrace._progress import tell
from rooftrace.errors import RequestError, TargetError
from rooftrace.tracer.asking import Job, names
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.sources.apart import Traced, can_go_apart, trace_apart
from rooftrace.tracer.sources.modules import collector_paused

if TYPE_CHECKING:
    from rooftrace.tracer.inputs import Inputs, Loaded


@dataclass(frozen=True, slots=True)
class TargetSource:
    """A target that builds a module."""

    job: Job

    def loaded(self) -> Loaded:
        """The module that the target builds, with inputs of the sizes that are asked for.

        What it imports later belongs inside the same `isolation.own_imports`.
        """
        from rooftrace.tracer.targets import load_target

        tell("building the model")
        return load_target(self.job.name, self.job.request)

    def traced(self) -> Traced:
        """The graphs, traced here, or in another process if the target's code cannot run here.

        Code is imported afresh each time; some code allows only one import in a process.
        """
        from rooftrace.tracer.patches import contexts
        from rooftrace.tracer.sharded import fake_mesh, huggingface
        from rooftrace.tracer.targets import isolation

        job, mesh = self.job, self.job.request.mesh
        with ExitStack() as stack:
            for context in (collector_paused(), contexts.apart(), isolation.own_imports()):
                stack.enter_context(context)
            if mesh:  # code names its own axes
                stack.enter_context(fake_mesh(mesh if job.is_code else huggingface.processes(mesh)))
            try:
                made = self.loaded()
            except TargetError:
                if not (job.is_code and isolation.imported_again() and can_go_apart(job)):
                    raise
            else:
                graphs = self._graphs(made)
                files = isolation.source_files()
                if not job.is_code and os.path.isfile(job.name):
                    files[os.path.realpath(job.name)] = isolation.digest(job.name)
                return Traced(graphs, files)
        return trace_apart(job)

    def _graphs(self, made: Loaded) -> dict[str, OpGraph]:
        from rooftrace.tracer.phases import trace_phases

        job, request = self.job, self.job.request
        if job.is_code or not (request.mesh or request.checkpoint != "none"):
            return trace_phases(made.module, made.inputs, job.phases, job.options, job.name)
        return self._stages(made) if request.mesh.get("pp", 1) > 1 else self._spread(made)

    def _spread(self, made: Loaded) -> dict[str, OpGraph]:
        """The graphs of a model that is spread over a mesh, or whose training checkpoints."""
        usual = ("forward",) if made.inputs.decode is None else ("prefill", "decode")
        phases = self.job.phases or (*usual, "training")
        graphs: dict[str, OpGraph] = {}
        for trains in (False, True):
            some = [phase for phase in phases if names.phase_of(phase).trains is trains]
            if not some:
                continue
            spread = self.loaded() if graphs else made
            inputs = spread.inputs
            if trains and self.job.options.loss is None:  # shards cannot be asked for labels
                inputs = inputs.trained(spread.module)
            graphs |= self._divided(spread, inputs, some, trains)
        return {phase: graphs[phase] for phase in phases}

    def _stages(self, made: Loaded) -> dict[str, OpGraph]:
        """The graphs of the distinct stages of a pipeline, each with one microbatch."""
        from rooftrace.tracer.pipelines import splitting, stages_of, table_of

        request = self.job.request
        for phase in self.job.phases or ():
            if not names.phase_of(phase).trains:
                raise RequestError(
                    f"--phase {phase} with --mesh pp={request.mesh['pp']}: pipelines are walked "
                    "for training; leave pp out, or ask for training"
                )
        ranks, schedule = request.mesh["pp"], request.schedule or "1f1b"
        count = stages_of(schedule, ranks)
        microbatches = request.microbatches or 2 * count
        table_of(schedule, ranks, microbatches)  # refused before anything is traced
        graphs: dict[str, OpGraph] = {}
        for stage in splitting.split(made.module, count):
            fresh = self.loaded() if graphs else made
            inputs = splitting.inputs_of(fresh.inputs, fresh.module, stage)
            splitting.keep(fresh.module, stage)
            (graph,) = self._divided(fresh, inputs, ("training",), trains=True).values()
            graph = splitting.with_stage(graph, stage, schedule, microbatches)
            graphs[graph.step] = graph
        return graphs

    def _divided(
        self, made: Loaded, inputs: Inputs, phases: Sequence[str], trains: bool
    ) -> dict[str, OpGraph]:
        """The graphs of one process's part of a model."""
        from rooftrace.tracer.phases import trace_phases
        from rooftrace.tracer.sharded import huggingface

        job, request = self.job, self.job.request
        kept = request.checkpoint
        huggingface.distribute(made.module, request.mesh, trains=trains, checkpoint=kept)
        with huggingface.divided(made.module, request.mesh):
            return trace_phases(made.module, inputs, phases, job.options, job.name)
