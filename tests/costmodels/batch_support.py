"""Small models for plans at many sizes: a stack of decoder layers, a stack of convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import rooftrace as rt
from rooftrace.costmodels.planning.plans import Plan
from rooftrace.tracer.graph.graph import OpGraph

WIDTH, HEADS, KV_HEADS = 64, 4, 2


class Layer(nn.Module):
    """One decoder layer: a token for each request, beside keys and values of earlier ones."""

    def __init__(self, batch: int, kv: int, waits: bool) -> None:
        super().__init__()
        self.waits = waits
        size = WIDTH // HEADS
        for name in ("keys", "values"):
            self.register_buffer(name, torch.empty(batch, KV_HEADS, kv, size))
        self.norm = nn.RMSNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 6 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, rows = x.shape[:2]
        hidden = self.norm(x)
        query = self.q(hidden).view(batch, rows, HEADS, -1).transpose(1, 2)
        key, value = self.kv(hidden).view(batch, rows, 2 * KV_HEADS, -1).transpose(1, 2).chunk(2, 1)
        keys, values = torch.cat([self.keys, key], 2), torch.cat([self.values, value], 2)
        mixed = functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, rows, -1))
        gate, up = self.up(x).chunk(2, -1)
        x = x + self.down(functional.silu(gate) * up)
        if self.waits:
            x.sum().item()
        return x


class Decoder(nn.Module):
    def __init__(self, layers: int, *sizes: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.layers = nn.ModuleList([Layer(*sizes) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, 96, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def decode(
    batch: int, kv: int, layers: int = 9, waits: bool = False, dtype: torch.dtype = torch.bfloat16
) -> OpGraph:
    """A step of the decoder."""
    with torch.device("meta"):
        model = Decoder(layers, batch, kv, waits).to(dtype)
        tokens = torch.zeros(batch, 1, dtype=torch.long)
    return rt.trace(model, tokens)


def images(batch: int, size: int) -> OpGraph:
    """Convolutions with more and with fewer channels, in fp32."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, groups=16),
            nn.Conv2d(16, 32, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 5),
        )
        x = torch.empty(batch, 3, size, size)
    return rt.trace(model, x)


def planned(graphs: list[OpGraph], execution: Any) -> list[Plan]:
    return [rt.plan(graph, execution) for graph in graphs]
