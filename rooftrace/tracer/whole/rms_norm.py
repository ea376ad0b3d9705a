"""RMS norm as one op with its backward, where PyTorch on meta spells it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from rooftrace.tracer.whole import backends, shown
from rooftrace.tracer.whole.library import OPS, define, differentiable

_aten: Any = torch.ops.aten


def _rms_norm_meta(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    kept = input.shape[: input.dim() - len(normalized_shape)]
    wide = input.dtype if input.dtype == torch.float64 else torch.float32
    rstd = input.new_empty((*kept, *(1 for _ in normalized_shape)), dtype=wide)
    return input.new_empty(input.shape), rstd


def _rms_norm_cpu(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    out, rstd = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)
    made = _rms_norm_meta(input, normalized_shape, weight, eps)
    return made[0].copy_(out), made[1].copy_(rstd.reshape(made[1].shape))


def _rms_norm_backward_meta(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    wanted = input.new_empty(input.shape) if output_mask[0] else input.new_empty(0)
    own = weight is not None and output_mask[1]
    return wanted, torch.empty_like(weight) if own and weight is not None else input.new_empty(0)


def _rms_norm_backward_cpu(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    spelled = _spelled_gradients(
        grad_out, input.detach(), normalized_shape, None if weight is None else weight.detach(), eps
    )
    made = _rms_norm_backward_meta(
        grad_out, input, normalized_shape, rstd, weight, eps, output_mask
    )
    for place, gradient in zip(made, spelled, strict=True):
        if place.shape == (0,) or gradient is None:
            continue
        place.copy_(gradient)
    return made


def _spelled_gradients(
    grad: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of input and weight through the ops that RMS norm is made of; differentiable where
    these require it themselves."""
    again = input.requires_grad or (weight is not None and weight.requires_grad)
    with differentiable():
        leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in (input, weight)
                  if t is not None]  # fmt: skip
        scale = leaves[1] if weight is not None else None
        out = torch.ops.aten._fused_rms_norm(leaves[0], normalized_shape, scale, eps)[0]
        grads = torch.autograd.grad(out, leaves, grad, create_graph=again)
    return grads[0], grads[1] if weight is not None else None


def _shown_rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """`rooftrace.rms_norm`, shown as CUDA's op, which elsewhere is taken apart before a mode sees
    it."""

    def run(input: Tensor, shape: Any, weight: Tensor | None, eps: float | None) -> Any:
        return OPS.rms_norm(input, shape, weight, eps)

    with torch._C._AutoDispatchBelowAutograd():
        public = _aten._fused_rms_norm.default
        made = shown.show(public, run, input, list(normalized_shape), weight, eps)
    return made[0], made[1]


def _shown_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    eps: float | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """`rooftrace.rms_norm_backward`, shown as CUDA's op."""

    def run(grad_out: Tensor, input: Tensor, shape: Any, rstd: Tensor, *rest: Any) -> Any:
        made = OPS.rms_norm_backward(grad_out, input, shape, rstd, rest[0], eps, rest[1])
        # What is not wanted is undefined, as on a GPU.
        return tuple(grad if own else None for grad, own in zip(made, rest[1], strict=True))

    public = _aten._fused_rms_norm_backward.default
    args = (grad_out, input, list(normalized_shape), rstd, weight, list(output_mask))
    made = shown.show(public, run, *args)
    return made[0], made[1]


def _is_shown(input: Tensor) -> bool:
    """Whether others see this call as CUDA's op: modes of the user's, and shards of a mesh, which
    have rules for that op."""
    return shown.watched() or type(input).__name__ == "DTensor"


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        op = _shown_rms_norm if _is_shown(input) else OPS.rms_norm
        out, rstd = op(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.options = (shape, eps)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, rstd = ctx.saved_tensors
        shape, eps = ctx.options
        if torch.is_grad_enabled():  # somebody differentiates the gradient
            spelled = _spelled_gradients(grads[0], input, shape, weight, eps)
            return spelled[0], None, spelled[1], None
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        op = _shown_backward if _is_shown(input) else OPS.rms_norm_backward
        grad_input, grad_weight = op(grads[0], input, shape, rstd, weight, eps, wanted)
        return grad_input if wanted[0] else None, None, grad_weight if wanted[1] else None, None


def _transformed() -> bool:
    """Whether a transform of torch.func or forward-mode derivatives are under way."""
    level = getattr(torch._C._functorch, "maybe_current_level", lambda: None)()
    return level is not None or torch.autograd.forward_ad._current_level >= 0


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The replacement for aten's entry point on meta tensors while `kept_whole` is on.

    It is taken apart where CUDA has no kernel either (`rms_norm_symint` in layer_norm.cpp):
    channels last, complex numbers, a weight of another type, and releases before torch 2.9.
    """
    taken_apart = (
        not backends.release().fuses_rms_norm
        or input.is_complex()
        or (weight is not None and weight.dtype != input.dtype)
        or suggest_memory_format(input) in (torch.channels_last, torch.channels_last_3d)
        or _transformed()
    )
    if taken_apart:
        spelled: Tensor = torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]
        return spelled
    run: Any = _RmsNorm.apply
    out: Tensor = run(input, list(normalized_shape), weight, eps)
    return out


define(
    "rms_norm(Tensor input, int[] normalized_shape, Tensor? weight, float? eps) "
    "-> (Tensor, Tensor)",
    Meta=_rms_norm_meta,
    CPU=_rms_norm_cpu,
    CUDA=_rms_norm_cpu,
)
define(
    "rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, "
    "Tensor? weight, float? eps, bool[] output_mask) -> (Tensor, Tensor)",
    Meta=_rms_norm_backward_meta,
    CPU=_rms_norm_backward_cpu,
    CUDA=_rms_norm_backward_cpu,
)
