"""Calls of attention kernels on random bf16 tensors: SDPA, flex_attention, varlen_attn, FA 3."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from cases import documents
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

Call = Callable[[], Any]
BLOCK = 128
CAP = 50.0
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def attention_call(kernel: str, sizes: dict[str, Any], device: str) -> Call:
    """The call of a case."""
    if kernel in ("varlen", "fa3"):
        return (_varlen if kernel == "varlen" else _fa3)(sizes, device)
    given = _tensors(sizes, device)
    return _flex(sizes, given) if kernel == "flex" else _sdpa(kernel, sizes, given)


def _tensors(sizes: dict[str, Any], device: str) -> tuple[torch.Tensor, ...]:
    """query[B, H, S, D], key and value[B, G, L, D]."""
    batch, width = sizes["batch"], sizes["width"]
    shapes = ((sizes["heads"], sizes["queries"]), *[(sizes["kv_heads"], sizes["keys"])] * 2)
    return tuple(
        torch.randn(batch, heads, rows, width, device=device, dtype=torch.bfloat16)
        for heads, rows in shapes
    )


# -- masks -----------------------------------------------------------------------------------------


def mask_function(sizes: dict[str, Any], device: str) -> Callable[..., torch.Tensor] | None:
    """The mask as flex_attention takes it; None where each query sees all keys."""
    kind, _, number = sizes["mask"].partition(":")
    ahead = sizes["keys"] - sizes["queries"]
    if kind == "none":
        return None
    if kind == "documents":
        lengths = torch.tensor(documents(sizes["mask"]), device=device)
        of = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        return lambda b, h, q, k: (of[q] == of[k]) & (q >= k)
    width = int(number or 0)
    if kind == "window":
        return lambda b, h, q, k: (q + ahead >= k) & (q + ahead - k < width)
    if kind == "chunk":
        return lambda b, h, q, k: (q + ahead >= k) & ((q + ahead) // width == k // width)
    if kind == "prefix":
        return lambda b, h, q, k: (q + ahead >= k) | (k < width)
    return lambda b, h, q, k: q + ahead >= k


def dense(sizes: dict[str, Any], device: str) -> torch.Tensor | None:
    """The mask as a tensor of booleans [S, L]."""
    function = mask_function(sizes, device)
    if function is None:
        return None
    query, key = (torch.arange(sizes[name], device=device) for name in ("queries", "keys"))
    rows = [function(0, 0, part[:, None], key[None, :]) for part in query.split(1024)]
    return torch.cat(rows)


def block_mask(sizes: dict[str, Any], device: str) -> BlockMask | None:
    """The mask in blocks, found a row of blocks at a time: the whole of it is never in memory."""
    function = mask_function(sizes, device)
    if function is None:
        return None
    queries, keys = sizes["queries"], sizes["keys"]
    columns = -(-keys // BLOCK)
    key = torch.arange(columns * BLOCK, device=device).clamp(max=keys - 1)[None, :]
    some, every = [], []
    for start in range(0, queries, BLOCK):
        query = torch.arange(start, min(start + BLOCK, queries), device=device)[:, None]
        seen = function(0, 0, query, key).expand(len(query), -1).reshape(-1, columns, BLOCK)
        every.append(seen.all(2).all(0) & (len(query) == BLOCK) & (keys % BLOCK == 0))
        some.append(seen.any(2).any(0) & ~every[-1])
    listed = [
        (rows.sum(-1, dtype=torch.int32), _first(rows)) for rows in map(torch.stack, (some, every))
    ]
    (count, where), (full, full_where) = [[t[None, None] for t in pair] for pair in listed]
    return BlockMask.from_kv_blocks(
        count, where, full, full_where, BLOCK, mask_mod=function, seq_lengths=(queries, keys)
    )


def _first(rows: torch.Tensor) -> torch.Tensor:
    """Places of the true entries of each row, before those of the others."""
    return torch.argsort(rows.int(), dim=-1, descending=True, stable=True).to(torch.int32)


# -- calls -----------------------------------------------------------------------------------------


def _sdpa(kernel: str, sizes: dict[str, Any], given: tuple[torch.Tensor, ...]) -> Call:
    query, key, value = given
    scores = sizes.get("scores")
    mask = None
    if kernel == "efficient" or sizes["mask"] not in ("none", "causal") or scores:
        mask = dense(sizes, query.device.type)
        if mask is None:
            shape = (sizes["batch"], 1, sizes["queries"], sizes["keys"])
            mask = torch.ones(shape, dtype=torch.bool, device=query.device)
        if scores == "bias":
            mask = torch.where(mask, torch.randn_like(mask, dtype=query.dtype), float("-inf"))
    if kernel == "efficient" or (kernel == "default" and mask is not None):
        times = sizes["heads"] // sizes["kv_heads"]  # this kernel has no groups
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    causal = mask is None and sizes["mask"] == "causal"

    def call() -> torch.Tensor:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, enable_gqa=key.shape[1] != query.shape[1]
        )

    if kernel == "default":
        return call

    def chosen() -> torch.Tensor:
        with sdpa_kernel(BACKENDS[kernel]):
            return call()

    return chosen


def _flex(sizes: dict[str, Any], given: tuple[torch.Tensor, ...]) -> Call:
    device, heads = given[0].device.type, sizes["heads"]
    scores = sizes.get("scores")
    mask = block_mask(sizes, device)
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    changes = {
        "softcap": lambda score, b, h, q, k: CAP * torch.tanh(score / CAP),
        "alibi": lambda score, b, h, q, k: score + slopes[h] * (k - q),
    }
    change = changes.get(scores)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return flex_attention(
            query, key, value, change, mask, enable_gqa=key.shape[1] != query.shape[1]
        )

    def attend_with_sinks(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        groups = key.shape[1] != query.shape[1]
        out, lse = flex_attention(query, key, value, None, mask, enable_gqa=groups, return_lse=True)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(out.dtype)

    compiled = torch.compile(attend_with_sinks if scores == "sinks" else attend, dynamic=False)
    arguments = list(given)
    if scores == "sinks":
        arguments.append(torch.randn(heads, device=device))
    return lambda: compiled(*arguments)


def _fa3(sizes: dict[str, Any], device: str) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache

    batch, width, kind = sizes["batch"], sizes["width"], sizes["mask"].partition(":")
    query, key, value = (
        torch.randn(batch, sizes[rows], sizes[heads], width, device=device, dtype=torch.bfloat16)
        for rows, heads in (("queries", "heads"), *[("keys", "kv_heads")] * 2)
    )
    more: dict[str, Any] = {"causal": kind[0] != "none"}
    if kind[0] == "window":
        more |= {"window_size": (int(kind[2]) - 1, 0)}
    if sizes.get("scores") == "softcap":
        more |= {"softcap": CAP}
    return lambda: flash_attn_with_kvcache(query, key, value, **more)


def _varlen(sizes: dict[str, Any], device: str) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    mask, keys = sizes["mask"], sizes["keys"]
    lengths = documents(mask) if mask.startswith("documents") else [keys]
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    more: dict[str, Any] = {"window_size": (-1, 0)}
    if mask.startswith("window"):
        more = {"window_size": (int(mask.partition(":")[2]) - 1, 0)}
    query, key, value = (
        torch.randn(keys, sizes[name], sizes["width"], device=device, dtype=torch.bfloat16)
        for name in ("heads", "kv_heads", "kv_heads")
    )
    longest = max(lengths)
    given = (query, key, value, offsets, offsets, longest, longest)
    known = inspect.signature(varlen_attn).parameters
    if "window_size" not in known:  # of the first releases
        if mask.startswith("window"):
            raise TypeError("this varlen_attn has no windows")
        more = {"is_causal": True}
    if "enable_gqa" in known:
        more["enable_gqa"] = True
    return lambda: varlen_attn(*given, **more)
