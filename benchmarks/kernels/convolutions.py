"""Calls of convolutions, forward and backward, and of the backward of attention's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[], Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def convolution_call(kernel: str, sizes: dict[str, Any], device: str) -> Call:
    """`convolution`, or what `convolution_backward` gives for image and filters.

    sizes: image[batch, channels, *size] with adjacent channels where `layout` is "last" (of one
    dimension: a transposed [batch, size, channels]), filters[out, channels / groups, *window].
    """
    dtype, many = DTYPES[sizes["dtype"]], len(sizes["size"])
    window, groups = sizes["window"], sizes["groups"]
    image = torch.randn(sizes["batch"], sizes["channels"], *sizes["size"], device=device)
    shape = (sizes["out"], sizes["channels"] // groups, *window)
    filters = torch.randn(*shape, device=device).to(dtype)
    image = image.to(dtype)
    if sizes["layout"] == "last":
        image = image.movedim(1, -1).contiguous().movedim(-1, 1)
        if many == 2:
            filters = filters.contiguous(memory_format=torch.channels_last)
    stride = [sizes["stride"]] * many
    padding = [0 if width == sizes["stride"] else width // 2 for width in window]  # of patches: 0
    how = (stride, padding, [1] * many, False, [0] * many, groups)

    def forward() -> torch.Tensor:
        return torch.ops.aten.convolution(image, filters, None, *how)

    if kernel == "convolution":
        return forward
    gradient = torch.randn_like(forward())
    wanted = [True, True, False]
    return lambda: torch.ops.aten.convolution_backward(gradient, image, filters, None, *how, wanted)


def gradient_call(kernel: str, sizes: dict[str, Any], device: str) -> Call:
    """The backward of causal attention by "flash" or "cudnn", of equal heads."""
    shape = (sizes["batch"], sizes["heads"], sizes["keys"], sizes["width"])
    dtype = torch.bfloat16
    query, key, value = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    scale = sizes["width"] ** -0.5
    aten = torch.ops.aten
    if kernel == "flash_backward":
        made = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)
        out, sums, *others = made
        gradient = torch.randn_like(out)
        return lambda: aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, out, sums, *others[:4], 0.0, True, *others[4:6],
            scale=scale,
        )  # fmt: skip
    made = aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, True, False, scale=scale
    )
    out, sums, *others = made
    gradient = torch.randn_like(out)
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, sums, others[4], others[5], None, *others[:4], 0.0, True,
        scale=scale,
    )  # fmt: skip
