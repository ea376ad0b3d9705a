"""Ops that stay whole, as the dispatch modes of the user's own code see them.

On a GPU a mode (a selective checkpoint's policy, a counter, a logger) is shown the op that PyTorch
chooses there, and not ours.  While such a mode stands before the recorder, an op of ours calls that
public op; the recorder, which gets it last, runs and records ours in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_aten: Any = torch.ops.aten
_ours: Any = torch.ops.rooftrace
_LOW = (torch.float16, torch.bfloat16)
_WIDEST_FLASH = 256
"""The widest head that flash attention takes."""
_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


class _Showing(threading.local):
    """The public op that is being shown, and what the recorder runs for it."""

    now: tuple[Any, Callable[..., Any]] | None = None


_showing = _Showing()


def watched() -> bool:
    """Whether a dispatch mode of the user's code sees the next op before the recorder does."""
    count = torch._C._len_torch_dispatch_stack()
    if not count:
        return False
    return not getattr(torch._C._get_dispatch_stack_at(count - 1), "runs_whole", False)


def shown(public: Any, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a public op; where the recorder gets it, it does `run` with the same arguments."""
    outer, _showing.now = _showing.now, (public, run)
    try:
        return public(*args, **kwargs)
    finally:
        _showing.now = outer


def behind(func: Any) -> Callable[..., Any] | None:
    """What the recorder runs for an op that is only shown; None for an op that is called."""
    now = _showing.now
    return now[1] if now is not None and now[0] is func else None


# -- attention -------------------------------------------------------------------------------------


def _attention_op(query: Tensor, key: Tensor, value: Tensor, mask: Any, is_causal: bool) -> str:
    """The kernel that CUDA takes: flash where it can, else the memory-efficient one.

    Flash attention takes fp16 and bf16 heads of one width up to 256, no mask, and a causal flag for
    square scores only.  `sdpa_kernel` regions are kept to.  That a device or its cuDNN may prefer
    cuDNN's kernel is not modelled; nor is that some shapes have no fused kernel there.
    """
    allowed: Any = torch.backends.cuda
    width = query.shape[-1]
    flash = (
        query.dtype in _LOW
        and mask is None
        and width == value.shape[-1] <= _WIDEST_FLASH
        and (not is_causal or query.shape[-2] == key.shape[-2])
    )
    if flash and allowed.flash_sdp_enabled():
        return "flash"
    if allowed.cudnn_sdp_enabled() and not allowed.mem_efficient_sdp_enabled():
        return "cudnn"
    return "efficient"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """`rooftrace.attention`, shown as the op of CUDA's kernel.  Operands have four dimensions."""
    name = _attention_op(query, key, value, mask, is_causal)
    public = getattr(_aten, f"_scaled_dot_product_{name}_attention").default

    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> Any:
        made = _ours.attention(query, key, value, mask, dropout_p, is_causal, scale)
        seed, offset = unrecorded(), unrecorded()
        if name == "efficient":
            return (*made, seed, offset)
        return (*made, None, None, query.shape[-2], key.shape[-2], seed, offset, None)

    flags: tuple[Any, ...] = (dropout_p, is_causal)
    if name == "flash":
        flags = (*flags, False)
    else:
        flags = (mask, True, *flags, *((False,) if name == "cudnn" else ()))
    out = shown(public, run, query, key, value, *flags, scale=scale)
    return out[0], out[1]


def attention_backward(
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
    """`rooftrace.attention_backward`, shown as the op of CUDA's kernel."""
    name = _attention_op(query, key, value, mask, is_causal)
    public = getattr(_aten, f"_scaled_dot_product_{name}_attention_backward").default
    made: list[Any] = []

    def run(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        made[:] = _ours.attention_backward(
            grad_out, query, key, value, mask, out, logsumexp, dropout_p, is_causal, scale
        )
        return tuple(made) if name == "efficient" else tuple(made[:3])

    seed, offset = unrecorded(), unrecorded()
    lengths = (None, None, query.shape[-2], key.shape[-2])
    wanted = [True, True, True, mask is not None and mask.requires_grad]
    rest: dict[str, tuple[Any, ...]] = {
        "flash": (out, logsumexp, *lengths, dropout_p, is_causal, seed, offset),
        "efficient": (mask, out, logsumexp, seed, offset, dropout_p, wanted, is_causal),
        "cudnn": (out, logsumexp, seed, offset, mask, *lengths, dropout_p, is_causal),
    }
    found = shown(public, run, grad_out, query, key, value, *rest[name], scale=scale)
    last: Any = found[3] if len(found) > 3 else made[3] if made else None
    return found[0], found[1], found[2], last


# -- recurrent networks ----------------------------------------------------------------------------


def rnn(
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
    """`rooftrace.rnn`, shown as cuDNN's op."""
    options = (mode, has_biases, num_layers, bidirectional, batch_first, batch_sizes)

    def run(*args: Any, **_: Any) -> Any:
        made = _ours.rnn(input, list(hx), list(params), *options)
        return (*made, unrecorded(), unrecorded())

    args = (input, list(params), 4 if has_biases else 2, None, hx[0], *hx[1:2])
    rest = _cudnn_options(hx, options, train=True)
    found = shown(_aten._cudnn_rnn.default, run, *args, *(() if hx[1:] else (None,)), *rest, None)
    return found[0], found[1], found[2]


def rnn_backward(
    grads: Sequence[Tensor | None],
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    output: Tensor,
    mode: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    batch_sizes: Sequence[int] | None = None,
) -> list[Tensor]:
    """`rooftrace.rnn_backward`, shown as cuDNN's op."""
    options = (mode, has_biases, num_layers, bidirectional, batch_first, batch_sizes)
    states = len(hx)

    def run(*args: Any, **_: Any) -> Any:
        made = _ours.rnn_backward(grads, input, hx, params, output, *options)
        cell = made[2] if states > 1 else None
        return made[0], made[1], cell, made[1 + states :]

    found = shown(
        _aten._cudnn_rnn_backward.default,
        run,
        input,
        list(params),
        4 if has_biases else 2,
        unrecorded(),
        hx[0],
        hx[1] if states > 1 else None,
        output,
        *(*grads, None, None)[:2],
        grads[2] if states > 1 else None,
        *_cudnn_options(hx, options, train=True),
        None,
        unrecorded(),
        [True] * 4,
    )
    return [found[0], *found[1 : 1 + states], *found[3]]


def _cudnn_options(hx: Sequence[Tensor], options: Any, train: bool) -> tuple[Any, ...]:
    """Arguments of cuDNN's ops from the mode to the sizes of the packed batches."""
    mode, _, layers, bidirectional, batch_first, sizes = options
    width = hx[0].shape[-1]
    kind = _CUDNN_MODES[mode]
    return kind, width, 0, layers, batch_first, 0.0, train, bidirectional, list(sizes or ())


# -- RMS norm --------------------------------------------------------------------------------------


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """`rooftrace.rms_norm`, shown as CUDA's op, which elsewhere is taken apart before a mode sees
    it."""

    def run(input: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
        return _ours.rms_norm(input, shape, weight, eps)

    with torch._C._AutoDispatchBelowAutograd():
        public = _aten._fused_rms_norm.default
        found = shown(public, run, input, list(normalized_shape), weight, eps)
    return found[0], found[1]


def rms_norm_backward(
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
        return _ours.rms_norm_backward(grad_out, input, shape, rstd, rest[0], eps, rest[1])

    public = _aten._fused_rms_norm_backward.default
    args = (grad_out, input, list(normalized_shape), rstd, weight, list(output_mask))
    found = shown(public, run, *args)
    return found[0], found[1]


def unrecorded() -> Tensor:
    """A state of random numbers, a reserve: a GPU's kernel has it, and nothing here reads it."""
    with _disable_current_modes():
        return torch.empty(0, device="meta")
