"""Operators for state-space models and for linear attention, which only rewrites make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rooftrace.tracer.recording.library import define

# -- state spaces ----------------------------------------------------------------------------------
# Ops of ours for the kernels of state-space models; only rewrites make them.
#
# The CPU kernels define the ops, token by token; the kernels of the libraries are
# `causal_conv1d` (Dao-AILab/causal-conv1d), `selective_scan` and `selective_state_update`
# (state-spaces/mamba, arXiv 2312.00752), and the five that `mamba_chunk_scan_combined` launches for
# state-space duality (arXiv 2405.21060): `ssd_steps`, `ssd_states`, `ssd_passing`, `ssd_products`,
# `ssd_output`.  Sizes: B sequences of S tokens, H heads of P numbers, states of N numbers for each,
# G groups of heads that share keys and queries.


def _laid_out(
    like: Tensor, shape: Sequence[int], order: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """An empty tensor whose dimensions lie in memory in this order, outermost first."""
    inner = like.new_empty([shape[d] for d in order], dtype=dtype)
    return inner.permute([list(order).index(d) for d in range(len(shape))])


def _wide(*tensors: Tensor) -> torch.dtype:
    """The precision of sums: fp64 if a tensor has it, else fp32."""
    fp64 = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if fp64 else torch.float32


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
    """
    batch, tokens, heads, width = x.shape
    wide = _wide(x)
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
    out = _laid_out(x, x.shape, order, dtype)
    return out, x.new_empty((batch, heads, width, B.shape[-1]), dtype=_wide(x))


_BEFORE_STATE = 7
"""Arguments of a scan between `x` and `state`."""


def _update(state: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """One token of the scan, whose state is overwritten; the arguments behind are the same."""
    arguments = (x, *rest[:_BEFORE_STATE], state, *rest[_BEFORE_STATE:])
    out, last = _scan(*arguments)
    return state.copy_(last), out


def _update_meta(state: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, order, dtype = rest
    return state, _laid_out(x, x.shape, order, dtype)


# -- the five kernels of state-space duality -------------------------------------------------------


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
    """The state that each chunk adds, [B, chunks, H, P, N]."""
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
    """y within the chunks and from earlier chunks, with D x and the gate, [B, S, H, P]."""
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
    """Each channel of x [B, C, S] with its filter [C, K]; S - K + 1 positions are left."""
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
    columns = torch.cat((state, x), -1)
    last = weight.shape[1] - 1 + x.shape[-1]
    y = _convolved(columns[..., columns.shape[-1] - last :], weight, bias, activation)
    out = _laid_out(x, x.shape, order, x.dtype).copy_(y)
    return state.copy_(columns[..., x.shape[-1] :]), out


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


# -- delta rules -----------------------------------------------------------------------------------
# Linear attention with a decaying state, with and without a delta rule, as one op each.
#
# Only rewrites make them; the kernels let such a graph run on real tensors.  They go token by
# token; the chunked kernels of libraries compute the same:
#
#     D_t = exp(g_t) S_{t-1}    S_t = D_t + k_t (beta_t (v_t - D_t^T k_t))^T     o_t = scale S_t^T
#     q_t
#
# (S. Yang et al., "Gated Delta Networks", arXiv 2412.06464; without g arXiv 2406.06484; with a g
# for each channel of the keys Kimi Linear, arXiv 2510.26692).  Linear attention adds k_t v_t^T
# instead (arXiv 2312.06635).


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    bonus: Tensor | None,
    state: Tensor | None,
    scale: float,
    query_norm: float | None,
    key_norm: float | None,
    is_log: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """o[B, T, H, V] and the last state [B, H, K, V]; an empty one unless it is to be kept.

    query, key [B, T, h, K], where each of h heads serves H / h of value [B, T, H, V]; decay
    [B, T, H], or [B, T, H, K] with one for each channel, or the same for all tokens ([H], [H, K]),
    as a logarithm or as it is; beta [B, T, H], None for linear attention without a delta.
    bonus [H, K]: the result has the state before the token, and that much of what it adds (RWKV-5,
    RWKV-6, arXiv 2404.05892).  query_norm, key_norm: added to the sum of squares of a row
    before it is divided by its length.
    """
    wide = _wide(query, value)
    heads = value.shape[2]
    q, k = _rows(query.to(wide), query_norm, heads), _rows(key.to(wide), key_norm, heads)
    v, q = value.to(wide), q * scale
    batch, steps, _, width = k.shape
    last = v.new_zeros((batch, heads, width, v.shape[-1])) if state is None else state.to(wide)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    if decay is not None and decay.dim() < 3:
        decay = decay.expand(batch, steps, *decay.shape)
    for t in range(steps):
        before = last
        if decay is not None:
            d = decay[:, t].to(wide)
            d = d.exp() if is_log else d
            last = last * (d[..., None] if decay.dim() == 4 else d[..., None, None])
        new = v[:, t]
        if beta is not None:
            recalled = torch.einsum("bhkv,bhk->bhv", last, k[:, t])
            new = beta[:, t].to(wide)[..., None] * (new - recalled)
        added = k[:, t, :, :, None] * new[:, :, None]
        last = last + added
        seen = last if bonus is None else before + bonus.to(wide)[..., None] * added
        out[:, t] = torch.einsum("bhkv,bhk->bhv", seen, q[:, t])
    kept = last.clone() if keep else last.new_empty((0,))
    return out.to(value.dtype), kept if state is None or not keep else kept.to(state.dtype)


def _rows(rows: Tensor, added: float | None, heads: int) -> Tensor:
    """Rows of length one if `added` is not None, each head as often as it serves another."""
    if added is not None:
        rows = rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + added)
    return rows.repeat_interleave(heads // rows.shape[2], 2)


def _delta_rule_meta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None,
    bonus: Tensor | None, state: Tensor | None, scale: float, query_norm: float | None,
    key_norm: float | None, is_log: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, _, heads, columns = value.shape
    shape = (batch, heads, key.shape[-1], columns) if keep else (0,)
    wide = _wide(query, value)
    kept = query.new_empty(shape, dtype=wide if state is None else state.dtype)
    return value.new_empty(value.shape), kept


def _delta_rule_into(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None,
    bonus: Tensor | None, state: Tensor | None, into: Tensor, *rest: float | bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A delta rule whose last state is written into the cache that holds it."""
    out, last = _delta_rule(query, key, value, decay, beta, bonus, state, *rest)  # type: ignore[arg-type]
    return out, into.copy_(last)


def _block_attention(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, query_decay: Tensor,
    key_decay: Tensor, pair_decay: Tensor, state: Tensor | None, scale: float, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Linear attention in blocks of n tokens with given tables of decays (lightning attention).

    query, key [B, T, H, K], value [B, T, H, V].  rate: H numbers, a state decays by exp(-rate) with
    each token.  query_decay, key_decay [H, n], by place in a block, of which a short block has the
    first and the last; pair_decay [H, n, n].
    """
    wide = _wide(query, value)
    q, k, v = (x.to(wide).transpose(1, 2) for x in (query, key, value))
    heads, width, columns = q.shape[1], k.shape[-1], v.shape[-1]
    length = query_decay.numel() // heads
    of_query, of_key = (x.to(wide).reshape(heads, length, 1) for x in (query_decay, key_decay))
    pairs, each = (
        pair_decay.to(wide).reshape(heads, length, length),
        rate.to(wide).reshape(-1, 1, 1),
    )
    last = v.new_zeros((len(v), heads, width, columns)) if state is None else state.to(wide)
    said = []
    for block in zip(*(torch.split(x, length, 2) for x in (q, k, v)), strict=True):
        rows = block[0].shape[2]
        scores = block[0] @ block[1].transpose(-1, -2) * pairs[:, :rows, :rows]
        said.append(block[0] * of_query[:, :rows] @ last + scores @ block[2])
        kept = (block[1] * of_key[:, length - rows :]).transpose(-1, -2)
        last = last * torch.exp(-each * rows) + kept @ block[2]
    out = (torch.cat(said, 2).transpose(1, 2) * scale).to(value.dtype).contiguous()
    return out, last.to(value.dtype) if keep else last.new_empty((0,), dtype=value.dtype)


def _block_attention_meta(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, query_decay: Tensor,
    key_decay: Tensor, pair_decay: Tensor, state: Tensor | None, scale: float, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, _, heads, columns = value.shape
    shape = (batch, heads, key.shape[-1], columns) if keep else (0,)
    return value.new_empty(value.shape), value.new_empty(shape)


_STATE_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? beta, Tensor? bonus, "
    "Tensor? state"
)
_SETTINGS = "float scale, float? query_norm, float? key_norm, bool is_log, bool keep"
for _name in ("delta_rule", "linear_attention"):
    define(
        f"{_name}({_STATE_OPERANDS}, {_SETTINGS}) -> (Tensor, Tensor)",
        Meta=_delta_rule_meta,
        CPU=_delta_rule,
    )
    define(
        f"{_name}_({_STATE_OPERANDS}, Tensor(a!) into, {_SETTINGS}) -> (Tensor, Tensor(a!))",
        Meta=lambda *operands: (operands[2].new_empty(operands[2].shape), operands[7]),
        CPU=_delta_rule_into,
    )
define(
    "block_attention(Tensor query, Tensor key, Tensor value, Tensor rate, Tensor query_decay, "
    "Tensor key_decay, Tensor pair_decay, Tensor? state, float scale, bool keep) "
    "-> (Tensor, Tensor)",
    Meta=_block_attention_meta,
    CPU=_block_attention,
)
