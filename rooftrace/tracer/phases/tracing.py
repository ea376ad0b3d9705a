"""Sources of graphs (modules, steps, scripts, targets, files), and the graphs of a job."""

from __future__ import annotations

import ast
import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rooftrace._processes import ONE_TASK, collector_off
from rooftrace._progress import tell
from rooftrace._reading import digest_of
from rooftrace.errors import RequestError, TargetError
from rooftrace.graph import Assumption, GraphFileError, OpGraph, load_graphs
from rooftrace.hardware import load_chip
from rooftrace.hardware.chip import USUAL
from rooftrace.hardware.systems import load_system
from rooftrace.tracer import Job, Options, names
from rooftrace.tracer.phases.apart import Traced, can_go_apart, trace_apart

if TYPE_CHECKING:
    from rooftrace.tracer.inputs import Inputs, Loaded
    from rooftrace.tracer.sharding.splitting import Stage

# -- scripts ---------------------------------------------------------------------------------------


def script_graphs(job: Job) -> dict[str, OpGraph]:
    """The steady steps of a script, by phase.

    What it prints goes to stderr; the files that it writes are gone afterwards.  Raises ScriptError
    where it fails, and TargetError where nothing of it ran on the device.
    """
    from rooftrace.scripts.steps import ScriptError, ScriptRequest

    command = names.ScriptCommand.of(job.name)
    joined = None if command.system is None else load_system(command.system)
    if joined is not None and command.chip is not None:
        raise RequestError(f"target {job.name!r}: --chip beside --system, which has its own chip")
    chip = load_chip(command.chip or USUAL) if joined is None else joined.joined_chip
    tell(f"running {command.where}")
    with tempfile.TemporaryDirectory(prefix="rooftrace-") as folder:
        request = ScriptRequest(
            command=command.words,
            chip=chip,
            steps=command.steps or names.STEPS,
            ranks=command.ranks,
            rank=command.rank,
            per_node=None if joined is None else joined.levels[0].size,
            scratch=folder,
            assume=job.options.assume,
            boundary=command.boundary,
        )
        script = request.run(stdout=sys.stderr)
    if script.failure is not None:
        raise ScriptError(script)
    if script.code and not script.stretches:
        chosen = script.said.get("choices", "")
        text = f"target {job.name!r}: the script exited with code {script.code}"
        raise TargetError(f"{text}\n{chosen}" if chosen else text)
    graphs = {phase: _said(graph, command) for phase, graph in script.by_phase().items()}
    if not graphs:
        raise TargetError(
            f"target {job.name!r}: it ran as a script, and nothing of it ran on the device; what "
            "it moves to 'cuda' is traced, for which no GPU is needed; to trace a module of it, "
            f"name that: {command.where}:NAME{_defined(command.where)}"
        )
    return job.of_phases(graphs, RequestError, job.name)


def _defined(where: str) -> str:
    """The classes and functions that a script defines, in words; "" where unknown."""
    with suppress(OSError, ValueError, SyntaxError):
        body = ast.parse(Path(where).read_bytes()).body
        made = [node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        return f"; it defines {', '.join(made[:12])}" if made else ""
    return ""


def _said(graph: OpGraph, command: names.ScriptCommand) -> OpGraph:
    """The graph, with the assumed chip of its script where nobody chose one."""
    if command.chip or command.system:
        return graph
    text = f"the script saw an {USUAL}, whatever chip is priced; run:--chip NAME shows it another"
    number = max((item.id for item in graph.assumptions), default=-1) + 1
    seen = Assumption(id=number, kind="device", where="", text=text, value=USUAL)
    return graph.replace(assumptions=(*graph.assumptions, seen))


# -- modules ---------------------------------------------------------------------------------------

AS_CALLED: Mapping[str, int] = MappingProxyType({})
"""Sizes of a call: those of its arguments."""
_DIMENSION = re.compile(r"(\w+)\.(\d+)")
"""A size of a call that is a dimension of an argument: "x.1", or "0.1" for the first argument."""


@contextmanager
def collector_paused(keep: bool = False) -> Iterator[None]:
    """No garbage collection inside: tracing and pricing make many objects that all stay.

    keep: exclude all objects from later collections too (gc.freeze).  That is for a program that
    ends soon: garbage made inside is never freed.  A command does so the first time, with the
    modules that it has imported: each full collection would go through them.
    """
    enabled = gc.isenabled()
    with collector_off.used():
        try:
            yield
        finally:
            if enabled and keep:
                gc.freeze()
            elif enabled and ONE_TASK:
                _freeze_once()


_freeze_once = cache(gc.freeze)


@contextmanager
def _traced_apart() -> Iterator[None]:
    """Inside, the modes of the user's code are off, and nothing is collected."""
    from torch import inference_mode

    from rooftrace.tracer.recording import overrides

    with collector_paused(), overrides.apart(), inference_mode(False):
        yield


@dataclass(frozen=True, slots=True)
class StepSource:
    """A step of the user's: a function whose first argument is a module."""

    step: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: Options

    def traced(self) -> Traced:
        """The graph, under the phase that its run showed."""
        from rooftrace.tracer.phases import steps

        with _traced_apart():
            graph = steps.trace_step(self.step, self.args, self.kwargs, self.options)
        return Traced({graph.phase: graph})


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module with the arguments of its call, or with the sizes that make them."""

    job: Job

    @property
    def module(self) -> Any:
        """The module, or the function that was made one."""
        return self.job.source

    @property
    def is_sized(self) -> bool:
        """Whether sizes make the arguments of the call."""
        return self.job.is_sized and not self.job.is_called

    def has_size(self, name: str) -> bool:
        """Whether the call has a size of this name: batch, or a dimension of an argument."""
        match = _DIMENSION.fullmatch(name)
        if match is None:
            return name == "batch"
        args, argument = self.job.args, match[1]
        if argument.isdigit():
            return int(argument) < len(args) and args[int(argument)] is not None
        return self.job.kwargs.get(argument) is not None

    def traced(self) -> Traced:
        """The graphs; each phase has separate arguments, which its run may change."""
        from rooftrace.tracer.phases import steps

        job = self.job
        if self.is_sized:
            return Traced(self.phases_at(job.phases))
        try:
            return Traced(self.each_at(AS_CALLED))
        except steps.OwnBackwardError:
            if "phases" in job.explicit or not job.is_function:
                raise
        return self._as_step().traced()

    def loaded(self, sizes: Mapping[str, int] = AS_CALLED) -> Loaded:
        """The module with the inputs of its call.

        sizes: of the call; "batch" is the first dimension of its tensors.  Raises RequestError for
        a size that it does not have.
        """
        from rooftrace.tracer.inputs import Loaded, call_inputs, module_inputs

        job = self.job
        if self.is_sized:
            return Loaded(self.module, module_inputs(self.module, job.request), "")
        job.check_call()
        args, kwargs = _resized(job.args, job.kwargs, sizes)
        return Loaded(self.module, call_inputs(self.module, args, kwargs, sizes.get("batch")), "")

    def each_at(self, sizes: Mapping[str, int]) -> dict[str, OpGraph]:
        """The graphs of all phases at these sizes of the call, each of a separate call."""
        graphs: dict[str, OpGraph] = {}
        with _traced_apart():
            for phase in self.job.phases or names.usual(self.module):
                graphs |= self.phases_at((phase,), sizes)
        return graphs

    def phases_at(
        self, phases: Sequence[str] | None, sizes: Mapping[str, int] = AS_CALLED
    ) -> dict[str, OpGraph]:
        """The graphs of some phases, None for those that fit, from one call at these sizes."""
        from rooftrace.tracer.phases.running import trace_phases

        with _traced_apart():
            made = self.loaded(sizes)
            return trace_phases(made.module, made.inputs, phases, self.job.options)

    def _as_step(self) -> StepSource:
        """The call of a function that runs backward itself, as a step of the user's."""

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            return function.function(*args, **kwargs)  # so that its ops are outside of modules

        call.__name__ = type(self.module).__name__
        job = self.job
        return StepSource(call, (self.module, *job.args), job.kwargs, job.options)


def _resized(
    args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, int]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call with these sizes of their dimensions."""
    wanted = {match: size for name, size in sizes.items() if (match := _DIMENSION.fullmatch(name))}
    if not wanted:
        return args, kwargs
    from rooftrace.tracer.values import inputs_on_meta

    moved, named = inputs_on_meta((list(args), dict(kwargs)))
    for match, size in wanted.items():
        name, dimension = match[1], int(match[2])
        held, key = (moved, int(name)) if name.isdigit() else (named, name)
        held[key] = _with_size(held[key], dimension, size, match[0])
    return moved, named


def _with_size(old: Any, dimension: int, size: int, name: str) -> Any:
    if not hasattr(old, "new_empty") or not -old.dim() <= dimension < old.dim():
        raise RequestError(f"size {name}: the argument has no such dimension")
    shape = list(old.shape)
    shape[dimension] = size
    return old.new_empty(shape).requires_grad_(old.requires_grad)


# -- targets ---------------------------------------------------------------------------------------
# Sources that are named: code, a config, an exported program, traced here or in another process.
#
# A Hugging Face model over a mesh is spread for each kind of phase: replicas share their weights
# in training only.  Its pipeline is traced stage by stage.


@dataclass(frozen=True, slots=True)
class TargetSource:
    """A target that builds a module."""

    job: Job

    def loaded(self) -> Loaded:
        """The module that the target builds, with inputs of the requested sizes.

        What it imports later belongs inside the same `isolation.own_imports`.
        """
        from rooftrace.tracer.targets import load_target

        tell("building the model")
        return load_target(self.job.name, self.job.request)

    def traced(self) -> Traced:
        """The graphs, traced here, or in another process if the target's code cannot run here.

        Code is imported afresh each time; some code allows only one import in a process.
        """
        from rooftrace.tracer.recording import overrides
        from rooftrace.tracer.sharding import fake_mesh, huggingface
        from rooftrace.tracer.targets import isolation

        job, mesh = self.job, self.job.request.mesh
        with ExitStack() as stack:
            for context in (collector_paused(), overrides.apart(), isolation.own_imports()):
                stack.enter_context(context)
            if mesh:  # code names the axes
                sizes = mesh if job.is_code else huggingface.processes(mesh)
                stands = isolation.standing()
                if stands is None:
                    stack.enter_context(fake_mesh(sizes))
                elif stands.spread is None:
                    stands.enter(fake_mesh(sizes))
            try:
                made = self.loaded()
            except TargetError:
                if not (job.is_code and isolation.imported_again() and can_go_apart(job)):
                    raise
            else:
                graphs = self._graphs(made)
                files = isolation.source_files()
                if not job.is_code and os.path.isfile(job.name):
                    files[os.path.realpath(job.name)] = digest_of(job.name, whole=True)
                return Traced(graphs, files, isolation.opened(), isolation.has_registered())
        return trace_apart(job)

    def _graphs(self, made: Loaded) -> dict[str, OpGraph]:
        from rooftrace.tracer.phases.running import trace_phases

        job, request = self.job, self.job.request
        if job.is_code or not (request.mesh or request.checkpoint != "none"):
            return trace_phases(made.module, made.inputs, job.phases, job.options, job.name)
        return self._stages(made) if request.mesh.get("pp", 1) > 1 else self._spread(made)

    def _spread(self, made: Loaded) -> dict[str, OpGraph]:
        """The graphs of a model that is spread over a mesh, or whose training checkpoints."""
        usual = ("forward",) if made.inputs.decode is None else ("prefill", "decode")
        shared = self.job.request.mesh.get("cp", 1)
        phases = self.job.phases or (*(usual[:1] if shared > 1 else usual), "training")
        for phase in phases:
            if shared > 1 and phase in ("decode", "requests"):
                raise RequestError(
                    f"--phase {phase} with --mesh cp={shared}: processes share the sequences of a "
                    "prompt or of training, and no step behind a cache; ask for prefill or training"
                )
        graphs: dict[str, OpGraph] = {}
        for trains in (False, True):
            some = [phase for phase in phases if names.phase_of(phase).trains is trains]
            if not some:
                continue
            spread = self.loaded() if graphs else made
            inputs = spread.inputs
            if trains and self.job.options.loss is None:  # shards give no labels
                inputs = inputs.trained(spread.module)
            graphs |= self._divided(spread, inputs, some, trains, self.loaded)
        return {phase: graphs[phase] for phase in phases}

    def _stages(self, made: Loaded) -> dict[str, OpGraph]:
        """The graphs of the distinct stages of a pipeline, each with one microbatch."""
        from rooftrace.tracer.sharding import schedule_of, splitting, stages_of, table_of

        request = self.job.request
        for phase in self.job.phases or ():
            if not names.phase_of(phase).trains:
                raise RequestError(
                    f"--phase {phase} with --mesh pp={request.mesh['pp']}: pipelines are walked "
                    "for training; leave pp out, or ask for training"
                )
        ranks, each = request.mesh["pp"], request.interleave
        schedule = schedule_of(request.schedule, each)
        count = stages_of(schedule, ranks, each)
        microbatches = request.microbatches or 2 * count
        table_of(schedule, ranks, microbatches, each)  # refused before anything is traced
        graphs: dict[str, OpGraph] = {}
        for stage in splitting.split(made.module, count):
            fresh = self.loaded() if graphs else made
            inputs = splitting.inputs_of(fresh.inputs, fresh.module, stage)
            splitting.keep(fresh.module, stage)
            again, behind = partial(self._kept, stage), microbatches > 1
            traced = self._divided(fresh, inputs, ("training",), True, again, behind)
            (graph,) = traced.values()
            graph = splitting.with_stage(graph, stage, schedule, microbatches)
            graphs[graph.step] = graph
        return graphs

    def _kept(self, stage: Stage) -> Loaded:
        """The model, of which one stage is left."""
        from rooftrace.tracer.sharding import splitting

        fresh = self.loaded()
        splitting.keep(fresh.module, stage)
        return fresh

    def _divided(
        self,
        made: Loaded,
        inputs: Inputs,
        phases: Sequence[str],
        trains: bool,
        again: Callable[[], Loaded],
        behind: bool = False,
    ) -> dict[str, OpGraph]:
        """The graphs of one process's part of a model, in training from a few of alike layers.

        again: makes the model once more, where these do not tell of all.  behind: see
        `running.trace_phases`.
        """
        from rooftrace.tracer.phases.attempts import describe
        from rooftrace.tracer.repeats import shorten
        from rooftrace.tracer.sharding.huggingface import sizes_of
        from rooftrace.tracer.sharding.splitting import layers_of

        model, options, short = describe(made.module), self.job.options, None
        mesh = self.job.request.mesh
        # A stage whose processes share weights keeps them from one microbatch to the next.
        held = mesh.get("pp", 1) > 1 and sizes_of(mesh)["fsdp"] > 1
        held = held or self.job.request.zero == 1  # buckets reach over layers
        if (
            trains
            and not held
            and options.repeats
            and not any("@" in kind for kind in options.assume)
        ):
            with suppress(RequestError):  # no layers
                short = shorten(made.module, layers_of(made.module))
        if short is None:
            return _counted(self._of_one(made.module, inputs, phases, trains, behind), model)
        from rooftrace.errors import TraceError

        try:
            with short.watch:
                few = self._of_one(made.module, inputs, phases, trains, behind)
            graphs = {phase: short.stretched(g, describe(short.layer)) for phase, g in few.items()}
        except (RequestError, TraceError):
            graphs = {}
        whole = {phase: graph for phase, graph in graphs.items() if graph is not None}
        if whole.keys() != set(phases):
            whole = self._of_one(again().module, inputs, phases, trains, behind)
        return _counted(whole, model)

    def _of_one(
        self, module: Any, inputs: Inputs, phases: Sequence[str], trains: bool, behind: bool
    ) -> dict[str, OpGraph]:
        """The graphs of one process's part of this module."""
        from rooftrace.tracer.phases.running import trace_phases
        from rooftrace.tracer.sharding import huggingface, splitting
        from rooftrace.tracer.targets import isolation

        job, request = self.job, self.job.request
        how: dict[str, Any] = {"checkpoint": request.checkpoint, "plan": request.plan}
        how |= {"zero": request.zero, "makes_loss": job.options.loss is None}
        if request.mesh.get("cp", 1) > 1:
            inputs = inputs.shared(module, request.mesh["cp"])
        stands = isolation.standing()
        if stands is not None and stands.spread is not None:
            module, said = stands.spread
        else:
            said = huggingface.distribute(module, request.mesh, trains=trains, **how)
            if stands is not None:
                stands.spread = module, said
        inputs = splitting.of_process(inputs, module)
        if said:
            inputs = replace(inputs, assumptions=(*inputs.assumptions, ("plan", said)))
        with huggingface.divided(module, request.mesh):
            return trace_phases(module, inputs, phases, job.options, job.name, behind)


def _counted(graphs: Mapping[str, OpGraph], model: Mapping[str, Any]) -> dict[str, OpGraph]:
    """The graphs of one process's part, with the counts of the model before it was spread."""
    counts = {name: model[name] for name in ("params", "params_trainable")}
    return {name: g.replace(model={**g.model, **counts}) for name, g in graphs.items()}


# -- tracing ---------------------------------------------------------------------------------------


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
        """The graphs of the requested phases."""
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
        from rooftrace.tracer.recording import overrides
        from rooftrace.tracer.targets import isolation

        with collector_paused(), overrides.apart(), isolation.own_imports():
            return Traced(script_graphs(self.job), isolation.source_files())
