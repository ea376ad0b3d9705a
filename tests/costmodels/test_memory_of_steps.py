"""Training steps written by hand, beside what the CPU's allocator gives out in the same step.

Norms, activation functions, losses and attention of plain ops, in fp32, bf16 and under autocast.
Where a kernel of the CPU makes a tensor of its own that CUDA's does not, or the other way round, a
program keeps its peak elsewhere, or says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import profile

import rooftrace as rt

BATCH, LENGTH, WIDTH = 4, 128, 128
CLOSE = {"fp32": 0.002, "bf16": 0.03, "autocast": 0.03}
"""Products of halves copy a weight into an order of their own on a CPU."""

Function = Callable[[Tensor], Tensor]


class Layers(nn.Module):
    """A function behind a linear layer, twice; the function may have two weights of its own."""

    def __init__(self, function: Callable[..., Tensor], weights: int = 0) -> None:
        super().__init__()
        self.function = function
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.gains = nn.ParameterList(torch.ones(WIDTH) for _ in range(2 * weights))

    def forward(self, x: Tensor) -> Tensor:
        count = len(self.gains) // 2
        for place, linear in enumerate(self.linears):
            own = [self.gains[place * count + i] for i in range(count)]
            x = self.function(linear(x), *own)
        return x


# -- functions -------------------------------------------------------------------------------------


def sparsemax(z: Tensor) -> Tensor:
    """The projection onto the simplex, by sorting (Martins and Astudillo 2016)."""
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    chosen = (1 + k * ordered > sums).sum(-1, keepdim=True)
    threshold = (sums.gather(-1, chosen - 1) - 1) / chosen
    return (z - threshold).clamp(min=0)


def entmax(z: Tensor) -> Tensor:
    """The 1.5-entmax, by sorting (Peters et al. 2019)."""
    z = (z - z.max(-1, keepdim=True).values) / 2
    ordered = z.sort(-1, descending=True).values
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    mean, squares = ordered.cumsum(-1) / k, (ordered**2).cumsum(-1) / k
    below = mean - ((1 - k * (squares - mean**2)) / k).clamp(min=0).add(1e-8).sqrt()
    chosen = (below <= ordered).sum(-1).unsqueeze(-1)
    return (z - below.gather(-1, chosen - 1)).clamp(min=0) ** 2


def dynamic_tanh(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """DyT (Zhu et al. 2025).  The weights are cast by hand: for a product of two precisions the CPU
    makes a copy of one operand, and CUDA does not (TensorIterator.cpp, `compute_types`)."""
    return gain.to(x.dtype) * torch.tanh(0.5 * x) + shift.to(x.dtype)


def softmax_by_hand(x: Tensor) -> Tensor:
    weights = (x - x.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def layer_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (variance + 1e-5).sqrt() * gain + shift


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def response_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """That of ConvNeXt V2."""
    size = x.norm(p=2, dim=1, keepdim=True)
    return gain * (x * (size / (size.mean(-1, keepdim=True) + 1e-6))) + shift + x


def mish(x: Tensor) -> Tensor:
    return F.mish(x)


def snake(x: Tensor, rate: Tensor) -> Tensor:
    return x + torch.sin(rate * x) ** 2 / (rate + 1e-9)


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x.pow(3))))


def share_of_positives(x: Tensor) -> Tensor:
    """A sum of bits, for which CUDA makes integers of 8 bytes of them first."""
    return x / (x > 0).sum(-1, keepdim=True).clamp(min=1)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def linear_attention(x: Tensor) -> Tensor:
    q, k, v = F.elu(heads(x)) + 1, F.elu(heads(x.flip(1))) + 1, heads(x)
    sums = q @ k.sum(-2).unsqueeze(-1)
    return (q @ (k.transpose(-1, -2) @ v) / (sums + 1e-6)).transpose(1, 2).flatten(2)


def rectified_attention(x: Tensor) -> Tensor:
    """Causal, with squares of what is above 0 in place of a softmax."""
    q = heads(x)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
    scores = (q @ q.transpose(-1, -2) / 8).masked_fill(later, -1e4)
    return (F.relu(scores) ** 2 @ q).transpose(1, 2).flatten(2)


def sorted_attention(x: Tensor) -> Tensor:
    q = heads(x)
    return (sparsemax(q @ q.transpose(-1, -2)) @ q).transpose(1, 2).flatten(2)


# -- losses ----------------------------------------------------------------------------------------


def square(out: Tensor) -> Tensor:
    return (out * out).mean()


def focal(out: Tensor) -> Tensor:
    rows = out.flatten(0, -2).log_softmax(-1)
    target = torch.arange(rows.shape[0], device=out.device) % WIDTH
    chosen = rows.gather(1, target[:, None]).squeeze(1)
    return (-((1 - chosen.exp()) ** 2) * chosen).mean()


def contrastive(out: Tensor) -> Tensor:
    rows = F.normalize(out.flatten(0, -2), dim=-1)
    scores = rows @ rows.t() / 0.1
    own = torch.eye(len(rows), dtype=torch.bool, device=out.device)
    target = torch.arange(len(rows), device=out.device) ^ 1
    return F.cross_entropy(scores.masked_fill(own, -torch.inf), target)


def squared_error(out: Tensor) -> Tensor:
    return F.mse_loss(out, torch.zeros_like(out))


def smooth_error(out: Tensor) -> Tensor:
    return F.smooth_l1_loss(out, torch.zeros_like(out))


def entropy(out: Tensor) -> Tensor:
    return F.binary_cross_entropy(torch.sigmoid(out), torch.ones_like(out))


# -- steps -----------------------------------------------------------------------------------------


def allocated(module: nn.Module, x: Tensor, loss: Function, autocast: bool) -> int:
    """The most that the CPU's allocator gave out in a step, and what was there before."""

    def step() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = module(x)
            found = loss(out)
        found.backward()
        return out, found

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        step()
        module.zero_grad(set_to_none=True)
        with profile(profile_memory=True) as profiler:
            kept = step()
    finally:
        torch.set_num_threads(threads)
    module.zero_grad(set_to_none=True)
    events: Any = profiler.kineto_results
    sizes = [(e.start_ns(), e.nbytes()) for e in events.events() if e.name() == "[memory]"]
    now = most = 0
    for _, size in sorted(sizes, key=lambda event: event[0]):
        now += size
        most = max(most, now)
    del kept
    return most + sum(t.nbytes for t in (*module.parameters(), x))


def predicted(module: nn.Module, x: Tensor, loss: Function, autocast: bool) -> int:
    """The same of a traced step, eager on a GPU."""

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                return self.inner(x)

    def cast(out: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
            return loss(out)

    graph = rt.trace(Cast(), x, phase="training", optimizer="none", loss=cast)
    return rt.estimate(graph, chip="h100-sxm", execution="eager").memory.peak


FP32, BF16, AUTOCAST = "fp32", "bf16", "autocast"
STEPS: dict[str, tuple[Callable[..., Tensor], int, Function, tuple[str, ...]]] = {
    "sparsemax": (sparsemax, 0, square, (FP32, BF16)),
    "sparsemax, squared error": (sparsemax, 0, squared_error, (FP32,)),
    "entmax": (entmax, 0, square, (FP32,)),
    "dynamic tanh": (dynamic_tanh, 2, square, (FP32, BF16, AUTOCAST)),
    "dynamic tanh, squared error": (dynamic_tanh, 2, squared_error, (FP32,)),
    "dynamic tanh, smooth error": (dynamic_tanh, 2, smooth_error, (FP32,)),
    "dynamic tanh, entropy": (dynamic_tanh, 2, entropy, (FP32,)),
    "softmax by hand": (softmax_by_hand, 0, square, (FP32, BF16)),
    "layer norm": (layer_norm, 2, square, (FP32, BF16, AUTOCAST)),
    "rms norm": (rms_norm, 1, square, (FP32, BF16, AUTOCAST)),
    "response norm": (response_norm, 2, square, (FP32, BF16)),
    "mish": (mish, 0, square, (FP32, BF16, AUTOCAST)),
    "snake": (snake, 1, square, (FP32, BF16)),
    "gelu by hand": (gelu_by_hand, 0, square, (FP32, BF16)),
    "share of positives": (share_of_positives, 0, square, (FP32, BF16)),
    "focal loss": (snake, 1, focal, (FP32,)),
    "contrastive loss": (gelu_by_hand, 0, contrastive, (FP32, BF16)),
    "linear attention": (linear_attention, 0, square, (FP32, BF16)),
    "rectified attention": (rectified_attention, 0, square, (FP32, BF16)),
    "sorted attention": (sorted_attention, 0, square, (FP32,)),
}
CASES = [(name, kind) for name, (*_, kinds) in STEPS.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_peak_of_a_step_is_what_a_real_one_allocates(name: str, kind: str) -> None:
    function, weights, loss, _ = STEPS[name]
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == BF16 else torch.float32
    module = Layers(function, weights).to(dtype)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)
    real = allocated(module, x, loss, kind == AUTOCAST)
    assert predicted(module, x, loss, kind == AUTOCAST) == pytest.approx(real, rel=CLOSE[kind])
