"""Operators of eager PyTorch that no library of products runs, on a GPU or without data.

Pooling, upsampling, lookups, gathers, scans, sorts, reductions along each dimension, copies that
transpose, losses, gradients of norms, and recurrent layers of cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from convolutions import DTYPES
from torch.nn import functional as F

Function = Callable[..., Any]
Made = tuple[Function, tuple[torch.Tensor, ...]]
aten = torch.ops.aten

OF_ONE: dict[str, Function] = {
    "max_pool_3_2": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool_2_2": lambda x: F.max_pool2d(x, 2, 2),
    "avg_pool_2_2": lambda x: F.avg_pool2d(x, 2, 2),
    "avg_pool_3_1": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "adaptive_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive_pool_7": lambda x: F.adaptive_avg_pool2d(x, 7),
    "nearest": lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "channel_sums": lambda x: x.sum((0, 2, 3)),
    "image_means": lambda x: x.mean((2, 3)),
    "transposed": lambda x: x.transpose(-1, -2).contiguous(),
    "heads_first": lambda x: x.transpose(1, 2).contiguous(),
    "last_to_first": lambda x: x.permute(0, 3, 1, 2).contiguous(),
    "sum_rows": lambda x: x.sum(-1),
    "sum_columns": lambda x: x.sum(0),
    "sum_middle": lambda x: x.sum(1),
    "sum_all": lambda x: x.sum(),
    "mean_rows": lambda x: x.mean(-1, keepdim=True),
    "var_rows": lambda x: x.var(-1),
    "max_rows": lambda x: x.max(-1),
    "amax_rows": lambda x: x.amax(-1),
    "argmax": lambda x: x.argmax(-1),
    "norm_all": lambda x: torch.linalg.vector_norm(x),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax_columns": lambda x: F.softmax(x, 0),
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum_columns": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(-1),
    "topk": lambda x: x.topk(8, -1),
    "cat_last": lambda x: torch.cat((x, x), -1),
    "cat_first": lambda x: torch.cat((x, x), 0),
    "stack_last": lambda x: torch.stack((x, x), -1),
    "repeat_heads": lambda x: x.repeat_interleave(4, 1),
    "roll": lambda x: torch.roll(x, (3, 3), (1, 2)),
    "triu": lambda x: x.triu(1),
    "dropout": lambda x: F.dropout(x, 0.1, training=True),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "glu": lambda x: F.glu(x, -1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "to_fp32": lambda x: x.float(),
    "nonzero": lambda x: (x > 0).nonzero(),
}
"""Functions of one random tensor."""


def image_gradient(forward: Function, backward: Function) -> Callable[[torch.Tensor], Made]:
    """What the backward takes: the gradient of the result, and the image."""

    def made(x: torch.Tensor) -> Made:
        return lambda g, x: backward(g, x), (torch.randn_like(forward(x)), x)

    return made


def max_pool_gradient(window: int) -> Callable[[torch.Tensor], Made]:
    """With the places that the forward kept."""
    how = ([window] * 2, [2, 2], [window // 3] * 2, [1, 1], False)

    def made(x: torch.Tensor) -> Made:
        out, places = aten.max_pool2d_with_indices(x, *how)
        return (
            lambda g, x, places: aten.max_pool2d_with_indices_backward(g, x, *how, places),
            (torch.randn_like(out), x, places),
        )

    return made


def row_gradient(kernel: str) -> Callable[[torch.Tensor], Made]:
    """Gradients of softmax, layer norm and batch norm."""

    def made(x: torch.Tensor) -> Made:
        g, wide = torch.randn_like(x), torch.ones_like(x[0] if x.dim() == 2 else x[0, :, 0, 0])
        if kernel == "softmax_backward":
            return lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype), (g, x)
        if kernel == "log_softmax_backward":
            return lambda g, y: aten._log_softmax_backward_data(g, y, -1, y.dtype), (g, x)
        if kernel == "layer_norm_backward":
            moments = torch.ones(x.shape[0], 1, device=x.device)
            return (
                lambda g, x, m, w: aten.native_layer_norm_backward(
                    g, x, [w.shape[0]], m, m, w, w, [True, True, True]
                ),
                (g, x, moments, wide),
            )
        wide = wide.float()
        if kernel == "batch_norm":
            return lambda x, w: aten.native_batch_norm(x, w, w, w, w, True, 0.1, 1e-5), (x, wide)
        return (
            lambda g, x, w: aten.native_batch_norm_backward(
                g, x, w, w, w, w, w, True, 1e-5, [True, True, True]
            ),
            (g, x, wide),
        )

    return made


OF_GRADIENTS: dict[str, Callable[[torch.Tensor], Made]] = {
    "max_pool_3_2_backward": max_pool_gradient(3),
    "max_pool_2_2_backward": max_pool_gradient(2),
    "avg_pool_2_2_backward": image_gradient(
        OF_ONE["avg_pool_2_2"],
        lambda g, x: aten.avg_pool2d_backward(g, x, [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    "adaptive_pool_7_backward": image_gradient(
        OF_ONE["adaptive_pool_7"], aten._adaptive_avg_pool2d_backward
    ),
    "nearest_backward": image_gradient(
        OF_ONE["nearest"],
        lambda g, x: aten.upsample_nearest2d_backward(
            g, list(g.shape[2:]), list(x.shape), 2.0, 2.0
        ),
    ),
    "bilinear_backward": image_gradient(
        OF_ONE["bilinear"],
        lambda g, x: aten.upsample_bilinear2d_backward(
            g, list(g.shape[2:]), list(x.shape), False, 2.0, 2.0
        ),
    ),
    "gelu_backward": image_gradient(OF_ONE["gelu"], aten.gelu_backward),
    "silu_backward": image_gradient(OF_ONE["silu"], aten.silu_backward),
    **{
        name: row_gradient(name)
        for name in (
            "softmax_backward", "log_softmax_backward", "layer_norm_backward", "batch_norm",
            "batch_norm_backward",
        )
    },
}  # fmt: skip
"""Of one random tensor: a function of its gradients."""
OF_INDICES: dict[str, Function] = {
    "embedding": lambda x, i: F.embedding(i, x),
    "index_select": lambda x, i: x.index_select(0, i),
    "advanced": lambda x, i: x[i],
    "gather_rows": lambda x, i: x.gather(0, i[:, None].expand(-1, x.shape[1])),
    "index_add": lambda x, i: torch.zeros_like(x).index_add_(0, i, _of_rows(x, i)),
    "scatter_add": lambda x, i: torch.zeros_like(x).scatter_add_(
        0, i[:, None].expand(-1, x.shape[1]), _of_rows(x, i)
    ),
    "index_put": lambda x, i: torch.zeros_like(x).index_put_((i,), _of_rows(x, i), accumulate=True),
    "embedding_backward": lambda x, i: aten.embedding_dense_backward(
        _of_rows(x, i), i, x.shape[0], -1, False
    ),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i),
}
"""Functions of a table[rows, columns] and of indices of its rows; of losses, of its columns."""
RECURRENT = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn": torch.nn.RNN}
OPERATORS = (*OF_ONE, *OF_GRADIENTS, *OF_INDICES, *RECURRENT, "lstm_training", "gru_training")


def _of_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.new_ones(()).expand(index.shape[0], x.shape[1])


def operator_of(kernel: str, sizes: dict[str, Any], device: str) -> Made:
    """A kernel of `OPERATORS` and what it takes; KeyError of another.

    sizes: `shape` of a random tensor of `dtype`, with adjacent channels where `layout` is "last";
    `indices`, how many random rows are read or written; of a recurrent layer `batch`, `steps`,
    `width` of input and state, `layers`, with batch first.
    """
    dtype = DTYPES[sizes["dtype"]]
    if kernel.removesuffix("_training") in RECURRENT:
        return _recurrent(kernel, sizes, device, dtype)
    x = torch.randn(sizes["shape"], device=device).to(dtype)
    if sizes.get("layout") == "last":
        x = x.contiguous(memory_format=torch.channels_last)
    if sizes.get("factor", 2) != 2:
        return _scaled(kernel, x, sizes["factor"])
    if kernel in OF_ONE:
        return OF_ONE[kernel], (x,)
    if kernel in OF_GRADIENTS:
        return OF_GRADIENTS[kernel](x)
    below = x.shape[1] if kernel == "cross_entropy" else x.shape[0]
    many = x.shape[0] if kernel == "cross_entropy" else sizes["indices"]
    return OF_INDICES[kernel], (x, torch.randint(below, (many,), device=device))


def _scaled(kernel: str, x: torch.Tensor, factor: int) -> Made:
    """Upsampling by another factor, or what its backward gives."""
    mode = kernel.removesuffix("_backward")
    size = [factor * side for side in x.shape[2:]]
    if mode == kernel:
        return lambda x: F.interpolate(x, size, mode=mode), (x,)
    grad = x.new_ones((*x.shape[:2], *size))
    if mode == "nearest":
        return lambda g: aten.upsample_nearest2d_backward(g, size, list(x.shape)), (grad,)
    return lambda g: aten.upsample_bilinear2d_backward(g, size, list(x.shape), False), (grad,)


def _recurrent(kernel: str, sizes: dict[str, Any], device: str, dtype: torch.dtype) -> Made:
    kind = RECURRENT[kernel.removesuffix("_training")]
    layer = kind(sizes["width"], sizes["width"], sizes["layers"], batch_first=True)
    layer = layer.to(device, dtype)
    x = torch.randn(sizes["batch"], sizes["steps"], sizes["width"], device=device).to(dtype)
    if not kernel.endswith("_training"):
        return lambda x: layer(x)[0], (x,)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            layer(x)[0].sum().backward()
        return x

    return step, (x,)
