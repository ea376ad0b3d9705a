"""Another counter gives another number: each difference, with the module, the op and the reason."""

# %%
import torch
from torch import nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.reporting.views import as_markdown, comparisons_view


class Tagger(nn.Module):
    """Words in, a tag for each out: an LSTM, attention over its states, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10_000, 256)
        self.lstm = nn.LSTM(256, 256, batch_first=True)
        self.tags = nn.Linear(256, 40)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.words(ids))
        return self.tags(F.scaled_dot_product_attention(states, states, states))


# %%
# On real CPU tensors FlopCounterMode meets a fused LSTM; on meta it would see its products.
model, ids = Tagger().eval(), torch.zeros(8, 128, dtype=torch.long)
found = rt.compare(model, ids, phases=["forward"])

# %% tags=["active-py"]
print(as_markdown(comparisons_view("Tagger", found)), end="")

# %% tags=["active-ipynb"]
# from IPython.display import Markdown
#
# Markdown(as_markdown(comparisons_view("Tagger", found)))
