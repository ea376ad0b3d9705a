"""Steps of many ops: a loop whose ops differ, one whose ops repeat, and lists of experts."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Loop(nn.Module):
    """So many small ops, one after the other."""

    def __init__(self, ops: int, period: int | None) -> None:
        super().__init__()
        draw = random.Random(0)
        self.plan = [draw.randrange(7) if period is None else i % period for i in range(ops)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for kind in self.plan:
            if kind == 0:
                y = y + x
            elif kind == 1:
                y = y * x
            elif kind == 2:
                y = torch.relu(y)
            elif kind == 3:
                y = y - x
            elif kind == 4:
                y = torch.sigmoid(y)
            elif kind == 5:
                y = torch.tanh(y)
            else:
                y = torch.exp(y)
        return y


def flat() -> Built:
    return Loop(500_000, None), (torch.zeros(8, 16),)


def periodic() -> Built:
    return Loop(500_000, 3), (torch.zeros(8, 16),)


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return hidden


class Experts(nn.Module):
    """A list of experts, of which each takes its tokens in Python."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norm(x)
        out = torch.zeros_like(x)
        weight, chosen = self.router(inside).softmax(-1).topk(8)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            out.index_add_(0, rows, expert(inside[rows]) * weight[rows, slot, None])
        return x + out


def experts() -> Built:
    """100 layers of 512 experts: 51,200 modules with 153,600 matrices."""
    with torch.device("meta"):
        layers = nn.Sequential(*(Experts(1024, 512, 512) for _ in range(100)))
        return layers, (torch.empty(4096, 1024),)


def encoder() -> Built:
    """What the trace of `large.py` is of."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return layer, (torch.ones(4, 16, 64),)
