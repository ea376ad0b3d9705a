"""Ops of ours for the kernels of state-space models; only rewrites make them.

The kernels on a CPU say what the ops compute, token by token; those of the libraries are
`causal_conv1d` (Dao-AILab/causal-conv1d), `selective_scan` and `selective_state_update`
(state-spaces/mamba, arXiv 2312.00752), and the five that `mamba_chunk_scan_combined` launches for
state-space duality (arXiv 2405.21060): `ssd_steps`, `ssd_states`, `ssd_passing`, `ssd_products`,
`ssd_output`.  Sizes: B sequences of S tokens, H heads of P numbers, states of N numbers for each,
G groups of heads with keys and queries of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftrace.tracer.whole.library import define


def _laid_out(
    like: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype
) -> Tensor:
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
    A_log: bool,
    order: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T; y_t = h_t C_t + D x_t, times silu(z_t).

    x, z, y [B, S, H, P]; dt [B, S, H, 1 or P]; A, D, dt_bias begin with H; B, C [B, S, G, N];
    state [B, H, P, N].  Without A, `dt` is the logarithm of the decay, and x is not scaled.
    A_log: `A` is stored as log(-A), of which an engine makes A as it loads the weights.
    chunk: tokens that the kernel takes at once; the result is that of any number.
    """
    batch, tokens, heads, width = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    optional = (None if t is None else t.to(wide) for t in (A, D, z, dt_bias, state))
    decay, skip, gate, bias, h = optional
    decay = -decay.exp() if A_log and decay is not None else decay
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


def _scan_meta(
    x: Tensor, dt: Tensor, A: Tensor | None, B: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    *_, order, dtype = rest
    batch, _, heads, width = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = _laid_out(x, x.shape, order, dtype)
    return out, x.new_empty((batch, heads, width, B.shape[-1]), dtype=wide)


def _update(state: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """One token of the scan, whose state is overwritten; the arguments behind are the same."""
    dt, a, b, c, d, z, bias, softplus, low, high, log, order, dtype = rest
    out, last = _scan(
        x,
        dt,
        a,
        b,
        c,
        d,
        z,
        bias,
        state,
        softplus,
        low,
        high,
        log,
        order,
        dtype,
    )
    return state.copy_(last), out


def _update_meta(state: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, order, dtype = rest
    return state, _laid_out(x, x.shape, order, dtype)


# -- the five kernels of state-space duality -------------------------------------------------------


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunks(x: Tensor, chunk: int, heads: int | None = None) -> Tensor:
    """[B, S, G, ...] as [B, chunks, L, H, ...], zeros behind the last token; a group's for all of
    its heads."""
    x = x.to(_wide(x))
    x = x if heads is None else x.repeat_interleave(heads // x.shape[2], 2)
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % chunk))
    return x.reshape(x.shape[0], -1, chunk, *x.shape[2:])


def _dual_steps(
    dt: Tensor,
    A: Tensor | None,
    dt_bias: Tensor | None,
    softplus: bool,
    low: float | None,
    high: float | None,
    A_log: bool,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """dt, and the running sums of dt A within each chunk: both [B, H, chunks, L]."""
    wide = _wide(dt)
    bias, decay = (None if t is None else t.to(wide) for t in (dt_bias, A))
    steps = _step_sizes(dt.to(wide), bias, softplus, low, high)
    decay = -decay.exp() if A_log and decay is not None else decay
    logarithms = steps if decay is None else steps * decay[..., 0]
    steps = torch.ones_like(steps) if decay is None else steps
    cut = [_chunks(t, chunk)[..., 0].permute(0, 3, 1, 2) for t in (steps, logarithms)]
    return cut[0].contiguous(), cut[1].cumsum(-1)


def _dual_states(x: Tensor, B: Tensor, steps: Tensor, sums: Tensor) -> Tensor:
    """What each chunk leaves behind, [B, chunks, H, P, N]."""
    chunk, heads = sums.shape[-1], x.shape[2]
    decays = (sums[..., -1:] - sums).exp() * steps
    return torch.einsum(
        "bclhp,bclhn,bhcl->bchpn", _chunks(x, chunk), _chunks(B, chunk, heads), decays
    ).contiguous()


def _dual_passing(
    states: Tensor, sums: Tensor, state: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The state that begins each chunk, in `dtype`, and the one behind the last."""
    now = torch.zeros_like(states[:, 0]) if state is None else state.to(states.dtype)
    begun = []
    for chunk in range(states.shape[1]):
        begun.append(now)
        now = sums[:, :, chunk, -1].exp()[..., None, None] * now + states[:, chunk]
    return torch.stack(begun, 1).to(dtype), now.clone()


def _dual_products(C: Tensor, B: Tensor, chunk: int) -> Tensor:
    """C B^T of each pair of tokens of a chunk, [B, chunks, G, L, L]."""
    return torch.einsum("bclgn,bcsgn->bcgls", _chunks(C, chunk), _chunks(B, chunk)).contiguous()


def _dual_output(
    products: Tensor,
    x: Tensor,
    steps: Tensor,
    sums: Tensor,
    C: Tensor,
    begun: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    order: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """y within the chunks and of those before, with D x and the gate, [B, S, H, P]."""
    chunk, heads, wide = sums.shape[-1], x.shape[2], sums.dtype
    differences = sums[..., :, None] - sums[..., None, :]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    decays = differences.masked_fill(later, -torch.inf).exp() * steps[..., None, :]
    weights = products.repeat_interleave(heads // products.shape[2], 2) * decays.transpose(1, 2)
    y = torch.einsum("bchls,bcshp->bclhp", weights, _chunks(x, chunk))
    before = torch.einsum("bclhn,bchpn->bclhp", _chunks(C, chunk, heads), begun.to(wide))
    y = (y + before * sums.exp().permute(0, 2, 3, 1)[..., None]).flatten(1, 2)[:, : x.shape[1]]
    y = y if D is None else y + x.to(wide) * D.to(wide)
    y = y if z is None else y * F.silu(z.to(wide))
    return _laid_out(x, x.shape, order, dtype).copy_(y)


# -- convolutions ----------------------------------------------------------------------------------


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


def _conv_update(
    state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    order: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """The causal convolution behind the last columns, `state` [B, C, L]; x moves them on."""
    whole = torch.cat((state, x), -1)
    last = weight.shape[1] - 1 + x.shape[-1]
    y = _convolved(whole[..., whole.shape[-1] - last :], weight, bias, activation)
    out = _laid_out(x, x.shape, order, x.dtype).copy_(y)
    return state.copy_(whole[..., x.shape[-1] :]), out


_OPERANDS = (
    "Tensor x, Tensor dt, Tensor? A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias"
)
_CHOICES = "bool softplus, float? low, float? high, bool A_log"
_LAYOUT = "int[] order, ScalarType dtype"
define(
    f"selective_scan({_OPERANDS}, Tensor? state, {_CHOICES}, {_LAYOUT}) -> (Tensor, Tensor)",
    Meta=_scan_meta,
    CPU=_scan,
)
define(
    f"ssd_steps(Tensor dt, Tensor? A, Tensor? dt_bias, {_CHOICES}, int chunk) -> (Tensor, Tensor)",
    CPU=_dual_steps,
)
define(
    "ssd_states(Tensor x, Tensor B, Tensor steps, Tensor sums) -> Tensor",
    CPU=_dual_states,
)
define(
    "ssd_passing(Tensor states, Tensor sums, Tensor? state, ScalarType dtype) -> (Tensor, Tensor)",
    CPU=_dual_passing,
)
define(
    "ssd_products(Tensor C, Tensor B, int chunk) -> Tensor",
    CPU=_dual_products,
)
define(
    "ssd_output(Tensor products, Tensor x, Tensor steps, Tensor sums, Tensor C, Tensor begun, "
    f"Tensor? D, Tensor? z, {_LAYOUT}) -> Tensor",
    CPU=_dual_output,
)
define(
    f"selective_state_update(Tensor(a!) state, {_OPERANDS}, {_CHOICES}, {_LAYOUT}) "
    "-> (Tensor(a!), Tensor)",
    Meta=_update_meta,
    CPU=_update,
)
define(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, str activation, int[] order) -> Tensor",
    CPU=_causal_conv1d,
)
define(
    "causal_conv1d_update(Tensor(a!) state, Tensor x, Tensor weight, Tensor? bias, str activation, "
    "int[] order) -> (Tensor(a!), Tensor)",
    CPU=_conv_update,
)
