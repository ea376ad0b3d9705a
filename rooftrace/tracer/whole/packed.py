"""Attention of several requests packed in one row: one kernel for all of them.

Queries [1, H, S, E] are the new tokens of the first request, of the second, and so on.  Keys
[1, H or fewer, L, E] and values [1, .., L, Ev] are the cached rows of all requests in that order,
then the new rows of all.  A token sees its own request up to itself; with a window only the last
`window` positions, and then a request has at most window - 1 cached rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rooftrace.tracer.asking import RequestLengths
from rooftrace.tracer.whole.attention import composed
from rooftrace.tracer.whole.library import OPS, define


def empty_result(query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """A result of so many columns as flash kernels write it, and room for the log-sum-exp."""
    batch, heads, rows, _ = query.shape
    out = query.new_empty((batch, rows, heads, width)).transpose(1, 2)
    return out, query.new_empty((batch, heads, rows), dtype=torch.float32)


def _packed_meta(
    query: Tensor, key: Tensor, value: Tensor, *lengths: object
) -> tuple[Tensor, Tensor]:
    return empty_result(query, value.shape[-1])


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
    """Of each request its queries, its rows among keys and values, and which of them are seen."""
    rows = RequestLengths(tuple(cached), tuple(new)).rows(window)
    before, after, token = 0, sum(rows), 0
    for held, count in zip(rows, new, strict=True):
        places = torch.cat(
            (
                torch.arange(before, before + held),
                torch.arange(after + token, after + token + count),
            )
        )
        ages = held + torch.arange(count)[:, None] - torch.arange(held + count)[None]
        seen = (ages >= 0) & (ages < window) if window else ages >= 0
        yield slice(token, token + count), places, seen
        before, token = before + held, token + count


_LENGTHS = "int[] cached, int[] new, int window, float scale"
define(
    f"packed_attention(Tensor query, Tensor key, Tensor value, {_LENGTHS}) -> (Tensor, Tensor)",
    Meta=_packed_meta,
    CPU=packed_attention,
)


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: RequestLengths, window: int, scale: float
) -> Tensor:
    """Attention of these requests as one op."""
    operands = (query, key, value, [*lengths.cached], [*lengths.new])
    out: Tensor = OPS.packed_attention(*operands, window, scale)[0]
    return out
