"""A small model, its loop, and a clock that the tests hand in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftrace.costmodels.estimates import flop_counts
from rooftrace.measured.live import LiveSession


class Net(nn.Module):
    """Two products; running statistics and dropout, which a careless trace would disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(F.gelu(self.norm(self.first(x)))))


def made() -> Net:
    """The same weights each time; random numbers go on from the same state too."""
    torch.manual_seed(0)
    return Net()


def batch(size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 16, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


class Ticks:
    """A clock: each reading is later than the one before by the next of `gaps`, in turns."""

    def __init__(self, *gaps: float) -> None:
        self.gaps, self.reads, self.now = gaps, 0, 0.0

    def __call__(self) -> float:
        self.now += self.gaps[self.reads % len(self.gaps)]
        self.reads += 1
        return self.now


def matrix_flops(live: LiveSession) -> int:
    """FLOP of the most frequent step in products, as FlopCounterMode counts them."""
    return sum(count * sum(flop_counts(graph).values()) for graph, count in live.graphs)
