"""Steps that optimizers of the user's take while code is recorded: in a step, or in a hook."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from rooftrace.errors import RequestError
from rooftrace.tracer.patches import original_of, replaced
from rooftrace.tracer.phases.optimizer import functions_unseen
from rooftrace.tracer.recording import Recorder
from rooftrace.tracer.tensors import subclasses, trees
from rooftrace.tracer.values import META


@dataclass
class Learnt:
    """Names of gradients by storage, and of the optimizers that stepped."""

    gradients: dict[int, str] = field(default_factory=dict)
    optimizers: list[str] = field(default_factory=list)

    def step(self, optimizer: Optimizer) -> None:
        """An optimizer steps."""
        self.optimizers.append(type(optimizer).__name__.lower())


@contextlib.contextmanager
def noted(recorder: Recorder, root: nn.Module) -> Iterator[Learnt]:
    """Inside, ops of optimizers are the optimizer's, also where hooks on gradients call them."""
    learnt = Learnt()

    def begins(optimizer: Optimizer, closure: bool) -> None:
        note_gradients(recorder, root, learnt)
        learnt.step(optimizer)
        _prepare(recorder, optimizer, closure)

    with contextlib.ExitStack() as stack:
        for handle in watched(recorder, begins, lambda optimizer: None):
            stack.callback(handle.remove)
        yield learnt


def watched(
    recorder: Recorder,
    begins: Callable[[Optimizer, bool], None],
    ended: Callable[[Optimizer], None],
) -> tuple[RemovableHandle, ...]:
    """From here on, until these hooks are removed, ops of optimizers are the optimizer's.

    begins: is called before each step, with whether a closure runs in it.  ended: is called after
    it; only then it has stepped, as a closure may run all else of a step first.
    """
    outer: list[tuple[Optimizer, str, str]] = []

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        here = recorder.here
        if not recorder.here_recorded() or here.part == "optimizer":
            return None  # a thread of somebody else, or the step that makes the states
        outer.append((optimizer, here.part, here.function))
        here.part = "optimizer"
        closure = bool(args[1:] or kwargs.get("closure"))
        begins(optimizer, closure)
        here.part, here.function = "optimizer", type(optimizer).__name__
        return _with_closures_outside(recorder, args, kwargs) if closure else None

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        here = recorder.here
        stepped = outer and outer[-1][0] is optimizer
        if stepped and recorder.here_recorded() and not here.paused:
            _, here.part, here.function = outer.pop()
            ended(optimizer)

    return register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)


def _with_closures_outside(recorder: Recorder, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an optimizer's step; ops of its closure, which runs the model, are not
    the optimizer's."""
    here = recorder.here

    def outside(item: Any) -> Any:
        if not callable(item) or isinstance(item, (Optimizer, Tensor)):
            return item

        @functools.wraps(item)
        def closure(*args: Any, **kwargs: Any) -> Any:
            before = here.part, here.function
            here.part, here.function, here.after_backward = "forward", "", False
            try:
                return item(*args, **kwargs)
            finally:
                here.part, here.function = before

        return closure

    return tuple(map(outside, args)), {name: outside(item) for name, item in kwargs.items()}


@contextlib.contextmanager
def foreach_on_meta() -> Iterator[None]:
    """Inside, optimizers and gradient clipping take the code path of a GPU for meta tensors."""
    with contextlib.ExitStack() as undo:
        for home, names in on_meta():
            undo.enter_context(replaced(home, names))
        yield


def on_meta() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Modules and their functions by which `foreach_on_meta` holds."""
    name = "_get_foreach_kernels_supported_devices"
    for module in ("torch.utils._foreach_utils", Optimizer.__module__):
        home = sys.modules[module]
        if hasattr(home, name):
            yield home, {name: functools.partial(_also_meta, original_of(home, name))}


def _also_meta(devices: Callable[[], list[str]]) -> list[str]:
    return [*devices(), "meta"]


def _prepare(recorder: Recorder, optimizer: Optimizer, closure: bool) -> None:
    """Give an optimizer the states that it has after many steps, and a GPU's implementation."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    stranger = next((p for p in parameters if p.device != META), None)
    if stranger is not None:
        raise RequestError(
            f"{type(optimizer).__name__} steps on a parameter {list(stranger.shape)} that is none "
            "of the captured modules': make it of theirs inside the step, or pass it to "
            "rooftrace.trace as an argument of the step"
        )
    enter_states(recorder, optimizer)
    if not closure and not any(optimizer.state.get(p) for p in parameters):
        with torch.no_grad(), functions_unseen(parameters), recorder.paused():
            try:
                with _disable_current_modes():
                    optimizer.step()
            except RuntimeError:  # it asks for values, which only the recorder follows
                optimizer.state.clear()
                optimizer.step()
        enter_states(recorder, optimizer)


def enter_states(recorder: Recorder, optimizer: Optimizer) -> None:
    """The weights of an optimizer, and the states that it has of them, are values of the graph."""
    kind = type(optimizer).__name__.lower()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [recorder.name_of(p) or f"{kind}.{index}" for index, p in enumerate(parameters)]
    for parameter, name in zip(parameters, names, strict=True):
        recorder.enter(parameter, "parameter", name)
    for parameter, name in zip(parameters, names, strict=True):
        for state, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                recorder.enter(value, "optimizer", f"{name}.{state}")


def note_gradients(recorder: Recorder, root: nn.Module, learnt: Learnt) -> None:
    for parameter in root.parameters():
        learnt.gradients.update(gradients_of(recorder, parameter))


def gradients_of(recorder: Recorder, parameter: Tensor) -> dict[int, str]:
    """The names of what the gradient of a tensor consists of, by storage."""
    gradient, entry = parameter.grad, recorder.entries.entry_of(parameter)
    if gradient is None:
        return {}
    name = recorder.name_of(parameter) or ("" if entry is None else entry.name)
    parts = subclasses.parts_of(gradient)
    parts = parts if trees.is_sparse(gradient) else parts[:1]
    tags = [(recorder.tags.of(part), suffix) for part, suffix in parts]
    return {tag.storage: f"{name}.grad{suffix}" for tag, suffix in tags if tag is not None}


def say_hooked(recorder: Recorder, taken: int, stepped: str | None, name: str) -> None:
    """Hooks took so many gradients away: the optimizer of this name has none to step with."""
    others = f"after {stepped} stepped there" if stepped else "and changed what they did"
    recorder.values.assume(
        "optimizer",
        f"hooks take {taken} gradients away while backward runs, {others}: {name} steps on the "
        "parameters that have a gradient after it",
    )
