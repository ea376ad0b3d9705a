"""Operations of the matrix engine: products, attention and convolutions, with their sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from rooftrace.measured.bench import Bench
from rooftrace.measured.suite.cases import (
    Call,
    MicroCase,
    NotOfferedError,
    element_size,
    torch_type,
    usual_precision,
)

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384)
_FEW_ROWS = (1, 16, 64, 256, 1000, 4096, 16384)
_WEIGHTS = (
    (256, 256),
    (768, 768),
    (1024, 1024),
    (3072, 768),
    (768, 3072),
    (2048, 2048),
    (4096, 4096),
    (8192, 8192),
    (14336, 4096),
    (4096, 14336),
    (28672, 8192),
    (16384, 16384),
    (7168, 2048),
    (2112, 7168),
    (24576, 1536),
    (128256, 4096),
    (5120, 640),
    (50257, 768),
    (1001, 999),
    (4095, 4097),
)
"""Rows and columns of weights: usual linear layers, and two sizes that no tile divides."""
_FEW_WEIGHTS = ((1024, 1024), (4096, 4096), (8192, 8192), (14336, 4096), (1001, 999))


def matmuls(on_cuda: bool) -> Iterator[MicroCase]:
    main = usual_precision(on_cuda)
    others = ("fp16", "fp32", "tf32", "fp8") if on_cuda else ("bf16",)
    for dtype in (main, *others):
        full = dtype == main
        for n, k in _WEIGHTS if full else _FEW_WEIGHTS:
            for m in _ROWS if full else _FEW_ROWS:
                yield _matmul(m, n, k, dtype)


def _matmul(m: int, n: int, k: int, dtype: str) -> MicroCase:
    """y[m, n] = x[m, k] @ w[n, k].T, as a linear layer computes it."""

    def make(bench: Bench) -> Call:
        if dtype == "fp8":
            return _fp8_product(bench, m, n, k)
        x = bench.random(m, k, dtype=torch_type(dtype))
        w = bench.random(n, k, dtype=torch_type(dtype))
        return lambda: F.linear(x, w)

    out = 2 if dtype == "fp8" else element_size(dtype)
    moved = element_size(dtype) * (m * k + n * k) + out * m * n
    sizes = {"dtype": dtype, "m": m, "n": n, "k": k}
    return MicroCase("matmul", sizes, 2.0 * m * n * k, moved, make)


def _fp8_product(bench: Bench, m: int, n: int, k: int) -> Call:
    offered = bench.on_cuda and torch.cuda.get_device_capability(bench.device) >= (8, 9)
    if not offered and bench.device.type != "meta":
        raise NotOfferedError("fp8 products need a GPU of compute capability 8.9 or above")
    if n % 16 or k % 16:
        raise NotOfferedError("fp8 products need n and k in sixteens")
    x = bench.random(m, k).to(torch.float8_e4m3fn)
    w = bench.random(n, k).to(torch.float8_e4m3fn)
    unit = torch.ones((), device=bench.device)
    return lambda: torch._scaled_mm(x, w.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)


def batched(on_cuda: bool) -> Iterator[MicroCase]:
    """y[b, m, n] = x[b, m, k] @ w[b, k, n]."""
    dtype = usual_precision(on_cuda)
    for batch in (8, 32, 256):
        for m, n, k in ((1, 128, 128), (64, 64, 64), (128, 128, 64), (512, 64, 512), (1024,) * 3):

            def make(bench: Bench, batch: int = batch, m: int = m, n: int = n, k: int = k) -> Call:
                x = bench.random(batch, m, k, dtype=torch_type(dtype))
                w = bench.random(batch, k, n, dtype=torch_type(dtype))
                return lambda: torch.bmm(x, w)

            moved = element_size(dtype) * batch * (m * k + k * n + m * n)
            sizes = {"dtype": dtype, "b": batch, "m": m, "n": n, "k": k}
            yield MicroCase("batched_matmul", sizes, 2.0 * batch * m * n * k, moved, make)


def _grouped_runs(on_cuda: bool) -> bool:
    """Whether torch has a kernel of grouped products; torch 2.8 has none for a CPU."""
    keys = ("CUDA" if on_cuda else "CPU", "CompositeExplicitAutograd")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return hasattr(torch, "_grouped_mm") and any(has_kernel("aten::_grouped_mm", k) for k in keys)


def grouped(on_cuda: bool) -> Iterator[MicroCase]:
    """y[rows, n] = x[rows, k] @ w[expert of the row, k, n], equally many rows to each expert."""
    if not _grouped_runs(on_cuda):
        return
    shapes = ((8, 14336, 4096), (64, 2816, 2048), (256, 4096, 7168), (8, 256, 128), (32, 512, 256))
    for experts, n, k in shapes:
        for each in (1, 8, 64, 512):
            rows = experts * each

            def make(
                bench: Bench, experts: int = experts, rows: int = rows, n: int = n, k: int = k
            ) -> Call:
                x = bench.random(rows, k, dtype=torch.bfloat16)
                w = bench.random(experts, k, n, dtype=torch.bfloat16)
                ends = torch.arange(1, experts + 1, device=bench.device, dtype=torch.int32)
                ends = (ends * (rows // experts)).to(torch.int32)
                return lambda: torch._grouped_mm(x, w, offs=ends)

            moved = 2.0 * (rows * k + experts * k * n + rows * n)
            sizes = {"dtype": "bf16", "experts": experts, "rows": rows, "n": n, "k": k}
            yield MicroCase("grouped_matmul", sizes, 2.0 * rows * n * k, moved, make)


# -- attention -------------------------------------------------------------------------------------

_HEADS = (
    (32, 32, 128),
    (32, 8, 128),
    (64, 8, 128),
    (12, 12, 64),
    (16, 16, 64),
    (8, 8, 256),
    (128, 128, 192),
)
"""Query heads, key heads, width of a head."""


def attention(on_cuda: bool) -> Iterator[MicroCase]:
    dtype = usual_precision(on_cuda)
    prompts = ((1, 128), (1, 512), (8, 512), (1, 1000), (1, 4096), (4, 4096), (1, 16384))
    for heads in _HEADS:
        for batch, length in prompts:
            for causal in (False, True):
                yield _attend("attention_prefill", dtype, batch, heads, length, length, causal)
        for batch in (1, 8, 64):
            for cached in (128, 512, 1024, 4096, 16384):
                yield _attend("attention_decode", dtype, batch, heads, 1, cached, False)


def _attend(
    kind: str,
    dtype: str,
    batch: int,
    heads: tuple[int, int, int],
    queries: int,
    keys: int,
    causal: bool,
) -> MicroCase:
    """Two products of [queries, d] with [keys, d] a head; a causal one needs keys up to its own."""
    h, hk, d = heads

    def make(bench: Bench) -> Call:
        q = bench.random(batch, h, queries, d, dtype=torch_type(dtype))
        k = bench.random(batch, hk, keys, d, dtype=torch_type(dtype))
        v = bench.random(batch, hk, keys, d, dtype=torch_type(dtype))
        attend: Any = F.scaled_dot_product_attention
        return lambda: attend(q, k, v, is_causal=causal, enable_gqa=h != hk)

    pairs = queries * (queries + 1) / 2 if causal else queries * keys
    moved = element_size(dtype) * batch * d * 2 * (h * queries + hk * keys)
    sizes = {"dtype": dtype, "b": batch, "h": h, "hk": hk, "q": queries, "kv": keys, "d": d}
    if queries > 1:
        sizes["causal"] = causal
    return MicroCase(kind, sizes, 4.0 * batch * h * d * pairs, moved, make)


# -- convolutions ----------------------------------------------------------------------------------

_CONVOLUTIONS = (
    # batch, channels in, channels out, width and height, kernel, stride, groups
    (64, 3, 64, 224, 7, 2, 1),
    (64, 64, 64, 56, 3, 1, 1),
    (64, 64, 256, 56, 1, 1, 1),
    (64, 128, 128, 28, 3, 1, 1),
    (64, 256, 256, 14, 3, 1, 1),
    (64, 512, 512, 7, 3, 1, 1),
    (64, 1024, 2048, 7, 1, 1, 1),
    (64, 256, 512, 56, 3, 2, 1),
    (64, 96, 96, 56, 7, 1, 96),
    (64, 384, 384, 14, 7, 1, 384),
    (64, 144, 144, 56, 3, 1, 144),
    (64, 256, 256, 28, 3, 1, 32),
    (2, 320, 320, 128, 3, 1, 1),
    (2, 1280, 1280, 32, 3, 1, 1),
    (2, 640, 320, 64, 1, 1, 1),
    (1, 3, 64, 224, 7, 2, 1),
    (1, 64, 64, 56, 3, 1, 1),
    (1, 64, 256, 56, 1, 1, 1),
    (1, 256, 256, 14, 3, 1, 1),
    (1, 144, 144, 56, 3, 1, 144),
    (1, 96, 96, 28, 7, 1, 96),
    (1, 64, 64, 28, 3, 1, 8),
)


def convolutions(on_cuda: bool) -> Iterator[MicroCase]:
    for dtype in ("fp16", "bf16") if on_cuda else ("fp32", "bf16"):
        for shape in _CONVOLUTIONS if dtype != "bf16" else _CONVOLUTIONS[1::4]:
            for last in (False, True):
                yield _convolution(dtype, *shape, channels_last=last)


def _convolution(
    dtype: str,
    batch: int,
    cin: int,
    cout: int,
    size: int,
    kernel: int,
    stride: int,
    groups: int,
    channels_last: bool,
) -> MicroCase:
    """y[b, cout, size/stride, size/stride]: each of them takes cin/groups * kernel^2 products."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def make(bench: Bench) -> Call:
        x = bench.random(batch, cin, size, size, dtype=torch_type(dtype))
        w = bench.random(cout, cin // groups, kernel, kernel, dtype=torch_type(dtype))
        x, w = x.contiguous(memory_format=layout), w.contiguous(memory_format=layout)
        return lambda: F.conv2d(x, w, stride=stride, padding=kernel // 2, groups=groups)

    out = batch * cout * (-(-size // stride)) ** 2
    taps = cin // groups * kernel**2
    moved = element_size(dtype) * (batch * cin * size**2 + cout * taps + out)
    sizes = {
        "dtype": dtype,
        "b": batch,
        "cin": cin,
        "cout": cout,
        "size": size,
        "kernel": kernel,
        "stride": stride,
        "groups": groups,
        "channels_last": channels_last,
    }
    return MicroCase("convolution", sizes, 2.0 * out * taps, moved, make)
