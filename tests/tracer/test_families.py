"""Families follow from what a graph does, whatever its modules are called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops.cost import FAMILIES
from tests.releases import TRANSFORMERS, with_implementations

# Transformers 4 gives the parts of its ViT other names.
VIT_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
VIT_DENSE = {"fc1", "fc2"}
if TRANSFORMERS < (5, 17):
    VIT_ATTENTION, VIT_DENSE = {"query", "key", "value"}, {"dense"}


def classified(*args: Any, **kwargs: Any) -> rt.types.OpGraph:
    """A traced graph, each op with its family."""
    return plan(rt.trace(*args, **kwargs), "eager").graph


def products(graph: rt.types.OpGraph) -> dict[str, set[str]]:
    """Families of matrix products and convolutions, with the last step of their modules' paths."""
    found: dict[str, set[str]] = {}
    for op in graph.ops:
        matrix = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "attention", "rnn")
        place = op.module.rpartition(".")[2]
        # transformers 5.17 makes the angles of positions by an outer product.
        if op.name.partition(".")[2] in matrix and place != "rotary_emb":
            found.setdefault(op.family, set()).add(place)
    return found


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        (
            "llama",
            (),
            {
                "attention": {"q_proj", "k_proj", "v_proj", "o_proj", "self_attn"},
                "dense": {"gate_proj", "up_proj", "down_proj"},
                "head": {"lm_head"},
            },
        ),
        (
            "bert",
            (),
            {
                "attention": {"query", "key", "value", "self"},
                "dense": {"dense"},
                "head": {"decoder"},
            },
        ),
        (
            "vit",
            (),
            {
                "attention": {"attention", *VIT_ATTENTION},
                "dense": VIT_DENSE,
                "convolution": {"projection"},
                "head": {"classifier"},
            },
        ),
        pytest.param(
            "mixtral",
            ("grouped_mm",),
            {"moe": {"gate", "experts"}, "head": {"lm_head"}},
            marks=with_implementations,
        ),
        pytest.param(
            "deepseek",
            ("grouped_mm",),
            {
                "moe": {"gate", "experts", "gate_proj", "up_proj", "down_proj"},
                "dense": {"gate_proj", "up_proj", "down_proj"},
                "head": {"lm_head"},
            },
            marks=with_implementations,
        ),
        ("resnet", (), {"head": {"head"}}),
        ("lstm", (), {"rnn": {"lstm"}, "head": {"scores"}}),
    ],
)
def test_products_have_the_family_of_what_they_are_for(
    name: str, settings: tuple[str, ...], expected: dict[str, set[str]], model: Callable[..., Any]
) -> None:
    case = model(name, *settings)
    found = products(classified(case.module, *case.args, **case.kwargs))
    assert {family: found.get(family) for family in expected} == expected


class Scale(nn.Module):
    """A norm written by hand, under a name that says nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.a


class Mix(nn.Module):
    """Attention written by hand: softmax between two batched products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).chunk(3, dim=-1)
        return self.b((q @ k.transpose(1, 2)).softmax(-1) @ v)


class Choice(nn.Module):
    """Experts written by hand: the best one of four by a score."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, 4)
        self.b = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.a(flat).softmax(-1).topk(1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.b):
            rows = (chosen[:, 0] == index).nonzero()[:, 0]
            out[rows] = expert(flat[rows]) * weight[rows]
        return out.view_as(x)


class Plain(nn.Module):
    """The three in a row, then a cap on the scores."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a, self.b, self.c = Scale(width), Mix(width), Choice(width)
        self.d, self.e = nn.Linear(width, width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.d(self.c(self.b(self.a(x)))).relu()
        return 30 * torch.tanh(self.e(x) / 30)


def test_names_decide_nothing() -> None:
    graph = classified(Plain(), torch.ones(2, 6, 8, device="meta"), phase="training")
    families: dict[str, set[str]] = {}
    for op in graph.ops:
        if op.kind == "kernel" and op.part == "forward" and op.module:
            families.setdefault(op.module.partition(".")[0], set()).add(op.family)
    assert families == {
        "a": {"norm"},
        "b": {"attention"},
        "c": {"moe"},
        "d": {"dense"},
        "e": {"head"},
    }


@pytest.mark.parametrize("name", ["llama", "deepseek", "resnet", "lstm", "t5"])
def test_every_op_has_a_family_and_a_backward_that_of_its_forward(
    name: str, model: Callable[..., Any]
) -> None:
    case = model(name)
    graph = classified(case.module, *case.args, phase="training", **case.kwargs)
    assert {op.family for op in graph.ops} <= set(FAMILIES)
    assert all((op.family == "optimizer") == (op.part == "optimizer") for op in graph.ops)
    inside = {
        op.module: op.family
        for op in graph.ops
        if op.part == "forward" and op.family in ("attention", "moe")
    }
    assert all(
        op.family == inside[op.module]
        for op in graph.ops
        if op.part == "backward" and op.module in inside
    )


def test_what_makes_the_cache_is_no_head(model: Callable[..., Any]) -> None:
    case = model("gpt2")
    graph = classified(case.module, phase="prefill", **case.kwargs)
    assert [op.module for op in graph.ops if op.family == "head"] == ["lm_head"]


class Inline(nn.Module):
    """A transformer block with everything in one forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.a = nn.Linear(width, 3 * width)
        self.b = nn.Linear(width, width)
        self.c, self.d = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mix(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.a(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return self.b(out.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x))
        return x + self.d(nn.functional.gelu(self.c(self.n2(x))))


class Spelled(Inline):
    """The same with a softmax between two batched products, and weights used as tensors."""

    def mix(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = nn.functional.linear(x, self.a.weight, self.a.bias)
        q, k, v = parts.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (width // self.heads) ** 0.5
        out = scores.softmax(-1) @ v
        out = out.transpose(1, 2).reshape(batch, length, width)
        return nn.functional.linear(out, self.b.weight, self.b.bias)


class Mixing(Inline):
    """The attention alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class SpelledMixing(Spelled):
    """The spelled attention alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Parts(nn.Module):
    """The same block of submodules, under names that say something else."""

    def __init__(self, width: int, heads: int, mixing: type[Inline]) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.conv_stem = mixing(width, heads)
        self.attention_free_mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv_stem(self.n1(x))
        return x + self.attention_free_mlp(self.n2(x))


class Stack(nn.Module):
    """Blocks and a head."""

    def __init__(self, *blocks: nn.Module, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm_head = nn.Linear(width, 512)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm_head(x)


def flop_shares(graph: rt.types.OpGraph) -> dict[str, float]:
    """Share of the FLOPs by family, of what does any."""
    estimate = rt.estimate(graph, execution="eager")
    entries = estimate.by_family().items()
    return {name: entry["flops"] / estimate.flops for name, entry in entries if entry["flops"]}


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("spelled", [False, True])
def test_attention_is_the_same_inline_and_in_a_module(spelled: bool, phase: str) -> None:
    block, mixing = (Spelled, SpelledMixing) if spelled else (Inline, Mixing)
    options = {"phase": phase, "optimizer": "none"} if phase == "training" else {}
    x = torch.ones(2, 128, 64)
    inline = flop_shares(rt.trace(Stack(block(64, 4), block(64, 4)), x, **options))
    parts = flop_shares(rt.trace(Stack(*(Parts(64, 4, mixing) for _ in "ab")), x, **options))
    alone = flop_shares(rt.trace(Stack(nn.Sequential(block(64, 4)), nn.Identity()), x, **options))
    assert 0.2 < parts["attention"] < 0.6
    assert inline.keys() == parts.keys() == alone.keys()
    for family, share in parts.items():
        assert inline[family] == pytest.approx(share, abs=0.005)


def test_a_block_without_submodules_at_the_root_is_no_attention_as_a_whole() -> None:
    found = flop_shares(rt.trace(Inline(64, 4), torch.ones(2, 128, 64)))
    assert 0.2 < found["attention"] < 0.6 and found["dense"] > 0.3 and found["norm"] > 0


def test_words_in_module_paths_decide_nothing() -> None:
    graph = classified(Stack(Parts(64, 4, Mixing)), torch.ones(2, 8, 64))
    families = {op.module: op.family for op in graph.ops if op.kind == "kernel"}
    assert families["norm_head"] == "head"
    assert families["blocks.0.attention_free_mlp.0"] == "dense"
    assert families["blocks.0.conv_stem.b"] == "attention"
    assert families["blocks.0.n1"] == "norm"
