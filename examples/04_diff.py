"""What a change costs before it is run: a norm that upcasts to fp32, found with its cause."""

# %%
import torch
from torch import nn

import rooftrace as rt
from rooftrace.reporting.views import as_markdown


class Norm(nn.Module):
    """RMS norm; `upcast` computes it in fp32."""

    def __init__(self, width: int, upcast: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.upcast = upcast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.upcast else x
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * scale).to(x.dtype) * self.gain


class Block(nn.Module):
    """Pre-norm linear layer with a residual."""

    def __init__(self, width: int, upcast: bool) -> None:
        super().__init__()
        self.norm = Norm(width, upcast)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


def model(upcast: bool) -> nn.Module:
    """Four blocks, bf16."""
    return nn.Sequential(*(Block(2048, upcast) for _ in range(4))).to(torch.bfloat16)


# %%
x = torch.empty(8192, 2048, dtype=torch.bfloat16)
change = rt.diff(model(False), model(True), x, phases=["forward"], execution="eager")

# %% tags=["active-py"]
print(as_markdown(change))

# %% tags=["active-ipynb"]
# change

# %% [markdown]
# A gate is a sentence for each budget that was passed.

# %%
for sentence in change.violations(["time>5%"]):
    print(sentence)
