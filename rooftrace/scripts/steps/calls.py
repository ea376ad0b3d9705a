"""Calls of a script's outermost modules: how they look, and results given without a new run."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rooftrace.scripts.steps.presenting import Shapes
from rooftrace.tracer import torch_private
from rooftrace.tracer.phases import steps
from rooftrace.tracer.sharding import fsdp
from rooftrace.tracer.values import META, Values, tensors_in, trees


def is_there(tensor: Tensor) -> bool:
    """Whether a tensor is on the device of a script, or a shard that comes there to be used."""
    return tensor.is_meta or fsdp.is_offloaded(tensor)


def runs_where(on_device: Callable[[Tensor], bool], module: nn.Module, arguments: Any) -> bool:
    """Whether the first weight of a module is there, or one of its inputs where it has none."""
    weight = next(trees.weights_in(module), None)
    if weight is not None:
        return on_device(weight)
    return any(on_device(tensor) for tensor in tensors_in(arguments))


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
        return is_there(tensor) and tensor not in self._shapes

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


# -- calls -----------------------------------------------------------------------------------------
# Calls of modules from outside of any module: how one looks, and one that need not run again.

_PLAIN = (int, str, bytes, bool, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Look:
    """How a call looks: two calls that look alike run the same ops.

    plain: that is so.  False where an argument is an object that may hold anything, and in a
    transform of torch.func, which sees the ops.  kind: how it looks, but for the numbers in the
    shapes and strides of its tensors, which are `sizes`.
    """

    kind: Any
    plain: bool
    sizes: tuple[int, ...] = ()

    @property
    def key(self) -> Any:
        """A key that is equal for calls that look alike."""
        return self.kind, self.sizes


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """A call of a module.

    run: runs it.  begun: its forward runs already, and `run` runs the rest.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    run: Callable[[], Any]
    begun: bool = False

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keywords of the call."""
        return tuple(self.args), dict(self.kwargs)

    def look(self) -> Look:
        """How it looks."""
        opaque: list[Any] = []
        sizes: list[int] = []
        inside = _look(self.arguments, opaque, sizes)
        state = (
            id(self.module),
            self.module.training,
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            trees.attribute(self.module, "require_backward_grad_sync"),
        )
        plain = not opaque and torch_private.peek_interpreter_stack() is None
        return Look((state, inside), plain, tuple(sizes))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its first tensor that has dimensions; () without one."""
        tensors = tensors_in(self.arguments)
        return next((tuple(map(int, t.shape)) for t in tensors if t.dim()), ())

    def __str__(self) -> str:
        """The class of the module, and the sizes of the tensors."""
        sizes = [str(list(tensor.shape)) for tensor in tensors_in(self.arguments)]
        more = f", {len(sizes) - 4} more" if len(sizes) > 4 else ""
        return f"{type(_inside(self.module)).__name__}({', '.join(sizes[:4])}{more})"


def _look(item: Any, opaque: list[Any], sizes: list[int]) -> Any:
    if isinstance(item, Tensor):
        sizes += _sizes(item)
        return item.dim(), str(item.layout), item.dtype, item.device.type, item.requires_grad
    if isinstance(item, float):
        return float
    if isinstance(item, _PLAIN):
        return item
    if isinstance(item, Mapping):
        return tuple((str(key), _look(value, opaque, sizes)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item), tuple(_look(part, opaque, sizes) for part in item)
    opaque.append(item)
    return type(item), tuple(_look(tensor, opaque, sizes) for tensor in tensors_in(item))


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return (*map(int, tensor.shape), *map(int, strides))


def resized(arguments: Any, sizes: Sequence[int]) -> Any:
    """Arguments of a call, plain ones, with new tensors of these sizes; None where one is not."""
    leaves, spec = torch_private.tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    strided = all(t.layout is torch.strided and type(t) is Tensor for t in tensors)
    if not strided or len(tensors) != len(tensors_in(arguments)):
        return None
    left = list(sizes)

    def new(tensor: Tensor) -> Tensor:
        shape, stride = left[: tensor.dim()], left[tensor.dim() : 2 * tensor.dim()]
        del left[: 2 * tensor.dim()]
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).zero_()

    with torch_private.disable_current_modes():
        made = [new(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return torch_private.tree_unflatten(made, spec)


def state_of(module: nn.Module) -> Any:
    """The state of a module and its submodules without weights; equal while nothing changes."""
    return tuple(
        (id(inner), name, _held(item))
        for inner in module.modules()
        for name, item in (*inner.__dict__.items(), *inner._buffers.items())
        if name not in _OF_MODULES
    )


_OF_MODULES = frozenset(nn.Module().__dict__)
_SIZED = (list, tuple, dict, set, deque)


def _held(item: Any) -> Any:
    if isinstance(item, (*_PLAIN, float)):
        return item
    tensors = ((id(t), _sizes(t), t.is_inference() or t._version) for t in tensors_in(item))
    return id(item), len(item) if isinstance(item, _SIZED) else 0, tuple(tensors)


def _inside(module: nn.Module) -> nn.Module:
    """The module inside torch's wrappers: of a compiled module, a replica or a shard."""
    inner = trees.attribute(module, "_orig_mod")
    if inner is None and type(module).__module__.startswith("torch."):
        held = dict(module.named_children())  # TorchScript's are no dictionary
        inner = held.get("module", held.get("_fsdp_wrapped_module"))
    return module if inner is None else _inside(inner)


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor that a call returned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    value: Any


class Result:
    """The result of a call, kept so that a call that looks alike need not run."""

    def __init__(self, output: Any, values: Values) -> None:
        leaves, self._spec = torch_private.tree_flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        plain = all(isinstance(leaf, (*_PLAIN, float, Tensor)) for leaf in leaves)
        strided = all(t.layout is torch.strided and type(t) is Tensor for t in tensors)
        self.reusable = plain and strided and len(tensors) == len(tensors_in(output))
        self._leaves: list[Any] = []
        if self.reusable:
            self._leaves = [_leaf(x, values) if isinstance(x, Tensor) else x for x in leaves]

    @property
    def leaves(self) -> tuple[Any, ...] | None:
        """Its leaves; None if it depends on weights, or holds a tensor with a value."""
        tensors = [leaf for leaf in self._leaves if isinstance(leaf, _Leaf)]
        bare = self.reusable and not any(leaf.grad or leaf.value is not None for leaf in tensors)
        return tuple(self._leaves) if bare else None

    def of(self, leaves: Sequence[Any]) -> Result:
        """Another of the same structure, made of these."""
        other = copy.copy(self)
        other._leaves = list(leaves)
        return other

    def again(self, module: nn.Module, values: Values, arguments: Any = ()) -> Any:
        """The output of such a call: new tensors of these sizes.

        They depend on the weights of the module, and on the tensors among its arguments.
        """
        wanted = [leaf for leaf in self._leaves if isinstance(leaf, _Leaf)]
        with_grad = [leaf for leaf in wanted if leaf.grad]
        weights = [
            tensor
            for tensor in (*module.parameters(), *tensors_in(arguments))
            if with_grad and tensor.requires_grad
        ]
        made: list[Tensor] = []
        if weights:
            out = _Depends.apply(with_grad, *weights)  # type: ignore[no-untyped-call]
            made = list(out)
        tensors: list[Any] = []
        for leaf in self._leaves:
            if not isinstance(leaf, _Leaf):
                tensors.append(leaf)
                continue
            tensor = made.pop(0) if leaf.grad and weights else _empty(leaf)
            if leaf.value is not None:
                values.learn(tensor, leaf.value.value, leaf.value.taint)
            tensors.append(tensor)
        return torch_private.tree_unflatten(tensors, self._spec)


def _leaf(tensor: Tensor, values: Values) -> _Leaf:
    layout = tuple(tensor.shape), tensor.stride()
    return _Leaf(*layout, tensor.dtype, tensor.requires_grad, values.known(tensor))


def _empty(leaf: _Leaf) -> Tensor:
    """A tensor of unknown values: one that a recorder sees being made counts as zeros."""
    with torch_private.disable_current_modes():
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=META)


class _Depends(torch.autograd.Function):
    """Tensors that stand for the results of a call that was not run, and depend on its weights."""

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[_Leaf], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.weights = weights  # not saved: a later step may have changed them in place
        return tuple(_empty(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # One that has a gradient keeps it: adding to it would change nothing that is seen.
        return None, *(
            None if w.is_leaf and w.grad is not None else _gradient(w) for w in ctx.weights
        )


def _gradient(weight: Tensor) -> Tensor:
    with torch_private.disable_current_modes():
        return torch.empty_like(weight)
