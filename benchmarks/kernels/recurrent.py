"""Calls of scans, delta rules, convolutions and grouped products on random bf16 tensors.

Packages: flash-linear-attention (Triton), mamba_ssm (Triton, and CUDA for the selective scan) and
causal_conv1d (CUDA).  Each is imported when a case of it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import logsigmoid, normalize

Call = Callable[[], Any]
BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 4
"""Of the convolutions."""
WHERE = {
    "chunk_gated_delta_rule": "gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "gated_delta_rule",
    "chunk_kda": "kda",
    "fused_recurrent_kda": "kda",
    "chunk_simple_gla": "simple_gla",
    "fused_recurrent_simple_gla": "simple_gla",
    "chunk_gla": "gla",
    "chunk_lightning_attn": "lightning_attn",
    "chunk_rwkv6": "rwkv6",
    "fused_recurrent_rwkv6": "rwkv6",
    "chunk_rwkv7": "rwkv7",
    "fused_mul_recurrent_rwkv7": "rwkv7",
}


def recurrent_call(kernel: str, sizes: dict[str, Any], device: str) -> Call:
    """The call of a case."""

    def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    if kernel in WHERE:
        return _delta(kernel, sizes, random)
    return OTHERS[kernel](sizes, random)


# -- flash-linear-attention ------------------------------------------------------------------------


def _delta(kernel: str, sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    function = getattr(import_module(f"fla.ops.{WHERE[kernel]}"), kernel)
    batch, tokens, heads, of_values, key_width, value_width = (
        sizes[name]
        for name in ("batch", "tokens", "heads", "value_heads", "key_width", "value_width")
    )
    query, key = (random(batch, tokens, heads, key_width) for _ in range(2))
    value = random(batch, tokens, of_values, value_width)
    state = random(batch, of_values, key_width, value_width, dtype=FP32)
    more: dict[str, Any] = {"initial_state": state, "output_final_state": True}
    gate = logsigmoid(random(batch, tokens, of_values, dtype=FP32))
    gates = logsigmoid(random(batch, tokens, of_values, key_width, dtype=FP32)).to(BF16)
    beta = random(batch, tokens, of_values).sigmoid()
    if "delta_rule" in kernel:
        more |= {"g": gate, "beta": beta, "use_qk_l2norm_in_kernel": True}
    elif "kda" in kernel:
        more |= {"g": gates.float(), "beta": beta, "use_qk_l2norm_in_kernel": True}
    elif "lightning" in kernel:
        more |= {"layer_idx": 8, "num_layers": 80}
    elif "simple_gla" in kernel:
        more |= {"g": gate}
    elif "gla" in kernel:
        more |= {"g": gates}
    elif "rwkv6" in kernel:
        more |= {"w": gates, "u": random(heads, key_width)}
    else:
        unit = normalize(random(batch, tokens, heads, key_width).float(), dim=-1).to(BF16)
        rate = random(batch, tokens, heads, key_width).sigmoid()
        decay = (-0.6065 * random(batch, tokens, heads, key_width).sigmoid()).to(BF16)
        if kernel.startswith("fused_mul"):
            return lambda: function(query, decay, key, value, unit, rate, **more)
        return lambda: function(
            r=query, w=decay, k=key, v=value, a=-unit, b=unit * rate, safe_gate=True, **more
        )
    return lambda: function(query, key, value, **more)


def _conv_triton(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    from fla.modules.causal_conv1d import causal_conv1d

    given = random(sizes["batch"], sizes["tokens"], sizes["channels"])
    weight = random(sizes["channels"], WIDTH)
    return lambda: causal_conv1d(given, weight, activation="silu", output_final_state=True)


def _conv_triton_step(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    from fla.modules.causal_conv1d import causal_conv1d_update

    given = random(sizes["batch"], 1, sizes["channels"])
    weight = random(sizes["channels"], WIDTH)
    cache = random(sizes["batch"], sizes["channels"], WIDTH)
    return lambda: causal_conv1d_update(given, cache, weight=weight, activation="silu")


# -- mamba_ssm, causal_conv1d ----------------------------------------------------------------------


def _ssd(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    batch, tokens, heads, groups = (sizes[name] for name in ("batch", "tokens", "heads", "groups"))
    given = random(batch, tokens, heads, sizes["width"])
    step = random(batch, tokens, heads)
    decay = -torch.exp(random(heads, dtype=FP32))
    into, out = (random(batch, tokens, groups, sizes["state"]) for _ in range(2))
    skip, bias = random(heads, dtype=FP32), random(heads, dtype=FP32)
    return lambda: mamba_chunk_scan_combined(
        given, step, decay, into, out, sizes["chunk"], D=skip, dt_bias=bias, dt_softplus=True,
        return_final_states=True,
    )  # fmt: skip


def _state_step(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    from mamba_ssm.ops.triton.selective_state_update import selective_state_update

    batch, held = sizes["batch"], FP32 if sizes["held"] == "fp32" else BF16
    width = sizes["state"]
    if "channels" in sizes:  # Mamba: each channel has a decay for each state
        channels = sizes["channels"]
        state = random(batch, channels, width, dtype=held)
        given, step, gate = (random(batch, channels) for _ in range(3))
        decay = -torch.exp(random(channels, width, dtype=FP32))
        into, out = (random(batch, width) for _ in range(2))
        skip, bias = (random(channels, dtype=FP32) for _ in range(2))
    else:  # Mamba-2: each head has one
        heads, size = sizes["heads"], sizes["width"]
        state = random(batch, heads, size, width, dtype=held)
        given, gate = (random(batch, heads, size) for _ in range(2))
        step = random(batch, heads)[..., None].expand(-1, -1, size)
        decay = -torch.exp(random(heads, dtype=FP32))[:, None, None].expand(-1, size, width)
        into, out = (random(batch, sizes["groups"], width) for _ in range(2))
        skip, bias = (random(heads, dtype=FP32)[:, None].expand(-1, size) for _ in range(2))
    return lambda: selective_state_update(
        state, given, step, decay, into, out, skip, gate, bias, dt_softplus=True
    )


def _scan(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    batch, tokens, channels, state = (
        sizes[name] for name in ("batch", "tokens", "channels", "state")
    )
    given, step = (random(batch, channels, tokens) for _ in range(2))
    gate = random(batch, channels, tokens) if sizes["gated"] else None
    decay = -torch.exp(random(channels, state, dtype=FP32))
    into, out = (random(batch, state, tokens) for _ in range(2))
    skip, bias = (random(channels, dtype=FP32) for _ in range(2))
    return lambda: selective_scan_fn(
        given, step, decay, into, out, skip, gate, bias, True, return_last_state=True
    )


def _conv_cuda(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    from causal_conv1d import causal_conv1d_fn

    given = random(sizes["batch"], sizes["channels"], sizes["tokens"])
    if sizes["channels_last"]:
        given = given.transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = random(sizes["channels"], WIDTH), random(sizes["channels"])
    return lambda: causal_conv1d_fn(given, weight, bias, activation="silu")


def _conv_cuda_step(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    from causal_conv1d import causal_conv1d_update

    given = random(sizes["batch"], sizes["channels"])
    weight, bias = random(sizes["channels"], WIDTH), random(sizes["channels"])
    cache = random(sizes["batch"], sizes["channels"], WIDTH)
    return lambda: causal_conv1d_update(given, cache, weight, bias, activation="silu")


# -- products, a copy ------------------------------------------------------------------------------


def _grouped(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    rows, experts = sizes["tokens"] * sizes["top_k"], sizes["experts"]
    given = random(rows, sizes["k"])
    weights = random(experts, sizes["n"], sizes["k"]).transpose(1, 2)
    ends = torch.arange(1, experts + 1, device=given.device) * rows // experts
    offsets = ends.to(torch.int32)
    return lambda: torch._grouped_mm(given, weights, offs=offsets)


def _copy(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    source = random(sizes["bytes"] // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _add(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    source = random(sizes["bytes"] // 4)
    target = torch.empty_like(source)
    return lambda: torch.add(source, 1, out=target)


def _nothing(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    one = random(1)
    return lambda: one.add_(1)


def _mm(sizes: dict[str, Any], random: Callable[..., torch.Tensor]) -> Call:
    left, right = random(sizes["m"], sizes["k"]), random(sizes["n"], sizes["k"]).t()
    return lambda: left @ right


OTHERS: dict[str, Callable[..., Call]] = {
    "causal_conv1d": _conv_triton,
    "causal_conv1d_update": _conv_triton_step,
    "mamba_chunk_scan_combined": _ssd,
    "selective_state_update": _state_step,
    "selective_scan": _scan,
    "causal_conv1d_cuda": _conv_cuda,
    "causal_conv1d_cuda_update": _conv_cuda_step,
    "grouped_mm": _grouped,
    "copy": _copy,
    "add": _add,
    "nothing": _nothing,
    "mm": _mm,
}
