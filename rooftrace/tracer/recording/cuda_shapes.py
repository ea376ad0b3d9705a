"""What ops return that have no meta kernel: those of SyncBatchNorm, which only a GPU runs, and CTC.

Statistics are in FP32 where the input is in a shorter type; what is normalised keeps its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rooftrace.tracer.ops import Call

_SHORT = (torch.float16, torch.bfloat16)


def returned(call: Call) -> Any:
    """The outputs of an op on meta.  Raises NotImplementedError for an op that is not known."""
    shapes = _SHAPES.get(call.name)
    if shapes is None:
        raise NotImplementedError(call.name)
    return shapes(*call.args, **call.kwargs)


def _per_channel(x: Tensor) -> Tensor:
    """C numbers of x[N, C, ...]."""
    dtype = torch.float32 if x.dtype in _SHORT else x.dtype
    return x.new_empty((x.shape[1],), dtype=dtype)


def _stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _per_channel(x), _per_channel(x)


def _of_all(x: Tensor, mean: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
    return _per_channel(x), _per_channel(x)


def _like_input(x: Tensor, *others: Any, **more: Any) -> Tensor:
    return torch.empty_like(x)


def _like_second(grad: Tensor, x: Tensor, *others: Any, **more: Any) -> Tensor:
    return torch.empty_like(x)


def _contiguous_like_second(grad: Tensor, x: Tensor, *others: Any, **more: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _reduced(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, ...]:
    """The sums of dy and of dy (x - mean), and the gradients of weight and bias, as asked for."""
    sums = [torch.empty_like(mean) if input_g else None for _ in range(2)]
    wanted = (weight_g, bias_g)
    gradients = [None if weight is None or not w else torch.empty_like(weight) for w in wanted]
    return (*sums, *gradients)


_SHAPES: Mapping[str, Callable[..., Any]] = {
    "aten.batch_norm_stats": _stats,
    "aten.batch_norm_gather_stats": _of_all,
    "aten.batch_norm_gather_stats_with_counts": _of_all,
    "aten.batch_norm_elemt": _like_input,
    "aten.batch_norm_backward_reduce": _reduced,
    "aten.batch_norm_backward_elemt": _like_second,
    "aten._ctc_loss_backward": _contiguous_like_second,
}
