"""Optimizer steps: one in the steady state, those of the user's code, and optimizer copies."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from rooftrace.errors import RequestError, one_of
from rooftrace.hardware.precisions import bytes_per_element
from rooftrace.tracer import Options, torch_private
from rooftrace.tracer.recording import Recorder, original_of, replaced
from rooftrace.tracer.sharding.zero import SharedStates, local_of, placed_gradient
from rooftrace.tracer.values import META, copies, trees

_LEARNING_RATE = 1e-3
"""Any: a step costs the same."""


def run_optimizer(
    recorder: Recorder,
    parameters: Sequence[nn.Parameter],
    name: str,
    dtype: str | None,
    sums: Mapping[int, Tensor] = MappingProxyType({}),
) -> dict[int, str]:
    """Record one step of the optimizer `name` on `parameters`, which have gradients.

    sums: gradients in fp32 that are not those of the parameters, by these' identity: the parameters
    are parts of weights.  Returns the names of the gradients that it makes itself, by storage.

    A first step, not recorded, makes the states.  Weights below fp32 (as they are, or as `dtype`
    will price them) get fp32 masters: gradients are cast up, the step is taken on the masters, and
    the result is cast back.  Raises RequestError for an unknown name.
    """
    if name == "none":
        return {}
    kind = optimizer_class(name)
    if sums and not _is_elementwise(kind):
        raise RequestError(f"--optimizer {name} with --zero 1: it steps whole weights, not parts")
    recorder.here.part, recorder.here.function = "optimizer", kind.__name__
    with torch.no_grad(), functions_unseen(parameters):
        with recorder.paused():
            stepped = [_master(p) if _is_low(p, dtype) else p for p in parameters]
        if _is_elementwise(kind):
            stepped = [_local(p, tensor) for p, tensor in zip(parameters, stepped, strict=True)]
        with recorder.paused():
            optimizers = [made_optimizer(kind, alike) for alike in _alike(stepped)]
            for optimizer in optimizers:
                optimizer.step()
        states = {id(t): s for optimizer in optimizers for t, s in optimizer.state.items()}
        pairs = list(zip(parameters, stepped, strict=True))
        low = [(p, s) for p, s in pairs if _is_low(p, dtype)]
        for parameter, tensor in zip(parameters, stepped, strict=True):
            owner = recorder.name_of(parameter)
            tensor.grad = sums.get(id(parameter), tensor.grad)
            if _is_low(parameter, dtype):
                enter_state(recorder, tensor, parameter, f"{owner}.master")
            for state, value in states.get(id(tensor), {}).items():
                if isinstance(value, Tensor):
                    enter_state(recorder, value, parameter, f"{owner}.{state}")
        own = [pair for pair in low if id(pair[0]) not in sums]
        wide = _cast_gradients(recorder, own) if own else {}
        for optimizer in optimizers:
            optimizer.step()
        if low:
            torch_private.foreach_copy_(
                [local_of(p) for p, _ in low], [local_of(master) for _, master in low]
            )
    recorder.here.function = ""
    return wide


def step_all(
    recorder: Recorder,
    parameters: Sequence[nn.Parameter],
    learnt: Learnt,
    options: Options,
) -> tuple[dict[int, str], str | None]:
    """Record a step: gradients by storage, and the optimizers, of hooks and the requested one."""
    trained = [p for p in parameters if p.grad is not None]
    gradients, stepped = learnt.gradients, "+".join(dict.fromkeys(learnt.optimizers)) or None
    for parameter in trained:
        gradients |= gradients_of(recorder, parameter)
    name, taken = options.optimizer, len(parameters) - len(trained)
    if taken and name != "none" and any(map(copies.hooks_of, parameters)):
        say_hooked(recorder, taken, stepped, name)
    if not trained:
        return gradients, stepped or "none"
    gradients |= run_optimizer(recorder, trained, name, options.dtype)
    return gradients, stepped and (stepped if name == "none" else f"{stepped}+{name}")


def step_shares(recorder: Recorder, shared: SharedStates, options: Options) -> dict[int, str]:
    """Record a step of this process's parts of weights: gradients by storage.

    All others get what it steps: behind other microbatches now, else in the next forward.
    """
    parts = [*shared.parts.values()]
    made = run_optimizer(recorder, parts, options.optimizer, options.dtype, shared.sums)
    with torch.no_grad():
        if shared.late:
            shared.gather()
        shared.clear()
    return made


def functions_unseen(parameters: Iterable[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Inside, modes see the ops of an optimizer alone; also its functions, where a gradient is
    sparse, which it makes by functions that PyTorch has on no meta device."""
    sparse = any(p.grad is not None and trees.is_sparse(p.grad) for p in parameters)
    return contextlib.nullcontext() if sparse else torch_private.DisableTorchFunction()


_NOT_ELEMENTWISE = frozenset({"Adafactor", "Muon", "LBFGS"})
"""Optimizers of torch whose step on a part of a weight is not a part of the step on all of it."""


def _is_elementwise(kind: type) -> bool:
    """Whether a shard is stepped by itself, as torch's kernels do for tensors of a mesh."""
    return kind.__name__ not in _NOT_ELEMENTWISE


def _local(parameter: nn.Parameter, stepped: Tensor) -> Tensor:
    """The shard of a tensor that is to be stepped, with the shard of its gradient; a plain tensor
    as it is.  Pending sums of the gradient are exchanged first."""
    shard = local_of(stepped)
    if shard is stepped:
        return stepped
    if stepped is parameter:
        shard.grad = local_of(placed_gradient(parameter))
    return shard


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors that one kernel can step together: plain ones, and those sharded over each mesh."""
    kinds: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = getattr(tensor, "device_mesh", None)
        kinds.setdefault(None if mesh is None else (type(tensor), mesh), []).append(tensor)
    return list(kinds.values())


_DEPTH = 6
"""How deep objects inside objects are looked into for optimizers."""


def optimizers_in(tree: Any) -> list[Optimizer]:
    """The optimizers in nested arguments: in containers, schedulers, scalers, other optimizers."""
    optimizers: dict[int, Optimizer] = {}
    depths: dict[int, int] = {}

    def search(item: Any, depth: int) -> None:
        plain = (Tensor, nn.Module, type, ModuleType, str, bytes, int, float, type(None))
        if isinstance(item, plain) or depths.get(id(item), 0) >= depth:
            return
        depths[id(item)] = depth
        if isinstance(item, Optimizer):
            optimizers[id(item)] = item
        inside: Iterable[Any] = vars(item).values() if hasattr(item, "__dict__") else ()
        if isinstance(item, Mapping):
            inside = (*item.values(), *inside)
        elif isinstance(item, (list, tuple, set, frozenset)):
            inside = (*item, *inside)
        for part in inside:
            search(part, depth - 1)

    search(tree, _DEPTH)
    return list(optimizers.values())


def copy_optimizers(optimizers: Sequence[Optimizer], memo: dict[int, Any]) -> None:
    """Put deep copies of optimizers into `memo`, with every attribute that they have.

    Their `__getstate__` keeps states, groups and defaults only.  A function set on an
    optimizer in place of a method (a scheduler's watch on `step`) holds the original: the copy
    runs the method that it wraps.
    """
    for optimizer in optimizers:
        memo[id(optimizer)] = object.__new__(type(optimizer))
    for optimizer in optimizers:
        made = memo[id(optimizer)]
        attributes = {
            n: v for n, v in vars(optimizer).items() if not _replaces_method(optimizer, n, v)
        }
        vars(made).update(copy.deepcopy(attributes, memo))
        for name in vars(optimizer).keys() - attributes.keys():
            setattr(made, name, _rebound(getattr(optimizer, name), getattr(made, name), made))


def _replaces_method(optimizer: Optimizer, name: str, value: Any) -> bool:
    return isinstance(value, FunctionType) and hasattr(type(optimizer), name)


def _rebound(function: Any, method: Any, made: Any) -> Any:
    """The method of a copy, with the attributes of the function that replaces the original's."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        made._opt_called = True  # a scheduler sets this, and reads it
        return method(*args, **kwargs)

    vars(call).update(vars(function))
    return call


def optimizer_class(name: str) -> Any:
    """The class in torch.optim of this name, in any case.  Raises RequestError."""
    kinds = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if inspect.isclass(c)
        and issubclass(c, torch.optim.Optimizer)
        and c is not torch.optim.Optimizer
    }
    kind = kinds.get(name.lower())
    if kind is None or not _steps_alone(kind):
        known = sorted(n for n, c in kinds.items() if _steps_alone(c))
        raise RequestError(f"optimizer {name!r:.60}: {one_of(name, known, 'none or one')}")
    return kind


def _steps_alone(kind: Any) -> bool:
    """Whether a step runs without a closure that calls the model again (LBFGS needs one)."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is None or closure.default is None


def _is_low(parameter: nn.Parameter, dtype: str | None) -> bool:
    if not parameter.dtype.is_floating_point:
        return False
    return parameter.element_size() < 4 or (dtype is not None and bytes_per_element(dtype) < 4)


def _master(parameter: nn.Parameter) -> Tensor:
    master = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
    master.grad = torch.empty_like(master)
    shard = local_of(master)
    if shard is not master:
        shard.grad = local_of(master.grad)
    return master


def made_optimizer(kind: Any, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """An optimizer of this class as on a GPU: many tensors in one kernel, if the class can."""
    accepts = inspect.signature(kind.__init__).parameters
    settings: dict[str, Any] = {}
    if "foreach" in accepts:
        settings["foreach"] = True  # torch's choice on a GPU
    if "lr" in accepts:
        settings["lr"] = _LEARNING_RATE
    made: torch.optim.Optimizer = kind(parameters, **settings)
    return made


def _cast_gradients(
    recorder: Recorder, low: Sequence[tuple[nn.Parameter, Tensor]]
) -> dict[int, str]:
    """Give each fp32 master the gradient of its weight, cast up; returns their names by storage."""
    wide = [torch.empty_like(master) for _, master in low]
    torch_private.foreach_copy_(
        [*map(local_of, wide)], [local_of(placed_gradient(p)) for p, _ in low if p.grad is not None]
    )
    names = {}
    for (parameter, master), gradient in zip(low, wide, strict=True):
        master.grad = gradient
        storage = recorder.storage_of(gradient)
        if storage is not None:
            names[storage] = f"{recorder.name_of(parameter)}.master.grad"
    return names


# -- stepping --------------------------------------------------------------------------------------
# Steps that optimizers of the user's take while code is recorded: in a step, or in a hook.


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
    names = ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices")
    for module in (torch_private.FOREACH, Optimizer.__module__):
        home = sys.modules[module]
        there = [name for name in names if hasattr(home, name)]
        yield home, {n: functools.partial(_also_meta, original_of(home, n)) for n in there}


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
                with torch_private.disable_current_modes():
                    optimizer.step()
            except RuntimeError:  # it asks for values, which only the recorder follows
                optimizer.state.clear()
                optimizer.step()
        enter_states(recorder, optimizer)


def enter_state(recorder: Recorder, state: Tensor, weight: Tensor, name: str) -> None:
    """A state of a weight, which lies where that does, is a value of the graph."""
    if any(recorder.tags.on_host(part) for part, _ in trees.parts_of(weight)):
        recorder.tags.hosts.update(trees.bytes_of(part) for part, _ in trees.parts_of(state))
    recorder.enter(state, "optimizer", name)


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
                enter_state(recorder, value, parameter, f"{name}.{state}")


def note_gradients(recorder: Recorder, root: nn.Module, learnt: Learnt) -> None:
    for parameter in root.parameters():
        learnt.gradients.update(gradients_of(recorder, parameter))


def gradients_of(recorder: Recorder, parameter: Tensor) -> dict[int, str]:
    """The names of the parts of a tensor's gradient, by storage."""
    gradient, entry = parameter.grad, recorder.entries.entry_of(parameter)
    if gradient is None:
        return {}
    name = recorder.name_of(parameter) or ("" if entry is None else entry.name)
    parts = trees.parts_of(gradient)
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
