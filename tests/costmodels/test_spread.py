"""Work on rows done before they are copied: the same results on real tensors, with less work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.ops import price_ops
from rooftrace.costmodels.rewrites.editing import NORMS, without_promotions
from rooftrace.costmodels.rewrites.layouts import without_copies
from rooftrace.costmodels.rewrites.spread import copied_late
from rooftrace.costmodels.rewrites.trained import joined_once
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.rebuild import to_fx
from tests.costmodels.serving_support import filled

HALF = torch.bfloat16


class Conditioned(nn.Module):
    """A vector for each sample, expanded over its positions before two layers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        wide = t[:, None].expand(x.shape)
        scale, shift = self.second(F.silu(self.first(wide))).chunk(2, -1)
        out: Tensor = (self.norm(self.mix(x)) * (1 + scale) + shift).pow(2)
        return out


class Positions(nn.Module):
    """Positions are looked up for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.mix = nn.Embedding(5, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)[None].expand(x.shape[:2])
        out: Tensor = self.mix(x + self.rows(at)) * t[:, None]
        return out


class Slowed(nn.Module):
    """Frames are repeated, one after the other, before a layer of each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = x * t[:, None]
        out: Tensor = self.down(F.gelu(self.up(x.repeat_interleave(4, 1))))
        return out


class Enlarged(nn.Module):
    """An image is enlarged before a 1x1 convolution; another one is tiled."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Upsample(scale_factor=2), nn.Conv2d(2, 3, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        image = (x * t[:, None]).view(4, 5, 2, 4).transpose(1, 2)
        out: Tensor = self.last(self.up(image)) + self.last(image.repeat(1, 1, 2, 2))
        return out


class BiasedByRows(nn.Module):
    """A mask of numbers is repeated for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.mix = nn.Parameter(torch.zeros(1, 1, 5, 5)), nn.Linear(8, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        heads = (x * t[:, None])[:, None]
        mask = self.bias.repeat(x.shape[0], 1, 1, 1)
        out: Tensor = self.mix(F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask))
        return out


def traced(make: Callable[[], nn.Module], phase: str) -> tuple[OpGraph, nn.Module]:
    module = filled(make())
    with torch.device("meta"):
        blank, inputs = make(), (torch.zeros(4, 5, 8), torch.zeros(4, 8))
    return rt.trace(blank, *inputs, phase=phase), module


def outputs(graph: OpGraph, module: nn.Module) -> tuple[Tensor, ...]:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    generator = torch.Generator().manual_seed(1)
    dtype = next(module.parameters()).dtype
    given = [torch.randn(s, generator=generator).to(dtype) for s in ((4, 5, 8), (4, 8))]
    ops = [
        replace(op, arguments={k: v for k, v in op.arguments.items() if k != "device"})
        for op in graph.ops
        if op.part != "optimizer"
    ]
    graph = graph.with_ops(ops)
    with torch.no_grad():
        made: tuple[Tensor, ...] = to_fx(graph, state)(*given)
    return made


def amounts(graph: OpGraph) -> tuple[float, float]:
    costs, _ = price_ops(graph)
    return sum(cost.flops() for cost in costs), sum(cost.bytes() for cost in costs)


class Pairs(nn.Module):
    """Scores of rows beside a vector of their sample, and of all pairs of rows side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 8)
        self.pair = nn.Parameter(torch.ones(16, 1))

    def scores(self, rows: Tensor) -> Tensor:
        n = rows.shape[0]
        sides = rows.repeat_interleave(n, 0), rows.repeat(n, 1)
        return (torch.cat(sides, 1).view(n, n, 16) @ self.pair).squeeze(2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        wide = t[:, None].expand(x.shape)
        rows = self.second(F.silu(self.first(torch.cat((wide, x), -1))))
        return rows + self.scores(rows[0]).sigmoid() @ rows[0] / 32


class PairsRead(Pairs):
    """Pairs that more than products read, and that a wider product reads."""

    def scores(self, rows: Tensor) -> Tensor:
        n = rows.shape[0]
        pairs = torch.cat((rows.repeat_interleave(n, 0), rows.repeat(n, 1)), 1)
        wide = (pairs + 0) @ torch.cat([self.pair] * 24, 1)
        return (pairs @ self.pair + pairs.tanh().mean(1, True) + wide.mean(1, True)).view(n, n)


class PairsApart(Pairs):
    """The scores of pairs as sums of those of rows."""

    def scores(self, rows: Tensor) -> Tensor:
        return rows @ self.pair[:8] + (rows @ self.pair[8:]).T


MODELS: dict[str, Any] = {
    "pairs": Pairs,
    "pairs read": PairsRead,
    "conditioned": Conditioned,
    "positions": Positions,
    "slowed": Slowed,
    "enlarged": Enlarged,
    "masks": BiasedByRows,
}


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("name", MODELS)
def test_copies_made_late_give_the_same_and_gradients_too(name: str, phase: str) -> None:
    graph, module = traced(MODELS[name], phase)
    late = copied_late(graph)
    assert late is not graph
    for mended, written in zip(outputs(late, module), outputs(graph, module), strict=True):
        torch.testing.assert_close(mended, written)
    assert amounts(late) < amounts(graph)


def test_pairs_cost_what_their_rows_do() -> None:
    (mended, _), (written, _) = (traced(model, "forward") for model in (PairsApart, Pairs))
    assert amounts(copied_late(written)) == amounts(copied_late(mended))


class Beside(nn.Module):
    """A layer of rows beside a vector of their sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        wide = t[:, None].expand(x.shape)
        y: Tensor = x + self.down(F.silu(self.up(torch.cat((x, wide), -1))))
        return y


class Stacked(nn.Module):
    """Layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Beside() for _ in range(8))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, t)
        return x


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_rows_of_the_layer_before_beside_copies_are_multiplied_apart(phase: str) -> None:
    graph, module = traced(Stacked, phase)
    assert graph.repeats
    short, long = copied_late(graph).expand(), copied_late(graph.expand())
    assert amounts(short) == amounts(long) < amounts(graph.expand())
    for mended, written in zip(
        outputs(short, module), outputs(graph.expand(), module), strict=True
    ):
        torch.testing.assert_close(mended, written)


class SharedKeys(nn.Module):
    """Heads share keys, which are repeated for a kernel that reads them all; a dropout is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        heads = self.mix(x).view(4, 5, 2, 4).transpose(1, 2)
        keys = heads[:, :1].expand(-1, 2, -1, -1)
        y = F.scaled_dot_product_attention(heads, keys, keys)
        return y.transpose(1, 2).flatten(2) + F.dropout(t[:, None].expand(4, 5, 8), 0.5)


def test_kernels_that_read_every_copy_and_numbers_that_are_drawn_keep_them() -> None:
    graph, _ = traced(SharedKeys, "training")
    assert amounts(copied_late(graph)) == amounts(graph)


class Grown(nn.Module):
    """Rows that a loop joins in each pass, and a product of a copy that is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rows = t[:, None]
        for _ in range(5):
            t = self.mix(t)
            rows = torch.cat([rows, t[:, None]], 1)
        how = self.norm.weight.float(), self.norm.bias.float(), self.norm.eps
        normed = F.layer_norm(x.float(), self.norm.normalized_shape, *how).to(x.dtype)
        return rows @ normed.transpose(1, 2).contiguous()


@pytest.mark.parametrize(
    "edit", [joined_once, without_copies, partial(without_promotions, casts=NORMS)]
)
def test_joins_after_a_loop_products_of_views_and_norms_of_halves_give_the_same(edit: Any) -> None:
    with torch.device("meta"):
        blank, inputs = (
            Grown().to(HALF),
            (torch.zeros(4, 5, 8).to(HALF), torch.zeros(4, 8).to(HALF)),
        )
    graph, module = rt.trace(blank, *inputs), filled(Grown(), HALF)
    mended = edit(graph)
    assert amounts(mended)[1] < amounts(graph)[1]
    torch.testing.assert_close(outputs(mended, module), outputs(graph, module))
