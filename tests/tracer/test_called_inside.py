"""Calls of rooftrace inside of code that torch compiles, transforms or records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import rooftrace as rt

NET, X = nn.Linear(8, 8), torch.ones(2, 8)
GRAPH = rt.trace(NET, X)
Call = Callable[[], Any]


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def calling(call: Call) -> Callable[[torch.Tensor], torch.Tensor]:
    def function(x: torch.Tensor) -> torch.Tensor:
        call()
        return (x * 2).sum()

    return function


def as_module(call: Call) -> nn.Module:
    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            call()
            return x + 1

    return Calls()


WORKS: dict[str, Callable[[Call], Any]] = {
    "make_fx": lambda call: make_fx(calling(call))(X),
    "export": lambda call: torch.export.export(as_module(call), (X,)),
    "a forward that is traced": lambda call: rt.trace(as_module(call), X),
}
MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "fake tensors": FakeTensorMode,
    "ops": Ops,
    "functions": Functions,
    "the meta device": lambda: torch.device("meta"),
    "hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}
REFUSED: dict[str, tuple[Callable[[Call], Any], str]] = {
    "jit": (lambda call: torch.jit.trace(calling(call), X), "torch.jit.trace"),
    "symbolic": (lambda call: torch.fx.symbolic_trace(as_module(call)), "torch.fx.symbolic_trace"),
    "vmap": (lambda call: torch.vmap(calling(call))(X), "torch.func"),
    "grad": (lambda call: torch.func.grad(calling(call))(X), "torch.func"),
    "functionalize": (lambda call: torch.func.functionalize(calling(call))(X), "torch.func"),
}


@pytest.mark.parametrize("name", [*WORKS, *MODES])
def test_a_call_inside_sees_what_it_sees_outside(name: str) -> None:
    traced: list[Any] = []
    call = lambda: traced.append(rt.trace(NET, X))  # noqa: E731
    if name in WORKS:
        WORKS[name](call)
    else:
        with MODES[name]():
            call()
    assert traced == [rt.trace(NET, X)] * len(traced) and traced


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_inside_of_what_cannot_be_left_is_refused(name: str) -> None:
    around, words = REFUSED[name]
    with pytest.raises(
        rt.types.RequestError, match=f"inside of .*{words}.*: call rooftrace outside"
    ):
        around(lambda: rt.trace(NET, X, phase="training"))


CALLS: dict[str, Call] = {
    "trace": lambda: rt.trace(NET, X),
    "training": lambda: rt.trace(NET, X, phase="training"),
    "estimate": lambda: rt.estimate(NET, X, chip="l4"),
    "diff": lambda: rt.diff(GRAPH, GRAPH),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_calls_it_as_it_is(name: str) -> None:
    """Dynamo would follow it into its own patches of torch, and fail there."""
    call = CALLS[name]

    @torch.compile(backend="eager")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        call()
        return x + 1

    torch._dynamo.reset()
    assert torch.equal(compiled(X), X + 1)


@pytest.mark.slow
def test_a_graph_that_may_not_break_refuses_the_call() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        rt.trace(NET, X)
        return x + 1

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"rooftrace.trace is no part of a graph; call it outside"):
        compiled(X)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), (2, 4, 8, 8)),
        (lambda x: F.interpolate(x, scale_factor=2.0), (2, 4, 8, 8)),
        (lambda x: F.instance_norm(x), (2, 4, 8, 8)),
        (lambda x: torch.matmul(x, x), (2, 4, 8, 8)),
        (lambda x: torch.stft(x, 64, return_complex=True, window=x[0, :64]), (2, 400)),
        (lambda x: F.one_hot(x.long(), 9), (4,)),
    ],
)
def test_inference_mode_has_the_ops_of_no_grad(
    function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    """A mode sees composite ops there; Python's decompositions are for compilers."""

    def inferring(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return function(x)

    def without_gradients(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return function(x)

    given = torch.zeros(shape)
    names = [[op.name for op in rt.trace(f, given).ops] for f in (inferring, without_gradients)]
    assert names[0] == names[1]
