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
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.angles
        return Rotary.turned(grads[0], cos, -sin), None, None


class Gated(torch.autograd.Function):
    """silu(a) b of halves a, b; only the halves are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, -1)
        s = torch.sigmoid(a)
        return torch.cat((grads[0] * b * s * (1 + a * (1 - s)), grads[0] * a * s), -1)


class Ring(torch.autograd.Function):
    """Causal attention of a process of "cp": a chunk from the front and its mirror image.

    Keys and values of all others come to it, in backward once more; their gradients go back.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        parts = Ring.calls(q, gather(k, group), gather(v, group))
        made = [_aten._scaled_dot_product_flash_attention(*each) for each in parts]
        out = torch.cat((made[0][0], made[1][0] + made[2][0]), 2)
        ctx.save_for_backward(q, k, v, out, made[0][1], made[2][1])
        ctx.group = group
        return out

    @staticmethod
    def calls(q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Any, ...]]:
        """Front chunk on itself; last chunk on all before it, and on itself.  [1, heads, s, d]."""
        half = q.shape[2] // 2
        keys, values = (t.transpose(0, 1).flatten(1, 2)[None] for t in (k, v))
        front, back = q[:, :, :half], q[:, :, half:]
        return [
            (front, keys[:, :, :half], values[:, :, :half], 0.0, True),
            (back, keys[:, :, :-half], values[:, :, :-half], 0.0, False),
            (back, keys[:, :, -half:], values[:, :, -half:], 0.0, True),
        ]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, first, second = ctx.saved_tensors
        half = q.shape[2] // 2
        parts = Ring.calls(q, gather(k, ctx.group), gather(v, ctx.group))
        seed = torch.empty((), dtype=torch.long, device="meta")
        dq, dk, dv = [], [], []
        places = (slice(0, half), slice(half, None), slice(half, None))
        for (qs, ks, vs, _, causal), at, sums in zip(
            parts, places, (first, second, second), strict=True
        ):
            made = _aten._scaled_dot_product_flash_attention_backward(
                grads[0][:, :, at], qs, ks, vs, out[:, :, at], sums,
                None, None, qs.shape[2], ks.shape[2], 0.0, causal, seed, seed,
            )  # fmt: skip
            for parts_of, grad in zip((dq, dk, dv), made, strict=False):
                parts_of.append(grad)
        grad_q = torch.cat((dq[0], dq[1] + dq[2]), 2)
        back = []
        for some, like in ((dk, k), (dv, v)):
            whole = torch.cat((some[1], some[2]), 2)[0].unflatten(1, (-1, like.shape[2]))
            back.append(scatter(whole.transpose(0, 1), ctx.group))
        return grad_q, back[0], back[1], None


class CrossEntropy(torch.autograd.Function):
    """The loss of logits [rows, words / tp] in one pass; its gradient takes the place of these."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Any) -> Tensor:
        high = added_up(logits.float().amax(-1), group, "max")
        total = added_up((logits.float() - high[:, None]).exp().sum(-1), group)
        ctx.save_for_backward(logits, high, total, labels)
        told = added_up(logits.gather(1, labels[:, None])[:, 0].float(), group)
        return (total.log() + high - told).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, high, total, _ = ctx.saved_tensors
        share = (logits.float() - high[:, None]).exp() / total[:, None] * grads[0]
        return logits.detach().copy_(share), None, None
