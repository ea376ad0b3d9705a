"""From notes of a step that ran to its graphs: the calls are run again, on meta copies.

Nothing of the user's changes: modules, gradients, optimizers and random numbers stay what they are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from rooftrace.errors import RequestError
from rooftrace.measured.live.notes import CallArguments, CallNote, Notebook
from rooftrace.tracer import trace
from rooftrace.tracer.graph import OpGraph
from rooftrace.tracer.patches import contexts
from rooftrace.tracer.tensors import tensors_in

_SHARDED = (
    "{name} has weights spread over several processes ({kind}): what one process runs is traced "
    "with a fake mesh; pass that graph, live(..., graph=rooftrace.trace(...))"
)

Forward = Callable[..., Any]
"""Runs a noted call: (module, *args, **kwargs) -> its output."""


def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def graph_of(
    notebook: Notebook, notes: Sequence[CallNote], steps: Sequence[int], forward: Forward
) -> OpGraph:
    """The graph of calls, each with its backward, and of steps of optimizers by their numbers.

    Raises what `rooftrace.trace` raises.
    """
    for module in notebook.modules:
        _refuse_sharded(module)
    count = len(notebook.modules)
    calls = [(note, _arguments(notebook, note)) for note in notes]
    arguments = [(call.args, call.kwargs) for _, call in calls]
    on_cpu = all(t.device.type == "cpu" for m in notebook.modules for t in m.parameters())
    # Steps of one optimizer are of one object, so that its state stays one.
    optimizers = [notebook.optimizers[number] for number in steps]

    def step(*everything: Any) -> None:
        modules, (inputs, *stepped) = everything[:count], everything[count:]
        for (note, call), (args, kwargs) in zip(calls, inputs, strict=True):
            _run(modules[note.module], note, call, args, kwargs, forward)
        for optimizer in stepped:
            _ready(optimizer, on_cpu)
            optimizer.step()

    step.__name__ = "of the loop"
    with undisturbed():
        return trace(step, *notebook.modules, arguments, *optimizers)


def _arguments(notebook: Notebook, note: CallNote) -> CallArguments:
    arguments = notebook.arguments_of(note)
    if arguments is None:
        raise RequestError("calls of too many sizes ran to keep the arguments of each; say kinds=")
    return arguments


def _run(
    module: nn.Module,
    note: CallNote,
    call: CallArguments,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    forward: Forward,
) -> None:
    for part, training in zip(module.modules(), call.training, strict=True):
        part.training = training
    with contextlib.ExitStack() as settings:
        settings.enter_context(torch.set_grad_enabled(note.gradients))
        for device, dtype in note.autocast:
            settings.enter_context(torch.autocast(device, dtype=dtype))
        output = forward(module, *args, **kwargs)
    outputs = tensors_in(output)
    roots: list[Tensor] = [outputs[root] for root in note.roots if root < len(outputs)]
    for turn in range(note.backwards if roots else 0):
        ones = [torch.ones_like(root) for root in roots]
        torch.autograd.backward(roots, ones, retain_graph=turn + 1 < note.backwards)


def _ready(optimizer: Optimizer, on_cpu: bool) -> None:
    """Give each trained weight a gradient, where no backward of this trace has.

    On a CPU torch steps weight after weight, and on meta as a GPU does, unless it is told.
    """
    for group in optimizer.param_groups:
        if on_cpu and "foreach" in group and not (group["foreach"] or group.get("fused")):
            group["foreach"] = False
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)


def _refuse_sharded(module: nn.Module) -> None:
    kinds = {type(tensor).__name__ for tensor in module.parameters()}
    kinds |= {type(part).__name__ for part in module.modules()}
    kind = next(iter(kinds & {"DTensor", "FullyShardedDataParallel"}), None)
    if kind is not None:
        raise RequestError(_SHARDED.format(name=type(module).__name__, kind=kind))


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Random numbers, the warnings that were shown and the mode of autograd stay what they are."""
    with (
        contexts.draws_undone(),
        warnings.catch_warnings(),
        torch.enable_grad(),
        torch.inference_mode(False),
    ):
        warnings.simplefilter("ignore")
        yield
