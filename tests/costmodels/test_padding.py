"""Odd sizes that activations have of their own, beside modules that are written padded."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.rewrites.layouts import odd_sizes, own_sizes, with_padded_products
from rooftrace.graph import OpGraph


class Mixer(nn.Module):
    """Mixes an odd number of tokens; wide: tokens that its weights are made for."""

    def __init__(self, wide: int, hidden: int = 256) -> None:
        super().__init__()
        self.wide, self.norm = wide, nn.LayerNorm(512)
        self.up, self.down = nn.Linear(wide, hidden), nn.Linear(hidden, wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).transpose(1, 2)
        tokens = h.shape[2]
        if self.wide > tokens:
            h = F.pad(h, (0, self.wide - tokens))
        h = self.down(F.gelu(self.up(h)))[..., :tokens]
        return torch.add(x, h.transpose(1, 2))


class Patches(nn.Module):
    """Rows of 147 values, cut out of an image; wide: values that the weights are made for."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.wide, self.layer, self.last = wide, nn.Linear(wide, 768), nn.Linear(768, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unfold(2, 7, 7).unfold(3, 7, 7).permute(0, 2, 3, 1, 4, 5).reshape(-1, 1024, 147)
        x = F.pad(x, (0, self.wide - 147)) if self.wide > 147 else x
        y: torch.Tensor = self.last(self.layer(x))
        return y


def traced(
    kind: Callable[[int], nn.Module], wide: int, count: int, phase: str, *shape: int
) -> OpGraph:
    with torch.device("meta"):
        model = nn.Sequential(*(kind(wide) for _ in range(count))).bfloat16()
        return rt.trace(
            model, torch.empty(shape, dtype=torch.bfloat16), phase=phase, optimizer="adamw"
        )


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("count", [1, 6])  # one layer, and some that are a repeat
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_padded_products_cost_what_a_module_written_padded_does(
    phase: str, count: int, execution: str
) -> None:
    odd = traced(Mixer, 49, count, phase, 256, 49, 512)
    wide = traced(Mixer, 56, count, phase, 256, 49, 512)
    edited, mended = (
        rt.estimate(graph, "a100-sxm-80", execution)
        for graph in (with_padded_products(odd, 49, 56), wide)
    )
    assert edited.flops == mended.flops and edited.t_est == pytest.approx(mended.t_est, rel=0.03)
    if execution == "eager":
        assert (edited.bytes_hbm, edited.kernels) == (mended.bytes_hbm, mended.kernels)


def test_a_padded_product_is_told_with_its_copies_where_it_pays() -> None:
    step = rt.estimate(traced(Mixer, 49, 2, "training", 256, 49, 512), "a100-sxm-80", "eager")
    mended = rt.estimate(traced(Mixer, 56, 2, "training", 256, 49, 512), "a100-sxm-80", "eager")
    (told,) = (w for w in rt.tools.guidance(step).options if w.lever == "padding")
    assert "49 to 56 in products" in told.action
    assert told.gain == pytest.approx(step.t_est - mended.t_est, rel=0.03)


def test_where_the_copies_take_longer_nothing_is_told() -> None:
    odd, wide = (traced(Patches, n, 1, "forward", 32, 3, 224, 224) for n in (147, 152))
    step, mended = (rt.estimate(graph, "l40s", "eager") for graph in (odd, wide))
    assert mended.t_est > step.t_est
    assert not [w for w in rt.tools.guidance(step).options if w.lever == "padding"]
    edited = rt.estimate(with_padded_products(odd, 147, 152), "l40s", "eager")
    assert edited.t_est == pytest.approx(mended.t_est, rel=0.01)


def test_widths_that_weights_alone_make_are_padded_everywhere() -> None:
    def inner(wide: int) -> nn.Module:
        layers = nn.Linear(512, wide), nn.GELU(), nn.Linear(wide, 512)
        return nn.Sequential(*layers)

    graph = traced(inner, 2731, 1, "forward", 4096, 512)
    assert odd_sizes(graph, 16) == {2731: 2736} and 2731 not in own_sizes(graph)


def test_rows_are_padded_for_the_precision_that_autocast_multiplies_in() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(64, 257), torch.empty(32, 64)

        def step() -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                y: torch.Tensor = model(x)
            return y

        graph = rt.trace(step)
    assert odd_sizes(graph, 16) == {257: 264}
