"""Findings of kernels: attention, layouts, products, the optimizer, launches, waits and copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.reporting.planted_ways import (
    HALF,
    ROWS,
    Way,
    half,
    heads,
    many_step,
    normal,
    same,
)

# -- an attention whose width is not innermost -----------------------------------------------------


class Pixels(nn.Module):
    """Attention over pixels, from one product for query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(512, 1536, 1), nn.Conv2d(512, 512, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)  # planted: width

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(x).reshape(x.shape[0], 3, 8, 64, -1).transpose(-1, -2).unbind(1)
        return x + self.out(self.attend(*rows).transpose(-1, -2).reshape(x.shape))


class PixelsMended(Pixels):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (query.contiguous(), key.contiguous(), value.contiguous())
        return F.scaled_dot_product_attention(*rows)


class Widths(nn.Module):
    """Attention with a bias, whose heads are 20 wide, by several layers of one line."""

    padded = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 480) for _ in range(3))
        self.register_buffer("bias", torch.zeros(1, 8, 720, 720, dtype=HALF))

    def attend(self, *rows: Tensor) -> Tensor:
        if self.padded:
            query, key, value = (F.pad(t, (0, 4)) for t in rows)
            out = F.scaled_dot_product_attention(query, key, value, self.bias, scale=20**-0.5)
            return out[..., :20]
        return F.scaled_dot_product_attention(*rows, self.bias)  # planted: odd

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(x).unflatten(-1, (3, 8, 20)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(*rows).transpose(1, 2).flatten(2)
        return x


class WidthsMended(Widths):
    padded = True


# -- convolutions of channels first ----------------------------------------------------------------


class Blocks(nn.Module):
    """Residual convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = x + layer(x).relu()  # planted: channels_last
        return x


# -- products --------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """Two wide products."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Wide(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # planted: precision


class Exact(Perceptron):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # planted: tf32


class Head(nn.Module):
    """The logits of a vocabulary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.head = nn.Linear(2048, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)  # planted: vocabulary


# -- an optimizer step of many small kernels -------------------------------------------------------


def fused_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    module(x).sum().backward()
    optimizer.step()


def looped_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    gradients_of(module, x)
    for weight in module.parameters():
        weight.grad.div_(8)  # planted: lists
    optimizer.step()


def listed_step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    gradients_of(module, x)
    torch._foreach_div_([weight.grad for weight in module.parameters()], 8)
    optimizer.step()


def gradients_of(module: nn.Module, x: Tensor) -> None:
    """Gradients of a step, from none."""
    module.zero_grad()
    module(x).sum().backward()


def perceptrons() -> nn.Module:
    return nn.Sequential(*[Perceptron(2048) for _ in range(8)])


# -- what the host and its launches do -------------------------------------------------------------


class WrittenGelu(nn.Module):
    """GELU as its formula says it, an operation each."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)  # planted: fusion
        return 0.5 * x * (1 + torch.tanh(inner))


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class SpelledGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = 0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))  # planted: activation
        return x * 0.5 * (1.0 + torch.tanh(inner))


class Activated(nn.Module):
    def __init__(self, act: Callable[[], nn.Module] = SpelledGelu) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(1024, 4096), act(), nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Small(nn.Module):
    """Many layers that take a GPU less time than their launch takes the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(400))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()  # planted: launch
        return x


class Asking(nn.Module):
    """Layers, each of which asks the device for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(200))

    def scale(self, x: Tensor) -> Any:
        return x.abs().amax().item()  # planted: wait

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x / self.scale(x)).relu()
        return x


class AskingMended(Asking):
    def scale(self, x: Tensor) -> Any:
        return x.abs().amax()


class Marked(nn.Module):
    """Layers, after each of which some rows are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(20))
        self.row = nn.Parameter(torch.zeros(1024))

    def marked(self, x: Tensor, mask: Tensor) -> Tensor:
        x[mask] = self.row  # planted: masks
        return x

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.marked(layer(x).relu(), mask)
        return x


class MarkedMended(Marked):
    def marked(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask[..., None], self.row, x)


def masked() -> tuple[Tensor, ...]:
    """Rows of 32 sequences, and which of them are replaced."""
    return torch.randn(32, 196, 1024).to(HALF), torch.rand(32, 196) < 0.5


# -- copies ----------------------------------------------------------------------------------------


class Turned(nn.Module):
    """A mean over one and the same sequence in two orders."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4096, dtype=HALF))

    def turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()  # planted: copy

    def forward(self, x: Tensor) -> Tensor:
        return (self.turned(x) * 2).sum(-1) * self.gate


class TurnedMended(Turned):
    def turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Grouped(nn.Module):
    """Attention whose heads share keys and values, which are copied for each."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (t.repeat_interleave(8, 1) for t in (key, value))  # planted: heads
        return F.scaled_dot_product_attention(query, key, value)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(query, key, value)


class GroupedMended(Grouped):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


# -- attention that is written out -----------------------------------------------------------------


class Written(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.transpose(-1, -2) / math.sqrt(128)
        return torch.softmax(scores, -1) @ value  # planted: attention


class WrittenMended(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


class Scaled(nn.Module):
    """Attention whose scores are scaled by the product itself, which adds nothing."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (t.flatten(0, 1) for t in (query, key, value))
        nothing = query.new_empty(1, 1, 1).expand(len(query), query.shape[1], key.shape[1])
        scores = torch.baddbmm(nothing, query, key.mT, beta=0, alpha=128**-0.5)
        return torch.bmm(scores.softmax(-1), value).unflatten(0, (16, -1))  # planted: scaled


class Laid(nn.Module):
    """Attention of heads that are copied to lie one after the other, which no kernel needs."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(1024, 3072)

    def laid(self, x: Tensor) -> Tensor:
        return x.contiguous()  # planted: laid

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x).unflatten(-1, (3, 8, 128)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*map(self.laid, rows), is_causal=True)


class LaidMended(Laid):
    def laid(self, x: Tensor) -> Tensor:
        return x


class Turning(nn.Module):
    """Attention after an embedding of positions in fp32, which leaves its operands in fp32."""

    narrow = False

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Linear(1024, 3072), nn.Linear(1024, 1024)
        self.register_buffer("turn", torch.ones(1024, 64))

    def turned(self, x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        turn = self.turn.float()
        return torch.cat((first * turn - second, first + second * turn), -1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self.turned(query), self.turned(key), value.float()
        return F.scaled_dot_product_attention(query, key, value)  # planted: widened

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x).unflatten(-1, (3, 8, 128)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*rows).transpose(1, 2).flatten(2).to(x.dtype))


class TurningMended(Turning):
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = self.turned(query).to(value.dtype), self.turned(key).to(value.dtype)
        return F.scaled_dot_product_attention(query, key, value)


KERNELS = (
    same(
        "width",
        "layout",
        "innermost",
        Way(make=half(Pixels), inputs=normal(32, 512, 32, 32), phase="training"),
        make=half(PixelsMended),
    ),
    same(
        "odd",
        "layout",
        "Pad heads",
        Way(make=half(Widths), inputs=normal(32, 720, 160), phase="training"),
        make=half(WidthsMended),
    ),
    same(
        "channels_last",
        "layout",
        "channels last",
        Way(make=half(Blocks), inputs=normal(256, 256, 56, 56)),
        make=lambda: Blocks().to(HALF).to(memory_format=torch.channels_last),
        inputs=lambda: (
            torch.randn(256, 256, 56, 56).to(HALF).to(memory_format=torch.channels_last),
        ),
    ),
    same(
        "precision",
        "compute",
        "in bf16 what",
        Way(make=Wide, inputs=ROWS),
        make=half(Wide),
        inputs=normal(8192, 4096),
    ),
    same("tf32", "compute", "TF32", Way(make=Exact, inputs=ROWS), execution={"tf32": True}),
    same(
        "vocabulary",
        "padding",
        "50,264",
        Way(make=half(lambda: Head(50257)), inputs=normal(8192, 2048)),
        make=half(lambda: Head(50264)),
    ),
    same(
        "optimizer",
        "optimizer",
        "fused",
        Way(make=perceptrons, inputs=normal(64, 2048, dtype=torch.float32), train=many_step),
        train=fused_step,
    ),
    same(
        "fusion",
        "fusion",
        "Compile",
        Way(make=WrittenGelu, inputs=normal(16384, 32768)),
        make=Gelu,
    ),
    same(
        "launch",
        "launch",
        "CUDA graph",
        Way(make=half(Small), inputs=normal(64, 512)),
        execution={"dispatch": "graph"},
    ),
    same(
        "wait",
        "wait",
        "item",
        Way(make=half(Asking), inputs=normal(4096, 1024)),
        make=half(AskingMended),
    ),
    same(
        "masks",
        "wait",
        "torch.where",
        Way(make=half(Marked), inputs=masked),
        make=half(MarkedMended),
    ),
    same(
        "copy",
        "copy",
        "Leave out copies",
        Way(make=Turned, inputs=normal(128, 4096, 4096)),
        make=TurnedMended,
    ),
    same(
        "heads",
        "rewrite",
        "without a copy",
        Way(make=Grouped, inputs=heads(4, 16384, 16)),
        make=GroupedMended,
    ),
    same(
        "attention",
        "rewrite",
        "one kernel",
        Way(make=Written, inputs=heads(32)),
        make=WrittenMended,
    ),
    same(
        "scaled",
        "rewrite",
        "one kernel",
        Way(make=Scaled, inputs=heads(32)),
        make=WrittenMended,
    ),
    same(
        "laid",
        "copy",
        "Leave out copies",
        Way(make=half(Laid), inputs=normal(8, 2048, 1024), phase="training"),
        make=half(LaidMended),
    ),
    same(
        "lists",
        "rewrite",
        "in one call",
        Way(make=half(perceptrons), inputs=normal(64, 2048), train=looped_step),
        train=listed_step,
    ),
    same(
        "widened",
        "compute",
        "Attend in bf16",
        Way(make=half(Turning), inputs=normal(8, 1024, 1024), phase="training"),
        make=half(TurningMended),
    ),
    same(
        "activation",
        "rewrite",
        "F.gelu(approximate='tanh')",
        Way(make=half(Activated), inputs=normal(8, 1024, 1024), phase="training"),
        make=half(lambda: Activated(Gelu)),
    ),
)
