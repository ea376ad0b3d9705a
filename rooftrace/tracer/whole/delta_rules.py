"""Linear attention with a decaying state, with and without a delta rule, as one op each.

Only rewrites make them; the kernels let such a graph run on real tensors.  They go token by token,
which is what the chunked kernels of libraries compute:

    D_t = exp(g_t) S_{t-1}    S_t = D_t + k_t (beta_t (v_t - D_t^T k_t))^T     o_t = scale S_t^T q_t

(S. Yang et al., "Gated Delta Networks", arXiv 2412.06464; without g arXiv 2406.06484; with a g for
each channel of the keys Kimi Linear, arXiv 2510.26692).  Linear attention adds k_t v_t^T instead
(arXiv 2312.06635).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftrace.tracer.whole.library import define


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
    RWKV-6, arXiv 2404.05892).  query_norm, key_norm: what is added to the sum of squares of a row
    before it is divided by its length.
    """
    wide = torch.float64 if torch.float64 in (query.dtype, value.dtype) else torch.float32
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
            known = torch.einsum("bhkv,bhk->bhv", last, k[:, t])
            new = beta[:, t].to(wide)[..., None] * (new - known)
        added = k[:, t, :, :, None] * new[:, :, None]
        last = last + added
        seen = last if bonus is None else before + bonus.to(wide)[..., None] * added
        out[:, t] = torch.einsum("bhkv,bhk->bhv", seen, q[:, t])
    kept = last.clone() if keep else last.new_empty((0,))
    return out.to(value.dtype), kept if state is None or not keep else kept.to(state.dtype)


def _rows(rows: Tensor, added: float | None, heads: int) -> Tensor:
    """Rows of length one where that is asked for, each head as often as it serves another."""
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
    wide = torch.float64 if torch.float64 in (query.dtype, value.dtype) else torch.float32
    kept = query.new_empty(shape, dtype=wide if state is None else state.dtype)
    return value.new_empty(value.shape), kept


def _delta_rule_into(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None,
    bonus: Tensor | None, state: Tensor | None, into: Tensor, *rest: float | bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A delta rule whose last state is written into the cache that holds it."""
    out, last = _delta_rule(query, key, value, decay, beta, bonus, state, *rest)  # type: ignore[arg-type]
    return out, into.copy_(last)


def _delta_rule_into_meta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None,
    bonus: Tensor | None, state: Tensor | None, into: Tensor, *rest: float | bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return value.new_empty(value.shape), into


def _block_attention(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, query_decay: Tensor,
    key_decay: Tensor, pair_decay: Tensor, state: Tensor | None, scale: float, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Linear attention in blocks of n tokens with given tables of decays (lightning attention).

    query, key [B, T, H, K], value [B, T, H, V].  rate: H numbers, a state decays by exp(-rate) with
    each token.  query_decay, key_decay [H, n], by place in a block, of which a short block has the
    first and the last; pair_decay [H, n, n].
    """
    wide = torch.float64 if torch.float64 in (query.dtype, value.dtype) else torch.float32
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


_OPERANDS = (
    "Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? beta, Tensor? bonus, "
    "Tensor? state"
)
_SETTINGS = "float scale, float? query_norm, float? key_norm, bool is_log, bool keep"
for _name in ("delta_rule", "linear_attention"):
    define(
        f"{_name}({_OPERANDS}, {_SETTINGS}) -> (Tensor, Tensor)",
        Meta=_delta_rule_meta,
        CPU=_delta_rule,
    )
    define(
        f"{_name}_({_OPERANDS}, Tensor(a!) into, {_SETTINGS}) -> (Tensor, Tensor(a!))",
        Meta=_delta_rule_into_meta,
        CPU=_delta_rule_into,
    )
define(
    "block_attention(Tensor query, Tensor key, Tensor value, Tensor rate, Tensor query_decay, "
    "Tensor key_decay, Tensor pair_decay, Tensor? state, float scale, bool keep) "
    "-> (Tensor, Tensor)",
    Meta=_block_attention_meta,
    CPU=_block_attention,
)
