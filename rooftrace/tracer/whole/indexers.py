"""The indexer of sparse attention as an operator of our own: scores added up over heads."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftrace.tracer.whole.library import define


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
