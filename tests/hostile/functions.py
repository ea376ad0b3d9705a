"""autograd.Functions of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .harness import Case, pattern
from .policies import trained
from .training_steps import mlp


class Numpy(Function):
    """Sorts rows by numpy, and scatters the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        order = np.argsort(x.detach().cpu().numpy(), axis=-1)
        ctx.order = torch.from_numpy(order)
        return torch.from_numpy(np.take_along_axis(x.detach().cpu().numpy(), order, -1)).to(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.zeros_like(g).scatter_(-1, ctx.order.to(g.device), g)


@pattern
def numpy_inside() -> Case:
    """forward leaves torch: numpy sorts real values, and comes back."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Numpy.apply(self.a(x)))

    return trained(Sorted(), torch.randn(7, 6), expected=2 * 7 * (2 * 60 + 3 * 30))


class Linear(Function):
    """A product that saves fp8-like rounded inputs and makes the weight gradient in two halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        half = len(g) // 2
        gw = g[:half].T @ x[:half].to(g) + g[half:].T @ x[half:].to(g)
        gx = g @ w if ctx.needs_input_grad[0] else None
        return gx, gw


@pattern
def own_backward_products() -> Case:
    """Backward asks ctx.needs_input_grad and splits one product in two."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(10, 6))
            self.b = nn.Parameter(torch.randn(3, 10))

        def forward(self, x: Tensor) -> Tensor:
            return Linear.apply(torch.tanh(Linear.apply(x, self.a)), self.b)

    return trained(Two(), torch.randn(7, 6), expected=2 * 7 * (2 * 60 + 3 * 30))


class Cube(Function):
    """x^3 by a product with a diagonal, differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return CubeBackward.apply(x, g)


class CubeBackward(Function):
    """Its gradient, itself a Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(x, g)
        return 3 * x**2 * g

    @staticmethod
    def backward(ctx: Any, gg: Tensor) -> Any:
        x, g = ctx.saved_tensors
        return 6 * x * g * gg, 3 * x**2 * gg


@pattern
def double_backward() -> Case:
    """A Function whose backward is a Function, differentiated twice inside of a loss."""
    model = mlp()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = Cube.apply(model(x)).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + slope.square().sum()
        loss.backward()
        return loss

    return Case(step, (model, torch.randn(7, 6)))


class Once(Function):
    """An implicit product whose backward may not be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, scale: float, name: str) -> tuple[Tensor, Tensor]:
        ctx.scale = scale
        ctx.save_for_backward(x, w)
        mask = (x @ w) > 0
        ctx.mark_non_differentiable(mask)
        return (x @ w) * scale * mask, mask

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        g = g * ctx.scale * ((x @ w) > 0)
        return g @ w.T, x.T @ g, None, None


@pattern
def once_differentiable_with_several_outputs() -> Case:
    """Non-tensor arguments, a non-differentiable output, and a product repeated in backward."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 10)
            self.weight = nn.Parameter(torch.randn(10, 3))

        def forward(self, x: Tensor) -> Tensor:
            out, _mask = Once.apply(self.first(x), self.weight, 0.5, "gate")
            return out

    flops = 2 * 7 * (2 * 60 + 5 * 30)
    return trained(Gated(), torch.randn(7, 6), expected=flops)


class Modern(Function):
    """setup_context, and a rule for vmap."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> Any:
        if in_dims[0] is None:
            x = x.expand(info.batch_size, *x.shape)
        if in_dims[1] is None:
            w = w.expand(info.batch_size, *w.shape)
        return torch.bmm(x.movedim(in_dims[0] or 0, 0), w.movedim(in_dims[1] or 0, 0)), 0


@pattern
def setup_context_style() -> Case:
    """forward has no ctx: setup_context saves."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(6, 10))
            self.b = nn.Parameter(torch.randn(10, 3))

        def forward(self, x: Tensor) -> Tensor:
            return Modern.apply(Modern.apply(x, self.a).relu(), self.b)

    # Its backward computes the gradient of the input whether somebody asks or not.
    return trained(Two(), torch.randn(7, 6), expected=2 * 7 * 3 * 90)


@pattern
def vmap_rule_of_a_function() -> Case:
    """vmap over a Function goes through its own static method, to another product."""

    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 10))

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(Modern.apply, in_dims=(0, None))(x, self.weight)

    return Case(Batched(), (torch.randn(3, 7, 6),), expected=2 * 3 * 7 * 60)


class Reversible(Function):
    """A reversible block: backward rebuilds the input, then differentiates a fresh forward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: nn.Module, g: nn.Module, *ps: Tensor) -> Any:
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            y = a + f(b)
            z = b + g(y)
        ctx.save_for_backward(y.detach(), z.detach())
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dz: Tensor) -> Any:
        y, z = ctx.saved_tensors
        with torch.enable_grad():
            y = y.detach().requires_grad_()
            gy = ctx.g(y)
        with torch.no_grad():
            b = z - gy
        gp = list(ctx.g.parameters())
        grads = torch.autograd.grad(gy, [y, *gp], dz)
        dy = dy + grads[0]
        with torch.enable_grad():
            b = b.detach().requires_grad_()
            fb = ctx.f(b)
        fp = list(ctx.f.parameters())
        others = torch.autograd.grad(fb, [b, *fp], dy)
        return (dy, dz + others[0], None, None, *others[1:], *grads[1:])


@pattern(recompute=True)
def reversible_block(recompute: bool = True) -> Case:
    """Modules are arguments of a Function; its backward runs them again under enable_grad."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.f, self.g = mlp(4, 7, 4), mlp(4, 9, 4)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.first(x).chunk(2, -1)
            if not recompute:
                y = a + self.f(b)
                return torch.cat([y, b + self.g(y)], -1)
            params = (*self.f.parameters(), *self.g.parameters())
            return torch.cat(Reversible.apply(a, b, self.f, self.g, *params), -1)

    return trained(Block(), torch.randn(5, 6))


class Straight(Function):
    """Rounds in forward, passes the gradient, clips it by a value asked of the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.limit = 2 * x.std().item()
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-ctx.limit, ctx.limit)


@pattern
def straight_through_with_item() -> Case:
    """forward keeps a Python number of the device for backward."""

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(Straight.apply(self.a(x)))

    return trained(Rounded(), torch.randn(7, 6), expected=2 * 7 * (2 * 60 + 3 * 30))
