"""Families follow from what a graph does, whatever its modules are called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.tracer.family import FAMILIES


def products(graph: rt.OpGraph) -> dict[str, set[str]]:
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
                "attention": {"q_proj", "k_proj", "v_proj", "o_proj", "attention"},
                "dense": {"fc1", "fc2"},
                "convolution": {"projection"},
                "head": {"classifier"},
            },
        ),
        ("mixtral", ("grouped_mm",), {"moe": {"gate", "experts"}, "head": {"lm_head"}}),
        (
            "deepseek",
            ("grouped_mm",),
            {
                "moe": {"gate", "experts", "gate_proj", "up_proj", "down_proj"},
                "dense": {"gate_proj", "up_proj", "down_proj"},
                "head": {"lm_head"},
            },
        ),
        ("resnet", (), {"head": {"head"}}),
        ("lstm", (), {"rnn": {"lstm"}, "head": {"scores"}}),
    ],
)
def test_products_have_the_family_of_what_they_are_for(
    name: str, settings: tuple[str, ...], expected: dict[str, set[str]], model: Callable[..., Any]
) -> None:
    case = model(name, *settings)
    found = products(rt.trace(case.module, *case.args, **case.kwargs))
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
    graph = rt.trace(Plain(), torch.ones(2, 6, 8), phase="training")
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
    graph = rt.trace(case.module, *case.args, phase="training", **case.kwargs)
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
    graph = rt.trace(case.module, phase="prefill", **case.kwargs)
    assert [op.module for op in graph.ops if op.family == "head"] == ["lm_head"]
