"""The same cases as modules on meta tensors, which rooftrace traces and prices.

Masks are comparisons of aranges, and heads that share keys are written out behind a mask, as
transformers does.  Kernels of scans, delta rules and convolutions are the ops which rewrites put in
their place; a rooftrace without such an op has no price of the case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from attention import CAP
from cases import documents
from convolutions import convolution_call
from operators import OPERATORS, operator_of
from row_kernels import KERNELS, function_of
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


def _attention(
    sizes: dict[str, Any], tensor: bool = False
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """tensor: also a causal mask is one, and shared heads are written out for its kernel."""
    mask, scores, times = sizes["mask"], sizes.get("scores"), sizes["heads"] // sizes["kv_heads"]
    groups = times > 1

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: torch.Tensor
    ) -> torch.Tensor:
        given = None
        if mask not in ("none", "causal") or scores == "bias" or (tensor and mask == "causal"):
            device = query.device
            rows = torch.arange(sizes["queries"], device=device)[:, None]
            given = seen(sizes, rows, torch.arange(sizes["keys"], device=device)[None, :])
        if scores == "bias":
            given = torch.where(given, torch.randn(given.shape, device=given.device), float("-inf"))
        causal = given is None and mask == "causal" and sizes["queries"] > 1
        if (given is not None or len(masks)) and groups:
            shape = (key.shape[0], key.shape[1] * times, *key.shape[2:])
            key, value = (
                x[:, :, None].expand(-1, -1, times, -1, -1).reshape(shape) for x in (key, value)
            )
        return scaled_dot_product_attention(
            query, key, value, masks[0] if masks else given, is_causal=causal,
            enable_gqa=key.shape[1] < query.shape[1],
        )  # fmt: skip

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

    more = []
    if scores == "tensor":
        shape = (sizes["batch"], 1, sizes["queries"], sizes["keys"])
        more = [meta(*shape, dtype=torch.bool)]
    return Plain(flex if scores == "softcap" else attend), (*_inputs(sizes), *more)


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


# -- recurrent layers: the ops that rewrites make --------------------------------------------------


def ops() -> Any:
    """Ops of rooftrace, which its tracer defines."""
    import rooftrace.tracer.recording.serving  # noqa: F401

    return torch.ops.rooftrace


def _delta(
    sizes: dict[str, Any], delta: bool, channels: bool
) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Linear attention; with a delta, beta and norms of query and key."""
    batch, tokens, heads = sizes["batch"], sizes["tokens"], sizes["value_heads"]
    width, columns = sizes["key_width"], sizes["value_width"]
    rows = [meta(batch, tokens, sizes["heads"], width) for _ in range(2)]
    decay = meta(batch, tokens, heads, *[width] * channels, dtype=torch.float32)
    operands = [*rows, meta(batch, tokens, heads, columns), decay, meta(batch, tokens, heads)]
    state = meta(batch, heads, width, columns, dtype=torch.float32)
    norm = 1e-6 if delta else None
    settings = (width**-0.5, norm, norm, True, True)
    name = "delta_rule" if delta else "linear_attention"

    def run(*passed: torch.Tensor) -> Any:
        *rows, beta, state = passed
        read = [*rows, beta if delta else None, None, state]
        if tokens == 1:
            return getattr(ops(), f"{name}_")(*read, state, *settings)
        return getattr(ops(), name)(*read, *settings)

    return Plain(run), (*operands, state)


def _ssd(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """State-space duality in its five kernels."""
    batch, tokens, heads, groups = (sizes[name] for name in ("batch", "tokens", "heads", "groups"))
    width, state = sizes["width"], sizes["state"]
    fp32 = torch.float32
    given = (
        meta(batch, tokens, heads, width), meta(batch, tokens, heads, 1),
        meta(heads, 1, dtype=fp32), *(meta(batch, tokens, groups, state) for _ in range(2)),
        meta(heads, 1, dtype=fp32), meta(heads, 1, dtype=fp32),
    )  # fmt: skip

    def run(x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
            D: torch.Tensor, bias: torch.Tensor) -> Any:  # fmt: skip
        chunk, order = sizes["chunk"], [0, 1, 2, 3]
        steps, sums = ops().ssd_steps(dt, A, bias, True, None, None, False, chunk)
        made = ops().ssd_states(x, B, steps, sums)
        begun, last = ops().ssd_passing(made, sums, None, x.dtype)
        products = ops().ssd_products(C, B, chunk)
        y = ops().ssd_output(products, x, steps, sums, C, begun, D, None, order, x.dtype)
        return y, last

    return Plain(run), given


def _scan(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The scan of Mamba, or the step of a state: heads of one channel, or of Mamba-2."""
    batch, tokens, size = sizes["batch"], sizes["tokens"], sizes["state"]
    heads, width = (
        (sizes["channels"], 1) if "channels" in sizes else (sizes["heads"], sizes["width"])
    )
    groups, inner = sizes.get("groups", 1), size if "channels" in sizes else 1
    fp32, x = torch.float32, meta(batch, tokens, heads, width)
    held = fp32 if sizes.get("held", "fp32") == "fp32" else torch.bfloat16
    given = (
        x, meta(batch, tokens, heads, 1), meta(heads, width if inner > 1 else 1, inner, dtype=fp32),
        *(meta(batch, tokens, groups, size) for _ in range(2)), meta(heads, 1, dtype=fp32),
        x.clone(), meta(heads, 1, dtype=fp32), meta(batch, heads, width, size, dtype=held),
    )  # fmt: skip

    def run(x: torch.Tensor, *given: torch.Tensor) -> Any:
        dt, A, B, C, D, z, bias, state = given
        gate = z if tokens == 1 or sizes["gated"] else None
        settings = (True, None, None, False)
        layout = ([0, 1, 2, 3], x.dtype)
        if tokens == 1:
            return ops().selective_state_update(
                state, x, dt, A, B, C, D, gate, bias, *settings, *layout
            )
        return ops().selective_scan(x, dt, A, B, C, D, gate, bias, None, *settings, *layout)

    return Plain(run), given


def _conv_step(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    channels = sizes["channels"]
    given = (meta(sizes["batch"], channels, WIDTH), meta(sizes["batch"], channels, 1),
             meta(channels, WIDTH), meta(channels))  # fmt: skip
    return Plain(lambda *g: ops().causal_conv1d_update(*g, "silu", [0, 1, 2])), given


# -- the others ------------------------------------------------------------------------------------


def _conv(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    channels, tokens = sizes["channels"], sizes["tokens"]

    def run(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if hasattr(ops(), "causal_conv1d"):
            return ops().causal_conv1d(given, weight, bias, "silu", [0, 1, 2])
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


def _add(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Plain(lambda given: given + 1), (meta(sizes["bytes"] // 4),)


def _copy(sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Plain(torch.clone), (meta(sizes["bytes"] // 4),)


def _rows(kernel: str, sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    of = operator_of if "shape" in sizes or "steps" in sizes else function_of
    function, given = of(kernel, sizes, "meta")
    return Plain(function), given


def _convolution(kernel: str, sizes: dict[str, Any]) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    call = convolution_call(kernel, sizes, "meta")
    return Plain(lambda _: call()), (meta(1),)


MODULES: dict[str, Callable[..., tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    **dict.fromkeys(("flash", "cudnn", "fa3", "default", "flex"), _attention),
    "efficient": partial(_attention, tensor=True),
    "varlen": _varlen,
    **dict.fromkeys(("causal_conv1d", "causal_conv1d_cuda"), _conv),
    "chunk_gated_delta_rule": partial(_delta, delta=True, channels=False),
    "fused_recurrent_gated_delta_rule": partial(_delta, delta=True, channels=False),
    "chunk_kda": partial(_delta, delta=True, channels=True),
    "fused_recurrent_kda": partial(_delta, delta=True, channels=True),
    **dict.fromkeys(
        ("chunk_simple_gla", "fused_recurrent_simple_gla"),
        partial(_delta, delta=False, channels=False),
    ),
    **dict.fromkeys(
        ("chunk_gla", "chunk_rwkv6", "fused_recurrent_rwkv6"),
        partial(_delta, delta=False, channels=True),
    ),
    "mamba_chunk_scan_combined": _ssd,
    "selective_scan": _scan,
    "selective_state_update": _scan,
    **dict.fromkeys(("causal_conv1d_update", "causal_conv1d_cuda_update"), _conv_step),
    "grouped_mm": _grouped,
    "convolution": partial(_convolution, "convolution"),
    "convolution_backward": partial(_convolution, "convolution_backward"),
    "mm": _mm,
    "copy": _copy,
    "add": _add,
    **{kernel: partial(_rows, kernel) for kernel in {*KERNELS, *OPERATORS}},
}
