"""Any module, any arguments: what one forward pass and one training step cost on an H200."""

# %%
import torch
from torch import nn

import rooftrace as rt


class Classifier(nn.Module):
    """Text classifier: embedding, two encoder layers, mean over the unmasked tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32_000, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(512, 10)

    def forward(self, ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(self.embedding(ids), src_key_padding_mask=~keep)
        pooled = (hidden * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return self.head(pooled)


# %% [markdown]
# The arguments are what the module takes. Here they are a batch of token ids and a mask.

# %%
model = Classifier()
ids = torch.zeros(64, 128, dtype=torch.long)
keep = torch.arange(128)[None].expand(64, -1) < 100

# %%
forward = rt.trace(model, ids, keep)
print(rt.estimate(forward, chip="h200-sxm"))

# %% [markdown]
# A training step has the loss, the backward pass and the optimizer too.

# %%
step = rt.trace(model, ids, keep, phase="training")
print(rt.estimate(step, chip="h200-sxm", execution="eager"))
