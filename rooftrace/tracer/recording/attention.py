"""Attention as one op with its backward, where PyTorch on meta takes it apart.

On the meta device `scaled_dot_product_attention` becomes some thirty ops with a materialised score
matrix; a GPU runs one kernel.  The CPU kernels let a captured graph run on real tensors.

Operands are query [..., H, S, E], key [..., H or fewer, L, E], value [..., L, Ev] and a mask or
None.  Options, behind them, are dropout_p, is_causal and scale.  Only rewrites give more:

sinks    [H]: one more column of scores, which takes its share of the softmax and has no value
softcap  scores x become softcap tanh(x / softcap) before the mask
fill     the value of scores that a boolean mask hides
window   each query sees the last so many keys up to its position; the last query stands last
chunk    each query sees the keys up to its position from the last multiple of so many positions
The last two stand in place of a mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.recording import library
from rooftrace.tracer.recording.library import OPS, define, differentiable
from rooftrace.tracer.recording.ops import COMPOSITE
from rooftrace.tracer.recording.overrides import Scope

_aten: Any = torch.ops.aten
_broadcast: Any = torch.broadcast_shapes
_LOW = (torch.float16, torch.bfloat16)


_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? mask"
OPTIONS = "float dropout_p, bool is_causal, float scale"
_PLAIN = 3
MORE = "Tensor? sinks=None, float softcap=0.0, float? fill=None, int window=0, int chunk=0"


def _attention_meta(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
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


def composed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Attention on real tensors by torch, also with fewer key heads than query heads."""
    grouped = query.dim() >= 3 and query.shape[-3] != key.shape[-3]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
    )


def _written(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    sinks: Tensor | None,
    softcap: float,
    fill: float | None,
    window: int,
    chunk: int,
) -> Tensor:
    """Attention by its definition, with the options that only rewrites give."""
    group = query.shape[-3] // key.shape[-3]
    key, value = (t.repeat_interleave(group, -3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    queries, length = scores.shape[-2:]
    if is_causal or window or chunk:
        last = torch.arange(queries)[:, None] + (0 if is_causal else length - queries)
        first = last - (window or length) + 1
        if chunk:
            first = last - last % chunk
        keys = torch.arange(length)
        mask = (first <= keys) & (keys <= last)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.where(mask, -math.inf if fill is None else fill)
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    probabilities = torch.softmax(scores, -1)[..., :length]
    return torch.dropout(probabilities, dropout_p, dropout_p > 0) @ value


def attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> Tensor:
    """Attention on real tensors, with the options of OPTIONS and, where there are any, of MORE."""
    if len(options) == _PLAIN:
        return composed(query, key, value, mask, *options)
    rest: tuple[Any, ...] = (None, 0.0, None, 0, 0)
    return _written(query, key, value, mask, *options, *rest[len(options) - _PLAIN :])


def _attention_cpu(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    result = attended(query, key, value, mask, *options)
    # The strides that the graph was captured with: CPU kernels choose others, by their case.
    out, logsumexp = _attention_meta(query, key, value, mask)
    # Only our backward gets the log-sum-exp, and it recomputes its inputs.
    return out.copy_(result), logsumexp.zero_()


def _backward_meta(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_mask = (
        torch.empty_like(mask)
        if mask is not None and mask.is_floating_point()
        else query.new_empty(0)
    )
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), grad_mask


def _backward_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with differentiable():
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        float_mask = mask is not None and mask.is_floating_point()
        bias = mask.detach().requires_grad_() if mask is not None and float_mask else mask
        again = composed(leaves[0], leaves[1], leaves[2], bias, *options)
        wanted = [*leaves, bias] if float_mask and bias is not None else leaves
        grads = torch.autograd.grad(again, wanted, grad_out)
    grad_mask = grads[3] if float_mask else query.new_empty(0)
    # As on meta, gradients have their input's strides.
    operands = zip((query, key, value), grads, strict=False)
    strided = [torch.empty_like(t).copy_(g) for t, g in operands]
    return strided[0], strided[1], strided[2], grad_mask


define(
    f"attention({_OPERANDS}, {OPTIONS}, {MORE}) -> (Tensor, Tensor)",
    Meta=_attention_meta,
    CPU=_attention_cpu,
)
define(
    f"attention_backward(Tensor grad_out, {_OPERANDS}, Tensor out, Tensor logsumexp, {OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    Meta=_backward_meta,
    CPU=_backward_cpu,
)


# -- as the user's modes see it ------------------------------------------------------------------


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool) -> str:
    """The kernel that CUDA takes: flash where it can, else the memory-efficient one.

    `sdpa_kernel` regions are kept to.  That a device or its cuDNN may prefer cuDNN's kernel is not
    modelled.  With fewer heads of keys fp32 counts as a half: the efficient kernel takes no groups.
    """
    allowed: Any = torch.backends.cuda
    halves = query.dtype in _LOW or query.shape[-3] != key.shape[-3]
    flash = halves and library.flash_takes(query, key, value, mask, is_causal)
    if flash and allowed.flash_sdp_enabled():
        return "flash"
    if allowed.cudnn_sdp_enabled() and not allowed.mem_efficient_sdp_enabled():
        return "cudnn"
    return "efficient"


class _Called:
    """The arguments of a public op as it was called: over shards it is called for each of them."""

    def __init__(self, public: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        names = (argument.name for argument in public._schema.arguments)
        self.named: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}

    @property
    def mask(self) -> Tensor | None:
        """The mask that is added to the scores."""
        return self.named.get("attn_bias")

    @property
    def options(self) -> tuple[float, bool, float]:
        """Dropout, whether it is causal, and the factor on the scores."""
        scale = self.named.get("scale")
        factor = 1.0 / math.sqrt(self.named["query"].shape[-1]) if scale is None else float(scale)
        return float(self.named.get("dropout_p", 0.0)), bool(self.named.get("is_causal")), factor


def _shown_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor]:
    """`rooftrace.attention`, shown as the op of CUDA's kernel.  Operands have four dimensions."""
    dropout_p, is_causal, scale = options
    name = _kernel(query, key, value, mask, is_causal)
    public = getattr(_aten, f"_scaled_dot_product_{name}_attention").default

    def run(*args: Any, **kwargs: Any) -> Any:
        call = _Called(public, args, kwargs)
        query, key, value = (call.named[part] for part in ("query", "key", "value"))
        made = OPS.attention(query, key, value, call.mask, *call.options)
        seed, offset = library.unrecorded(), library.unrecorded()
        if name == "efficient":
            return (*made, seed, offset)
        return (*made, None, None, query.shape[-2], key.shape[-2], seed, offset, None)

    flags: tuple[Any, ...] = (dropout_p, is_causal)
    if name == "flash":
        flags = (*flags, False)
    else:
        flags = (mask, True, *flags, *((False,) if name == "cudnn" else ()))
    out = library.show(public, run, query, key, value, *flags, scale=scale)
    return out[0], out[1]


def _shown_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rooftrace.attention_backward`, shown as the op of CUDA's kernel."""
    dropout_p, is_causal, scale = options
    name = _kernel(query, key, value, mask, is_causal)
    public = getattr(_aten, f"_scaled_dot_product_{name}_attention_backward").default
    made: list[Any] = []

    def run(grad_out: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = _Called(public, (grad_out, *args), kwargs)
        operands = (call.named[part] for part in ("query", "key", "value"))
        results = call.named["out"], call.named["logsumexp"]
        made[:] = OPS.attention_backward(grad_out, *operands, call.mask, *results, *call.options)
        if name != "efficient":
            return tuple(made[:3])
        return (*made[:3], made[3] if wanted[3] else None)  # undefined, as on a GPU

    seed, offset = library.unrecorded(), library.unrecorded()
    lengths = (None, None, query.shape[-2], key.shape[-2])
    wanted = [True, True, True, mask is not None and mask.requires_grad]
    rest: dict[str, tuple[Any, ...]] = {
        "flash": (out, logsumexp, *lengths, dropout_p, is_causal, seed, offset),
        "efficient": (mask, out, logsumexp, seed, offset, dropout_p, wanted, is_causal),
        "cudnn": (out, logsumexp, seed, offset, mask, *lengths, dropout_p, is_causal),
    }
    grads = library.show(public, run, grad_out, query, key, value, *rest[name], scale=scale)
    last: Any = grads[3] if len(grads) > 3 else made[3] if made else None
    return grads[0], grads[1], grads[2], last


def _is_shown(query: Tensor) -> bool:
    """Whether others see this call as CUDA's op, which takes four dimensions: modes of the user's,
    and shards of a mesh, which have rules for that op."""
    return query.dim() == 4 and (library.watched() or type(query).__name__ == "DTensor")


# -- in place of aten's entry point --------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *options: Any
    ) -> Tensor:
        op = _shown_forward if _is_shown(query) else OPS.attention
        out, logsumexp = op(query, key, value, mask, *options)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, mask, out, logsumexp = ctx.saved_tensors
        op = _shown_backward if _is_shown(query) else OPS.attention_backward
        *operands, grad_mask = op(grads[0], query, key, value, mask, out, logsumexp, *ctx.options)
        wants_mask = mask is not None and mask.requires_grad
        return (*operands, grad_mask if wants_mask else None, None, None, None)


def scaled_dot_product_attention(
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
    """The replacement for aten's entry point on meta tensors while `kept_whole` is on.

    Where CUDA has no kernel for all of it, it is taken apart as there.  Operands that do not go
    together raise torch's error.
    """
    if not library.agree(query, key, value, attn_mask):
        entry: Any = torch.ops.aten.scaled_dot_product_attention.default
        operands = (query, key, value, attn_mask, dropout_p, is_causal)
        made: Tensor = entry._op_dk(COMPOSITE, *operands, scale=scale, enable_gqa=enable_gqa)
        return made
    why = library.why_math(query, key, value, attn_mask, bool(is_causal), enable_gqa)
    if why:
        options = (_added(attn_mask, query), dropout_p, is_causal)
        return _taken_apart(why, query, key, value, *options, scale=scale, enable_gqa=enable_gqa)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    run: Any = _Attention.apply
    out: Tensor = run(query, key, value, attn_mask, float(dropout_p), bool(is_causal), factor)
    return out


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as numbers that are added to the scores (`convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    hidden = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
    return torch.where(mask, 0.0, hidden)


def _taken_apart(why: str, *args: Any, scale: float | None, enable_gqa: bool) -> Tensor:
    """Attention as the products, copies and softmax that CUDA runs."""
    scope = Scope.current() or Scope()
    scope.apart = why
    try:
        if not library.release().math_in_fp32:
            return _in_own_precision(*args, scale=scale)
        run = torch.ops.aten._scaled_dot_product_attention_math
        out: Tensor = run(*args, None, scale=scale, enable_gqa=enable_gqa)[0]
        return out
    finally:
        scope.apart = ""


def _in_own_precision(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
) -> Tensor:
    """Attention taken apart as up to torch 2.4: halves stay halves, and the softmax is a plain one.

    Later releases compute it in fp32, and make rows without a key zero.
    """
    factor = math.sqrt(1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale))
    queries = query * factor
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        mask = _added(torch.ones(shape, dtype=torch.bool, device=query.device).tril(), query)
    scores = torch.matmul(queries, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores = scores.add_(mask)
    probabilities = torch.softmax(scores, -1)
    if dropout_p > 0.0:
        probabilities = torch.dropout(probabilities, dropout_p, True)
    return torch.matmul(probabilities, value)
