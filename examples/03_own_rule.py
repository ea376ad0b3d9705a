"""An op that rooftrace does not know: it is listed, its bytes count, and a rule is one function."""

# %%
import torch
from torch import nn

import rooftrace as rt
from rooftrace.extend import Cost, OpView, rule

library = torch.library.Library("mylib", "DEF")
library.define("swish_sum(Tensor x, Tensor y) -> Tensor")
library.impl("swish_sum", lambda x, y: torch.empty_like(x), "Meta")


class Block(nn.Module):
    """A linear layer and somebody's fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mylib.swish_sum(self.up(x), x)


# %% [markdown]
# Without a rule the op is listed, with its shapes and the beginning of a rule to fill in.

# %%
graph = rt.trace(Block(), torch.empty(4096, 1024))
for op in rt.estimate(graph).unsupported_ops():
    print(f"no rule: {op.target} x{op.count}, {op.bytes / 1e6:.1f} MB, {op.shapes}")
    print(op.stub)


# %% [markdown]
# The rule says what the op computes, and that it reads its inputs and writes its output once.


# %%
@rule("mylib::swish_sum", fusion="pointwise")
def swish_sum(op: OpView) -> Cost:
    """out = x * sigmoid(x) + y.  Sigmoid is 4 flop, the product and the sum are one each."""
    return Cost.of(vector=6 * op.outputs[0].elements) + op.streamed()


estimate = rt.estimate(graph)
print(f"with the rule: {estimate.coverage.bytes_with_rule_share:.0%} of bytes have a rule")

# %% tags=["active-ipynb"]
# estimate
