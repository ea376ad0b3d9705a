"""A model sharded over many chips: what they exchange, what waits for it, and how it scales."""

# %%
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import rooftrace as rt


class Block(nn.Module):
    """The MLP of a transformer, with its residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


# %% [markdown]
# The sharded module is the plan. `rt.tools.fake_mesh` stands for the processes: one of them is
# traced, on the meta device, and its collectives talk to nobody.


# %%
def step(data: int, tensor: int) -> rt.types.OpGraph:
    """A training step of 8 blocks, 4,096 tokens for each of `data` replicas."""
    with rt.tools.fake_mesh({"dp": data, "tp": tensor}) as mesh, torch.device("meta"):
        model = nn.Sequential(*(Block(4096) for _ in range(8))).bfloat16()
        for block in model:
            if tensor > 1:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan)
            if data > 1:
                fully_shard(block, mesh=mesh["dp"])
        if data > 1:
            fully_shard(model, mesh=mesh["dp"])  # the root, which prefetches the next block
        x = torch.empty(4096, 4096, dtype=torch.bfloat16)
        return rt.trace(model, x, phase="training")


# %%
print(f"{'mesh':14} {'step':>8} {'tokens/s of a chip':>19} {'exposed':>8} {'peak':>9}  MFU")
for data, tensor in ((8, 1), (4, 2), (2, 4), (1, 8)):
    estimate = rt.estimate(step(data, tensor), system="dgx-h100")
    tokens = 4096 * data / estimate.t_est / (data * tensor)
    print(
        f"dp={data}, tp={tensor:<5} {estimate.t_est * 1e3:5.2f} ms {tokens:19,.0f}"
        f" {estimate.times.t_exposed / estimate.t_est:8.0%}"
        f" {estimate.memory.peak / 2**30:5.1f} GiB {estimate.mfu:4.0%}"
    )

# %% [markdown]
# What each group of processes sends, in one step of the first mesh, and how much of it the step
# waits for: the rest is hidden beside computing.

# %%
estimate = rt.estimate(step(8, 1), system="dgx-h100")
for row in estimate.communication:
    print(
        f"{row.axis} {row.kind} of {row.ranks}: {row.calls} calls, {row.bytes / 1e9:.2f} GB,"
        f" {row.seconds * 1e3:.2f} ms, {row.exposed * 1e3:.2f} ms exposed"
    )

# %% tags=["active-ipynb"]
# estimate
