"""Linear layers, attention, experts and the loss as Megatron-LM runs them, with their exchanges.

Weights are bf16.  Gradients of weights add up in fp32 (`main`) inside of backward.  Exchanges are
functional collectives: they run beside what does not read them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_c10d: Any = torch.ops._c10d_functional
_aten: Any = torch.ops.aten


class Weight(nn.Parameter):
    """A bf16 weight with its fp32 gradient."""

    main: Tensor
    expert: bool  # whether it is one of experts, which other processes have others of


def weight(*shape: int, expert: bool = False) -> Weight:
    """A weight of this shape on meta."""
    made: Any = Weight(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))
    made.main = torch.empty(*shape, dtype=torch.float32, device="meta")
    made.expert = expert
    return made  # type: ignore[no-any-return]


def size_of(group: Any) -> int:
    """How many processes a group has; 1 for none."""
    return 1 if group is None else int(group.size())


def gather(x: Tensor, group: Any) -> Tensor:
    """All parts of a tensor along its first dimension."""
    if size_of(group) == 1:
        return x
    made = _c10d.all_gather_into_tensor(x.contiguous(), size_of(group), group.group_name)
    return _c10d.wait_tensor(made)  # type: ignore[no-any-return]


def scatter(x: Tensor, group: Any) -> Tensor:
    """A part of the sum over all processes, along the first dimension."""
    if size_of(group) == 1:
        return x
    made = _c10d.reduce_scatter_tensor(x.contiguous(), "sum", size_of(group), group.group_name)
    return _c10d.wait_tensor(made)  # type: ignore[no-any-return]


def added_up(x: Tensor, group: Any, how: str = "sum") -> Tensor:
    """The sum, or the maximum, over all processes."""
    if size_of(group) == 1:
        return x
    return _c10d.wait_tensor(_c10d.all_reduce(x, how, group.group_name))  # type: ignore[no-any-return]


def exchange(x: Tensor, group: Any) -> Tensor:
    """Equal parts to every process, along the first dimension."""
    if size_of(group) == 1:
        return x
    splits = [len(x) // size_of(group)] * size_of(group)
    made = _c10d.all_to_all_single(x.contiguous(), splits, splits, group.group_name)
    return _c10d.wait_tensor(made)  # type: ignore[no-any-return]


def accumulate(w: Any, grad: Tensor, x: Tensor) -> None:
    """main += grad^T x, in one product that writes fp32."""
    _aten.addmm.dtype_out(w.main, grad.t(), x, torch.float32, out=w.main)


class Column(torch.autograd.Function):
    """x w^T, of which each process has some columns; x is gathered, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Weight, group: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w, ctx.group = w, group
        return gather(x, group) @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        whole = gather(x, ctx.group)
        dx = scatter(grads[0] @ ctx.w, ctx.group)
        accumulate(ctx.w, grads[0], whole)
        return dx, None, None


class Head(Column):
    """The last product, which is Megatron-LM's own: a bf16 tensor stands for the gradient of its
    weight until the hook that knows of the fp32 one (tensor_parallel/layers.py)."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Column.backward(ctx, *grads)[0], torch.zeros_like(ctx.w), None


class Row(torch.autograd.Function):
    """x w^T, of which each process has some rows of w^T; results are added up and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Weight, group: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w, ctx.group = w, group
        return scatter(x @ w.t(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad = gather(grads[0], ctx.group)
        dx = grad @ ctx.w
        accumulate(ctx.w, grad, x)
        return dx, None, None


class Experts(torch.autograd.Function):
    """A product for each expert: x [experts, rows, in], w [experts, out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Weight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.w = w
        return torch.bmm(x, w.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        w, grad = ctx.w, grads[0]
        dx = torch.bmm(grad, w)
        for main, its_grad, its_rows in zip(w.main, grad, x, strict=True):
            _aten.addmm.dtype_out(main, its_grad.t(), its_rows, torch.float32, out=main)
        return dx, None


class Embedding(torch.autograd.Function):
    """Rows of a table, of which each process has some words."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, w: Weight, group: Any) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.w, ctx.group = w, group
        return scatter(F.embedding(ids, w), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        grad = gather(grads[0], ctx.group)
        made = _aten.embedding_dense_backward(grad, ids, len(ctx.w), -1, False)
        ctx.w.main.add_(made)
        return None, None, None


class Rotary(torch.autograd.Function):
    """Heads [rows, heads, width] turned by their positions; nothing is kept but the angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.angles = cos, sin
        return Rotary.turned(x, cos, sin)

    @staticmethod
    @torch.compile
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.angles
        return Rotary.turned(grads[0], cos, -sin), None, None


@torch.compile
def gated(x: Tensor, shares: Tensor | None) -> Tensor:
    """silu(a) b of halves a, b, times the shares of experts."""
    a, b = x.chunk(2, -1)
    made = F.silu(a) * b
    return made if shares is None else made * shares


@torch.compile
def gated_back(x: Tensor, shares: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of `gated`."""
    a, b = x.chunk(2, -1)
    s, inner = torch.sigmoid(a), grad if shares is None else grad * shares
    dx = torch.cat((inner * b * s * (1 + a * (1 - s)), inner * a * s), -1)
    return dx, None if shares is None else (grad * a * s * b).sum(-1, keepdim=True)


class Gated(torch.autograd.Function):
    """silu(a) b of halves a, b; only the halves are kept.  Shares [rows, 1] of experts scale it
    (`weighted_bias_swiglu_impl`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, shares)
        return gated(x, shares)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gated_back(*ctx.saved_tensors, grads[0])


class Turned(torch.autograd.Function):
    """Heads [rows, heads, width] of own rows as [all rows, own heads, width], or back.

    Rows of a process are a chunk from the front of a sequence and its mirror image: they are put in
    order behind the exchange (`flash_attn_a2a_communicate` of Transformer Engine).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, back: bool) -> Tensor:
        ctx.group, ctx.back = group, back
        return Turned.exchanged(x, group, back)

    @staticmethod
    def exchanged(x: Tensor, group: Any, back: bool) -> Tensor:
        count = size_of(group)
        order = torch.empty(2 * count, dtype=torch.long, device="meta")
        if back:
            chunks = x.unflatten(0, (2 * count, -1)).index_select(0, order).flatten(0, 1)
            made = exchange(chunks, group).unflatten(0, (count, -1))
            return made.movedim(0, 1).flatten(1, 2)
        parts = x.unflatten(1, (count, -1)).movedim(1, 0).flatten(0, 1)
        made = exchange(parts, group).unflatten(0, (2 * count, -1))
        return made.index_select(0, order).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return Turned.exchanged(grads[0], ctx.group, not ctx.back), None, None


@torch.compile
def shares_of(logits: Tensor, high: Tensor, total: Tensor, scale: Tensor) -> Tensor:
    """The gradient of a loss by its logits, of their highest one and the sum of exponentials."""
    return ((logits.float() - high[:, None]).exp() / total[:, None] * scale).to(logits.dtype)


@torch.compile
def exponentials(logits: Tensor, high: Tensor) -> Tensor:
    """The sum of the exponentials of each row."""
    return (logits.float() - high[:, None]).exp().sum(-1)


class CrossEntropy(torch.autograd.Function):
    """The loss of logits [rows, words / tp] in one pass; its gradient takes the place of these."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        high = added_up(logits.float().amax(-1), group, "max")
        total = added_up(exponentials(logits, high), group)
        ctx.save_for_backward(logits, high, total, labels)
        told = added_up(logits.gather(1, labels[:, None])[:, 0].float(), group)
        return (total.log() + high - told).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, high, total, _ = ctx.saved_tensors
        return logits.detach().copy_(shares_of(logits, high, total, grads[0])), None, None
