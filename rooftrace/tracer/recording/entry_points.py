"""Entry points of aten that are recorded as one op: attention, recurrent networks, RMS norm,
dropout, and the gradient of mish."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rooftrace import _processes
from rooftrace.tracer.recording.attention import scaled_dot_product_attention
from rooftrace.tracer.recording.library import Library
from rooftrace.tracer.recording.overrides import Scope
from rooftrace.tracer.recording.recurrent import entry, packed_entry, rms_norm
from rooftrace.tracer.torch_private import AutoDispatchBelowAutograd, DispatchKey, is_key_excluded


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """One kernel, as on a GPU; elsewhere PyTorch makes the noise, scales it and multiplies."""
    if not train or p == 0 or input.numel() == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """One kernel, as on a GPU (ActivationMishKernel.cu); meta has none, and spells it out."""
    if is_key_excluded(DispatchKey.AutogradFunctionality):  # autograd has passed the call on
        return torch.empty_like(x)
    again = torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad)
    if again:  # somebody differentiates the gradient
        spelled: Tensor = torch.ops.aten.mish_backward.default._op_dk(_COMPOSITE, grad, x)
        return spelled
    with AutoDispatchBelowAutograd():
        made: Tensor = torch.ops.aten.mish_backward(grad, x)
    return made


_COMPOSITE = DispatchKey.CompositeImplicitAutograd


RMS_NORM_IS_ONE_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
"""Whether this torch has that kernel's backward: on CUDA, from torch 2.9 on.  An older one spells
the norm out, whatever release a step is priced for."""

_ENTRIES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "dropout": _dropout,
    **({"rms_norm": rms_norm} if RMS_NORM_IS_ONE_KERNEL else {}),
    **{f"{mode}.input": entry(mode) for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"{mode}.data": packed_entry(mode) for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}


_GRADIENTS: dict[str, Callable[..., Any]] = {"mish_backward": _mish_backward}
"""Ops of autograd that are one kernel on a GPU, and that no code calls."""

_REPLACED = {**_ENTRIES, **_GRADIENTS}
_PLACES = tuple((name, key) for name in _REPLACED for key in ("Meta", "AutogradMeta"))
"""Their slots in the dispatcher: op and dispatch key."""


def whole_entry(func: Any) -> Callable[..., Any] | None:
    """The function that replaces an entry point of aten; None for any other."""
    overload = "" if func._overloadname == "default" else f".{func._overloadname}"
    return _ENTRIES.get(f"{func._opname}{overload}") if func.namespace == "aten" else None


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """Inside, attention, recurrent networks, RMS norm and dropout stay one op each on meta.

    That holds for threads of a recording; in all others they run as they would without us.
    """
    with _KERNELS.used():
        yield


_kernel_of: Callable[..., Any] | None = getattr(torch.library, "get_kernel", None)
"""A kernel of the dispatcher, as something that holds it; older releases of torch have none."""
_TAKEN_AWAY: collections.deque[list[Any]] = collections.deque(maxlen=64)
"""The last kernels that were taken away.

A thread that calls attention on meta waits for the interpreter inside of the kernel that stood
there when it came, without holding it: freed meanwhile, the kernel ends the process.
"""
_LEFT: list[Any] = []
"""A library whose kernels could neither be held nor taken away: the next recording uses it."""


def _registered() -> Callable[[], None]:
    """Register the kernels, for all recordings; return their undo."""
    library = _LEFT.pop() if _LEFT else _with_kernels()
    kernels = [_kernel_of(f"aten::{name}", key) for name, key in _PLACES] if _kernel_of else []

    def undo() -> None:
        if kernels or _processes.alone():
            _TAKEN_AWAY.append(kernels)
            library._destroy()
        else:
            _LEFT.append(library)

    return undo


def _with_kernels() -> Any:
    library = Library("aten", "IMPL")
    kernels = {name: _in_scope(_op(name), function) for name, function in _REPLACED.items()}
    for name, key in _PLACES:
        # Library.impl refuses ops with a composite implementation; the binding does not.
        library.m.impl(name, key, kernels[name])
    return library


_KERNELS = _processes.Shared(_registered)


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_scope(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that runs `function` in threads of a recording, and elsewhere takes `op` apart."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if Scope.current() is None:
            return op._op_dk(_COMPOSITE, *args, **kwargs)
        return function(*args, **kwargs)

    return kernel
