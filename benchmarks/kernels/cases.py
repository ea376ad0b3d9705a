"""Which kernels are measured, at which sizes; what a mask lets through.  No torch here.

A case is a group (one process measures it), a kernel and its sizes.  Masks are words:
  none, causal          each query sees all keys, or those before it and itself
  window:W, chunk:C     causal, of the last W keys, or of the keys of its own chunk
  prefix:P              causal, and the first P keys see each other
  documents:A,BxN       causal, within documents of A, B, B, ... tokens that are packed in one row
Queries are the last rows of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

LLAMA, GPT_OSS, GEMMA = (32, 8, 128), (64, 8, 64), (8, 4, 256)
"""Heads of query, heads of key and value, width."""
UNEQUAL = "documents:4096,64x63"


@dataclass(frozen=True)
class Case:
    """A kernel at one size; sizes are numbers and words that go into a file as they are."""

    group: str
    kernel: str
    sizes: dict[str, Any] = field(hash=False)

    def __str__(self) -> str:
        return f"{self.kernel} " + " ".join(f"{k}={v}" for k, v in self.sizes.items())


# -- masks -----------------------------------------------------------------------------------------


def documents(mask: str) -> list[int]:
    """The lengths in `documents:4096,64x63`."""
    found = []
    for part in mask.removeprefix("documents:").split(","):
        length, _, times = part.partition("x")
        found += [int(length)] * int(times or 1)
    return found


def pairs(mask: str, queries: int, keys: int) -> int:
    """(query, key) pairs that a mask lets through."""
    kind, _, number = mask.partition(":")
    if kind == "none":
        return queries * keys
    if kind == "documents":
        return sum(n * (n + 1) // 2 for n in documents(mask))
    seen = 0
    for row in range(keys - queries, keys):
        if kind == "window":
            seen += min(row + 1, int(number))
        elif kind == "chunk":
            seen += row % int(number) + 1
        elif kind == "prefix":
            seen += max(row + 1, int(number))
        else:
            seen += row + 1
    return seen


# -- attention -------------------------------------------------------------------------------------


def attention(
    group: str,
    kernel: str,
    heads: tuple[int, int, int],
    keys: int,
    mask: str,
    batch: int = 1,
    queries: int = 0,
    **more: Any,
) -> Case:
    """A prompt, or the last `queries` of `keys`."""
    names = ("heads", "kv_heads", "width")
    sizes = {"batch": batch, "queries": queries or keys, "keys": keys, "mask": mask}
    return Case(group, kernel, {**sizes, **dict(zip(names, heads, strict=True)), **more})


def prompts() -> Iterator[Case]:
    """scaled_dot_product_attention: the flash kernels with a causal flag, and masks as tensors."""
    for heads, keys in product((LLAMA, GPT_OSS, GEMMA), (4096, 8192, 2048, 16384, 32768)):
        if heads != LLAMA and keys == 16384:
            continue
        for kernel in ("flash", "cudnn"):
            yield attention("sdpa", kernel, heads, keys, "causal")
    yield attention("sdpa", "flash", LLAMA, 2048, "causal", batch=4)
    yield attention("sdpa", "flash", LLAMA, 4096, "none")
    for heads, mask in product((LLAMA, GPT_OSS, GEMMA), ("causal", "window:1024")):
        yield attention("sdpa", "default", heads, 8192, mask)
    for heads, batch in product((LLAMA, GPT_OSS, GEMMA), (1, 8)):
        yield attention("sdpa", "default", heads, 8192, "none", batch, 1)
    for keys, mask in product((2048, 4096, 8192, 16384), ("causal", "window:128", "window:1024")):
        yield attention("sdpa", "efficient", LLAMA, keys, mask)
    for heads, mask in ((GPT_OSS, "window:128"), (GEMMA, "window:1024"), (LLAMA, "window:4096")):
        yield attention("sdpa", "efficient", heads, 8192, mask)
    for keys, kernel in ((4096, "default"), (4096, "cudnn"), (8192, "cudnn")):
        yield attention("sdpa", kernel, LLAMA, keys, "window:1024")
    yield attention("sdpa", "efficient", LLAMA, 4096, "causal", scores="bias")


def decoding() -> Iterator[Case]:
    """One query for each of a batch: as the flash kernels read a cache, and with a mask tensor."""
    sizes = ((8, 4096), (1, 4096), (1, 32768), (8, 32768), (32, 4096), (1, 131072), (8, 131072))
    for (batch, keys), kernel in product(sizes, ("flash", "cudnn", "efficient", "default")):
        given = {"scores": "tensor"} if kernel in ("efficient", "default") else {}
        if kernel == "efficient" and batch * keys > 2**18:
            continue
        yield attention("decode", kernel, LLAMA, keys, "none", batch, 1, **given)
    for heads, (batch, keys), kernel in product(
        (GPT_OSS, GEMMA), ((8, 4096), (1, 32768), (32, 1024)), ("flash", "cudnn")
    ):
        yield attention("decode", kernel, heads, keys, "none", batch, 1)
    for batch, keys in ((8, 4096), (8, 32768), (1, 131072), (32, 4096)):
        yield attention("flex", "flex", LLAMA, keys, "none", batch, 1)
    for heads, keys, mask in product((LLAMA,), (32768,), ("window:1024", "window:128")):
        yield attention("flex", "flex", heads, keys, mask, 8, 1)


def masked() -> Iterator[Case]:
    """flex_attention with block masks and changed scores."""
    for keys in (4096, 8192, 2048, 16384, 32768):
        yield attention("flex", "flex", LLAMA, keys, "causal")
    windows = ((8192, 1024), (8192, 128), (32768, 1024), (32768, 4096), (4096, 1024),
               (8192, 4096), (8192, 512), (32768, 128), (2048, 128), (16384, 1024))  # fmt: skip
    for keys, width in windows:
        yield attention("flex", "flex", LLAMA, keys, f"window:{width}")
    yield attention("flex", "flex", LLAMA, 32768, "chunk:8192")
    yield attention("flex", "flex", LLAMA, 8128, UNEQUAL)
    yield attention("flex", "flex", LLAMA, 8192, "documents:1024x8")
    yield attention("flex", "flex", LLAMA, 32768, "documents:2048x16")
    yield attention("flex", "flex", LLAMA, 8192, "prefix:1024")
    for scores in ("softcap", "alibi", "sinks"):
        yield attention("flex", "flex", LLAMA, 8192, "causal", scores=scores)
    for keys, mask in product((4096, 8192), ("causal", "window:128")):
        yield attention("flex", "flex", GPT_OSS, keys, mask)
        yield attention("flex", "flex", GPT_OSS, keys, mask, scores="sinks")
    yield attention("flex", "flex", GPT_OSS, 32768, "window:128", scores="sinks")
    for keys in (4096, 8192, 32768):
        yield attention("flex", "flex", GEMMA, keys, "causal")
        yield attention("flex", "flex", GEMMA, keys, "window:1024")
    yield attention("flex", "flex", GEMMA, 8192, "window:4096", scores="softcap")
    yield attention("flex", "flex", GEMMA, 8192, "window:512")


def packed() -> Iterator[Case]:
    """varlen_attn, whose kernel takes offsets of documents and a window."""
    for mask in ("documents:4096x2", "documents:2048x16", UNEQUAL, "documents:127x64"):
        length = sum(documents(mask))
        yield attention("varlen", "varlen", LLAMA, length, mask)
    for heads, keys, width in ((LLAMA, 8192, 1024), (LLAMA, 32768, 1024), (LLAMA, 32768, 4096),
                               (LLAMA, 8192, 128), (GPT_OSS, 8192, 128), (GEMMA, 8192, 1024),
                               (GEMMA, 32768, 1024)):  # fmt: skip
        yield attention("varlen", "varlen", heads, keys, f"window:{width}")
    yield attention("varlen", "varlen", LLAMA, 8192, "causal")


def third() -> Iterator[Case]:
    """FlashAttention 3: prompts, windows, and one query on a cache."""
    for heads, keys in product((LLAMA, GPT_OSS, GEMMA), (4096, 8192, 2048, 32768)):
        yield attention("fa3", "fa3", heads, keys, "causal")
    for heads, keys, width in ((LLAMA, 8192, 1024), (LLAMA, 8192, 128), (LLAMA, 8192, 4096),
                               (LLAMA, 32768, 1024), (LLAMA, 32768, 4096), (LLAMA, 2048, 128),
                               (GPT_OSS, 4096, 128), (GPT_OSS, 32768, 128), (GEMMA, 8192, 1024),
                               (GEMMA, 32768, 1024), (GEMMA, 4096, 1024)):  # fmt: skip
        yield attention("fa3", "fa3", heads, keys, f"window:{width}")
    yield attention("fa3", "fa3", LLAMA, 2048, "causal", batch=4)
    yield attention("fa3", "fa3", (32, 32, 128), 8192, "causal", scores="softcap")
    yield attention("fa3", "fa3", (32, 32, 128), 8192, "causal")
    sizes = ((8, 4096), (1, 4096), (1, 32768), (8, 32768), (32, 4096), (1, 131072), (8, 131072))
    for batch, keys in sizes:
        yield attention("fa3", "fa3", LLAMA, keys, "none", batch, 1)
    for batch, keys, width in (
        (8, 32768, 1024),
        (8, 32768, 128),
        (1, 131072, 4096),
        (32, 4096, 1024),
    ):
        yield attention("fa3", "fa3", LLAMA, keys, f"window:{width}", batch, 1)
    for heads, width in ((GPT_OSS, 128), (GEMMA, 1024)):
        for batch, keys in ((8, 4096), (1, 32768), (32, 1024)):
            yield attention("fa3", "fa3", heads, keys, "none", batch, 1)
        yield attention("fa3", "fa3", heads, 32768, f"window:{width}", 8, 1)


# -- recurrent layers ------------------------------------------------------------------------------

PROMPTS = ((1, 4096), (4, 4096), (1, 1024), (1, 16384), (4, 1024), (4, 16384))
BATCHES = (8, 1, 64, 256)
QWEN = {"heads": 16, "value_heads": 32, "key_width": 128, "value_width": 128}
KIMI = {"heads": 32, "value_heads": 32, "key_width": 128, "value_width": 128}
MINIMAX = {"heads": 64, "value_heads": 64, "key_width": 128, "value_width": 128}
RWKV = {"heads": 64, "value_heads": 64, "key_width": 64, "value_width": 64}
DELTA = {
    "chunk_gated_delta_rule": QWEN,
    "chunk_kda": KIMI,
    "chunk_simple_gla": KIMI,
    "chunk_gla": KIMI,
    "chunk_lightning_attn": MINIMAX,
    "chunk_rwkv6": RWKV,
    "chunk_rwkv7": RWKV,
}
STEPS = {
    "fused_recurrent_gated_delta_rule": QWEN,
    "fused_recurrent_kda": KIMI,
    "fused_recurrent_simple_gla": KIMI,
    "fused_recurrent_rwkv6": RWKV,
    "fused_mul_recurrent_rwkv7": RWKV,
}
MAMBA2 = {
    "mamba2-2.7b": {"heads": 80, "width": 64, "groups": 1, "state": 128, "chunk": 256},
    "nemotron-h-8b": {"heads": 128, "width": 64, "groups": 8, "state": 128, "chunk": 128},
    "falcon-h1-7b": {"heads": 24, "width": 128, "groups": 1, "state": 256, "chunk": 256},
    "nemotron-h-56b": {"heads": 256, "width": 64, "groups": 8, "state": 256, "chunk": 128},
}


def delta_rules() -> Iterator[Case]:
    """Delta rules and linear attention of flash-linear-attention, and its convolution."""
    for kernel, sizes in DELTA.items():
        for batch, tokens in PROMPTS:
            if sizes not in (QWEN, KIMI) and batch * tokens > 16384:
                continue
            yield Case("fla", kernel, {"batch": batch, "tokens": tokens, **sizes})
    for (kernel, sizes), batch in product(STEPS.items(), BATCHES):
        yield Case("fla", kernel, {"batch": batch, "tokens": 1, **sizes})
    for batch, tokens in PROMPTS:
        yield Case("fla", "causal_conv1d", {"batch": batch, "tokens": tokens, "channels": 8192})
    for batch in BATCHES:
        sizes = {"batch": batch, "tokens": 1, "channels": 8192}
        yield Case("fla", "causal_conv1d_update", sizes)


def state_spaces() -> Iterator[Case]:
    """SSD and the steps of a state, by the Triton kernels of mamba_ssm."""
    for (name, sizes), (batch, tokens) in product(MAMBA2.items(), PROMPTS):
        if name == "nemotron-h-56b" and batch * tokens > 16384:
            continue
        given = {"batch": batch, "tokens": tokens, **sizes}
        yield Case("mamba", "mamba_chunk_scan_combined", given)
    for (name, sizes), batch in product(MAMBA2.items(), BATCHES):
        for held in ("fp32", "bf16") if name == "nemotron-h-8b" else ("bf16",):
            given = {"batch": batch, "tokens": 1, **sizes, "held": held}
            yield Case("mamba", "selective_state_update", given)
    for batch in BATCHES:
        given = {"batch": batch, "tokens": 1, "channels": 8192, "state": 16, "held": "fp32"}
        yield Case("mamba", "selective_state_update", given)


def scans() -> Iterator[Case]:
    """The CUDA kernels of mamba_ssm and causal_conv1d: Jamba (8192 channels), mamba-2.8b (5120)."""
    for (batch, tokens), gated in product(PROMPTS, (False, True)):
        given = {"batch": batch, "tokens": tokens, "channels": 8192, "state": 16, "gated": gated}
        yield Case("cuda", "selective_scan", given)
    for batch, tokens in PROMPTS[:3]:
        given = {"batch": batch, "tokens": tokens, "channels": 5120, "state": 16, "gated": True}
        yield Case("cuda", "selective_scan", given)
    for (batch, tokens), last in product(PROMPTS, (False, True)):
        given = {"batch": batch, "tokens": tokens, "channels": 8192, "channels_last": last}
        yield Case("cuda", "causal_conv1d_cuda", given)
    for batch in BATCHES:
        given = {"batch": batch, "tokens": 1, "channels": 8192}
        yield Case("cuda", "causal_conv1d_cuda_update", given)


# -- convolutions, and gradients -----------------------------------------------------------------


def convolution(
    channels: int,
    size: tuple[int, ...],
    window: int,
    groups: int,
    layout: str,
    dtype: str,
    **more: Any,
) -> Iterator[Case]:
    """Forward and backward; a window of one dimension is as wide as `size` is long in number."""
    sizes = {"batch": 8, "channels": channels, "out": channels, "size": size, "stride": 1}
    sizes |= {"window": (window,) * len(size), "groups": groups, "layout": layout, "dtype": dtype}
    for kernel in ("convolution", "convolution_backward"):
        yield Case("conv", kernel, {**sizes, **more})


def convolutions() -> Iterator[Case]:
    """Depthwise ones of sequences and of images by window; dense and grouped ones beside them."""
    layouts = ("first", "last")
    for window, layout in product((15, 3, 31, 4, 7, 5, 9), layouts):
        yield from convolution(512, (2048,), window, 512, layout, "bf16")
    for layout, dtype in product(layouts, ("fp32", "fp16")):
        yield from convolution(512, (2048,), 15, 512, layout, dtype)
    for channels, length in ((256, 1024), (2048, 2048), (512, 16384)):
        yield from convolution(channels, (length,), 15, channels, "first", "bf16")
    for layout in layouts:
        yield from convolution(512, (2048,), 15, 1, layout, "bf16")
        yield from convolution(512, (2048,), 1, 1, layout, "bf16")
    for window, layout in product((7, 3, 5, 9, 13, 31), layouts):
        yield from convolution(192, (56, 56), window, 192, layout, "bf16", batch=64)
    for layout, dtype in product(layouts, ("fp32", "fp16")):
        yield from convolution(192, (56, 56), 7, 192, layout, dtype, batch=64)
    for channels, side, layout in product((384, 768), (28, 14), layouts):
        yield from convolution(channels, (side, side), 7, channels, layout, "bf16", batch=64)
    for layout, dtype in product(layouts, ("bf16", "fp32")):
        yield from convolution(256, (56, 56), 3, 1, layout, dtype, batch=64)
        yield from convolution(256, (56, 56), 1, 1, layout, dtype, batch=64)
        yield from convolution(256, (56, 56), 3, 32, layout, dtype, batch=64)
        yield from convolution(512, (14, 14), 3, 1, layout, dtype, batch=64)
        yield from convolution(320, (64, 64), 3, 1, layout, dtype)
    yield from first_layers()
    yield from grouped_and_deep()
    for width, layout in product((4, 8, 16, 32, 48, 64), layouts):
        yield from convolution(384, (28, 28), 3, 384 // width, layout, "bf16", batch=64)


def grouped_and_deep() -> Iterator[Case]:
    """Wide groups, volumes, large images of few channels, windows that are not square."""
    for channels, side, groups in ((896, 14, 16), (448, 28, 8), (224, 56, 4), (1024, 14, 32)):
        yield from convolution(channels, (side, side), 3, groups, "first", "bf16", batch=64)
    for channels, size in ((64, (16, 56, 56)), (128, (8, 28, 28)), (256, (4, 14, 14))):
        for layout, dtype in (("first", "bf16"), ("first", "fp32"), ("last", "bf16")):
            yield from convolution(channels, size, 3, 1, layout, dtype, batch=16)
    squares = ((64, 224, "bf16"), (128, 112, "bf16"), (256, 56, "bf16"), (512, 28, "bf16"),
               (96, 35, "fp32"), (192, 17, "fp32"), (64, 90, "fp32"), (128, 64, "fp32"),
               (64, 147, "fp32"))  # fmt: skip
    for channels, side, dtype in squares:
        yield from convolution(channels, (side, side), 3, 1, "first", dtype, batch=64)
    for out, channels, side, dtype in ((768, 192, 17, "fp32"), (192, 768, 17, "fp32"),
                                       (96, 24, 96, "bf16"), (24, 96, 96, "bf16"),
                                       (512, 128, 28, "bf16"), (960, 160, 14, "bf16")):  # fmt: skip
        yield from convolution(channels, (side, side), 1, 1, "first", dtype, batch=64, out=out)
    for channels, side, stride in ((96, 112, 2), (144, 56, 1), (960, 14, 1), (576, 14, 1)):
        more = {"batch": 64, "stride": stride}
        yield from convolution(channels, (side, side), 3, channels, "first", "bf16", **more)


def first_layers() -> Iterator[Case]:
    """Convolutions of three channels: patches, and stems."""
    kinds = ((16, 16, 768), (14, 14, 1024), (4, 4, 96), (7, 2, 64), (3, 2, 32), (3, 1, 64))
    for (window, stride, out), layout, dtype in product(
        kinds, ("first", "last"), ("bf16", "fp16", "fp32")
    ):
        sizes = {"batch": 64, "out": out, "stride": stride}
        yield from convolution(3, (224, 224), window, 1, layout, dtype, **sizes)


def gradients() -> Iterator[Case]:
    """The backward of causal attention."""
    for heads, keys in product((LLAMA, GPT_OSS), (8192, 32768, 2048, 4096, 16384)):
        for kernel in ("flash_backward", "cudnn_backward"):
            yield attention("gradients", kernel, (heads[0], heads[0], heads[2]), keys, "causal")
    for kernel in ("flash_backward", "cudnn_backward"):
        yield attention("gradients", kernel, (32, 32, 128), 2048, "causal", batch=16)


def rows() -> Iterator[Case]:
    """Norms, softmaxes and reductions of rows of several widths, and group norms of images."""
    of_rows = ("softmax", "layer_norm", "rms_norm", "sum_rows", "sum_columns", "argmax")
    wide = tuple(
        (2**25 // columns, columns) for columns in (256, 512, *(2**n for n in range(10, 15)))
    )
    more = ((16384, 4096), (65536, 4096), (131072, 64), (8192, 50257), (16384, 1025))
    for dtype, (count, columns), kernel in product(("bf16", "fp32"), wide + more, of_rows):
        yield Case("rows", kernel, {"rows": count, "columns": columns, "dtype": dtype})
    images = ((2, 320, 64, 32), (8, 320, 64, 32), (2, 640, 128, 32), (64, 64, 56, 32),
              (8, 1280, 16, 32), (2, 1280, 32, 32), (1, 512, 256, 32), (16, 512, 64, 32),
              (2, 320, 64, 8), (2, 320, 64, 1))  # fmt: skip
    calls = (("group_norm", "first"), ("group_norm_backward", "first"), ("group_norm", "last"))
    for dtype, image, (kernel, layout) in product(("bf16", "fp32"), images, calls):
        sizes = dict(zip(("batch", "channels", "side", "groups"), image, strict=True))
        yield Case("rows", kernel, {**sizes, "layout": layout, "dtype": dtype})


def operators() -> Iterator[Case]:
    """Pooling, lookups, scans, reductions, transposes, losses and recurrent layers, by shapes."""
    images = ((64, 64, 112, 112), (64, 256, 56, 56), (8, 320, 64, 64), (2, 512, 256, 256))
    of_images = (
        "max_pool_3_2", "max_pool_2_2", "avg_pool_2_2", "avg_pool_3_1", "adaptive_pool", "nearest",
        "bilinear", "max_pool_3_2_backward", "max_pool_2_2_backward", "avg_pool_2_2_backward",
        "nearest_backward", "bilinear_backward", "batch_norm", "batch_norm_backward",
    )  # fmt: skip
    for shape, kernel, layout in product(images, of_images, ("first", "last")):
        for dtype in ("bf16", "fp32")[: 1 if layout == "last" else 2]:
            yield _operator(kernel, shape, dtype, layout=layout)
    for shape, kernel in product(images, ("pad", "channel_sums", "image_means", "adaptive_pool_7",
                                          "adaptive_pool_7_backward")):  # fmt: skip
        yield _operator(kernel, shape, "bf16", layout="first")
    tables = ((131072, 256), (32768, 1024), (8192, 4096), (2048, 16384), (8192, 50257), (32, 2**20))
    of_tables = (
        "sum_columns", "sum_rows", "mean_rows", "var_rows", "max_rows", "amax_rows", "argmax",
        "norm_all", "sum_all", "logsumexp", "log_softmax", "softmax_columns", "cumsum",
        "cumsum_columns", "topk", "cat_last", "cat_first", "stack_last", "transposed", "dropout",
        "gelu", "gelu_tanh", "silu", "glu", "masked_fill", "to_fp32", "triu", "gelu_backward",
        "silu_backward", "softmax_backward", "log_softmax_backward", "layer_norm_backward",
    )  # fmt: skip
    for shape, kernel in product(tables, of_tables):
        for dtype in ("bf16", "fp32")[: 1 if shape[0] in (32, 131072) else 2]:
            if kernel != "glu" or not shape[1] % 2:
                yield _operator(kernel, shape, dtype)
    for shape in ((8, 2048, 32, 128), (64, 196, 12, 64), (2, 8192, 8, 256)):
        for kernel in ("heads_first", "last_to_first", "repeat_heads", "roll", "sum_middle"):
            yield _operator(kernel, shape, "bf16")
    for shape in ((4096, 8), (4096, 128), (64, 32768), (1, 2**20), (1, 128256)):
        for kernel in ("sort", "topk", "cumsum", "argmax", "nonzero"):
            yield _operator(kernel, shape, "fp32")
    yield from scaled()
    yield from lookups()
    yield from recurrent_layers()


def scaled() -> Iterator[Case]:
    """Upsampling by other factors than two."""
    images = (((8, 64, 128, 128), 4), ((8, 64, 64, 64), 8), ((8, 64, 32, 32), 16),
              ((8, 256, 1, 1), 64), ((8, 21, 64, 64), 8), ((2, 64, 256, 256), 2))  # fmt: skip
    kernels = ("bilinear", "nearest", "bilinear_backward", "nearest_backward")
    for (shape, factor), kernel, dtype in product(images, kernels, ("bf16", "fp32")):
        yield _operator(kernel, shape, dtype, layout="first", factor=factor)


def lookups() -> Iterator[Case]:
    """Rows read from a table and added to it, and losses over a vocabulary."""
    lookup = ("embedding", "index_select", "gather_rows", "index_add", "scatter_add", "index_put",
              "embedding_backward")  # fmt: skip
    for rows, columns, count in ((50257, 768, 8192), (128256, 4096, 8192), (10**6, 64, 65536),
                                 (100_000, 128, 10**6), (128256, 4096, 64)):  # fmt: skip
        for kernel in lookup:
            yield _operator(kernel, (rows, columns), "bf16", indices=count)
            if kernel in ("index_add", "scatter_add", "embedding_backward"):
                yield _operator(kernel, (rows, columns), "fp32", indices=count)
    for shape, dtype in product(((8192, 50257), (2048, 128256), (256, 1000)), ("bf16", "fp32")):
        yield _operator("cross_entropy", shape, dtype)


def recurrent_layers() -> Iterator[Case]:
    """LSTMs and GRUs of cuDNN."""
    shapes = ((16, 512, 1024, 1), (16, 512, 1024, 4), (64, 128, 512, 2), (1, 256, 1024, 1),
              (256, 64, 256, 1), (8, 512, 2048, 1), (32, 1000, 128, 2))  # fmt: skip
    for (batch, steps, width, layers), dtype in product(shapes, ("bf16", "fp32")):
        sizes = {"batch": batch, "steps": steps, "width": width, "layers": layers, "dtype": dtype}
        for kernel in ("lstm", "gru", "lstm_training", "gru_training"):
            if layers == 1 or not kernel.startswith("gru"):
                yield Case("operators", kernel, sizes)


def _operator(kernel: str, shape: tuple[int, ...], dtype: str, **more: Any) -> Case:
    return Case("operators", kernel, {"shape": list(shape), "dtype": dtype, **more})


# -- experts, and what all others are read beside --------------------------------------------------

EXPERTS = {
    "gpt-oss-20b up": (32, 4, 2880, 5760),
    "gpt-oss-20b down": (32, 4, 2880, 2880),
    "mixtral-8x7b up": (8, 2, 4096, 28672),
    "mixtral-8x7b down": (8, 2, 14336, 4096),
    "qwen3-30b-a3b up": (128, 8, 2048, 1536),
    "qwen3-30b-a3b down": (128, 8, 768, 2048),
}


def grouped() -> Iterator[Case]:
    """torch._grouped_mm in bf16 over tokens of a balanced routing."""
    for (name, (experts, chosen, k, n)), tokens in product(EXPERTS.items(), (4096, 512, 64, 8)):
        sizes = {"experts": experts, "top_k": chosen, "k": k, "n": n, "tokens": tokens}
        yield Case("experts", "grouped_mm", {"of": name, **sizes})


def baseline() -> Iterator[Case]:
    """A copy, products, and a kernel that does next to nothing."""
    yield Case("baseline", "copy", {"bytes": 2**31})
    for size in (2**31, 2**27, 2**24):
        yield Case("baseline", "add", {"bytes": size})
    yield Case("baseline", "nothing", {})
    for m in (8192, 4096, 1):
        yield Case("baseline", "mm", {"m": m, "n": 8192, "k": 8192})


def cases() -> list[Case]:
    """All of them; each group begins with what tells most."""
    attentions = (prompts, decoding, packed, masked, third)
    recurrent = (delta_rules, state_spaces, scans)
    parts = (baseline, *attentions, *recurrent, convolutions, gradients, rows, operators, grouped)
    return [case for part in parts for case in part()]
