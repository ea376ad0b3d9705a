"""Norms, softmaxes and reductions of rows: a function and its inputs, on a GPU or without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from convolutions import DTYPES
from torch.nn import functional as F

Function = Callable[..., Any]
OF_ROWS: dict[str, Function] = {
    "softmax": lambda x: F.softmax(x, -1),
    "sum_rows": lambda x: x.sum(-1),
    "sum_columns": lambda x: x.sum(0),
    "argmax": lambda x: x.argmax(-1),
    "layer_norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "rms_norm": lambda x, w, _: F.rms_norm(x, w.shape, w),
}
"""Functions of x[rows, columns], and of a weight and a bias of `columns`."""
KERNELS = (*OF_ROWS, "group_norm", "group_norm_backward")


def function_of(
    kernel: str, sizes: dict[str, Any], device: str
) -> tuple[Function, tuple[torch.Tensor, ...]]:
    """A kernel of `KERNELS` and what it takes; KeyError of another.

    sizes: x[rows, columns]; of group norms x[batch, channels, side, side] with its groups, and
    adjacent channels where `layout` is "last".
    """

    def made(*shape: int) -> torch.Tensor:
        return torch.ones(shape, device=device, dtype=DTYPES[sizes["dtype"]])

    if kernel in OF_ROWS:
        x, wide = made(sizes["rows"], sizes["columns"]), made(sizes["columns"])
        return OF_ROWS[kernel], (x, wide, wide) if "norm" in kernel else (x,)
    batch, channels, side, groups = (sizes[n] for n in ("batch", "channels", "side", "groups"))
    x, weight = made(batch, channels, side, side), made(channels)
    if kernel == "group_norm":
        if sizes["layout"] == "last":
            x = x.to(memory_format=torch.channels_last)
        return lambda x, w: F.group_norm(x, groups, w, w), (x, weight)
    if kernel != "group_norm_backward":
        raise KeyError(kernel)
    moments = made(batch, groups)
    how = (batch, channels, side * side, groups, [True, True, True])
    return (
        lambda g, x, m, w: torch.ops.aten.native_group_norm_backward(g, x, m, m, w, *how),
        (x, x, moments, weight),
    )
