"""Modules: the tensors that they own, the parameters of their forward, and their paths."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rooftrace.tracer.tensors.trees import PLAIN, tensors_in

LAZY = (UninitializedParameter, UninitializedBuffer)
"""Classes of tensors that have no shape before their module is called the first time."""


def asked(item: Any, name: str, default: Any = None) -> Any:
    """An attribute that a user's object need not have; what it raises says that it has none."""
    try:
        return getattr(item, name, default)
    except Exception:  # of the user's own __getattr__
        return default


def class_name(module: nn.Module) -> str:
    """The class of a module; TorchScript's say of what they were made."""
    made_of = module.original_name if isinstance(module, torch.jit.ScriptModule) else ""
    return str(made_of or type(module).__name__)


def own_tensors(module: nn.Module) -> Iterable[Tensor]:
    """Parameters, buffers and plain tensor attributes of one module, without its children's."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor
    for value in vars(module).values():
        if isinstance(value, Tensor):
            yield value


def weights_in(root: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers of a module and its children, also where its own attributes have the
    names of the methods that list them."""
    return chain(nn.Module.parameters(root), nn.Module.buffers(root))


def beside_in(module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Tensors in objects that a module holds, with the names of its attributes.

    seen: objects that are not looked into (again).
    """
    seen = set() if seen is None else seen
    for name, item in vars(module).items():
        if name not in ("_parameters", "_buffers", "_modules") and not isinstance(item, PLAIN):
            yield from ((name, tensor) for tensor in tensors_in(item, seen))


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, by name; for TorchScript from its schema."""
    forward: Any = module.forward
    if not isinstance(module, torch.jit.ScriptModule):
        return inspect.signature(forward).parameters
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [argument.name for argument in forward.schema.arguments[1:]]
    return {name: inspect.Parameter(name, kind) for name in names}


def is_lazy(module: nn.Module) -> bool:
    """Whether some parameter has no shape before the first call (nn.LazyLinear)."""
    return any(
        isinstance(tensor, LAZY) for owner in module.modules() for tensor in own_tensors(owner)
    )


def shown_path(path: str) -> str:
    """A module path without the steps that torch.compile adds."""
    if "_orig_mod" not in path:
        return path
    return ".".join(step for step in path.split(".") if step != "_orig_mod")
