"""Meta twins of modules and inputs: same sizes, no data, nothing shared with the original."""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_map_only

from rooftrace.tracer.closures import copy_hooks
from rooftrace.tracer.origin import TraceError
from rooftrace.tracer.trees import tensors_in
from rooftrace.tracer.values import META, REAL, REAL_VALUE, Real, small

_LAZY = (UninitializedParameter, UninitializedBuffer)


def twin(tensor: Tensor) -> Tensor:
    """A fresh meta tensor of the same size and strides; a small value is kept under REAL_VALUE."""
    empty = torch.empty_like(tensor, device=META)
    empty.requires_grad_(tensor.requires_grad and tensor.dtype.is_floating_point)
    _refer(empty, tensor)
    if tensor.device.type == "cpu" and small(tensor) and type(tensor) is Tensor:
        empty.__dict__[REAL_VALUE] = tensor.detach().clone()
    elif REAL_VALUE in tensor.__dict__:
        empty.__dict__[REAL_VALUE] = tensor.__dict__[REAL_VALUE]
    return empty


def on_meta(module: nn.Module) -> nn.Module:
    """The module itself if all its tensors are on meta, else a copy with meta tensors.

    The copy shares no state with the original, and no weight is copied.  Raises TraceError for
    a module that cannot be copied.
    """
    memo: dict[int, Any] = {}
    scripted = _scripted(module)
    inside = {id(part) for script in scripted for part in script.modules()}
    for script in scripted:
        if any(t.device.type != "meta" for t in (*script.parameters(), *script.buffers())):
            memo[id(script)] = _loaded_on_meta(script)
    for owner in module.modules():
        for tensor in () if id(owner) in inside else own_tensors(owner):
            if tensor.device.type != "meta" and id(tensor) not in memo:
                memo[id(tensor)] = parameter_twin(tensor)
    if not memo:
        return module
    own = [t for part in module.modules() if id(part) not in inside for t in own_tensors(part)]
    try:
        made: nn.Module = copy.deepcopy(module, memo)
        copy_hooks(own, memo)
        return made
    except (TypeError, RuntimeError, ValueError, AttributeError) as error:
        raise TraceError(
            f"{type(module).__name__} cannot be copied to the meta device ({error}): build it "
            "under `with torch.device('meta'):` and pass that"
        ) from error


def _scripted(module: nn.Module) -> list[torch.jit.ScriptModule]:
    """The outermost modules that TorchScript compiled."""
    if isinstance(module, torch.jit.ScriptModule):
        return [module]
    return [found for child in module.children() for found in _scripted(child)]


def _loaded_on_meta(script: torch.jit.ScriptModule) -> nn.Module:
    """A copy on meta, by way of TorchScript's own file: it moves in no other way."""
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    loaded: nn.Module = torch.jit.load(file, map_location=META)  # type: ignore[no-untyped-call]
    for mine, theirs in zip(script.modules(), loaded.modules(), strict=True):
        theirs.training = mine.training
    return loaded


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, by name; of TorchScript's as its schema has them."""
    forward: Any = module.forward
    if not isinstance(module, torch.jit.ScriptModule):
        return inspect.signature(forward).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [argument.name for argument in forward.schema.arguments[1:]]
    return {name: inspect.Parameter(name, kind) for name in names}


def own_tensors(module: nn.Module) -> Iterable[Tensor]:
    """Parameters, buffers and plain tensor attributes of one module, without its children's."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
    for value in vars(module).values():
        if isinstance(value, Tensor):
            yield value


def parameter_twin(tensor: Tensor) -> Tensor:
    """A meta tensor for one that a module owns: a parameter stays one."""
    if isinstance(tensor, _LAZY):
        kind: Any = type(tensor)
        empty: Tensor = kind(tensor.requires_grad, device=META, dtype=tensor.dtype)
        return empty
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(torch.empty_like(tensor, device=META), tensor.requires_grad)
        _refer(made, tensor)
        return made
    return twin(tensor)


def _refer(empty: Tensor, tensor: Tensor) -> None:
    """Let a twin know the real tensor, from which values are computed where code asks for them."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if plain and tensor.device.type == "cpu":
        empty.__dict__[REAL] = Real(tensor)
    elif REAL in tensor.__dict__:
        empty.__dict__[REAL] = tensor.__dict__[REAL]


def is_lazy(module: nn.Module) -> bool:
    """Whether some parameter has no shape before the first call (nn.LazyLinear)."""
    return any(
        isinstance(tensor, _LAZY) for owner in module.modules() for tensor in own_tensors(owner)
    )


def inputs_on_meta(tree: Any) -> Any:
    """A copy of nested arguments with a twin for every tensor, the user's own left as they are."""
    return replaced(tree, twin)


def replaced(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of nested Python values with every tensor in it changed, each once."""
    memo = {id(tensor): change(tensor) for tensor in tensors_in(tree)}
    try:
        return copy.deepcopy(tree, dict(memo))
    except (TypeError, RuntimeError):  # a generator, a lock ...: only the containers are copied
        return tree_map_only(Tensor, lambda tensor: memo[id(tensor)], tree)
