"""Findings of calls: numbers made again, too wide, or not read; loops; inputs that grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.reporting.planted_ways import (
    HALF,
    Way,
    half,
    normal,
    same,
)

# -- numbers that are made again, or wider than the rest -------------------------------------------


class Windows(nn.Module):
    """Layers, each of which makes the mask of attention to near tokens for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 1536) for _ in range(4))

    def mask(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        far = (at[:, None] - at).abs() > 512
        rows = torch.zeros(x.shape[0], 1, *far.shape, dtype=x.dtype, device=x.device)
        return rows.masked_fill(far, float("-inf"))  # planted: repeated

    def shared(self, x: Tensor) -> Tensor | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared(x)
        for layer in self.layers:
            mask = self.mask(x) if shared is None else shared
            rows = layer(x).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(*rows, mask).transpose(1, 2).flatten(2)
        return x


class WindowsMended(Windows):
    def shared(self, x: Tensor) -> Tensor | None:
        return self.mask(x)


class Messages(nn.Module):
    """Sums over the neighbours of nodes, in 64 bits as the degrees came from NumPy."""

    wide = torch.float64

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))
        self.register_buffer("degrees", torch.ones(100_000, 1, dtype=self.wide))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            sums = torch.zeros_like(x, dtype=self.wide)
            sums.index_add_(0, target, layer(x)[source].to(self.wide))  # planted: doubles
            x = (sums / self.degrees).relu().float()
        return x


class MessagesMended(Messages):
    wide = torch.float32


def edges() -> tuple[Tensor, ...]:
    """100,000 nodes of 256 numbers, and a million edges between them."""
    source, target = (torch.randint(0, 100_000, (1_000_000,)) for _ in range(2))
    return torch.randn(100_000, 256), source, target


class Codec(nn.Module):
    """Wide products whose weights stay in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(8192, 8192)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = F.linear(x, weight.to(x.dtype)).relu()  # planted: cast
        return x


class Masks(nn.Module):
    """Convolutions of so many channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        how = {"kernel_size": 3, "padding": 1, "bias": False}
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, **how) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()  # planted: channels
        return x


def last(module: nn.Module) -> nn.Module:
    """A module in bf16 with channels last."""
    return module.to(HALF).to(memory_format=torch.channels_last)


def images(channels: int) -> Callable[[], tuple[Tensor, ...]]:
    """Images in bf16 with channels last."""
    return lambda: (
        torch.randn(32, channels, 100, 100).to(HALF).to(memory_format=torch.channels_last),
    )


class Parts(nn.Module):
    """A convolution of each part of the channels, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 256, 1)
        self.parts = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        pieces = self.first(x).chunk(8, 1)
        pairs = zip(pieces, self.parts, strict=True)
        made = [F.conv2d(p, c.weight, c.bias, padding=1) for p, c in pairs]  # planted: groups
        return torch.cat(made, 1)


class PartsMended(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(64, 256, 1), nn.Conv2d(256, 256, 3, padding=1, groups=8))


class Items(nn.Module):
    """A product for each sequence of a batch."""

    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([a @ b.T for a, b in zip(x, y, strict=True)])  # planted: loop

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.scores(x, y)


class ItemsMended(Items):
    def scores(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ y.transpose(1, 2)


class Cells(nn.Module):
    """A cell of an LSTM for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(256, 512)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[1], 512)
        states = []
        for step in x:
            h, c = self.cell(step, (h, c))  # planted: steps
            states.append(h)
        return torch.stack(states)


class CellsMended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(256, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Hot(nn.Module):
    """A table that is multiplied with rows of one 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(8192, 1024, bias=False)

    def forward(self, at: Tensor) -> Tensor:
        return self.table(F.one_hot(at, 8192).to(self.table.weight.dtype))  # planted: lookup


class Scaled(nn.Module):
    """Products, each of which a buffer in fp32 makes fp32."""

    def __init__(self, wide: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(4)).to(HALF)
        self.register_buffer("scale", torch.ones(2048, dtype=torch.float32 if wide else HALF))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x.to(HALF)) * self.scale)  # planted: promoted
        return x


class Divided(nn.Module):
    """Products with weights that each step divides by their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8192, 8192))

    def divided(self) -> Tensor:
        return self.weight / self.weight.norm(dim=1, keepdim=True)  # planted: before

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.divided())


class DividedMended(Divided):
    def divided(self) -> Tensor:
        return self.weight


class Rms(nn.Module):
    """A norm spelled in fp32, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2048))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)  # planted: named
        return self.weight * wide.to(x.dtype)


class RmsNamed(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (2048,), self.weight, 1e-6)


class Normal(nn.Module):
    """Residual blocks before which rows are normed."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm() for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


# -- results that are not read, and inputs that grow ----------------------------------------------


class Cached(nn.Module):
    """One more token, whose key and value make a cache longer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(2048, 6144)

    def grown(self, cache: Tensor, new: Tensor) -> Tensor:
        return torch.cat([cache, new], 2)  # planted: room

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        query, key, value = self.qkv(x).unflatten(-1, (3, 16, 128)).permute(2, 0, 3, 1, 4)
        keys, values = self.grown(keys, key), self.grown(values, value)
        return F.scaled_dot_product_attention(query, keys, values), keys, values


class CachedMended(Cached):
    def grown(self, cache: Tensor, new: Tensor) -> Tensor:
        cache[:, :, -1:] = new
        return cache


def caches(rows: int) -> Callable[[], tuple[Tensor, ...]]:
    """One token of 32 sequences, and their keys and values."""
    shapes = (32, 1, 2048), (32, 16, rows, 128), (32, 16, rows, 128)
    return lambda: tuple(torch.randn(shape).to(HALF) for shape in shapes)


class Sampled(nn.Module):
    """The most likely words of a vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1024, 32000, bias=False)

    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        shares, words = torch.sort(logits, dim=-1, descending=True)  # planted: sort
        return shares[:, :50], words[:, :50]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.best(self.head(x))


class SampledMended(Sampled):
    def best(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(logits, 50)


class Last(nn.Module):
    """The next word, from logits of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1024, 50000, bias=False)

    def last(self, x: Tensor) -> Tensor:
        return self.head(x)[:, -1]  # planted: position

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x).argmax(-1)


class LastMended(Last):
    def last(self, x: Tensor) -> Tensor:
        return self.head(x[:, -1])


class Again(nn.Module):
    """Layers that run again in backward, although there is room for what they make."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        how: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
        layers = (nn.TransformerEncoderLayer(1024, 16, 4096, **how) for _ in range(3))
        self.layers, self.again = nn.ModuleList(layers), again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.again:
                x = checkpoint(layer, x, use_reentrant=False)  # planted: checkpoints
            else:
                x = layer(x)
        return x


class Conditioned(nn.Module):
    """The time of a sample, expanded over its positions before two layers of it."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.mix, self.first, self.second = (nn.Linear(512, 512) for _ in range(3))
        self.late = late

    def timed(self, t: Tensor) -> Tensor:
        return self.second(F.silu(self.first(t)))  # planted: spread

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t = t[:, None]
        return self.mix(x) * (self.timed(t) if self.late else self.timed(t.expand(x.shape)))


class Additive(nn.Module):
    """Attention by a layer that reads the query beside each key."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.score = nn.Linear(1024, 512), nn.Linear(512, 1)

    def mixed(self, query: Tensor, keys: Tensor) -> Tensor:
        wide = query[:, None].expand(keys.shape)
        return self.mix(torch.cat((wide, keys), -1))  # planted: beside

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return (self.score(self.mixed(query, keys).tanh()).softmax(1) * keys).sum(1)


class AdditiveMended(Additive):
    def mixed(self, query: Tensor, keys: Tensor) -> Tensor:
        first, second = self.mix.weight.split(512, 1)
        return F.linear(query, first)[:, None] + F.linear(keys, second, self.mix.bias)


class Taught(nn.Module):
    """A student and its teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))) for _ in range(2)
        )


def taught_step(module: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(module.student(x), module.teacher(x)).backward()  # planted: unread
    optimizer.step()


def spared_step(module: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    with torch.no_grad():
        aim = module.teacher(x)
    F.mse_loss(module.student(x), aim).backward()
    optimizer.step()


class Framed(nn.Module):
    """The strength of frames of a sound, which are cut one by one."""

    def frames(self, x: Tensor) -> Tensor:
        parts = [x[:, at : at + 400] for at in range(0, x.shape[1] - 399, 160)]
        return torch.stack(parts, 1)  # planted: frames

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.frames(x) * 0.5).abs()


class FramedMended(Framed):
    def frames(self, x: Tensor) -> Tensor:
        return x.unfold(-1, 400, 160)


class Growing(nn.Module):
    """States of a loop, joined in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(1024, 1024)

    def forward(self, x: Tensor) -> Tensor:
        out = x[:, None]
        for _ in range(24):
            x = F.silu(self.step(x))
            out = torch.cat([out, x[:, None]], 1)  # planted: joins
        return out


class GrowingMended(Growing):
    def forward(self, x: Tensor) -> Tensor:
        out = [x[:, None]]
        for _ in range(24):
            x = F.silu(self.step(x))
            out.append(x[:, None])
        return torch.cat(out, 1)


class Normed(nn.Module):
    """Norms between casts, as CLIP has them."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(1024) for _ in range(4))
        self.wide = wide

    def norm(self, norm: Any, x: Tensor) -> Tensor:
        how = norm.normalized_shape, norm.weight.float(), norm.bias.float(), norm.eps
        return F.layer_norm(x.float(), *how).to(x.dtype)  # planted: norms

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.norms:
            x = F.gelu(self.norm(layer, x) if self.wide else layer(x))
        return x


CALLS = (
    same(
        "repeated",
        "rewrite",
        "Compute once",
        Way(make=half(Windows), inputs=normal(32, 2048, 512), phase="training"),
        make=half(WindowsMended),
    ),
    same("doubles", "compute", "fp64", Way(make=Messages, inputs=edges), make=MessagesMended),
    same(
        "cast",
        "copy",
        "as each step casts them",
        Way(make=Codec, inputs=normal(256, 8192)),
        make=half(Codec),
    ),
    same(
        "channels",
        "padding",
        "Pad 100 to 104",
        Way(make=lambda: last(Masks(100)), inputs=images(100)),
        make=lambda: last(Masks(104)),
        inputs=images(104),
    ),
    same(
        "loop",
        "rewrite",
        "equal calls",
        Way(make=Items, inputs=lambda: tuple(torch.randn(64, 256, 512).to(HALF) for _ in range(2))),
        make=ItemsMended,
    ),
    same(
        "groups",
        "rewrite",
        "groups=",
        Way(make=lambda: last(Parts()), inputs=images(64), phase="training"),
        make=lambda: last(PartsMended()),
    ),
    same(
        "steps",
        "rewrite",
        "all steps",
        Way(make=half(Cells), inputs=normal(24, 32, 256)),
        make=half(CellsMended),
    ),
    same(
        "lookup",
        "rewrite",
        "Look rows up",
        Way(make=half(Hot), inputs=lambda: (torch.randint(0, 8192, (65536,)),)),
        make=half(lambda: nn.Embedding(8192, 1024)),
    ),
    same(
        "promoted",
        "compute",
        "Keep in bf16",
        Way(make=Scaled, inputs=normal(16384, 2048)),
        make=lambda: Scaled(wide=False),
    ),
    same(
        "before",
        "rewrite",
        "Make once",
        Way(make=half(Divided), inputs=normal(256, 8192)),
        make=half(DividedMended),
    ),
    same(
        "room",
        "rewrite",
        "have room",
        Way(make=half(Cached), inputs=caches(4095)),
        make=half(CachedMended),
        inputs=caches(4096),
    ),
    same(
        "sort",
        "rewrite",
        "topk",
        Way(make=half(Sampled), inputs=normal(256, 1024)),
        make=half(SampledMended),
    ),
    same(
        "position",
        "rewrite",
        "one position",
        Way(make=half(Last), inputs=normal(8, 1024, 1024)),
        make=half(LastMended),
    ),
    same(
        "checkpoints",
        "memory",
        "Leave out checkpoints",
        Way(make=half(lambda: Again(True)), inputs=normal(8, 1024, 1024), phase="training"),
        make=half(lambda: Again(False)),
    ),
    same(
        "spread",
        "rewrite",
        "before they are repeated",
        Way(
            make=half(lambda: Conditioned(False)),
            inputs=lambda: (torch.randn(32, 1024, 512).to(HALF), torch.randn(32, 512).to(HALF)),
            phase="training",
        ),
        make=half(lambda: Conditioned(True)),
    ),
    same(
        "beside",
        "rewrite",
        "before they are repeated",
        Way(
            make=half(Additive),
            inputs=lambda: (torch.randn(256, 512).to(HALF), torch.randn(256, 1024, 512).to(HALF)),
            phase="training",
        ),
        make=half(AdditiveMended),
    ),
    same(
        "unread",
        "rewrite",
        "that no optimizer reads",
        Way(make=half(Taught), inputs=normal(8192, 1024), train=taught_step),
        train=spared_step,
    ),
    same(
        "joins",
        "rewrite",
        "once, after it",
        Way(make=half(Growing), inputs=normal(4096, 1024)),
        make=half(GrowingMended),
    ),
    same(
        "named",
        "rewrite",
        "F.rms_norm",
        Way(make=half(lambda: Normal(Rms)), inputs=normal(8, 1024, 2048), phase="training"),
        make=half(lambda: Normal(RmsNamed)),
    ),
    same(
        "frames",
        "rewrite",
        "unfold",
        Way(make=Framed, inputs=normal(32, 80000, dtype=torch.float32)),
        make=FramedMended,
    ),
    same(
        "norms",
        "compute",
        "Take norms of bf16",
        Way(make=half(lambda: Normed(True)), inputs=normal(16384, 1024), phase="training"),
        make=half(lambda: Normed(False)),
    ),
)
