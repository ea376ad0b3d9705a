"""The same cases as modules on meta tensors, which rooftrace traces and prices.

Masks are comparisons of aranges, as a model writes them.  A kernel that is not here has no module
whose trace shows it as one op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attention import CAP
from cases import documents
from torch import nn
from torch.nn.functional import conv1d, scaled_dot_product_attention, silu

WIDTH = 4


class Plain(nn.Module):
    """A function of its inputs, as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: torch.Tensor) -> Any:
        return self.function(*given)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(*shape, device="meta", dtype=dtype)


def module_of(kernel: str, sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The module of a case and its inputs; KeyError where there is none."""
    function = MODULES[kernel]
    return function(sizes)


# -- attention -------------------------------------------------------------------------------------


def _inputs(sizes: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    batch, width = sizes["batch"], sizes["width"]
    query = meta(batch, sizes["heads"], sizes["queries"], width)
    return query, *(meta(batch, sizes["kv_heads"], sizes["keys"], width) for _ in range(2))


def seen(sizes: dict[str, Any], query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Whether a query sees a key, of indices that are broadcast."""
    kind, _, number = sizes["mask"].partition(":")
    query = query + (sizes["keys"] - sizes["queries"])
    if kind == "documents":
        lengths = torch.tensor(documents(sizes["mask"]))
        of = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        return (of[query] == of[key]) & (query >= key)
    width = int(number or 0)
    if kind == "window":
        return (query >= key) & (query - key < width)
    if kind == "chunk":
        return (query >= key) & (query // width == key // width)
    if kind == "prefix":
        return (query >= key) | (key < width)
    return query >= key


def _attention(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    mask, scores, groups = sizes["mask"], sizes.get("scores"), sizes["kv_heads"] < sizes["heads"]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        given = None
        if mask not in ("none", "causal") or scores == "bias":
            device = query.device
            rows = torch.arange(sizes["queries"], device=device)[:, None]
            given = seen(sizes, rows, torch.arange(sizes["keys"], device=device)[None, :])
        if scores == "bias":
            given = torch.where(given, torch.randn(given.shape, device=given.device), float("-inf"))
        causal = given is None and mask == "causal" and sizes["queries"] > 1
        return scaled_dot_product_attention(
            query, key, value, given, is_causal=causal, enable_gqa=groups
        )

    def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        block = None
        if mask != "none":
            block = create_block_mask(
                lambda b, h, q, k: seen(sizes, q, k), None, None, sizes["queries"], sizes["keys"],
                device=query.device,
            )  # fmt: skip
        change = (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP)) if scores == "softcap" else None
        return flex_attention(query, key, value, change, block, enable_gqa=groups)

    return Plain(flex if scores == "softcap" else attend), _inputs(sizes)


def _varlen(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    if not sizes["mask"].startswith("documents"):
        return _attention(sizes)
    from torch.nn.attention.varlen import varlen_attn

    lengths = documents(sizes["mask"])
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    shapes = [(sizes["keys"], sizes[name], sizes["width"]) for name in ("heads", *["kv_heads"] * 2)]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        longest = max(lengths)
        return varlen_attn(
            query, key, value, offsets, offsets, longest, longest,
            window_size=(-1, 0), enable_gqa=True,
        )  # fmt: skip

    return Plain(attend), tuple(meta(*shape) for shape in shapes)


# -- the others ------------------------------------------------------------------------------------


def _conv(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    channels, tokens = sizes["channels"], sizes["tokens"]

    def run(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        made = conv1d(given, weight[:, None], bias, padding=WIDTH - 1, groups=channels)
        return silu(made[..., :tokens])

    given = (meta(sizes["batch"], channels, tokens), meta(channels, WIDTH), meta(channels))
    return Plain(run), given


def _grouped(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    rows, experts = sizes["tokens"] * sizes["top_k"], sizes["experts"]
    ends = (torch.arange(1, experts + 1) * rows // experts).to(torch.int32)

    def run(given: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(given, weights.transpose(1, 2), offs=ends.to(given.device))

    return Plain(run), (meta(rows, sizes["k"]), meta(experts, sizes["n"], sizes["k"]))


def _mm(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    given = (meta(sizes["m"], sizes["k"]), meta(sizes["n"], sizes["k"]))
    return Plain(lambda left, right: left @ right.t()), given


def _copy(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Plain(torch.clone), (meta(sizes["bytes"] // 4),)


MODULES: dict[str, Callable[..., tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    **dict.fromkeys(("flash", "cudnn", "fa3", "efficient", "default", "flex"), _attention),
    "varlen": _varlen,
    **dict.fromkeys(("causal_conv1d", "causal_conv1d_cuda"), _conv),
    "grouped_mm": _grouped,
    "mm": _mm,
    "copy": _copy,
}
