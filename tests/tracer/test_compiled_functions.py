"""Functions under torch.compile(fullgraph=True): recorded as they are written, and not compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt

WIDTH = 32
X = torch.ones(8, WIDTH)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight)


@torch.compile
def plain(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight)


@torch.compile(fullgraph=True)
def whole(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight)


@torch.compile(fullgraph=True, dynamic=True)
def resized(x: Tensor, weight: Tensor) -> Tensor:
    return product(x, weight)


@torch.compile(fullgraph=True)
def nested(x: Tensor, weight: Tensor) -> Tensor:
    return whole(x, weight)


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class ByMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    @torch.compile(fullgraph=True)
    def multiplied(self, x: Tensor) -> Tensor:
        return product(x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.multiplied(x)  # type: ignore[no-any-return]


class WholeForward(ByMethod):
    @torch.compile(fullgraph=True)
    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


def in_place(module: nn.Module) -> nn.Module:
    module.compile(fullgraph=True)
    return module


FORMS: dict[str, Callable[[], Any]] = {
    "decorated": lambda: Layer(plain),
    "with_arguments": lambda: Layer(whole),
    "dynamic": lambda: Layer(resized),
    "nested": lambda: Layer(nested),
    "called": lambda: Layer(torch.compile(product, fullgraph=True)),
    "another_backend": lambda: Layer(torch.compile(product, fullgraph=True, backend="aot_eager")),
    "a_method": ByMethod,
    "a_forward": WholeForward,
    "a_module": lambda: torch.compile(Layer(product), fullgraph=True),
    "in_place": lambda: in_place(Layer(product)),
    "both": lambda: in_place(Layer(whole)),
    "a_layer": lambda: nn.Sequential(in_place(Layer(whole)), torch.compile(Layer(whole))),
}


def really(layers: int, training: bool) -> int:
    """FLOP of so many layers on real tensors, without torch.compile."""
    model = nn.Sequential(*(Layer(product) for _ in range(layers)))
    with FlopCounterMode(display=False) as theirs:
        out = model(X)
        if training:
            out.sum().backward()
    return int(theirs.get_total_flops())


@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("form", FORMS)
def test_a_whole_graph_counts_as_the_function_does(form: str, phase: str) -> None:
    graph = rt.trace(FORMS[form](), X, phase=phase)
    layers = 2 if form == "a_layer" else 1
    assert rt.estimate(graph, chip="l4").flops_matrix == really(layers, phase == "training")


@torch.compile(fullgraph=True)
def update(weight: Tensor, gradient: Tensor, moment: Tensor) -> None:
    moment.lerp_(gradient, 0.1)
    weight.add_(moment, alpha=-0.1)


def own_step(model: nn.Module, moments: list[Tensor], x: Tensor) -> None:
    model(x).sum().backward()
    with torch.no_grad():
        for weight, moment in zip(model.parameters(), moments, strict=True):
            update(weight, weight.grad, moment)
            weight.grad = None


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).sum().backward()
    torch.compile(optimizer.step, fullgraph=True)()
    optimizer.zero_grad()


def test_updates_are_of_the_optimizer() -> None:
    graph = rt.trace(own_step, Layer(whole), [torch.zeros(WIDTH, WIDTH)], X)
    updates = [op.name for op in graph.ops if op.part == "optimizer" and op.kind == "kernel"]
    assert updates == ["aten.lerp_", "aten.add_"]
    model = Layer(whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = rt.trace(optimizer_step, model, optimizer, X)
    updates = [op.name for op in graph.ops if op.part == "optimizer" and op.kind == "kernel"]
    assert updates == ["aten._foreach_add_"]


def test_a_capture_runs_whole_graphs_and_leaves_them_as_they_were() -> None:
    model = Layer(whole)
    with rt.capture(model) as capture:
        model(X).sum().backward()
    assert [op.name for op in capture.graph.ops if op.name == "aten.mm"] == 2 * ["aten.mm"]
    compiled = torch.compile(product, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X, model.weight), product(X, model.weight))
    broken = torch.compile(lambda x: torch._dynamo.graph_break() or x, fullgraph=True,
                           backend="eager")  # fmt: skip
    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken(X)
    torch._dynamo.reset()
