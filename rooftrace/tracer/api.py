"""The tracer's front door: a module or a target in, operator graphs out."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rooftrace.tracer.graph import OpGraph, load_graphs, looks_saved, save_graphs

if TYPE_CHECKING:
    from torch import nn

    from rooftrace.tracer.asking import Asked, Loss, Options, Request
    from rooftrace.tracer.phases import Capture
    from rooftrace.tracer.targets import Traced

PathLike = os.PathLike[str]


def trace(
    model: nn.Module | Callable[..., Any] | OpGraph | Mapping[str, OpGraph] | str | PathLike,
    *args: Any,
    phase: str | None = None,
    loss: Loss | None = None,
    optimizer: str | None = None,
    dtype: str | None = None,
    branches: Mapping[int, bool] | None = None,
    assume: Mapping[str, Any] | None = None,
    repeats: bool | None = None,
    **kwargs: Any,
) -> OpGraph:
    """Capture one step of `model` called with these arguments.

    Tensors among the arguments are only looked at for their size, and for their value where they
    are small (ids, masks, lengths).  phase: forward (default), training (adds loss, backward and
    the optimizer step), prefill or decode (one token after a prompt of `input_ids`).  loss: maps
    the output to a scalar; without it the model's own loss, or a unit gradient into each floating
    output.  optimizer: adamw (default), none, or the name of a class in torch.optim, in any case.
    dtype: the precision that the step will be priced in, if not the model's own (`reprice`).
    branches: which way unknown conditions go, by their number in the order they are met.
    assume: what is taken for unknown values, by kind or kind@module: {"density": 0.1,
    "branch@layers.*.gate": True, "value": 3, "balanced-routing": "uniform"}.
    repeats: layers that are alike stand once in the graph, and their Python runs once where nothing
    else could come of it; False runs and lists everything.

    model may also be a function of yours whose first argument is a module: a whole step.  Ops of
    autograd and of torch.optim in it are its backward and its optimizer; phase, loss, optimizer
    and dtype are then what it runs.

    Or it names a target, "path/file.py:build" or a Hugging Face config.json: then, and for a
    Hugging Face model without arguments, batch, seq, kv and inputs={"x": "8,3,224,224:fp32"} are
    the sizes.  Of a saved graph phase chooses one.

    Raises TraceError where the model's code fails, RequestError where the phase makes no sense and
    for an argument that neither the model nor rooftrace takes.
    """
    from rooftrace.tracer.asking import RequestError, asked, is_graph, sorted_arguments

    wanted, call = sorted_arguments(model, args, kwargs, trace)
    wanted.refuse(("phases",), "trace gives the graph of one phase; say phase=")
    wanted.refuse(
        ("weights_dtype", "kv_dtype"), "a trace has the model's own precisions; price it in others"
    )
    ours = {**{name: wanted.value(name) for name in wanted.given}, "phase": phase, "loss": loss}
    ours |= {"optimizer": optimizer, "dtype": dtype, "branches": branches, "assume": assume}
    wanted = asked({**ours, "repeats": repeats})
    if is_graph(model):
        wanted.refuse(("dtype",), "a graph is traced already; `reprice` prices it in another")
    if wanted.phases is None and not is_graph(model) and not is_step(model, args):
        wanted = replace(wanted, phases=("forward",))
    graphs = graphs_of(model, args, call, wanted)
    if len(graphs) != 1:
        raise RequestError(f"which phase? say phase=, one of {', '.join(graphs)}")
    return next(iter(graphs.values()))


def is_step(source: Any, args: Sequence[Any]) -> bool:
    """Whether a source is a step of the user's: a function whose first argument is a module."""
    if isinstance(source, (str, os.PathLike, OpGraph, Mapping)) or not callable(source):
        return False
    from torch import nn

    return not isinstance(source, nn.Module) and bool(args) and isinstance(args[0], nn.Module)


def graphs_of(
    source: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: Asked,
    progress: Callable[[str], None] | None = None,
) -> dict[str, OpGraph]:
    """Graphs by phase of any source: a module called with these arguments, a step, a graph, graphs
    by phase, a saved graph, or a target.

    phases: default forward and training of a module with arguments, those that fit of a target.
    Raises RequestError for what the source cannot be asked.
    """
    from rooftrace.tracer.asking import check_used, is_graph, is_named, refuse_for_graph

    if is_graph(source):
        name = os.fspath(source) if is_named(source) else "this source"
        refuse_for_graph(wanted, name)
        if is_named(source):
            graphs = _select(load_graphs(source), wanted.phases, name)
        else:
            graphs = {source.phase: source} if isinstance(source, OpGraph) else dict(source)
            graphs = _select(graphs, wanted.phases, "the graphs that were given")
        if all(isinstance(graph, OpGraph) for graph in graphs.values()):
            check_used(wanted, graphs)
        return graphs
    if is_named(source):
        return dict(traced_target(source, wanted, progress).graphs)
    if is_step(source, args):
        return _graph_of_step(source, args, kwargs, wanted)
    graphs = _graphs_of_module(source, args, kwargs, wanted, progress)
    check_used(wanted, graphs)
    return graphs


def traced_target(
    target: str | os.PathLike[str],
    wanted: Asked,
    progress: Callable[[str], None] | None = None,
) -> Traced:
    """A target traced as was asked.  Raises RequestError for what it cannot be asked."""
    from rooftrace.tracer.asking import check_used, names_code

    if names_code(os.fspath(target)):
        wanted.refuse(("trust_remote_code",), "the code of this target runs as it is")
    traced = trace_sources(target, wanted.phases, wanted.request, wanted.options, progress)
    check_used(wanted, traced.graphs)
    return traced


def _graph_of_step(
    step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], wanted: Asked
) -> dict[str, OpGraph]:
    """The graph of a step of the user's, by what it turned out to be."""
    from torch import inference_mode

    from rooftrace.tracer.asking import SIZES
    from rooftrace.tracer.phases import trace_step

    wanted.refuse(("phases", "loss", "optimizer", "dtype"), "a step of your own runs what it runs")
    wanted.refuse(SIZES, "a step of your own has the sizes of its arguments")
    with collector_paused(), inference_mode(False):
        graph = trace_step(step, args, kwargs, wanted.options)
    return {graph.phase: graph}


def _graphs_of_module(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: Asked,
    progress: Callable[[str], None] | None,
) -> dict[str, OpGraph]:
    from torch import inference_mode

    from rooftrace.tracer.asking import check_call
    from rooftrace.tracer.phases import check_request, trace_phases
    from rooftrace.tracer.targets import call_inputs

    check_request(module, wanted.phases, wanted.options)
    wanted.refuse(("trust_remote_code",), "the module is built already")
    if args or kwargs:
        wanted.refuse(
            ("batch", "seq", "kv", "inputs"),
            "the arguments of the call have their sizes; change those, or leave them out and let "
            "the sizes make them",
        )
    with collector_paused(), inference_mode(False):
        if not args and not kwargs and wanted.sized():
            from rooftrace.tracer.targets import module_inputs

            inputs = module_inputs(module, wanted.request)
            return trace_phases(module, inputs, wanted.phases, wanted.options, progress)
        check_call(module, args, kwargs)
        graphs: dict[str, OpGraph] = {}
        for phase in wanted.phases or ("forward", "training"):
            inputs = call_inputs(module, tuple(args), dict(kwargs))
            graphs |= trace_phases(module, inputs, (phase,), wanted.options, progress)
        return graphs


def capture(*modules: nn.Module, assume: Mapping[str, Any] | None = None) -> Capture:
    """Record any code that uses `modules`, which were built on the meta device.

        with capture(model) as captured:
            loss = step(model, batch)
        captured.graph  # phase "training" if a backward ran inside, else "forward"

    Several modules stand in the graph under the names of their classes.  Tensors made inside are on
    meta; meta tensors from outside are inputs.  Raises RequestError for a module with real weights:
    `trace` copies those.
    """
    from rooftrace.tracer.asking import Options
    from rooftrace.tracer.phases import Capture

    return Capture(modules, Options(assume=dict(assume or {})))


def trace_target(
    target: str | os.PathLike[str],
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> dict[str, OpGraph]:
    """The graphs by phase of whatever `target` names: code, a Hugging Face config, a saved graph.

    phases: None takes what fits the model (prefill, decode and training if it keeps a cache, else
    forward and training), or everything in a saved file.  request, options: sizes and how to trace,
    or their fields by name: batch, seq, kv, inputs, optimizer, assume and the like.
    """
    from rooftrace.tracer.asking import sorted_arguments

    named = {"phases": phases, "request": request, "options": options}
    ours = {name: value for name, value in named.items() if value is not None}
    wanted, _ = sorted_arguments(target, (), {**ours, **kwargs}, trace_target)
    wanted.refuse(
        ("weights_dtype", "kv_dtype"), "a trace has the model's own precisions; price it in others"
    )
    return graphs_of(target, (), {}, wanted, progress)


def trace_sources(
    target: str | os.PathLike[str],
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
) -> Traced:
    """`trace_target`, with the files that it read.

    Code is imported afresh each time.  Where that fails for code that this process has imported
    before (some allows it only once), it is traced in a process of its own.
    """
    from rooftrace.tracer.asking import TargetError
    from rooftrace.tracer.targets import (
        Traced,
        can_go_apart,
        digest,
        imported_again,
        own_imports,
        source_files,
        trace_apart,
    )

    name = os.fspath(target)
    if looks_saved(name):
        return Traced(_select(load_graphs(name), phases, name))
    from rooftrace.tracer.asking import names_code
    from rooftrace.tracer.phases import trace_phases
    from rooftrace.tracer.targets import load_target

    tell = progress or (lambda _: None)
    with collector_paused(), own_imports():
        tell("building the model")
        try:
            loaded = load_target(name, request)
        except TargetError:
            if not (names_code(name) and imported_again() and can_go_apart(options)):
                raise
        else:
            graphs = trace_phases(loaded.module, loaded.inputs, phases, options, progress, name)
            files = source_files()
            if not names_code(name) and os.path.isfile(name):
                files[os.path.realpath(name)] = digest(name)
            return Traced(graphs, files)
    return trace_apart(name, phases, request, options, progress)


def trace_apart_each(
    targets: Sequence[tuple[str, Asked]], progress: Callable[[str], None] | None = None
) -> list[Traced | None]:
    """Targets that are code, each traced in a process of its own, all at the same time.

    None of them sees what another one, or this process, imported or patched.  None in the list is
    what cannot be told to another process.  Raises what the first that fails raises.
    """
    from concurrent.futures import ThreadPoolExecutor

    from rooftrace.tracer.targets import can_go_apart, trace_apart

    if not all(can_go_apart(wanted.options) for _, wanted in targets):
        return [None] * len(targets)
    with ThreadPoolExecutor(max(1, len(targets))) as pool:
        running = [
            pool.submit(trace_apart, name, w.phases, w.request, w.options, progress)
            for name, w in targets
        ]
        return [one.result() for one in running]


BatchTrace = Callable[[str, int], OpGraph]
"""Traces a phase at a batch size."""


def at_batches(
    source: nn.Module | str | os.PathLike[str],
    *args: Any,
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> tuple[tuple[str, ...], BatchTrace]:
    """The phases of a module called with these arguments, or of a target, and what traces one of
    them at another batch size (the first dimension of the inputs).  Each trace is kept.

    Raises RequestError for a graph, which has its sizes, and for what cannot run at another batch.
    """
    from rooftrace.tracer.asking import Options, Request, RequestError

    options, tell = options or Options(), progress or (lambda _: None)
    if isinstance(source, (str, os.PathLike)) and not looks_saved(os.fspath(source)):
        run = _target_at(os.fspath(source), request or Request(), options)
    elif isinstance(source, (str, os.PathLike, OpGraph, Mapping)):
        raise RequestError(
            "another batch cannot be traced from a graph, which has its sizes: give the module or "
            "the target that it was made from"
        )
    else:
        run = _module_at(source, args, kwargs, options)
    known = {(phase, 1): graph for phase, graph in run(phases, 1).items()}

    def trace_at(phase: str, batch: int) -> OpGraph:
        if (phase, batch) not in known:
            tell(f"{phase} at batch {batch:,}")
            try:
                known[phase, batch] = run((phase,), batch)[phase]
            except RuntimeError as error:  # a TraceError, or torch's own
                raise RequestError(
                    f"{phase} runs with batch 1 and not with {batch}, so the first dimension of "
                    f"its inputs is not their batch: {str(error).splitlines()[0]}"
                ) from error
        return known[phase, batch]

    return tuple(phase for phase, _ in known), trace_at


_RunAt = Callable[[Sequence[str] | None, int], dict[str, OpGraph]]
"""Traces some phases at a batch size."""


def _target_at(target: str, request: Request, options: Options) -> _RunAt:
    from rooftrace.tracer.targets import Kept, keeping

    kept = Kept()

    def run(phases: Sequence[str] | None, batch: int) -> dict[str, OpGraph]:
        with keeping(kept):
            return trace_target(target, phases, replace(request, batch=batch), options)

    return run


def _module_at(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Options
) -> _RunAt:
    from rooftrace.tracer.phases import trace_phases
    from rooftrace.tracer.targets import call_inputs, with_batch
    from rooftrace.tracer.twins import inputs_on_meta

    given = inputs_on_meta((tuple(args), dict(kwargs)))

    def run(phases: Sequence[str] | None, batch: int) -> dict[str, OpGraph]:
        positional, named = with_batch(given, batch)
        with collector_paused():
            inputs = call_inputs(module, positional, named)
            return trace_phases(module, inputs, phases, options)

    return run


def save(graph: OpGraph | Mapping[str, OpGraph], path: str | os.PathLike[str]) -> None:
    """Write one graph, or graphs by phase, to a JSON file (gzip if the name ends in .gz)."""
    save_graphs({graph.phase: graph} if isinstance(graph, OpGraph) else graph, path)


def load(path: str | os.PathLike[str], phase: str | None = None) -> OpGraph:
    """Read one graph from a file: the only one in it, or that of `phase`."""
    from rooftrace.tracer.graph import GraphFileError

    graphs = load_graphs(path)
    if phase is None and len(graphs) == 1:
        return next(iter(graphs.values()))
    if phase is None or phase not in graphs:
        asked = "which phase is wanted" if phase is None else f"there is no phase {phase!r}"
        raise GraphFileError(f"{os.fspath(path)}: {asked}; it holds {', '.join(graphs)}")
    return graphs[phase]


def _select(
    graphs: dict[str, OpGraph], phases: Sequence[str] | None, name: str
) -> dict[str, OpGraph]:
    if phases is None:
        return graphs
    from rooftrace.tracer.graph import GraphFileError

    for phase in phases:
        if phase not in graphs:
            raise GraphFileError(
                f"{name}: no graph of phase {phase!r}; it holds {', '.join(graphs)}"
            )
    return {phase: graphs[phase] for phase in phases}


@contextmanager
def collector_paused(keep: bool = False) -> Iterator[None]:
    """No garbage collection inside: tracing and pricing make many objects that all stay.

    keep: set everything aside for good, so that the collector never looks through it again.  That
    is for a program that ends soon: garbage made inside is never freed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if keep:
                gc.freeze()
            gc.enable()


def floating_input(model: nn.Module, shape: tuple[int, ...]) -> Any:
    """A meta tensor of this shape in the precision of the model's first floating parameter."""
    import torch

    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.empty(shape, dtype=dtype, device="meta")
