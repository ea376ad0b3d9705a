"""Recurrent networks and RMS norm as one op with a backward; entry points recorded as one op."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftrace import _processes
from rooftrace.tracer import torch_private
from rooftrace.tracer.recording import library
from rooftrace.tracer.recording.attention import scaled_dot_product_attention
from rooftrace.tracer.recording.library import OPS, Library, define, differentiable
from rooftrace.tracer.recording.ops import COMPOSITE
from rooftrace.tracer.recording.overrides import Scope
from rooftrace.tracer.torch_private import AutoDispatchBelowAutograd, DispatchKey, is_key_excluded

# -- recurrent networks ----------------------------------------------------------------------------
# Recurrent networks as one op with its backward, where PyTorch on meta unrolls them over time.
#
# A GPU runs one cuDNN kernel.  The CPU kernels let a captured graph run on real tensors.

_aten: Any = torch.ops.aten
_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_KEPT = {"lstm": 5, "gru": 5, "rnn_tanh": 0, "rnn_relu": 0}
"""Values that a layer keeps for backward for each element of its output, besides the output: LSTM
four gates and a cell, GRU five (`_thnn_fused_lstm_cell`, `_thnn_fused_gru_cell`, RNN.cu).  cuDNN
does not document its reserve."""


class _Options(NamedTuple):
    """The build of a network: the arguments of its op after the tensors."""

    mode: str  # lstm, gru, rnn_tanh or rnn_relu
    has_biases: bool
    num_layers: int
    bidirectional: bool
    batch_first: bool
    batch_sizes: Sequence[int] | None = None  # rows of each time step of packed sequences


def _rnn_meta(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options = _Options(*rest)
    width = hx[0].shape[-1] * (2 if options.bidirectional else 1)
    if options.batch_first and input.dim() == 3:
        # cuDNN and the CPU work time-major and return a transposed view.
        batch, steps = input.shape[:2]
        output = input.new_empty((steps, batch, width)).transpose(0, 1)
    else:
        output = input.new_empty((*input.shape[:-1], width))
    cell = torch.empty_like(hx[1]) if options.mode == "lstm" else input.new_empty(0)
    return output, torch.empty_like(hx[0]), cell


def _rnn_cpu(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    options = _Options(*rest)
    kernel: Any = getattr(torch.ops.aten, options.mode)
    states: Any = list(hx) if options.mode == "lstm" else hx[0]
    build = (options.has_biases, options.num_layers, 0.0, False, options.bidirectional)
    if options.batch_sizes is None:
        result = kernel.input(input, states, list(params), *build, options.batch_first)
    else:
        result = kernel.data(input, torch.tensor(options.batch_sizes), states, list(params), *build)
    return (*result, input.new_empty(0))[:3]


def _backward_meta(
    grads: Sequence[Tensor | None],
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    *rest: Any,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (input, *hx, *params)]


def _backward_cpu(
    grads: Sequence[Tensor | None],
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    output: Tensor,
    *options: Any,
) -> list[Tensor]:
    with differentiable():
        leaves = [t.detach().requires_grad_() for t in (input, *hx, *params)]
        states = 1 + len(hx)
        outputs = _rnn_cpu(leaves[0], leaves[1:states], leaves[states:], *options)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=False) if g is not None]
        return list(torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs]))


_TENSORS = "Tensor input, Tensor[] hx, Tensor[] params"
_OPTIONS = (
    "str mode, bool has_biases, int num_layers, bool bidirectional, bool batch_first, "
    "int[]? batch_sizes=None"
)
define(f"rnn({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)", Meta=_rnn_meta, CPU=_rnn_cpu)
define(
    f"rnn_backward(Tensor?[] grads, {_TENSORS}, Tensor output, {_OPTIONS}) -> Tensor[]",
    Meta=_backward_meta,
    CPU=_backward_cpu,
)


# -- as the user's modes see it ------------------------------------------------------------------


def _shown_forward(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`rooftrace.rnn`, shown as cuDNN's op."""

    def run(*args: Any, **_: Any) -> Any:
        made = OPS.rnn(input, list(hx), list(params), *options)
        return (*made, library.unrecorded(), library.unrecorded())

    how = _Options(*options)
    args = (input, list(params), 4 if how.has_biases else 2, None, hx[0])
    cell = hx[1] if hx[1:] else None
    rest = _cudnn_options(hx, how)
    outputs = library.show(_aten._cudnn_rnn.default, run, *args, cell, *rest, None)
    return outputs[0], outputs[1], outputs[2]


def _shown_backward(
    grads: Sequence[Tensor | None],
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    output: Tensor,
    *options: Any,
) -> list[Tensor]:
    """`rooftrace.rnn_backward`, shown as cuDNN's op."""
    states, how = len(hx), _Options(*options)

    def run(*args: Any, **_: Any) -> Any:
        made = OPS.rnn_backward(grads, input, hx, params, output, *options)
        cell = made[2] if states > 1 else None
        return made[0], made[1], cell, made[1 + states :]

    made = library.show(
        _aten._cudnn_rnn_backward.default,
        run,
        input,
        list(params),
        4 if how.has_biases else 2,
        library.unrecorded(),
        hx[0],
        hx[1] if states > 1 else None,
        output,
        *(*grads, None, None)[:2],
        grads[2] if states > 1 else None,
        *_cudnn_options(hx, how),
        None,
        library.unrecorded(),
        [True] * 4,
    )
    return [made[0], *made[1 : 1 + states], *made[3]]


def _cudnn_options(hx: Sequence[Tensor], how: _Options) -> tuple[Any, ...]:
    """Arguments of cuDNN's ops from the mode to the sizes of the packed batches, in training."""
    sizes = list(how.batch_sizes or ())
    built = (hx[0].shape[-1], 0, how.num_layers, how.batch_first, 0.0, True, how.bidirectional)
    return (_CUDNN_MODES[how.mode], *built, sizes)


# -- in place of aten's entry points -------------------------------------------------------------


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        states: int,
        keeps: bool,
        input: Tensor,
        *tensors: Tensor,
    ) -> Any:
        hx, params = tensors[:states], tensors[states:]
        op = _shown_forward if library.watched() else OPS.rnn
        outputs = op(input, list(hx), list(params), *options)
        reserve = _reserve(outputs[0], options) if keeps else None
        ctx.save_for_backward(input, outputs[0], *tensors)
        ctx.reserve = reserve
        ctx.options, ctx.states = options, states
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        input, output, *tensors = ctx.saved_tensors
        hx, params = tensors[: ctx.states], tensors[ctx.states :]
        reserve, ctx.reserve = ctx.reserve, None
        op = _shown_backward if library.watched() else OPS.rnn_backward
        result = op(list(grads), input, hx, params, output, *ctx.options)
        del reserve  # was there until now
        return None, None, None, *result


def _reserve(output: Tensor, options: _Options) -> Tensor:
    """Values kept in training: the gates of each layer, and the outputs of inner layers."""
    size = ((_KEPT[options.mode] + 1) * options.num_layers - 1) * output.numel()
    return output.new_empty(size)


def _run(input: Tensor, hx: Any, params: Sequence[Tensor], options: _Options) -> Any:
    """The result of aten's op of this mode."""
    run: Any = _Rnn.apply
    states = list(hx) if options.mode == "lstm" else [hx]
    outputs = run(options, len(states), torch.is_grad_enabled(), input, *states, *params)
    return outputs if options.mode == "lstm" else outputs[:2]


def entry(
    mode: str,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
    sizes: list[int] | None = None,
) -> Any:
    """The replacement for `aten.lstm.input` and its like on meta while `kept_whole` is on."""
    options = _Options(mode, has_biases, num_layers, bidirectional, batch_first, sizes)
    return _run(input, hx, params, options)


def packed_entry(mode: str, data: Tensor, batch_sizes: Tensor, *rest: Any) -> Any:
    """The entry for sequences of unequal length: the rows of all time steps, and how many each
    step has."""
    whole: tuple[Any, ...] = (*rest, False, batch_sizes.tolist())
    return entry(mode, data, *whole)


# -- rms norm --------------------------------------------------------------------------------------
# RMS norm as one op with its backward, where PyTorch on meta spells it out.


def _rms_norm_meta(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    kept = input.shape[: input.dim() - len(normalized_shape)]
    wide = input.dtype if input.dtype == torch.float64 else torch.float32
    rstd = input.new_empty((*kept, *(1 for _ in normalized_shape)), dtype=wide)
    return input.new_empty(input.shape), rstd


def _rms_norm_cpu(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    out, rstd = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)
    made = _rms_norm_meta(input, normalized_shape, weight, eps)
    return made[0].copy_(out), made[1].copy_(rstd.reshape(made[1].shape))


def _rms_norm_backward_meta(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    wanted = input.new_empty(input.shape) if output_mask[0] else input.new_empty(0)
    if weight is None or not output_mask[1]:
        return wanted, input.new_empty(0)
    return wanted, torch.empty_like(weight)


def _rms_norm_backward_cpu(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    spelled = _spelled_gradients(
        grad_out, input.detach(), normalized_shape, None if weight is None else weight.detach(), eps
    )
    made = _rms_norm_backward_meta(
        grad_out, input, normalized_shape, rstd, weight, eps, output_mask
    )
    for place, gradient in zip(made, spelled, strict=True):
        if place.shape == (0,) or gradient is None:
            continue
        place.copy_(gradient)
    return made


def _spelled_gradients(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of input and weight through the ops that RMS norm is made of; differentiable where
    these require it themselves."""
    again = input.requires_grad or (weight is not None and weight.requires_grad)
    with differentiable():
        leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in (input, weight)
                  if t is not None]  # fmt: skip
        scale = leaves[1] if weight is not None else None
        out = torch.ops.aten._fused_rms_norm(leaves[0], normalized_shape, scale, eps)[0]
        grads = torch.autograd.grad(out, leaves, grad, create_graph=again)
    return grads[0], grads[1] if weight is not None else None


def _shown_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """`rooftrace.rms_norm`, shown as CUDA's op, which elsewhere is taken apart before a mode sees
    it."""

    def run(input: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
        return OPS.rms_norm(input, shape, weight, eps)

    with torch_private.AutoDispatchBelowAutograd():
        public = _aten._fused_rms_norm.default
        made = library.show(public, run, input, list(normalized_shape), weight, eps)
    return made[0], made[1]


def _shown_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """`rooftrace.rms_norm_backward`, shown as CUDA's op."""

    def run(grad_out: Tensor, input: Tensor, shape: Any, rstd: Tensor, *rest: Any) -> Any:
        made = OPS.rms_norm_backward(grad_out, input, shape, rstd, rest[0], eps, rest[1])
        # What is not wanted is undefined, as on a GPU.
        return tuple(grad if wanted else None for grad, wanted in zip(made, rest[1], strict=True))

    public = _aten._fused_rms_norm_backward.default
    args = (grad_out, input, list(normalized_shape), rstd, weight, list(output_mask))
    made = library.show(public, run, *args)
    return made[0], made[1]


def _is_shown(input: Tensor) -> bool:
    """Whether others see this call as CUDA's op: modes of the user's, and shards of a mesh, which
    have rules for that op."""
    return library.watched() or type(input).__name__ == "DTensor"


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        op = _shown_rms_norm if _is_shown(input) else OPS.rms_norm
        out, rstd = op(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.options = (shape, eps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        shape, eps = ctx.options
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            spelled = _spelled_gradients(grads[0], input, shape, weight, eps)
            return spelled[0], None, spelled[1], None
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        op = _shown_norm_backward if _is_shown(input) else OPS.rms_norm_backward
        grad_input, grad_weight = op(grads[0], input, shape, rstd, weight, eps, wanted)
        return grad_input if wanted[0] else None, None, grad_weight if wanted[1] else None, None


def _transformed() -> bool:
    """Whether a transform of torch.func or forward-mode derivatives are under way."""
    level = torch_private.maybe_current_level()
    return level is not None or torch_private.current_level >= 0


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The replacement for aten's entry point on meta tensors while `kept_whole` is on.

    It is taken apart where CUDA has no kernel either (`rms_norm_symint` in layer_norm.cpp):
    channels last, complex numbers, a weight of another type, and releases before torch 2.9.
    """
    taken_apart = (
        not library.release().fuses_rms_norm
        or input.is_complex()
        or (weight is not None and weight.dtype != input.dtype)
        or torch_private.suggest_memory_format(input)
        in (torch.channels_last, torch.channels_last_3d)
        or _transformed()
    )
    if taken_apart:
        spelled: Tensor = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
        return spelled
    run: Any = _RmsNorm.apply
    out: Tensor = run(input, list(normalized_shape), weight, eps)
    return out


define(
    "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) "
    "-> (Tensor, Tensor)",
    Meta=_rms_norm_meta,
    CPU=_rms_norm_cpu,
    CUDA=_rms_norm_cpu,
)
define(
    "rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, "
    "Tensor? weight, float? eps, bool[] output_mask) -> (Tensor, Tensor)",
    Meta=_rms_norm_backward_meta,
    CPU=_rms_norm_backward_cpu,
    CUDA=_rms_norm_backward_cpu,
)


# -- Entry points of aten that are recorded as one op: attention, recurrent networks, RMS norm, ----


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """One kernel, as on a GPU; elsewhere PyTorch makes the noise, scales it and multiplies."""
    if not train or p == 0 or input.numel() == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


def _op(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _softmax(name: str) -> Callable[..., Tensor]:
    """A softmax that widens fp16 itself, as on a GPU (SoftMax.cpp); bf16 is cast before."""
    entry, kernel = _op(f"{name}.int"), _op(f"_{name}")

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        if input.dtype == torch.float16 and dtype == torch.float32:
            widened: Tensor = kernel(input, dim, True)
            return widened
        made: Tensor = entry._op_dk(COMPOSITE, input, dim, dtype)
        return made

    return softmax


def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """One kernel, as on a GPU (ActivationMishKernel.cu); meta has none, and spells it out."""
    if is_key_excluded(DispatchKey.AutogradFunctionality):  # autograd has passed the call on
        return torch.empty_like(x)
    again = torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad)
    if again:  # somebody differentiates the gradient
        spelled: Tensor = torch.ops.aten.mish_backward.default._op_dk(COMPOSITE, grad, x)
        return spelled
    with AutoDispatchBelowAutograd():
        made: Tensor = torch.ops.aten.mish_backward(grad, x)
    return made


RMS_NORM_IS_ONE_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
"""Whether this torch has that kernel's backward: on CUDA, from torch 2.9 on.  An older one spells
the norm out, whatever release a step is priced for."""

_ENTRIES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "dropout": _dropout,
    **{f"{name}.int": _softmax(name) for name in ("softmax", "log_softmax")},
    **({"rms_norm": rms_norm} if RMS_NORM_IS_ONE_KERNEL else {}),
    **{f"{mode}.input": partial(entry, mode) for mode in _CUDNN_MODES},
    **{f"{mode}.data": partial(packed_entry, mode) for mode in _CUDNN_MODES},
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
    """Inside, attention, recurrent networks, RMS norm and dropout stay one op each on meta, and a
    softmax of fp16 with results in fp32.

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


def _in_scope(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel that runs `function` in threads of a recording, and elsewhere takes `op` apart."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if Scope.current() is None:
            return op._op_dk(COMPOSITE, *args, **kwargs)
        return function(*args, **kwargs)

    return kernel
