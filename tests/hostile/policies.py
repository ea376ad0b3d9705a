"""What is kept for backward, and what is computed twice or stored otherwise."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from .harness import Case, pattern
from .training_steps import mlp, mlp_flops


def trained(model: nn.Module, *args: Any, **more: Any) -> Case:
    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    return Case(model, args, options=options, **more)


class Attention(nn.Module):
    """Projections and scaled dot-product attention of two heads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, 2, w // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).reshape(b, n, w))


class Checkpointed(nn.Module):
    """Runs the layers one after another, each under a checkpoint."""

    def __init__(self, layers: list[nn.Module], on: bool, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(layers)
        self.on, self.options = on, options

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, **self.options) if self.on else layer(x)
        return x


@pattern(recompute=True)
def reentrant(recompute: bool = True) -> Case:
    """The old kind of checkpoint: forward without grad, then forward and backward in backward."""
    model = Checkpointed([mlp(8, 11, 8) for _ in range(3)], recompute, use_reentrant=True)
    return trained(model, torch.randn(7, 6))


@pattern(recompute=True)
def non_reentrant(recompute: bool = True) -> Case:
    """The new kind: hooks of saved tensors, and an early stop once all of them are there."""
    model = Checkpointed([mlp(8, 11, 8) for _ in range(3)], recompute, use_reentrant=False)
    return trained(model, torch.randn(7, 6))


@pattern(recompute=True)
def reentrant_attention(recompute: bool = True) -> Case:
    """Attention under the old checkpoint: its forward runs with grad disabled, twice."""
    model = Checkpointed([Attention(), Attention()], recompute, use_reentrant=True)
    return trained(model, torch.randn(2, 5, 6))


@pattern(recompute=True)
def non_reentrant_attention(recompute: bool = True) -> Case:
    """Attention under the new checkpoint: recomputed below autograd."""
    model = Checkpointed([Attention(), Attention()], recompute, use_reentrant=False)
    return trained(model, torch.randn(2, 5, 6))


class Recurrent(nn.Module):
    """An LSTM with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.start = nn.Parameter(torch.zeros(2, 1, 1, 8))  # learned, so that it has a gradient

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.start.expand(-1, -1, len(x), -1).contiguous()
        return x + self.lstm(x, (h, c))[0]


@pattern(recompute=True)
def checkpointed_lstm(recompute: bool = True) -> Case:
    """An LSTM is one op for cuDNN and many on a CPU; here it is recomputed."""
    model = Checkpointed([Recurrent()], recompute, use_reentrant=False)
    return trained(model, torch.randn(2, 5, 6))


class Scaled(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.T, x.T @ g


class OwnFunction(nn.Module):
    """Uses the Function above."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Scaled.apply(x, self.weight))


@pattern(recompute=True)
def checkpointed_function(recompute: bool = True) -> Case:
    """A custom Function runs its forward without grad, also when it is recomputed."""
    model = Checkpointed([OwnFunction(), OwnFunction()], recompute, use_reentrant=False)
    return trained(model, torch.randn(7, 6))


@pattern(recompute=True)
def nested_checkpoints(recompute: bool = True) -> Case:
    """A checkpoint around a checkpoint: the inner forward runs three times."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.a, self.b = nn.Linear(6, 8), mlp(8, 11, 8), mlp(8, 13, 8)

        def inner(self, x: Tensor) -> Tensor:
            if not recompute:
                return self.b(self.a(x))
            return self.b(checkpoint(self.a, x, use_reentrant=False))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return checkpoint(self.inner, x, use_reentrant=False) if recompute else self.inner(x)

    return trained(Nested(), torch.randn(7, 6))


def every_second_product(counts: dict[str, int], ctx: Any, op: Any, *_: Any, **__: Any) -> Any:
    if op is torch.ops.aten.mm.default or op is torch.ops.aten.addmm.default:
        kind = "recompute" if ctx.is_recompute else "forward"
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] % 2:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pattern(recompute=True)
def every_second_product_saved(recompute: bool = True) -> Case:
    """torchtitan's policy: a counter decides which products are saved; the list asks for SDPA."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(partial(every_second_product, {}))

    layers = [nn.Sequential(mlp(8, 11, 8), mlp(8, 13, 8)) for _ in range(2)]
    model = Checkpointed(layers, recompute, use_reentrant=False, context_fn=contexts)
    return trained(model, torch.randn(7, 6))


SAVED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}


@pattern(recompute=True)
def attention_saved_by_policy(recompute: bool = True) -> Case:
    """A selective policy saves the output of attention and recomputes everything else."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saved = op in SAVED
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    model = Checkpointed([Attention()], recompute, use_reentrant=False, context_fn=contexts)
    return trained(model, torch.randn(2, 5, 6))


@pattern
def packed_to_lower_precision() -> Case:
    """saved_tensors_hooks store activations in bf16 and bring them back in backward."""
    model = mlp()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        def pack(t: Tensor) -> Any:
            return (t.dtype, t.bfloat16()) if t.dtype is torch.float32 else (None, t)

        def unpack(packed: Any) -> Tensor:
            dtype, t = packed
            return t if dtype is None else t.to(dtype)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x).square().mean()
        loss.backward()
        return loss

    return Case(step, (model, torch.randn(7, 6)), expected=mlp_flops(7))


@pattern
def packed_by_a_sketch() -> Case:
    """saved_tensors_hooks project activations by a random matrix: products in pack and unpack."""
    model = mlp()
    sketch = torch.randn(10, 4)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        def pack(t: Tensor) -> Any:
            return (t @ sketch,) if t.shape == (7, 10) and t.grad_fn is not None else t

        def unpack(packed: Any) -> Tensor:
            return packed[0] @ sketch.T if isinstance(packed, tuple) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(x).square().mean()
        loss.backward()
        return loss

    return Case(step, (model, torch.randn(7, 6)))


@pattern(recompute=True)
def sequential_segments(recompute: bool = True) -> Case:
    """checkpoint_sequential: all segments but the last are recomputed."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.layers = nn.Sequential(*[mlp(8, 11, 8) for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if not recompute:
                return self.layers(x)
            return checkpoint_sequential(self.layers, 2, x, use_reentrant=False)

    return trained(Segments(), torch.randn(7, 6))


@pattern
def saved_on_cpu() -> Case:
    """save_on_cpu moves what backward needs, and back."""
    model = mlp()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().mean()
        loss.backward()
        return loss

    return Case(step, (model, torch.randn(7, 6)), expected=mlp_flops(7))


@pattern
def sharded_by_hand() -> Case:
    """FSDP-like: hooks make `weight` from a flat shard before forward and again before backward."""

    class Sharded(nn.Module):
        def __init__(self, k: int, n: int) -> None:
            super().__init__()
            self.k, self.n = k, n
            self.shards = nn.ParameterList(torch.randn(k * n // 2) for _ in range(2))
            self.inner = nn.Linear(k, n, bias=False)
            del self.inner.weight
            self.inner.register_forward_pre_hook(self.unshard)
            self.inner.register_forward_hook(self.reshard)

        def unshard(self, module: nn.Module, args: Any) -> None:
            module.weight = torch.cat(list(self.shards)).view(self.n, self.k)  # type: ignore[assignment]

        def reshard(self, module: nn.Module, args: Any, out: Tensor) -> None:
            del module.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = nn.Sequential(Sharded(6, 10), nn.ReLU(), Sharded(10, 3))
    return trained(model, torch.randn(7, 6), expected=mlp_flops(7))


@pattern(recompute=True)
def checkpoint_with_dropout_and_autocast(recompute: bool = True) -> Case:
    """The state of the random generator and of autocast is put back for the second run."""

    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 11), nn.Dropout(0.5), nn.Linear(11, 8))

    model = Checkpointed([layer(), layer()], recompute, use_reentrant=True)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(x).float()

    return trained(Outer(), torch.randn(7, 6))
