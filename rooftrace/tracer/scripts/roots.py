"""The modules of a script that are called from outside of any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rooftrace.tracer.phases import steps
from rooftrace.tracer.scripts.presenting import Shapes
from rooftrace.tracer.tensors import owners, tensors_in


def runs_where(there: Callable[[Tensor], bool], module: nn.Module, arguments: Any) -> bool:
    """Whether the first weight of a module is there, or one of its inputs where it has none."""
    weight = next(owners.weights_in(module), None)
    if weight is not None:
        return there(weight)
    return any(there(tensor) for tensor in tensors_in(arguments))


class Roots:
    """The outermost modules so far.  shapes: tensors that are on meta for the script too."""

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._modules: list[nn.Module] = []

    @property
    def container(self) -> nn.Module:
        """The only one, or a container of all under their class names; empty before any call."""
        return steps.container_of(self._modules) if self._modules else nn.Module()

    def on_device(self, module: nn.Module, arguments: Any) -> bool:
        """Whether a call of a module runs on the device: its weights are there, or its inputs."""
        return runs_where(self._is_there, module, arguments)

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.is_meta and tensor not in self._shapes

    @property
    def met(self) -> bool:
        """Whether there are any."""
        return bool(self._modules)

    def meet(self, module: nn.Module) -> None:
        """A module is called: recorders to come know its parts by their names."""
        if any(module is part for root in self._modules for part in root.modules()):
            return
        inside = {id(part) for part in module.modules()}
        weighs = next(iter(module.parameters()), None) is not None
        if weighs or not self._modules:
            self._modules = [m for m in self._modules if id(m) not in inside] + [module]
