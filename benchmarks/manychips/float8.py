"""Linear layers whose products run in fp8, scaled by the largest value of each operand.

They are what float8 training libraries put in place of `nn.Linear`: two operands are cast for each
of three products (output, gradient of the input, gradient of the weight); sums stay in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A tensor in fp8, and the scale that brings it back."""
    largest = tensor.abs().amax().float()
    scale = torch.finfo(dtype).max / largest.clamp(min=1e-12)
    return (tensor * scale).to(dtype), scale.reciprocal()


def product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """a[M, K] times b[K, N], of which the kernel wants rows and columns in this order."""
    columns = b.t().contiguous().t()
    return torch._scaled_mm(
        a.contiguous(), columns, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16
    )


class _Float8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        x8, x_scale = cast(flat, FORWARD)
        w8, w_scale = cast(weight, FORWARD)
        ctx.save_for_backward(flat, weight)
        ctx.shape = x.shape
        return product(x8, x_scale, w8.t(), w_scale).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        flat, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        g8, g_scale = cast(grad, BACKWARD)
        w8, w_scale = cast(weight, FORWARD)
        x8, x_scale = cast(flat, FORWARD)
        to_input = product(g8, g_scale, w8, w_scale).reshape(ctx.shape)
        return to_input, product(g8.t(), g_scale, x8, x_scale)


class Float8Linear(nn.Linear):
    """A linear layer without a bias that multiplies in fp8."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Float8.apply(x, self.weight)
        return out


def in_float8(model: nn.Module, but: tuple[str, ...] = ("lm_head",)) -> None:
    """Let the linear layers of a model multiply in fp8, but for these."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name not in but:
            module.__class__ = Float8Linear
