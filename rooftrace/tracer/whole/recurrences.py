"""Ops of ours for the kernels of state-space models; only rewrites make them.

The kernels on a CPU say what the ops compute, token by token; those of the libraries are
`causal_conv1d` (Dao-AILab/causal-conv1d), `selective_scan` and `selective_state_update`
(state-spaces/mamba, arXiv 2312.00752), and `mamba_chunk_scan_combined` for `ssd` (arXiv
2405.21060).  Sizes: B sequences of S tokens, H heads of P numbers, states of N numbers for each,
G groups of heads with keys and queries of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftrace.tracer.whole.library import define


def _laid_out(like: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An empty tensor whose dimensions lie in memory in this order, outermost first."""
    inner = like.new_empty([shape[d] for d in order], dtype=dtype)
    return inner.permute([list(order).index(d) for d in range(len(shape))])


def _step_sizes(
    dt: Tensor, bias: Tensor | None, softplus: bool, low: float | None, high: float | None
) -> Tensor:
    dt = dt if bias is None else dt + bias
    dt = F.softplus(dt) if softplus else dt
    return dt if low is None and high is None else dt.clamp(low, high)


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor | None,
    softplus: bool,
    low: float | None,
    high: float | None,
    chunk: int,
    order: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T; y_t = h_t C_t + D x_t, times silu(z_t).

    x, z, y [B, S, H, P]; dt [B, S, H, 1 or P]; A, D, dt_bias begin with H; B, C [B, S, G, N];
    state [B, H, P, N].  Without A, `dt` is the logarithm of the decay, and x is not scaled.
    chunk: tokens that the kernel takes at once; the result is that of any number.
    """
    batch, tokens, heads, width = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    optional = (None if t is None else t.to(wide) for t in (A, D, z, dt_bias, state))
    decay, skip, gate, bias, h = optional
    values, keys, queries = x.to(wide), B.to(wide), C.to(wide)
    steps = _step_sizes(dt.to(wide), bias, softplus, low, high)
    repeats = heads // B.shape[2]
    keys, queries = (t.repeat_interleave(repeats, 2) for t in (keys, queries))
    if h is None:
        h = values.new_zeros((batch, heads, width, B.shape[-1]))
    made = []
    for t in range(tokens):
        step = steps[:, t, :, :, None]
        scaled = values[:, t] if decay is None else values[:, t] * steps[:, t]
        h = torch.exp(step if decay is None else step * decay) * h
        h = h + scaled[..., None] * keys[:, t, :, None, :]
        made.append((h * queries[:, t, :, None, :]).sum(-1))
    y = torch.stack(made, 1)
    y = y if skip is None else y + values * skip
    y = y if gate is None else y * F.silu(gate)
    out = _laid_out(x, x.shape, order, dtype).copy_(y)
    return out, h.clone()


def _scan_meta(x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    *_, order, dtype = rest
    batch, _, heads, width = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = _laid_out(x, x.shape, order, dtype)  # type: ignore[arg-type]
    return out, x.new_empty((batch, heads, width, B.shape[-1]), dtype=wide)


def _update(state: Tensor, x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    """One token of the scan, whose state is overwritten; the arguments behind are the same."""
    dt, a, b, c, d, z, bias, softplus, low, high, order, dtype = rest
    out, last = _scan(
        x, dt, a, b, c, d, z, bias, state, softplus, low, high, 1, order, dtype  # type: ignore[arg-type]
    )
    return state.copy_(last), out


def _update_meta(state: Tensor, x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    *_, order, dtype = rest
    return state, _laid_out(x, x.shape, order, dtype)  # type: ignore[arg-type]


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Each channel of x [B, C, S] with its own filter [C, K]; S - K + 1 positions are left."""
    out = F.conv1d(x, weight.to(x.dtype)[:, None], bias, groups=x.shape[1])
    return F.silu(out) if activation == "silu" else out


def _causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, order: Sequence[int]
) -> Tensor:
    """y_t = sum_k w_k x_{t - K + 1 + k} (+ bias, SiLU) of x [B, C, S], zeros before the first."""
    y = _convolved(F.pad(x, (weight.shape[1] - 1, 0)), weight, bias, activation)
    return _laid_out(x, x.shape, order, x.dtype).copy_(y)


def _causal_conv1d_meta(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, order: Sequence[int]
) -> Tensor:
    return _laid_out(x, x.shape, order, x.dtype)


def _conv_update(
    state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    order: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The same behind the last columns in `state` [B, C, L], which moves on by those of x."""
    whole = torch.cat((state, x), -1)
    last = weight.shape[1] - 1 + x.shape[-1]
    y = _convolved(whole[..., whole.shape[-1] - last :], weight, bias, activation)
    out = _laid_out(x, x.shape, order, x.dtype).copy_(y)
    return state.copy_(whole[..., x.shape[-1] :]), out


def _conv_update_meta(
    state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    order: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return state, _laid_out(x, x.shape, order, x.dtype)


_OPERANDS = "Tensor x, Tensor dt, Tensor? A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias"
_CHOICES = "bool softplus, float? low, float? high"
_LAYOUT = "int[] order, ScalarType dtype"
for _name in ("selective_scan", "ssd"):
    define(
        f"{_name}({_OPERANDS}, Tensor? state, {_CHOICES}, int chunk, {_LAYOUT}) -> (Tensor, Tensor)",
        Meta=_scan_meta,
        CPU=_scan,
    )
define(
    f"selective_state_update(Tensor(a!) state, {_OPERANDS}, {_CHOICES}, {_LAYOUT}) "
    "-> (Tensor(a!), Tensor)",
    Meta=_update_meta,
    CPU=_update,
)
define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, str activation, int[] order) -> Tensor",
    Meta=_causal_conv1d_meta,
    CPU=_causal_conv1d,
)
define(
    "causal_conv1d_update(Tensor(a!) state, Tensor x, Tensor weight, Tensor? bias, str activation, "
    "int[] order) -> (Tensor(a!), Tensor)",
    Meta=_conv_update_meta,
    CPU=_conv_update,
)
