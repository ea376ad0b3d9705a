"""A repository with models, as a user of the gate has one."""

from __future__ import annotations

from pathlib import Path

MODELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth, width):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net():
    return Net(3, 64), (torch.ones(8, 16, 64),)


def cnn():
    conv = nn.Conv2d(3, 8, 3)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten()), (torch.ones(2, 3, 16, 16),)
"""
SETTINGS = """
[tool.rooftrace]
executions = ["eager"]
phases = ["forward"]

[tool.rooftrace.targets]
net = "models.py:net"
cnn = "models.py:cnn"
"""
CASTS = "self.up(self.norm(x).double().float())"
"""In place of `self.up(self.norm(x))`: two casts more in every block."""


def repository(folder: Path, settings: str = SETTINGS, models: str = MODELS) -> Path:
    """Write the files of a repository."""
    (folder / "models.py").write_text(models)
    (folder / "pyproject.toml").write_text(settings)
    return folder
