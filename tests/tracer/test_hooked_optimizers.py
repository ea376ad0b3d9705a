"""Optimizers that step in hooks on gradients, each of which is freed as it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from tests.tracer.test_sparse import really_allocated

WIDTH = 256
X = torch.ones(4, WIDTH)
SGD = partial(torch.optim.SGD, lr=0.1)
Made = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
    )


BOOK: dict[nn.Parameter, torch.optim.Optimizer] = {}


def by_global(parameter: nn.Parameter) -> None:
    BOOK[parameter].step()
    BOOK[parameter].zero_grad()


def by_helper(parameter: nn.Parameter) -> None:
    by_global(parameter)


def hooked(model: nn.Module, hook_of: Callable[[nn.Parameter], Any]) -> nn.Module:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook_of(parameter))
    return model


def in_globals(made: Made, hook: Callable[..., None] = by_global) -> nn.Module:
    model = net()
    BOOK.clear()
    BOOK.update({p: made([p]) for p in model.parameters()})
    return hooked(model, lambda _: hook)


def in_a_closure(made: Made) -> nn.Module:
    model = net()
    optimizers = {p: made([p]) for p in model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    return hooked(model, lambda _: hook)


def by_identity(made: Made) -> nn.Module:
    model = net()
    optimizers = {id(p): made([p]) for p in model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[id(parameter)].step()
        parameter.grad = None

    return hooked(model, lambda _: hook)


def by_name(made: Made) -> nn.Module:
    model = net()
    optimizers = {name: made([p]) for name, p in model.named_parameters()}
    names = {p: name for name, p in model.named_parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[names[parameter]].step()
        parameter.grad = None

    return hooked(model, lambda _: hook)


class Stepper:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, parameter: nn.Parameter) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, parameter: nn.Parameter) -> None:
        self(parameter)


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    optimizer.step()
    optimizer.zero_grad()


def as_an_attribute(made: Made) -> nn.Module:
    model: Any = net()
    for parameter in model.parameters():
        parameter.optimizer = made([parameter])

    def hook(parameter: Any) -> None:
        stepped(parameter.optimizer, parameter)

    return hooked(model, lambda _: hook)


FORMS: dict[str, Callable[[Made], nn.Module]] = {
    "in_globals": in_globals,
    "by_a_function_of_globals": lambda made: in_globals(made, by_helper),
    "in_a_closure": in_a_closure,
    "by_identity": by_identity,
    "by_name": by_name,
    "an_object": lambda made: hooked(net(), lambda p: Stepper(made([p]))),
    "a_method": lambda made: hooked(net(), lambda p: Stepper(made([p])).step),
    "a_partial": lambda made: hooked(net(), lambda p: partial(stepped, made([p]))),
    "as_an_attribute": as_an_attribute,
}


def step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def captured(model: nn.Module) -> rt.types.OpGraph:
    with rt.capture(model) as capture:
        step(model, X)
    return capture.graph


WAYS: dict[str, Callable[[nn.Module], rt.types.OpGraph]] = {
    "step": lambda model: rt.trace(step, model, X),
    "capture": captured,
    "phase": lambda model: rt.trace(
        model, X, phase="training", optimizer="none", loss=lambda out: out.sum()
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_each_parameter_is_stepped_as_its_gradient_comes(form: str, way: str) -> None:
    model = FORMS[form](SGD)
    before = [p.detach().clone() for p in model.parameters()]
    graph = WAYS[way](model)
    assert not graph.assumptions
    assert graph.workload["optimizer"] == "sgd"
    updates = [op for op in graph.ops if op.part == "optimizer" and op.kind == "kernel"]
    assert len(updates) == 6
    assert sum(op.part == "backward" for op in graph.ops[graph.ops.index(updates[0]) :]) > 5
    peak = rt.estimate(graph, chip="l4", execution="eager").memory.peak
    standing = sum(p.nbytes for p in model.parameters()) + X.nbytes
    assert all(map(torch.equal, before, model.parameters()))  # the user's own are as they were
    returned = 4 * 4 * 8 if way == "phase" else 0  # a phase keeps what the module returns
    assert peak == standing + returned + really_allocated(step, (model, X))


def test_states_of_optimizers_in_hooks_stand_and_not_all_gradients() -> None:
    model = in_a_closure(partial(torch.optim.Adam, lr=0.1))
    memory = rt.estimate(rt.trace(step, model, X), chip="l4", execution="eager").memory
    weights = sum(p.nbytes for p in model.parameters())
    assert memory.optimizer >= 2 * weights
    assert memory.peak < 3 * weights + 2.2 * 4 * WIDTH**2  # a gradient, and what Adam makes of it


def test_the_optimizer_of_the_phase_steps_on_what_hooks_leave() -> None:
    model = net()
    first = model[0].weight
    optimizer = SGD([first])

    def hook(parameter: nn.Parameter) -> None:
        optimizer.step()
        parameter.grad = None

    first.register_post_accumulate_grad_hook(hook)
    graph = rt.trace(model, X, phase="training", optimizer="adam")
    assert graph.workload["optimizer"] == "sgd+adam"
    (said,) = (a.text for a in graph.assumptions if a.kind == "optimizer")
    assert "1 gradients away" in said and "adam steps on the parameters that have" in said
    names = Counter(op.name for op in graph.ops if op.part == "optimizer")
    assert names["aten._foreach_lerp_"] == 1
    (moments,) = (op for op in graph.ops if op.name == "aten._foreach_lerp_")
    assert len(moments.outputs) == 5


def test_layers_that_are_alike_are_stepped_each() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    optimizers = {p: SGD([p]) for p in model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooked(model, lambda _: hook)
    graph = rt.trace(model, torch.ones(4, 64), phase="training", optimizer="none")
    kernels = [op for op in graph.ops if op.kind == "kernel" and op.part == "optimizer"]
    assert sum(graph.times(op) for op in kernels) == 24


def test_a_gradient_that_is_dropped_before_the_last_op_is_freed_there() -> None:
    model = net()
    optimizer = SGD(model.parameters())

    def averaged(model: nn.Module, optimizer: Any, averages: list[Tensor], x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for average, parameter in zip(averages, model.parameters(), strict=True):
                average.copy_(average * 0.9 + parameter * 0.1)

    averages = [p.detach().clone() for p in model.parameters()]
    args = model, optimizer, averages, X
    real = 2 * sum(p.nbytes for p in model.parameters()) + X.nbytes
    graph = rt.trace(averaged, *args)
    peak = rt.estimate(graph, chip="l4", execution="eager").memory.peak
    assert peak == real + really_allocated(averaged, args)


# -- a step without a module -----------------------------------------------------------------------


def gradient(weight: Tensor, x: Tensor) -> Any:
    (x @ weight).square().sum().backward()
    return weight.grad


def by_autograd(weight: Tensor, x: Tensor) -> Any:
    return torch.autograd.grad((x @ weight).square().sum(), weight)[0]


def updated(weight: Tensor, x: Tensor) -> Tensor:
    (x @ weight).square().sum().backward()
    with torch.no_grad():
        weight.sub_(weight.grad, alpha=0.1)  # type: ignore[arg-type]
    weight.grad = None
    return weight


@pytest.mark.parametrize("function", [gradient, by_autograd, updated])
@pytest.mark.parametrize("kind", [lambda t: t.requires_grad_(), nn.Parameter])
def test_a_function_of_leaves_that_calls_backward_is_a_step(
    function: Callable[..., Any], kind: Callable[[Tensor], Tensor]
) -> None:
    graph = rt.trace(function, kind(torch.ones(16, 8)), torch.ones(4, 16))
    parts = [op.part for op in graph.ops if op.kind == "kernel"]
    last = ["optimizer"] if function is updated else []
    assert graph.phase == "training" and not graph.assumptions
    assert parts == ["forward"] * 3 + ["backward"] * (len(parts) - 3 - len(last)) + last
    assert rt.estimate(graph, chip="l4").flops_matrix == 2 * 2 * 4 * 16 * 8
    assert [graph.values[value].shape for value in graph.outputs] == [(16, 8)]
    weight = kind(torch.ones(16, 8))
    real = really_allocated(function, (weight, torch.ones(4, 16)))
    peak = rt.estimate(graph, chip="l4", execution="eager").memory.peak
    assert peak == 4 * (16 * 8 + 4 * 16) + real


def test_a_phase_without_gradients_says_that_the_code_calls_backward() -> None:
    weight, x = torch.ones(16, 8, requires_grad=True), torch.ones(4, 16)
    with pytest.raises(
        rt.types.RequestError, match="forward of gradient runs without gradients, and"
    ):
        rt.trace(gradient, weight, x, phase="forward")

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 8))

        def forward(self, x: Tensor) -> Any:
            return gradient(self.weight, x)

    with pytest.raises(
        rt.types.RequestError, match=r"rooftrace\.trace\(lambda module, x: module\(x\)"
    ):
        rt.trace(Own(), x)
    graph = rt.trace(lambda module, x: module(x), Own(), x)
    assert [op.part for op in graph.ops if op.name == "aten.mm"] == ["forward", "backward"]
    with pytest.raises(rt.types.TraceError, match="does not require grad"):
        rt.trace(gradient, torch.ones(16, 8), x)


class Logged:
    """A trainer of a script: it holds the model, and something that cannot be copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.lines = model, iter(())

    def log(self, text: str) -> None:
        next(self.lines, text)


TRAINER: list[Logged] = []


def logged(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    TRAINER[0].log("stepped")


def test_a_global_that_cannot_be_copied_stays() -> None:
    model = net()
    TRAINER[:] = [Logged(model)]
    TRAINER[0].lines = (line for line in ())
    graph = rt.trace(logged, model, X)
    assert {op.part for op in graph.ops} == {"forward", "backward"}
    TRAINER.clear()
