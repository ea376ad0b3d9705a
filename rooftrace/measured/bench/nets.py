"""Plain torch models of the usual kinds, to measure without a model library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cache = tuple[tuple[Tensor, Tensor], ...]


class Attention(nn.Module):
    """Self-attention, or attention to `context`; key heads may be fewer than query heads."""

    def __init__(self, width: int, heads: int, key_heads: int = 0, context: int = 0) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads or heads, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(context or width, 2 * self.key_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        causal: bool = False,
        past: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = x.shape
        q = self.query(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        made = self.key_value(x if context is None else context)
        k, v = made.view(batch, -1, 2 * self.key_heads, self.size).transpose(1, 2).chunk(2, dim=1)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        attend: Any = F.scaled_dot_product_attention
        y = attend(
            q, k, v, is_causal=causal and past is None, enable_gqa=self.heads != self.key_heads
        )
        return self.out(y.transpose(1, 2).reshape(batch, length, width)), (k, v)


class Gated(nn.Module):
    """A feed-forward layer with a gate."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.into(x).chunk(2, dim=-1)
        result: Tensor = self.out(F.silu(gate) * value)
        return result


class Mixture(nn.Module):
    """A mixture of experts: each token takes a few; the experts run one after the other."""

    def __init__(self, width: int, hidden: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList([Gated(width, hidden) for _ in range(experts)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = self.router(flat).softmax(-1).topk(self.chosen, dim=-1)
        result = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, place = (ids == index).nonzero(as_tuple=True)
            result.index_add_(0, rows, expert(flat[rows]) * weights[rows, place, None])
        return result.view_as(x)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm and with a shortcut."""

    def __init__(
        self, width: int, heads: int, key_heads: int, hidden: int, experts: int, chosen: int
    ) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, key_heads)
        self.feed = Mixture(width, hidden, experts, chosen) if experts else Gated(width, hidden)

    def forward(
        self, x: Tensor, causal: bool = False, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, state = self.attention(self.before(x), causal=causal, past=past)
        x = x + y
        return x + self.feed(self.between(x)), state


class Decoder(nn.Module):
    """A language model that keeps its keys and values; with `experts`, a mixture of them."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        key_heads: int,
        hidden: int,
        vocabulary: int,
        experts: int = 0,
        chosen: int = 2,
        positions: int = 8192,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(
            [DecoderLayer(width, heads, key_heads, hidden, experts, chosen) for _ in range(layers)]
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(
        self, input_ids: Tensor, past_key_values: Cache | None = None, use_cache: bool = False
    ) -> dict[str, Any]:
        start = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        places = torch.arange(start, start + input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.places(places)
        states = []
        for index, block in enumerate(self.blocks):
            past = None if past_key_values is None else past_key_values[index]
            x, state = block(x, causal=True, past=past)
            states.append(state)
        result: dict[str, Any] = {"logits": self.head(self.norm(x))}
        return {**result, "past_key_values": tuple(states)} if use_cache else result


class VisionTransformer(nn.Module):
    """Patches of an image through blocks of attention."""

    def __init__(
        self, image: int, patch: int, width: int, layers: int, heads: int, classes: int = 1000
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(
            [DecoderLayer(width, heads, heads, 4 * width, 0, 0) for _ in range(layers)]
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x, _ = block(x)
        result: Tensor = self.head(x.mean(1))
        return result


def _normed(cin: int, cout: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(cout),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut."""

    def __init__(self, cin: int, width: int, stride: int) -> None:
        super().__init__()
        cout = 4 * width
        self.body = nn.Sequential(
            _normed(cin, width, 1),
            nn.ReLU(inplace=True),
            _normed(width, width, 3, stride),
            nn.ReLU(inplace=True),
            _normed(width, cout, 1),
        )
        same = cin == cout and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else _normed(cin, cout, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class Inverted(nn.Module):
    """1x1 to a wider layer, depthwise, 1x1 back, and a shortcut."""

    def __init__(self, cin: int, cout: int, stride: int, factor: int = 6, kernel: int = 3) -> None:
        super().__init__()
        wide = factor * cin
        self.body = nn.Sequential(
            _normed(cin, wide, 1),
            nn.SiLU(inplace=True),
            _normed(wide, wide, kernel, stride, groups=wide),
            nn.SiLU(inplace=True),
            _normed(wide, cout, 1),
        )
        self.added = stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.added else y


class ConvNet(nn.Module):
    """Stages of bottlenecks, or (`inverted`) of depthwise blocks, from an image to classes."""

    def __init__(
        self, widths: Sequence[int], depths: Sequence[int], inverted: bool = False
    ) -> None:
        super().__init__()
        wider = 1 if inverted else 4
        blocks: list[nn.Module] = [_normed(3, widths[0], 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        cin = widths[0]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for index in range(depth):
                stride = 2 if index == 0 and stage else 1
                blocks.append((Inverted if inverted else Bottleneck)(cin, width, stride))
                cin = wider * width
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(cin, 1000)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(x).mean((2, 3)))
        return result


class Residual(nn.Module):
    """Two convolutions behind group norms, with the time step added between."""

    def __init__(self, cin: int, cout: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, 1, 1))
        self.time = nn.Linear(time, cout)
        self.second = nn.Sequential(
            nn.GroupNorm(8, cout), nn.SiLU(), nn.Conv2d(cout, cout, 3, 1, 1)
        )
        self.skip: nn.Module = nn.Identity() if cin == cout else nn.Conv2d(cin, cout, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        result: Tensor = self.skip(x) + self.second(y)
        return result


class Attended(nn.Module):
    """Pixels attend to each other, then to a text."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.inner = Attention(width, heads)
        self.outer = Attention(width, heads, context=context)
        self.feed = Gated(width, 4 * width)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        y = x.flatten(2).transpose(1, 2)
        y = y + self.inner(self.norms[0](y))[0]
        y = y + self.outer(self.norms[1](y), text)[0]
        y = y + self.feed(self.norms[2](y))
        result: Tensor = y.transpose(1, 2).reshape(x.shape)
        return result


class UNet(nn.Module):
    """One step of a diffusion model: down, up, shortcuts across, attention where it is small."""

    def __init__(self, width: int, factors: Sequence[int], heads: int, context: int) -> None:
        super().__init__()
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.inside = nn.Conv2d(4, width, 3, 1, 1)
        widths = [width * factor for factor in factors]
        befores = [width, *widths[:-1]]
        self.down = nn.ModuleList(
            [Residual(a, b, time) for a, b in zip(befores, widths, strict=True)]
        )
        self.shrink = nn.ModuleList([nn.Conv2d(w, w, 3, 2, 1) for w in widths])
        self.middle = Residual(widths[-1], widths[-1], time)
        self.attended = nn.ModuleList([Attended(w, heads, context) for w in widths])
        self.up = nn.ModuleList(
            [
                Residual(a + b, b, time)
                for a, b in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
            ]
        )
        self.outside = nn.Conv2d(widths[0], 4, 3, 1, 1)

    def forward(self, x: Tensor, step: Tensor, text: Tensor) -> Tensor:
        rates = torch.exp(-torch.arange(self.width // 2, device=x.device) / self.width)
        angle = (step[:, None] * rates).to(x.dtype)
        time = self.time(torch.cat((angle.sin(), angle.cos()), dim=-1))
        x = self.inside(x)
        across = []
        for index, block in enumerate(self.down):
            x = block(x, time)
            if index:  # the first resolution has too many pixels
                x = self.attended[index](x, text)
            across.append(x)
            x = self.shrink[index](x)
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, across.pop()), dim=1), time)
        result: Tensor = self.outside(x)
        return result


class Recurrent(nn.Module):
    """An LSTM over words, with a class for each."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 64)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(self.words(words))[0])
        return result


class Recommender(nn.Module):
    """Sums of looked-up rows and a dense vector, every pair of them multiplied, then a score."""

    def __init__(self, rows: int, tables: int, width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)]
        )
        self.bottom = nn.Sequential(
            nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        pairs = tables * (tables + 1) // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = rows @ rows.transpose(1, 2)
        result: Tensor = self.top(torch.cat((x, products[:, self.pairs[0], self.pairs[1]]), dim=1))
        return result
