"""Operators that stay whole on meta tensors: attention, recurrent networks, RMS norm, dropout.

On the meta device PyTorch decomposes `scaled_dot_product_attention` into some thirty ops with a
materialised score matrix, unrolls `nn.LSTM` over time and spells RMS norm, where a GPU runs one
kernel.  Here they
are custom ops of our own namespace, with autograd; `kept_whole()` makes aten's entry points call
them for meta tensors.  The CPU implementations let a captured graph run on real tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from rooftrace.tracer.recording import shown

_SCHEMAS = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout_p, "
    "bool is_causal, float scale) -> (Tensor, Tensor)",
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? mask, "
    "Tensor out, Tensor logsumexp, float dropout_p, bool is_causal, float scale) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "rnn(Tensor input, Tensor[] hx, Tensor[] params, str mode, bool has_biases, int num_layers, "
    "bool bidirectional, bool batch_first, int[]? batch_sizes=None) -> (Tensor, Tensor, Tensor)",
    "rnn_backward(Tensor?[] grads, Tensor input, Tensor[] hx, Tensor[] params, Tensor output, "
    "str mode, bool has_biases, int num_layers, bool bidirectional, bool batch_first, "
    "int[]? batch_sizes=None) -> Tensor[]",
    "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) "
    "-> (Tensor, Tensor)",
    "rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, "
    "Tensor? weight, float? eps, bool[] output_mask) -> (Tensor, Tensor)",
)

_Library: Any = torch.library.Library
_library = _Library("rooftrace", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema)
_ops: Any = torch.ops.rooftrace


def define(schema: str, **kernels: Callable[..., Any]) -> None:
    """Add an operator of ours, with its kernels by device ("Meta", "CPU")."""
    _library.define(schema)
    for device, kernel in kernels.items():
        _library.impl(schema.partition("(")[0], kernel, device)


# -- attention -----------------------------------------------------------------------------------

_broadcast: Any = torch.broadcast_shapes


def _attention_meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    batch = _broadcast(query.shape[:-3], key.shape[:-3])
    heads = query.shape[-3:-2]
    rows = query.shape[-2]
    if query.dim() == 4:
        # Flash kernels write [B, S, H, D] and return it transposed, so the view back is free.
        out = query.new_empty((*batch, rows, *heads, value.shape[-1])).transpose(1, 2)
    else:
        out = query.new_empty((*batch, *heads, rows, value.shape[-1]))
    return out, query.new_empty((*batch, *heads, rows), dtype=torch.float32)


def _grouped(query: Tensor, key: Tensor) -> bool:
    return query.dim() >= 3 and query.shape[-3] != key.shape[-3]


def _attention_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    result = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=_grouped(query, key)
    )
    # The strides that the graph was captured with: CPU kernels choose others, by their case.
    out, logsumexp = _attention_meta(query, key, value, mask, dropout_p, is_causal, scale)
    # Nothing but our own backward reads the log-sum-exp, and that recomputes what it needs.
    return out.copy_(result), logsumexp.zero_()


def _attention_backward_meta(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_mask = (
        torch.empty_like(mask)
        if mask is not None and mask.is_floating_point()
        else query.new_empty(0)
    )
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), grad_mask


@contextlib.contextmanager
def _differentiable() -> Iterator[None]:
    """Inside, autograd follows ops, also where a dispatch mode asks for a value: it runs below."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded -= torch._C.DispatchKeySet(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


def _attention_backward_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with _differentiable():
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        float_mask = mask is not None and mask.is_floating_point()
        bias = mask.detach().requires_grad_() if mask is not None and float_mask else mask
        again = torch.nn.functional.scaled_dot_product_attention(
            leaves[0],
            leaves[1],
            leaves[2],
            bias,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=_grouped(query, key),
        )
        wanted = [*leaves, bias] if float_mask and bias is not None else leaves
        grads = torch.autograd.grad(again, wanted, grad_out)
    grad_mask = grads[3] if float_mask else query.new_empty(0)
    # As on meta, gradients have their input's strides.
    given = [torch.empty_like(t).copy_(g) for t, g in zip((query, key, value), grads, strict=False)]
    return given[0], given[1], given[2], grad_mask


def _is_shown(query: Tensor) -> bool:
    """Whether modes of the user's see this call: their formulas know four dimensions."""
    return query.dim() == 4 and shown.watched()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        op = shown.attention if _is_shown(query) else _ops.attention
        out, logsumexp = op(query, key, value, mask, dropout_p, is_causal, scale)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        ctx.options = (dropout_p, is_causal, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, mask, out, logsumexp = ctx.saved_tensors
        op = shown.attention_backward if _is_shown(query) else _ops.attention_backward
        grad_query, grad_key, grad_value, grad_mask = op(
            grads[0], query, key, value, mask, out, logsumexp, *ctx.options
        )
        wants_mask = mask is not None and mask.requires_grad
        return (
            grad_query,
            grad_key,
            grad_value,
            grad_mask if wants_mask else None,
            None,
            None,
            None,
        )


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What aten's entry point calls for meta tensors while `kept_whole` is on."""
    whole = (
        query.is_floating_point()
        and query.dim() >= 2
        and query.dim() == key.dim() == value.dim()
        and (query.dim() < 3 or query.shape[-3] % max(key.shape[-3], 1) == 0)
    )
    if not whole:
        return torch.ops.aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    missing = 3 - query.dim() if query.dim() < 3 else 0
    if query.dim() < 4 and shown.watched():
        missing = 4 - query.dim()
    for _ in range(missing):
        query, key, value = query[None], key[None], value[None]
    run: Any = _Attention.apply
    out: Tensor = run(query, key, value, attn_mask, float(dropout_p), bool(is_causal), factor)
    for _ in range(missing):
        out = out[0]
    return out


# -- recurrent networks --------------------------------------------------------------------------


def _rnn_meta(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    width = hx[0].shape[-1] * (2 if bidirectional else 1)
    if batch_first and input.dim() == 3:
        # cuDNN and the CPU work time-major and return a transposed view.
        batch, steps = input.shape[:2]
        output = input.new_empty((steps, batch, width)).transpose(0, 1)
    else:
        output = input.new_empty((*input.shape[:-1], width))
    cell = torch.empty_like(hx[1]) if mode == "lstm" else input.new_empty(0)
    return output, torch.empty_like(hx[0]), cell


def _rnn_run(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel: Any = getattr(torch.ops.aten, mode)
    states: Any = list(hx) if mode == "lstm" else hx[0]
    options = (list(params), has_biases, num_layers, 0.0, False, bidirectional)
    if batch_sizes is None:
        result = kernel.input(input, states, *options, batch_first)
    else:
        result = kernel.data(input, torch.tensor(batch_sizes), states, *options)
    return (*result, input.new_empty(0))[:3]


def _rnn_backward_meta(
    grads: Sequence[Tensor | None],
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    *options: Any,
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (input, *hx, *params)]


def _rnn_backward_cpu(
    grads: Sequence[Tensor | None],
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    output: Tensor,
    mode: str,
    *options: Any,
) -> list[Tensor]:
    with _differentiable():
        leaves = [t.detach().requires_grad_() for t in (input, *hx, *params)]
        states = 1 + len(hx)
        outputs = _rnn_run(leaves[0], leaves[1:states], leaves[states:], mode, *options)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=False) if g is not None]
        return list(torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs]))


class _Rnn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: tuple[Any, ...],
        states: int,
        keeps: bool,
        input: Tensor,
        *tensors: Tensor,
    ) -> Any:
        hx, params = tensors[:states], tensors[states:]
        op = shown.rnn if shown.watched() else _ops.rnn
        outputs = op(input, list(hx), list(params), *options)
        reserve = _reserve(outputs[0], *options) if keeps else None
        ctx.save_for_backward(input, outputs[0], *tensors)
        ctx.reserve = reserve
        ctx.options, ctx.states = options, states
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        input, output, *tensors = ctx.saved_tensors
        hx, params = tensors[: ctx.states], tensors[ctx.states :]
        reserve, ctx.reserve = ctx.reserve, None
        op = shown.rnn_backward if shown.watched() else _ops.rnn_backward
        result = op(list(grads), input, hx, params, output, *ctx.options)
        del reserve  # was there until now
        return None, None, None, *result


_KEPT = {"lstm": 5, "gru": 5, "rnn_tanh": 0, "rnn_relu": 0}
"""Values that a layer keeps for backward for each element of its output, beside the output: LSTM
four gates and a cell, GRU five (`_thnn_fused_lstm_cell`, `_thnn_fused_gru_cell`, RNN.cu).  What
cuDNN keeps it does not say."""


def _reserve(
    output: Tensor,
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    *_: Any,
) -> Tensor:
    """Room for what training keeps: of each layer its gates, and of those inside the output."""
    return output.new_empty(((_KEPT[mode] + 1) * num_layers - 1) * output.numel())


def _entry(mode: str) -> Callable[..., Any]:
    run: Any = _Rnn.apply

    def call(
        input: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        states = list(hx) if mode == "lstm" else [hx]
        options = (mode, has_biases, num_layers, bidirectional, batch_first)
        keeps = torch.is_grad_enabled()
        outputs = run(options, len(states), keeps, input, *states, *params)
        return outputs if mode == "lstm" else outputs[:2]

    return call


def _packed_entry(mode: str) -> Callable[..., Any]:
    """Sequences of unequal length: the rows of all time steps, and how many each step has."""
    run: Any = _Rnn.apply

    def call(
        data: Tensor,
        batch_sizes: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        states = list(hx) if mode == "lstm" else [hx]
        options = (mode, has_biases, num_layers, bidirectional, False, batch_sizes.tolist())
        keeps = torch.is_grad_enabled()
        outputs = run(options, len(states), keeps, data, *states, *params)
        return outputs if mode == "lstm" else outputs[:2]

    return call


# -- RMS norm ------------------------------------------------------------------------------------


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
    own = weight is not None and output_mask[1]
    return wanted, torch.empty_like(weight) if own and weight is not None else input.new_empty(0)


def _rms_norm_backward_cpu(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    found = _spelled_gradients(
        grad_out, input.detach(), normalized_shape, None if weight is None else weight.detach(), eps
    )
    made = _rms_norm_backward_meta(
        grad_out, input, normalized_shape, rstd, weight, eps, output_mask
    )
    for place, gradient in zip(made, found, strict=True):
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
    with _differentiable():
        leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in (input, weight)
                  if t is not None]  # fmt: skip
        given = leaves[1] if weight is not None else None
        out = torch.ops.aten._fused_rms_norm(leaves[0], normalized_shape, given, eps)[0]
        found = torch.autograd.grad(out, leaves, grad, create_graph=again)
    return found[0], found[1] if weight is not None else None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        op = shown.rms_norm if shown.watched() else _ops.rms_norm
        out, rstd = op(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.options = (shape, eps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        shape, eps = ctx.options
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            found = _spelled_gradients(grads[0], input, shape, weight, eps)
            return found[0], None, found[1], None
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        op = shown.rms_norm_backward if shown.watched() else _ops.rms_norm_backward
        grad_input, grad_weight = op(grads[0], input, shape, rstd, weight, eps, wanted)
        return grad_input if wanted[0] else None, None, grad_weight if wanted[1] else None, None


def _transformed() -> bool:
    """Whether a transform of torch.func or forward-mode derivatives are under way."""
    level = getattr(torch._C._functorch, "maybe_current_level", lambda: None)()
    return level is not None or torch.autograd.forward_ad._current_level >= 0


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """What aten's entry point calls for meta tensors while `kept_whole` is on.

    It is taken apart where CUDA has no kernel either (`rms_norm_symint` in layer_norm.cpp):
    channels last, complex numbers, a weight of another type.
    """
    taken_apart = (
        input.is_complex()
        or (weight is not None and weight.dtype != input.dtype)
        or suggest_memory_format(input) in (torch.channels_last, torch.channels_last_3d)
        or _transformed()
    )
    if taken_apart:
        spelled: Tensor = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
        return spelled
    run: Any = _RmsNorm.apply
    out: Tensor = run(input, list(normalized_shape), weight, eps)
    return out


# -- dropout -------------------------------------------------------------------------------------


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    """One kernel, as on a GPU; elsewhere PyTorch makes the noise, scales it and multiplies."""
    if not train or p == 0 or input.numel() == 0:
        return input
    return torch.native_dropout(input, p, train)[0]


_library.impl("attention", _attention_meta, "Meta")
_library.impl("attention", _attention_cpu, "CPU")
_library.impl("attention_backward", _attention_backward_meta, "Meta")
_library.impl("attention_backward", _attention_backward_cpu, "CPU")
_library.impl("rnn", _rnn_meta, "Meta")
_library.impl("rnn", _rnn_run, "CPU")
_library.impl("rnn_backward", _rnn_backward_meta, "Meta")
_library.impl("rnn_backward", _rnn_backward_cpu, "CPU")

_library.impl("rms_norm", _rms_norm_meta, "Meta")
for _device in ("CPU", "CUDA"):
    _library.impl("rms_norm", _rms_norm_cpu, _device)
    _library.impl("rms_norm_backward", _rms_norm_backward_cpu, _device)
_library.impl("rms_norm_backward", _rms_norm_backward_meta, "Meta")

RMS_NORM_IS_ONE_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
"""On CUDA, from torch 2.9 on."""

_ENTRIES: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _scaled_dot_product_attention,
    "dropout": _dropout,
    **({"rms_norm": _rms_norm} if RMS_NORM_IS_ONE_KERNEL else {}),
    **{f"{mode}.input": _entry(mode) for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    **{f"{mode}.data": _packed_entry(mode) for mode in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}


def whole_entry(func: Any) -> Callable[..., Any] | None:
    """What stands for an entry point of aten that stays whole."""
    overload = "" if func._overloadname == "default" else f".{func._overloadname}"
    return _ENTRIES.get(f"{func._opname}{overload}") if func.namespace == "aten" else None


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """While active, attention, recurrent networks, RMS norm and dropout on meta tensors are one op
    each."""
    library = _Library("aten", "IMPL")
    for name, function in _ENTRIES.items():
        for key in ("Meta", "AutogradMeta"):
            # Library.impl refuses ops with a composite implementation; the binding does not.
            library.m.impl(name, key, function)
    try:
        yield
    finally:
        library._destroy()
