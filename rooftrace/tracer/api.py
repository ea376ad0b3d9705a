"""The tracer's front door: a module or a target in, operator graphs out."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace._progress import telling
from rooftrace.errors import RequestError
from rooftrace.graph import GraphFileError, OpGraph, load_graphs, save_graphs

if TYPE_CHECKING:
    from torch import nn

    from rooftrace.tracer.phases.steps import Capture
    from rooftrace.tracer.request import Options, Request

PathLike = os.PathLike[str]


def trace(
    model: nn.Module | Callable[..., Any] | OpGraph | Mapping[str, OpGraph] | str | PathLike,
    *args: Any,
    phase: str | None = None,
    loss: Callable[[Any], Any] | None = None,
    optimizer: str | None = None,
    dtype: str | None = None,
    branches: Mapping[int, bool] | None = None,
    assume: Mapping[str, Any] | None = None,
    repeats: bool | None = None,
    torch: str | None = None,
    **kwargs: Any,
) -> OpGraph:
    """Capture one step of `model` called with these arguments.

    Of a tensor among the arguments only the size is read; of a small one (ids, masks, lengths)
    also its value.  phase: forward (default), training (adds loss, backward and
    the optimizer step), prefill or decode (one token after a prompt of `input_ids`).  loss: maps
    the output to a scalar; without it the model's own loss, or a unit gradient into each floating
    output.  optimizer: adamw (default), none, or the name of a class in torch.optim, in any case.
    dtype: the precision that the step will be priced in, if not the model's own (`reprice`).
    branches: which way unknown conditions go, by their number in the order they are met.
    assume: what is taken for unknown values, by kind or kind@module: {"density": 0.1,
    "branch@layers.*.gate": True, "value": 3, "routing": "skewed:1.0"}.
    repeats: equal layers stand once in the graph, and their Python runs once where a second run
    could record nothing else; False runs and lists everything.
    torch: the release of PyTorch that runs the step, "2.8" or "2.5.1", where it is another than the
    one that is installed: it decides which ops are one kernel on CUDA.

    model may also be a torch.export.ExportedProgram, or a plain function, trace(fn, x, y), with the
    modules and tensors that it refers to.  Or it is a function of yours whose first argument is a
    module: a whole step.  Ops of autograd and of torch.optim in it are its backward and its
    optimizer; phase, loss, optimizer and dtype are then what it runs.

    Or it names a target, "path/file.py:build" or a Hugging Face config.json: then, and for a
    Hugging Face model without arguments, batch, seq, kv and inputs={"x": "8,3,224,224:fp32"} are
    the sizes.  cached=(4096, 100) and new=(1, 512) are those of a step of requests of different
    lengths, in place of batch, seq and kv.  Of a saved graph phase chooses one.

    Raises TraceError where the model's code fails.  Raises RequestError for a phase that the model
    does not have, and for an argument that neither the model nor rooftrace takes.
    """
    from rooftrace.tracer.job import Job
    from rooftrace.tracer.phases import traced

    how = {
        "loss": loss,
        "optimizer": optimizer,
        "branches": branches,
        "repeats": repeats,
        "torch": torch,
    }
    job = Job.of(trace, model, args, kwargs, phase=phase, dtype=dtype, assume=assume, **how)
    if phase is None:
        job.refuse(("phases",), "trace gives the graph of one phase; say phase=")
    job.refuse(_PRICED_LATER, _PRICE_LATER)
    if job.is_graph:
        job.refuse(("dtype",), "a graph is traced already; `reprice` prices it in another")
    return only(traced(job.of_one_phase()).graphs)


_PRICED_LATER = ("weights_dtype", "kv_dtype")
_PRICE_LATER = "a trace has the model's own precisions; price it in others"


def only(graphs: Mapping[str, OpGraph]) -> OpGraph:
    """The only one of these graphs.  Raises RequestError where there are several."""
    if len(graphs) != 1:
        raise RequestError(f"which phase? say phase=, one of {', '.join(graphs)}")
    return next(iter(graphs.values()))


def capture(*modules: nn.Module, assume: Mapping[str, Any] | None = None) -> Capture:
    """Record any code that uses `modules`; `rooftrace.capture` says what holds inside.

    Tensors made inside are on meta.  Raises RequestError for a module that cannot move there.
    """
    from rooftrace.tracer.phases import steps
    from rooftrace.tracer.request import Options

    return steps.Capture(modules, Options(assume=dict(assume or {})))


def trace_target(
    target: str | PathLike,
    phases: Sequence[str] | None = None,
    request: Request | None = None,
    options: Options | None = None,
    progress: Callable[[str], None] | None = None,
    **kwargs: Any,
) -> dict[str, OpGraph]:
    """The graphs by phase of whatever `target` names: code, a Hugging Face config, a saved graph.

    phases: None takes what fits the model (prefill, decode and training if it keeps a cache, else
    forward and training), or everything in a saved file.  request, options: sizes and how to trace,
    or their fields by name: batch, seq, kv, inputs, optimizer, assume and the like.  progress: a
    function that is called with a line of text at each step of the work.
    """
    from rooftrace.tracer.job import Job
    from rooftrace.tracer.phases import traced

    whole = {"phases": phases, "request": request, "options": options}
    job = Job.of(trace_target, target, (), kwargs, **whole)
    job.refuse(_PRICED_LATER, _PRICE_LATER)
    with telling(progress):
        return dict(traced(job).graphs)


def save(graph: OpGraph | Mapping[str, OpGraph], path: str | os.PathLike[str]) -> None:
    """Write one graph, or graphs by phase, to a JSON file (gzip if the name ends in .gz)."""
    save_graphs({graph.phase: graph} if isinstance(graph, OpGraph) else graph, path)


def load(path: str | os.PathLike[str], phase: str | None = None) -> OpGraph:
    """Read one graph from a file: the only one in it, or that of `phase`."""
    graphs = load_graphs(path)
    if phase is None and len(graphs) == 1:
        return next(iter(graphs.values()))
    if phase is None or phase not in graphs:
        asked = "which phase is wanted" if phase is None else f"there is no phase {phase!r}"
        raise GraphFileError(f"{os.fspath(path)}: {asked}; it holds {', '.join(graphs)}")
    return graphs[phase]
