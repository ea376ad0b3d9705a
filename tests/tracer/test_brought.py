"""Weights that are somewhere else until the code runs, and state that a step keeps for weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt

pytestmark = pytest.mark.quick


def flops(run: Any, *args: Any) -> int:
    return rt.estimate(rt.trace(run, *args), execution="eager").flops_matrix


def weights_in(graph: rt.types.OpGraph) -> set[tuple[str, tuple[int, ...]]]:
    read = {i for op in graph.ops if op.name in ("aten.addmm", "aten.t") for i in op.inputs}
    values = [graph.values[i] for i in read]
    return {(value.name, value.shape) for value in values if value.role == "weights" and value.name}


class Streamed(nn.Module):
    """Takes the weights of its layer from a store on the host, in each way that code does."""

    def __init__(self, way: Callable[["Streamed"], None]) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 10)
        self.store = {k: torch.full_like(v, 0.5) for k, v in self.lin.state_dict().items()}
        self.way = way
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.way(self)
        y = self.lin(x)
        for p in self.lin.parameters():
            p.data = torch.empty(0)
        return y


def by_data(module: Streamed) -> None:
    for name, p in module.lin.named_parameters():
        p.data = module.store[name].clone()


def by_parameter(module: Streamed) -> None:
    for name in ("weight", "bias"):
        setattr(module.lin, name, nn.Parameter(module.store[name].clone(), requires_grad=False))


def by_state_dict(module: Streamed) -> None:
    module.lin.load_state_dict(module.store)


def by_assigned_state_dict(module: Streamed) -> None:
    module.lin.load_state_dict({k: v.clone() for k, v in module.store.items()}, assign=True)


def by_copy(module: Streamed) -> None:
    for name, p in module.lin.named_parameters():
        p.data.copy_(module.store[name])


def by_swap(module: Streamed) -> None:
    for name in ("weight", "bias"):
        new = nn.Parameter(module.store[name].clone(), requires_grad=False)
        torch.utils.swap_tensors(getattr(module.lin, name), new)


WAYS = [by_data, by_parameter, by_state_dict, by_assigned_state_dict, by_copy, by_swap]


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_the_host_brings_are_weights(way: Any) -> None:
    module, x = Streamed(way), torch.randn(7, 6)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    graph = rt.trace(module, x)
    assert rt.estimate(graph, execution="eager").flops_matrix == 2 * 7 * 60
    if way not in (by_state_dict, by_copy):  # what a copy writes is another value of the weight
        assert weights_in(graph) == {("lin.weight", (10, 6)), ("lin.bias", (10,))}
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(bool((v == 0.5).all()) for v in module.store.values())


@pytest.mark.parametrize("wide", [10, 70_000])
def test_values_of_brought_weights_are_known(wide: int) -> None:
    """70,000 floats are not carried along: their values are computed when they are asked for."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(wide), requires_grad=False)
            self.lin = nn.Linear(6, 10)
            self.stored = torch.ones(wide)

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.stored.clone()
            return self.lin(x) if (self.weight.sum() > wide / 2).item() else x

    graph = rt.trace(Asks(), torch.randn(7, 6))
    assert rt.estimate(graph, execution="eager").flops_matrix == 2 * 7 * 60
    assert "branch" not in {a.kind for a in graph.assumptions}


def test_a_weight_that_another_replaced_after_it_was_read_gives_no_value() -> None:
    class Replaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(70_000), requires_grad=False)
            self.lin = nn.Linear(6, 10)

        def forward(self, x: Tensor) -> Tensor:
            first = self.weight.sum()
            self.weight.data = torch.ones(70_000, device="cpu")
            return self.lin(x) if (self.weight.sum() > first).item() else x

    graph = rt.trace(Replaced(), torch.randn(7, 6))
    assert "branch" in {a.kind for a in graph.assumptions}  # never decided by the old values


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5))


def trained(model: nn.Module) -> int:
    """FLOP of a forward and a backward, by torch's counter."""
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(7, 6)).square().mean().backward()
    model.zero_grad()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.AdamW])
def test_masters_in_a_closure_are_stepped(optimizer: Any) -> None:
    net = model()
    masters = [p.detach().clone().requires_grad_() for p in net.parameters()]
    stepper = optimizer(masters, lr=0.1) if optimizer else None

    def step(net: nn.Module, x: Tensor) -> None:
        net(x).square().mean().backward()
        for master, p in zip(masters, net.parameters(), strict=True):
            master.grad, p.grad = p.grad.to("cpu", torch.float32), None
        with torch.no_grad():
            if stepper is not None:
                stepper.step()
            else:
                for master in masters:
                    master -= 0.1 * master.grad
            for master, p in zip(masters, net.parameters(), strict=True):
                p.copy_(master)

    before = [master.detach().clone() for master in masters]
    graph = rt.trace(step, net, torch.randn(7, 6))
    assert rt.estimate(graph, execution="eager").flops_matrix == trained(model())
    assert any(op.part == "optimizer" and op.name != "aten.copy_" for op in graph.ops)
    assert all(torch.equal(a, b) for a, b in zip(before, masters, strict=True))
    assert all(master.grad is None for master in masters)


def test_averages_in_a_closure_are_work_and_stay_what_they_were() -> None:
    net = model()
    average = [p.detach().clone() for p in net.parameters()]

    def step(net: nn.Module, x: Tensor) -> None:
        net(x).square().mean().backward()
        with torch.no_grad():
            for mean, p in zip(average, net.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)

    before = [mean.clone() for mean in average]
    graph = rt.trace(step, net, torch.randn(7, 6))
    assert sum(op.name == "aten.mul_" for op in graph.expand().ops) == len(average)
    assert all(torch.equal(a, b) for a, b in zip(before, average, strict=True))
