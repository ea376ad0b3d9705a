"""Ops of ours that no entry point of aten stands for.

Only rewrites make attention on latents and the append to a cache that has room; a sparse tensor is
coalesced by an op on its indices and its values.  The kernels let such a graph run on real tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.whole import (  # noqa: F401  they register their ops
    delta_rules,
    experts,
    recurrences,
)
from rooftrace.tracer.whole.attention import MORE, OPTIONS, attended
from rooftrace.tracer.whole.library import OPS, define
from rooftrace.tracer.whole.packed import empty_result, packed_attention


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
    batch, heads, rows, rank = query.shape
    out = query.new_empty((batch, rows, heads, rank)).transpose(1, 2)
    return out.copy_(result), query.new_zeros((batch, heads, rows), dtype=torch.float32)


def _latent_attention_meta(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, heads, rows, rank = query.shape
    out = query.new_empty((batch, rows, heads, rank)).transpose(1, 2)
    return out, query.new_empty((batch, heads, rows), dtype=torch.float32)


def _packed_latent(
    query: Tensor, query_rope: Tensor, latent: Tensor, rope: Tensor, *lengths: Any
) -> tuple[Tensor, Tensor]:
    """Attention on one latent for all heads, as above, of requests packed in one row."""
    queries, keys = torch.cat((query, query_rope), -1), torch.cat((latent, rope), -1)
    return packed_attention(queries, keys, latent, *lengths)


def _packed_latent_meta(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_result(query, query.shape[-1])


def _append(cache: Tensor, new: Sequence[Tensor], dim: int) -> Tensor:
    """The rows of a cache and the new ones; a server has room for them in the cache."""
    return torch.cat((cache, *new), dim)


def _coalesce(
    indices: Tensor, values: Tensor, size: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    """The places that `indices` [D, Z] names, in order and each once, and the sums of their values.

    size: of the D dimensions.  count: how many places there are, where nobody can look.
    """
    whole = torch.sparse_coo_tensor(
        indices, values, (*size, *values.shape[1:]), check_invariants=False
    ).coalesce()
    return whole.indices().clone(), whole.values().clone()


def _coalesce_meta(
    indices: Tensor, values: Tensor, size: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    return indices.new_empty((len(indices), count)), values.new_empty((count, *values.shape[1:]))


define(
    "latent_attention(Tensor query, Tensor query_rope, Tensor latent, Tensor rope, Tensor? mask, "
    f"{OPTIONS}, {MORE}) -> (Tensor, Tensor)",
    Meta=_latent_attention_meta,
    CPU=_latent_attention,
)
define(
    "packed_latent_attention(Tensor query, Tensor query_rope, Tensor latent, Tensor rope, "
    "int[] cached, int[] new, int window, float scale) -> (Tensor, Tensor)",
    Meta=_packed_latent_meta,
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
    """`torch.ops.rooftrace`, with the ops of attention and those of this file."""
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
