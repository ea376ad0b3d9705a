"""Steps of fp32 as autocast runs them: the edited graph beside one traced under autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.rewrites import under_autocast


class Convolved(nn.Module):
    """Convolutions, norms of a batch, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(64), nn.Linear(64, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = F.relu(self.norm(self.second(x))) + x
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.zeros_like(x[:, 0, 0, 0]).long())


class Attending(nn.Module):
    """Attention as products, and a perceptron, both with a norm before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rows, self.out = (
            nn.LayerNorm(512),
            nn.Linear(512, 1536),
            nn.Linear(512, 512),
        )
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.rows(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(q @ k.transpose(1, 2) / 512**0.5, -1) @ v)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Under(nn.Module):
    """A module under autocast."""

    def __init__(self, inner: nn.Module, half: torch.dtype) -> None:
        super().__init__()
        self.inner, self.half = inner, half

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", self.half):
            return self.inner(x)


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize(
    ("make", "shape"), [(Convolved, (32, 3, 64, 64)), (Attending, (16, 512, 512))]
)
def test_a_step_under_autocast_costs_what_its_trace_does(
    make: Callable[[], nn.Module], shape: tuple[int, ...], phase: str
) -> None:
    with torch.device("meta"):
        module, x = make(), torch.empty(shape)
    plain, traced = (rt.trace(m, x, phase=phase) for m in (module, Under(module, torch.bfloat16)))
    edited, wanted = (
        rt.estimate(graph, chip="l4", execution="eager")
        for graph in (under_autocast(plain, "bf16"), traced)
    )
    assert edited.t_est == pytest.approx(wanted.t_est, rel=0.05)
    assert edited.bytes_hbm == pytest.approx(wanted.bytes_hbm, rel=0.05)
    assert edited.flops == pytest.approx(wanted.flops, rel=0.01)
    casts = [sum(op.name == "aten._to_copy" for op in g.ops) for g in (plain, edited.plan.source)]
    assert casts[0] < casts[1]


def test_the_chip_says_which_half_and_a_step_with_halves_is_not_told() -> None:
    with torch.device("meta"):
        module, x = Attending(), torch.empty(16, 512, 512)
    graphs = [rt.trace(m, x, phase="training") for m in (module, Under(module, torch.float16))]
    told = [
        [w.action for w in rt.tools.guidance(rt.estimate(g, chip=chip, execution="eager")).options]
        for g in graphs
        for chip in ("a100-sxm-80", "v100-sxm2-16")
    ]
    autocast = [[a[-4:] for a in actions if "autocast" in a] for actions in told]
    assert autocast == [["bf16"], ["fp16"], [], []]
