"""What a model is made of, beside what hooks on real modules and tensors see."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.estimates import INPUT, OUTPUT, Anatomy, Wiring, anatomy


class Attention(nn.Module):
    """Grouped queries: four heads, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(64, 64), nn.Linear(64, 64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (4, 16)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 16)).unbind(2)
        made = nn.functional.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.out(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.attention = Attention()
        self.gate, self.up, self.down = nn.Linear(64, 256), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        inner = self.second(x)
        return x + self.down(self.gate(inner).relu() * self.up(inner))


class Stack(nn.Module):
    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(64, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(model: nn.Module, *inputs: torch.Tensor, **how: Any) -> Anatomy:
    return anatomy(rt.estimate(model, *inputs, chip="h200-sxm", execution="efficient", **how))


@pytest.fixture(scope="module")
def stack() -> Anatomy:
    return made(Stack(), torch.zeros(2, 16, dtype=torch.int64))


def names(wiring: Wiring) -> dict[str, set[str]]:
    """{node: what it reads} by their names in the block; ops by name and place."""
    seen: Counter[str] = Counter()
    shown = []
    for node in wiring.nodes:
        name = node.named(wiring.path)
        shown.append(f"{name} {seen[name]}" if seen[name] else name)
        seen[name] += 1
    reads: dict[str, set[str]] = {name: set() for name in shown}
    for a, b in wiring.edges:
        reads[shown[b]].add(shown[a])
    return reads


def test_parameters_by_pattern_are_those_of_the_modules(stack: Anatomy) -> None:
    model = Stack()
    expected: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for path, module in model.named_modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if own:
            starred = ".".join("*" if part.isdigit() else part for part in path.split("."))
            expected[starred, type(module).__name__] += own
            count[starred, type(module).__name__] += 1
    assert {(p.pattern, p.kind): p.params for p in stack.patterns} == expected
    assert {(p.pattern, p.kind): p.count for p in stack.patterns} == count
    assert all(p.bytes == 4 * p.params for p in stack.patterns)
    assert [p.params for p in stack.patterns] == sorted(expected.values(), reverse=True)


def test_classes_are_those_of_the_modules_that_hooks_see(stack: Anatomy) -> None:
    model, ran = Stack(), Counter[str]()
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, *_: ran.update([type(m).__name__]))
    model(torch.zeros(2, 16, dtype=torch.int64))
    assert dict(stack.classes) == ran


def test_attention_has_the_sizes_that_its_kernel_gets(stack: Anatomy) -> None:
    (only,) = stack.attention
    assert (only.heads, only.heads_kv, only.width, only.width_values) == (4, 2, 16, 16)
    assert (only.queries, only.keys, only.count) == (16, 16, 5)
    assert only.kind == "grouped-query"
    assert 0.5 < only.useful < 0.6  # the mask lets 17 of 32 scores through, and softmax is counted


def test_the_stack_is_one_node_and_blocks_follow_each_other(stack: Anatomy) -> None:
    whole = stack.wirings[0]
    assert names(whole) == {
        INPUT: set(),
        "table": {INPUT},
        "blocks.*": {"table"},
        "head": {"blocks.*"},
        OUTPUT: {"head"},
    }
    (blocks,) = [node for node in whole.nodes if node.kind == "Block"]
    assert blocks.count == 5 and str(blocks.output) == "fp32[2, 16, 64]"
    assert sum(node.share for node in whole.nodes) == pytest.approx(1)


def test_a_block_is_wired_as_its_code_says(stack: Anatomy) -> None:
    block = stack.wirings[1]
    assert block.kind == "Block" and block.count == 5
    reads = names(block)
    (relu,) = [name for name in reads if "activation" in name or "mul" in name]
    assert reads["first"] == {INPUT} and reads["attention"] == {"first"}
    assert reads["aten.add"] == {INPUT, "attention"}
    assert reads["second"] == {"aten.add"}
    assert reads["gate"] == reads["up"] == {"second"}
    assert reads[relu] == {"gate", "up"} and reads["down"] == {relu}
    assert reads["aten.add 1"] == {"aten.add", "down"}
    assert reads[OUTPUT] == {"aten.add 1"}


def wired_by_hooks(model: nn.Module, *inputs: torch.Tensor) -> set[tuple[str, str]]:
    """(module, module) where the second gets the very tensor that the first returned."""
    maker: dict[int, str] = {id(tensor): INPUT for tensor in inputs}
    alive: list[torch.Tensor] = []
    edges: set[tuple[str, str]] = set()

    def hook(path: str) -> Any:
        def after(_: nn.Module, given: tuple[Any, ...], out: torch.Tensor) -> None:
            edges.update((maker[id(tensor)], path) for tensor in given)
            maker[id(out)] = path
            alive.append(out)

        return after

    for path, module in model.named_children():
        module.register_forward_hook(hook(path))
    model(*inputs)
    return edges


class Branches(nn.Module):
    """Modules that read each other's results in no simple order."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcde":
            setattr(self, name, nn.Linear(32, 32))
        self.join = nn.Bilinear(32, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x), self.b(x)
        deep = self.c(left)
        return self.e(self.join(deep, self.d(right)))


def test_wires_are_those_that_hooks_see_between_modules() -> None:
    model, x = Branches(), torch.randn(8, 32)
    whole = made(model, x).wirings[0]
    edges = {
        (whole.nodes[a].path, whole.nodes[b].path)
        for a, b in whole.edges
        if whole.nodes[b].path != OUTPUT
    }
    assert edges == wired_by_hooks(model, x)


def test_what_does_not_follow_is_not_one_node() -> None:
    """Layers that are alike stand once only where one follows the other."""
    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)]
    whole = made(nn.Sequential(*layers), torch.randn(4, 32)).wirings[0]
    kinds = [(node.kind, node.count) for node in whole.nodes if node.kind]
    assert kinds == [("Linear", 1), ("ReLU", 1), ("Linear", 2), ("Linear", 1)]


@pytest.mark.parametrize("repeats", [True, False])
def test_it_is_the_same_whether_layers_are_found_equal(repeats: bool, stack: Anatomy) -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    other = made(Stack(), tokens, repeats=repeats)
    assert other.patterns == stack.patterns and other.classes == stack.classes
    assert [names(w) for w in other.wirings] == [names(w) for w in stack.wirings]
    assert [w.count for w in other.wirings] == [w.count for w in stack.wirings]


def test_a_training_step_shows_its_forward_pass(stack: Anatomy) -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    step = made(Stack(), tokens, phase="training", loss=lambda out: out.sum())
    with_loss, without = names(step.wirings[0]), names(stack.wirings[0])
    assert {name: with_loss[name] for name in without if name != OUTPUT} == {
        name: reads for name, reads in without.items() if name != OUTPUT
    }


def test_kernels_add_up_to_those_of_the_step() -> None:
    estimate = rt.estimate(Stack(), torch.zeros(2, 16, dtype=torch.int64), chip="h200-sxm")
    kinds = anatomy(estimate).kernels
    assert sum(kind.count for kind in kinds) == estimate.kernels
    assert sum(kind.seconds for kind in kinds) == pytest.approx(estimate.times.t_serial)


def test_a_model_without_kernels_has_no_parts() -> None:
    empty = made(nn.Identity(), torch.ones(2))
    assert empty.patterns == empty.attention == empty.kernels == empty.wirings == ()


class Latent(nn.Module):
    """Keys and values of four heads, widened from a latent of 24; adapters: as LoRA does it."""

    def __init__(self, adapters: bool) -> None:
        super().__init__()
        self.q, self.adapters = nn.Linear(64, 64), adapters
        self.down, self.norm, self.up = nn.Linear(64, 24), nn.LayerNorm(24), nn.Linear(24, 128)
        self.base = nn.Linear(64, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kv = self.up(self.norm(self.down(x)))
        kv = kv + self.base(x) if self.adapters else kv
        k, v = kv.unflatten(-1, (2, 4, 16)).unbind(2)
        q = self.q(x).unflatten(-1, (4, 16))
        return nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        )


@pytest.mark.parametrize("execution", ["eager", "efficient"])
def test_attention_over_a_latent_is_not_multi_head(execution: str) -> None:
    for adapters, rank, kind in ((False, 24, "latent (MLA), rank 24"), (True, 0, "multi-head")):
        step = rt.estimate(Latent(adapters), torch.randn(2, 8, 64), execution=execution)
        attention = anatomy(step).attention
        assert [(each.latent, each.kind) for each in attention] == [(rank, kind)]


class Traits(nn.Module):
    """A table that is the head too, one of positions, a gate, and an activation without one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wpe = nn.Embedding(100, 32), nn.Embedding(16, 32)
        self.gate, self.up, self.act = nn.Linear(32, 32), nn.Linear(32, 32), nn.GELU()
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(tokens) + self.wpe.weight)
        x = nn.functional.silu(self.gate(x)) * self.up(x)
        return nn.functional.linear(self.act(x), self.table.weight)


def test_traits_are_those_of_the_ops() -> None:
    anatomy_of = made(Traits(), torch.zeros(1, 16, dtype=torch.long))
    assert dict(anatomy_of.traits) == {
        "class": "Traits",
        "attention": "none",
        "positions": "weights, wpe.weight",
        "norms": "LayerNorm x 1",
        "activations": "gated silu in Traits x 1, gelu in GELU x 1",
        "tied weights": "table.weight",
    }
    sizes = dict(anatomy_of.families)
    assert sum(sizes.values()) == sum(p.numel() for p in Traits().parameters())
    assert sizes["norm"] == 64 and sizes["embedding"] == 100 * 32


def test_attention_of_products_and_sines_of_a_time_are_not_called_none_and_rotary() -> None:
    """Both words stood of a diffusion model whose attention took half of its step."""

    class Diffusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.qkv = nn.Linear(32, 32), nn.Linear(32, 96)

        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            angles = time[:, None] * torch.arange(1.0, 17.0, device=time.device)
            x = x + self.time(torch.cat([angles.cos(), angles.sin()], -1))[:, None]
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    graph = rt.trace(Diffusion(), torch.zeros(2, 64, 32), torch.zeros(2), phase="training")
    traits = dict(anatomy(rt.estimate(graph, chip="h100-sxm", execution="efficient")).traits)
    assert traits["attention"] == "written out in products"
    assert traits["positions"] == "none found"
