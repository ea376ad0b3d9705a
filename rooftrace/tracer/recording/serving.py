"""Operators for serving: latent and packed attention, cache appends, sparse tensors, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer import RequestLengths
from rooftrace.tracer.recording import recurrences  # noqa: F401
from rooftrace.tracer.recording.attention import MORE, OPTIONS, attended, composed
from rooftrace.tracer.recording.library import OPS, define

# -- ops without an entry point --------------------------------------------------------------------
# Ops of ours that no entry point of aten stands for.
#
# Only rewrites make attention on latents and the append to a cache that has room; a sparse tensor
# is coalesced by an op on its indices and its values.  The kernels let such a graph run on real
# tensors.


def _latent_attention(
    query: Tensor,
    query_rope: Tensor,
    latent: Tensor,
    rope: Tensor,
    mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """softmax(scale (query latent^T + query_rope rope^T) + mask) latent, one latent for all heads.

    query [B, H, S, r], query_rope [B, H, S, d_r], latent [B, 1, L, r], rope [B, 1, L, d_r].
    """
    queries, keys = torch.cat((query, query_rope), -1), torch.cat((latent, rope), -1)
    result = attended(queries, keys, latent, mask, *options)
    out, logsumexp = empty_result(query, query.shape[-1])
    return out.copy_(result), logsumexp.zero_()


def _latent_meta(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_result(query, query.shape[-1])


def _packed_latent(
    query: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, *lengths: Any
) -> tuple[Tensor, Tensor]:
    """Attention on one latent for all heads, as above, of requests packed in one row."""
    queries, keys = torch.cat((query, query_rope), -1), torch.cat((latent, rope), -1)
    return packed_attention(queries, keys, latent, *lengths)


def _append(cache: Tensor, new: Sequence[Tensor], dim: int) -> Tensor:
    """The rows of a cache and the new ones; a server has room for them in the cache."""
    return torch.cat((cache, *new), dim)


def _coalesce(
    indices: Tensor, values: Tensor, size: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    """The distinct columns of `indices` [D, Z], in order, and the sums of their values.

    size: of the D dimensions.  count: of the distinct columns, where their values are unknown.
    """
    coalesced = torch.sparse_coo_tensor(
        indices, values, (*size, *values.shape[1:]), check_invariants=False
    ).coalesce()
    return coalesced.indices().clone(), coalesced.values().clone()


def _coalesce_meta(
    indices: Tensor, values: Tensor, size: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    return indices.new_empty((len(indices), count)), values.new_empty((count, *values.shape[1:]))


define(
    "latent_attention(Tensor query, Tensor query_rope, Tensor latent, Tensor rope, Tensor? mask, "
    f"{OPTIONS}, {MORE}) -> (Tensor, Tensor)",
    Meta=_latent_meta,
    CPU=_latent_attention,
)
define(
    "packed_latent_attention(Tensor query, Tensor query_rope, Tensor latent, Tensor rope, "
    "int[] cached, int[] new, int window, float scale) -> (Tensor, Tensor)",
    Meta=_latent_meta,
    CPU=_packed_latent,
)
define("cache_append(Tensor cache, Tensor[] new, int dim) -> Tensor", CPU=_append)
define(
    "coalesce(Tensor indices, Tensor values, int[] size, int count) -> (Tensor, Tensor)",
    Meta=_coalesce_meta,
    CPU=_coalesce,
    CUDA=_coalesce,
)


def own_ops() -> Any:
    """`torch.ops.rooftrace`, with the ops of attention and of this file."""
    return OPS


# -- the indexer of sparse attention: scores added up over heads -----------------------------------


def _index_scores(
    query: Tensor, key: Tensor, weights: Tensor, scale: float, dtype: torch.dtype
) -> Tensor:
    """I[b, s, l] = sum over h of w[b, s, h] relu(scale q[b, s, h] k[b, l])."""
    heads = torch.einsum("bshd,bld->bshl", query.to(dtype), key.to(dtype))
    return torch.einsum("bsh,bshl->bsl", weights.to(dtype), (heads * scale).relu())


define(
    "index_scores(Tensor query, Tensor key, Tensor weights, float scale, ScalarType dtype) "
    "-> Tensor",
    CPU=_index_scores,
)


# -- attention of several requests packed in one row -----------------------------------------------
# One kernel for all of them.  Queries [1, H, S, E] are the new tokens of the first request, of the
# second, and so on.  Keys [1, H or fewer, L, E] and values [1, .., L, Ev] are the cached rows of
# all requests in that order, then the new rows of all.  A token sees its request up to itself;
# with a window only the last `window` positions, and then a request has at most window - 1 cached
# rows.


def empty_result(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A result of so many columns as flash kernels write it, and room for the log-sum-exp."""
    batch, heads, rows, _ = query.shape
    out = query.new_empty((batch, rows, heads, width)).transpose(1, 2)
    return out, query.new_empty((batch, heads, rows), dtype=torch.float32)


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cached: Sequence[int],
    new: Sequence[int],
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The result on real tensors, request by request, and zeros for its log-sum-exp."""
    out, logsumexp = empty_result(query, value.shape[-1])
    for tokens, rows, mask in _each(cached, new, window):
        # Nothing but a backward reads the log-sum-exp, and a step of requests has none.
        out[:, :, tokens] = composed(
            query[:, :, tokens], key[:, :, rows], value[:, :, rows], mask, 0.0, False, scale
        )
    return out, logsumexp.zero_()


def _each(
    cached: Sequence[int], new: Sequence[int], window: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each request: its queries, its rows among keys and values, and the visible pairs."""
    rows = RequestLengths(tuple(cached), tuple(new)).rows(window)
    before, after, token = 0, sum(rows), 0
    for held, count in zip(rows, new, strict=True):
        positions = torch.cat(
            (
                torch.arange(before, before + held),
                torch.arange(after + token, after + token + count),
            )
        )
        ages = held + torch.arange(count)[:, None] - torch.arange(held + count)[None]
        seen = (ages >= 0) & (ages < window) if window else ages >= 0
        yield slice(token, token + count), positions, seen
        before, token = before + held, token + count


_LENGTHS = "int[] cached, int[] new, int window, float scale"
define(
    f"packed_attention(Tensor query, Tensor key, Tensor value, {_LENGTHS}) -> (Tensor, Tensor)",
    Meta=lambda query, key, value, *lengths: empty_result(query, value.shape[-1]),
    CPU=packed_attention,
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: RequestLengths, window: int, scale: float
) -> Tensor:
    """Attention of these requests as one op."""
    operands = (query, key, value, [*lengths.cached], [*lengths.new])
    out: Tensor = OPS.packed_attention(*operands, window, scale)[0]
    return out


# -- experts ---------------------------------------------------------------------------------------
# Operators of ours for the kernels of servers around experts: the choice of experts, the rows of
# each expert, products that take and put back rows by their numbers, and the sum of what a token's
# experts make.

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "root of softplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    "none": lambda x: x,
}
"""The function of the logits of a token; of all of them, or of the chosen ones."""


def _route(
    logits: Tensor, bias: Tensor | None, k: int, score: str, groups: int, kept: int, best: int,
    fill: float, after: str, least: float, scale: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    scores = _SCORES[score](wide)
    choice = scores if bias is None else scores + bias
    if kept < groups:
        parts = choice.view(*choice.shape[:-1], groups, -1)
        sums = parts.topk(best, -1).values.sum(-1)
        allowed = torch.zeros_like(sums).scatter(-1, sums.topk(kept, -1).indices, 1).bool()
        choice = parts.masked_fill(~allowed[..., None], fill).flatten(-2)
    chosen = choice.topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    if after == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + least)
    elif after == "clamped sum":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=least)
    else:
        weights = _SCORES[after](weights)
    return (weights * scale).to(dtype), chosen


def _align(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The rows in the order of their experts, and where the rows of each expert end."""
    flat = chosen.flatten()
    ends = torch.bincount(flat, minlength=experts)[:experts].cumsum(0)
    return flat.argsort(stable=True).int(), ends.int()


def _align_meta(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return (
        chosen.new_empty((chosen.numel(),), dtype=torch.int32),
        chosen.new_empty((experts,), dtype=torch.int32),
    )


def _product(
    rows: Tensor, mat2: Tensor, order: Tensor, offs: Tensor, bias: Tensor | None,
    scores: Tensor | None, share: int,
) -> Tensor:  # fmt: skip
    out = rows.new_zeros((len(order), mat2.shape[2]))
    start = 0
    for expert, end in enumerate(offs.tolist()):
        where = order[start:end].long()
        made = rows[where // share] @ mat2[expert]
        made = made if bias is None else made + bias[expert]
        out[where] = made if scores is None else (made * scores.flatten()[where, None]).to(out)
        start = end
    return out


def _combine(rows: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    return rows.view(-1, k, rows.shape[1]).to(dtype).sum(1)


define(
    "route_experts(Tensor logits, Tensor? bias, int k, str score, int groups, int kept, int best, "
    "float fill, str after, float least, float scale, ScalarType dtype) -> (Tensor, Tensor)",
    CPU=_route,
)
define(
    "align_experts(Tensor chosen, int experts) -> (Tensor, Tensor)", Meta=_align_meta, CPU=_align
)
define(
    "expert_mm(Tensor rows, Tensor mat2, Tensor order, Tensor offs, Tensor? bias, Tensor? scores, "
    "int share) -> Tensor",
    Meta=lambda rows, mat2, order, *rest: rows.new_empty((len(order), mat2.shape[2])),
    CPU=_product,
)
define("combine_experts(Tensor rows, int k, ScalarType dtype) -> Tensor", CPU=_combine)
