"""Inference engines in small: caches, quantisation, folding, low precision."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case, pattern
from .training_steps import mlp
from .wrappers import FORWARD


class Block(nn.Module):
    """Single-head attention by hand over whatever keys a cache returns."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v


@pattern
def cache_of_lists() -> Case:
    """Keys and values are appended to lists on self and concatenated at each token."""

    class Cached(Block):
        def __init__(self) -> None:
            super().__init__()
            self.keys: list[Tensor] = []
            self.values: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            outs = []
            for token in x.split(1, 1):
                self.keys.append(self.k(token))
                self.values.append(self.v(token))
                k, v = torch.cat(self.keys, 1), torch.cat(self.values, 1)
                outs.append(self.attend(self.q(token), k, v))
            return torch.cat(outs, 1)

    n, b = 5, 2
    flops = 3 * 2 * b * n * 36 + 2 * 2 * b * 6 * sum(range(1, n + 1))
    return Case(Cached().requires_grad_(False), (torch.randn(b, n, 6),), expected=flops)


@pattern
def paged_cache() -> Case:
    """Blocks of a pool are written by index_put_ and gathered through a table of block numbers."""

    class Paged(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("pool", torch.randn(2, 10, 4, 6), persistent=False)

        def forward(self, x: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
            block = table.gather(1, (lengths // 4)[:, None])[:, 0]
            self.pool[0].index_put_((block, lengths % 4), self.k(x))
            self.pool[1].index_put_((block, lengths % 4), self.v(x))
            k, v = self.pool[:, table].flatten(2, 3)
            seen = torch.arange(k.shape[1]) <= lengths[:, None]
            return self.attend(self.q(x)[:, None], k, v, seen[:, None])

    table = torch.tensor([[3, 1, 7], [0, 9, 4]])
    data = torch.randn(2, 6), table, torch.tensor([9, 6])
    flops = 3 * 2 * 2 * 36 + 2 * 2 * 2 * 12 * 6
    return Case(Paged().requires_grad_(False), data, expected=flops)


@pattern
def static_cache() -> Case:
    """A buffer of the full length is written at a position in a buffer, which counts itself."""

    class Static(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(2, 2, 12, 6))
            self.register_buffer("at", torch.tensor([3]))

        def forward(self, x: Tensor) -> Tensor:
            where = self.at + torch.arange(x.shape[1])
            self.cache[0].index_copy_(1, where, self.k(x))
            self.cache[1].index_copy_(1, where, self.v(x))
            mask = torch.arange(12)[None] <= where[:, None]
            self.at += x.shape[1]
            return self.attend(self.q(x), self.cache[0], self.cache[1], mask)

    flops = 3 * 2 * 2 * 4 * 36 + 2 * 2 * 2 * 4 * 12 * 6
    return Case(Static().requires_grad_(False), (torch.randn(2, 4, 6),), expected=flops)


@pattern
def sliding_window() -> Case:
    """A rolling cache drops what is older than the window; slices by Python ints."""

    class Sliding(Block):
        def forward(self, x: Tensor, window: int) -> Tensor:
            k = v = x[:, :0]
            outs = []
            for t in range(x.shape[1]):
                token = x[:, t : t + 1]
                k = torch.cat([k, self.k(token)], 1)[:, -window:]
                v = torch.cat([v, self.v(token)], 1)[:, -window:]
                outs.append(self.attend(self.q(token), k, v))
            return torch.cat(outs, 1)

    seen = 1 + 2 + 3 + 4 * 4
    flops = 3 * 2 * 2 * 7 * 36 + 2 * 2 * 2 * 6 * seen
    return Case(Sliding(), (torch.randn(2, 7, 6), 4), expected=flops)


@pattern
def quantised_linear() -> Case:
    """quantize_dynamic: packed weights are a ScriptObject, not tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(mlp().eval(), {nn.Linear})
    return Case(model, (torch.randn(7, 6),), expected=7 * FORWARD)


@pattern
def quantised_convolution() -> Case:
    """Static quantisation: quint8 activations, packed convolution weights, a dequantised head."""
    import torch.ao.nn.quantized as nnq

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nnq.Conv2d(3, 5, 3, stride=2)
            self.head = nn.Linear(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.quantize_per_tensor(x, 0.1, 10, torch.quint8)
            return self.head(self.conv(x).dequantize().mean((2, 3)))

    return Case(
        Quantised().eval(), (torch.randn(2, 3, 9, 7),), expected=2 * 2 * 5 * 12 * 27 + 2 * 2 * 20
    )


@pattern
def folded_batch_norm() -> Case:
    """Batch norm is folded into the convolution by fuse_conv_bn_eval, in the step itself."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    model = nn.Sequential(nn.Conv2d(3, 5, 3, groups=1), nn.BatchNorm2d(5)).eval()

    def step(model: nn.Sequential, x: Tensor) -> Tensor:
        fused = fuse_conv_bn_eval(model[0], model[1])
        return fused(x)

    return Case(step, (model, torch.randn(2, 3, 8, 6)), expected=2 * 2 * 5 * 24 * 27)


@pattern
def grouped_and_transposed_convolutions() -> Case:
    """Depthwise, grouped, dilated and transposed convolutions in training."""
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=4), nn.Conv2d(8, 6, 3, groups=2, dilation=2),
        nn.ConvTranspose2d(6, 4, 2, stride=2, groups=2), nn.Conv2d(4, 3, 1),
    )  # fmt: skip
    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    first, second = 8 * 10 * 8 * 9, 6 * 6 * 4 * 9 * 4
    third, fourth = 6 * 6 * 4 * 2 * 4, 3 * 12 * 8 * 4
    flops = 2 * 2 * (2 * first + 3 * (second + third + fourth))
    return Case(model, (torch.randn(2, 4, 12, 10),), options=options, expected=flops)


@pattern
def half_precision_with_fp32_islands() -> Case:
    """Half weights, norms and softmax in fp32, the head upcast; products of two precisions."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3)
            self.half()
            self.norm.float()

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.a(x.half()).float()).half()
            x = (x.float() @ x.float().T).softmax(-1).half() @ x
            return F.linear(x.float(), self.b.weight.float())

    flops = 2 * 7 * 60 + 2 * 2 * 49 * 10 + 2 * 7 * 30
    return Case(Half(), (torch.randn(7, 6),), expected=flops)


@pattern
def inference_mode_with_a_copy_of_itself() -> Case:
    """inference_mode inside forward, and inference tensors kept on self for the next call."""

    class Inferring(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                y = self.linear(x)
                if self.last is not None:
                    y = y + self.linear(self.last)
                self.last = y
            return y.clone()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inferring()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.inner(2 * x)

    return Case(Twice(), (torch.randn(7, 6),), expected=3 * 2 * 7 * 36)


@pattern
def autocast_on_the_cpu() -> Case:
    """autocast by decorator, nested and switched off for one product."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            with torch.autocast("cpu", enabled=False):
                x = x.float() @ self.b.weight.T
            return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])

    flops = 2 * 7 * 90 + 2 * 2 * 49 * 3
    return Case(Cast().requires_grad_(False), (torch.randn(7, 6),), expected=flops)


@pattern
def streaming_convolution() -> Case:
    """A causal convolution keeps its last inputs in a buffer and runs chunk by chunk."""

    class Streaming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 5, 3)
            self.register_buffer("past", torch.zeros(2, 3, 2))

        def forward(self, x: Tensor) -> Tensor:
            outs = []
            for chunk in x.split(4, -1):
                both = torch.cat([self.past, chunk], -1)
                self.past = both[..., -2:].detach()
                outs.append(self.conv(both))
            return torch.cat(outs, -1)

    model = Streaming().requires_grad_(False)
    return Case(model, (torch.randn(2, 3, 10),), expected=2 * 2 * 5 * 10 * 9)


@pattern
def grouped_query_attention() -> Case:
    """SDPA with enable_gqa, then with a float mask, then with values wider than keys."""

    class Grouped(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
            one = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            wide = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
            two = F.scaled_dot_product_attention(q, *wide, attn_mask=bias)
            return one + two

    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 7, 4), torch.randn(2, 2, 7, 4)
    flops = 2 * 2 * 2 * 6 * 35 * 8
    return Case(Grouped(), (q, k, v, torch.randn(5, 7)), expected=flops)


@pattern
def vectorised_sampling_loop() -> Case:
    """A diffusion sampler: a schedule as tensors, `.item()` at each step, guidance by a batch."""

    class Sampler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(7, 11, 6)
            self.register_buffer("betas", torch.linspace(0.1, 0.9, 20))

        def forward(self, x: Tensor, steps: int) -> Tensor:
            for t in torch.linspace(19, 0, steps).long().tolist():
                beta = self.betas[t].item()
                time = torch.full((2 * len(x), 1), beta)
                both = self.net(torch.cat([torch.cat([x, x]), time], -1))
                a, b = both.chunk(2)
                x = x - beta * (b + 2.0 * (a - b))
                if beta > 0.2:
                    x = x + 0.1 * torch.randn_like(x)
            return x

    flops = 4 * 2 * 6 * (77 + 66)
    return Case(Sampler().requires_grad_(False), (torch.randn(3, 6), 4), expected=flops)
