"""What a symbolic tracer gives up on: an `if` on data, a loop by an argument, a shared module.

No adapter and no change to the model is needed: rooftrace runs the module on fake tensors. Which
way a data-dependent `if` goes cannot be known without the data, so the report lists what it took
as an assumption.
"""

import torch
from torch import Tensor, nn


class Refiner(nn.Module):
    """Refines a sequence step by step, and mixes its channels with a learnt matrix at the end."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.step = nn.Sequential(nn.Linear(width, width), nn.SiLU())
        self.gate = nn.Parameter(torch.zeros(width))
        self.mixing = nn.Parameter(torch.eye(width))

    def forward(self, x: Tensor, *, steps: int = 1, context: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        for _ in range(steps):
            x = x + self.step(x)
        if context is not None:
            weights = torch.einsum("btd,bsd->bts", x, context).softmax(dim=-1)
            x = x + torch.einsum("bts,bsd->btd", weights, context)
        if x.abs().amax() > 1e3:  # depends on the values, not only on the shapes
            x = x * self.gate.sigmoid()
        return torch.matmul(self.norm(x), self.mixing)  # `norm` runs twice, its weights are one


def build() -> tuple[nn.Module, dict[str, object]]:
    """The module and its keyword arguments: tensors, and a Python int that sets the loop."""
    inputs = {"x": torch.randn(4, 64, 256), "steps": 3, "context": torch.randn(4, 16, 256)}
    return Refiner(), inputs
