"""Plain functions and exported programs as sources, beside the modules that they came from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rooftrace as rt

X = torch.ones(4, 8)
WEIGHT = torch.ones(8, 3)
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
MACS = 4 * (8 * 16 + 16 * 4)  # rows x (both products)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def macs(*args: Any, **kwargs: Any) -> int:
    return rt.estimate(*args, execution="eager", **kwargs).macs


def in_a_closure() -> Callable[..., Any]:
    model = net()
    return lambda x: model(x).softmax(-1)


class Scorer:
    """An object of the user's that is no module."""

    def __init__(self) -> None:
        self.model = net()

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x)

    def score(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize(
    ("function", "where"),
    [
        (in_a_closure(), "model.0"),
        (lambda x: MODEL(x), "MODEL.0"),
        (functools.partial(lambda model, x: model(x), net()), "argument_0.0"),
        (net().forward, "0"),
        (Scorer(), "model.0"),
    ],
)
def test_a_function_traces_with_the_modules_that_it_refers_to(function: Any, where: str) -> None:
    graph = rt.trace(function, X)
    assert rt.estimate(graph, execution="eager").macs == MACS
    assert where in {op.module for op in graph.ops}
    assert graph.model["params"] == sum(p.numel() for p in MODEL.parameters())
    assert [graph.values[index].shape for index in graph.inputs] == [(4, 8)]
    training = rt.trace(function, X, phase="training")
    assert {"forward", "backward", "optimizer"} <= {op.part for op in training.ops}


def test_the_originals_stay_as_they_were() -> None:
    rt.trace(lambda x: MODEL(x), X, phase="training")
    assert all(p.device.type == "cpu" and p.grad is None for p in MODEL.parameters())
    assert MODEL(X).shape == (4, 4)


def test_a_function_of_tensors_alone() -> None:
    graph = rt.trace(lambda a, b: a @ b, X, WEIGHT)
    assert rt.estimate(graph).macs == 4 * 8 * 3
    assert [graph.values[index].name for index in graph.inputs] == ["a", "b"]
    assert macs(lambda a: a @ WEIGHT, X) == 4 * 8 * 3
    assert macs(torch.matmul, X, WEIGHT) == 4 * 8 * 3
    assert macs(functools.partial(F.linear, weight=WEIGHT.t()), X) == 4 * 8 * 3
    assert macs(torch.vmap(lambda a, b: a * b), X, X) == 0
    loss = torch.func.grad(lambda w, a: (a @ w).sum())
    assert macs(loss, WEIGHT, X) in (4 * 8 * 3, 2 * 4 * 8 * 3)  # the forward product may be unread


def test_a_report_of_a_function_has_training_only_where_something_learns() -> None:
    assert rt.report(lambda a: a @ WEIGHT, X, chip="l4").phases == ("forward",)
    assert rt.report(lambda a: MODEL(a), X, chip="l4").phases == ("forward", "training")


def test_a_functions_arguments_are_checked_by_its_signature() -> None:
    def scaled(x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale

    assert rt.trace(scaled, X, scale=2.0).ops[-1].arguments["other"] == 2.0
    with pytest.raises(rt.types.RequestError, match="scaled: missing a required argument: 'x'"):
        rt.trace(scaled)
    with pytest.raises(rt.types.RequestError, match="did you mean 'scale'"):
        rt.trace(scaled, X, scael=2.0)


def test_an_exported_program_is_the_module_that_it_came_from() -> None:
    model = net()
    program = torch.export.export(model, (X,))
    for phase in ("forward", "training"):
        ours, theirs = rt.trace(program, X, phase=phase), rt.trace(model, X, phase=phase)
        assert rt.estimate(ours).flops == rt.estimate(theirs).flops
        assert rt.estimate(ours).bytes_hbm == rt.estimate(theirs).bytes_hbm
        assert {op.module for op in ours.ops} == {op.module for op in theirs.ops}
    assert ours.model["params"] == theirs.model["params"]
    assert (ours.model["name"], ours.modules["0"], ours.modules["2"]) == (
        "Sequential", "Linear", "Linear",
    )  # fmt: skip
    assert program.module()(X).shape == (4, 4)  # it still runs


def wrapped_open(*args: Any) -> Any:
    """Stands beside the models, as IPython's `open` does in a notebook: it wraps C code."""


wrapped_open.__wrapped__ = open  # type: ignore[attr-defined]


def test_a_namespace_with_a_wrapped_builtin_is_watched() -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for index in range(3):
                x = x * index
            return x

    assert len(rt.trace(Loop(), X).ops) >= 1
