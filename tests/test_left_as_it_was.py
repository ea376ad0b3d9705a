"""Every public function that runs or traces a module of the user's leaves it, and torch, as before.

Also where the module fails, and where functions stand inside of one another.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.errors import TraceError


class Stateful(nn.Module):
    """Statistics, dropout, numbers of three generators, a frozen weight, a hook and a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 4)
        self.head.bias.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8))
        self.body[0].weight.grad = torch.ones(8, 8)
        self.body[1].register_forward_hook(lambda module, args, out: out + 0)
        self.body[2].eval()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.seen += x.detach().sum(0)
        noise = torch.randn_like(x) + random.random() + numpy.random.rand()
        if fail:
            raise ValueError("as asked")
        return self.head(self.body(x + noise))


def picture(module: nn.Module, *tensors: Tensor) -> dict[str, Any]:
    """What a user could see of a module, its inputs and torch."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own |= {f"input {i}": tensor for i, tensor in enumerate(tensors)}
    parts = dict(module.named_modules())
    return {
        "identity": {name: id(t) for name, t in own.items()},
        "value": {name: t.detach().tolist() for name, t in own.items()},
        "marks": {name: sorted(t.__dict__) for name, t in own.items()},
        "gradient": {
            name: None if t.grad is None else (id(t.grad), t.grad.tolist())
            for name, t in own.items()
        },
        "requires_grad": {name: t.requires_grad for name, t in own.items()},
        "training": {path: part.training for path, part in parts.items()},
        "attributes": {path: sorted(vars(part)) for path, part in parts.items()},
        "hooks": {
            path: [
                list(part._forward_hooks),
                list(part._forward_pre_hooks),
                list(part._backward_hooks),
            ]
            for path, part in parts.items()
        },
        "torch": torch.get_rng_state().tolist(),
        "random": random.getstate(),
        "numpy": tuple(map(str, numpy.random.get_state())),
        "dtype": torch.get_default_dtype(),
        "device": torch.empty(0).device,
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "modes": torch._C._len_torch_dispatch_stack(),
        "functions": torch._C._len_torch_function_stack(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def inside(module: nn.Module, x: Tensor, **more: Any) -> None:
    with rt.capture(module):
        module(x, **more).sum().backward()


def step(module: nn.Module, x: Tensor, **more: Any) -> None:
    module(x, **more).sum().backward()


def measured(module: nn.Module, x: Tensor, **more: Any) -> None:
    phase = more.pop("phase", "forward")
    rt.measure(module, x, phase=phase, budget_s=0.2, **more)


CALLS: dict[str, Callable[..., Any]] = {
    "trace": rt.trace,
    "trace training": lambda m, x, **k: rt.trace(m, x, phase="training", **k),
    "trace a step": lambda m, x, **k: rt.trace(step, m, x, **k),
    "estimate": lambda m, x, **k: rt.estimate(m, x, chip="l4", **k),
    "capture": inside,
    "compare": rt.compare,
    "compare training": lambda m, x, **k: rt.compare(m, x, phase="training", **k),
    "compare fvcore": lambda m, x, **k: rt.compare(m, x, peers=("fvcore",), **k),
    "diff": lambda m, x, **k: rt.diff(m, m, x, **k),
    "inventory": lambda m, x, **k: rt.inventory(m),
    "dump_model_info": lambda m, x, **k: rt.tools.dump_model_info(
        m, report_path="report", input_data=x, plot_distributions=False
    ),
    "breaks": rt.graph_breaks,
    "measure": measured,
    "measure training": lambda m, x, **k: measured(m, x, phase="training", **k),
    "measure compiled": lambda m, x, **k: measured(m, x, compiled=True, ops=False, **k),
    "profile": lambda m, x, **k: rt.profile(m, (x,), **k),
    "summary": lambda m, x, **k: rt.summary(m, input_data=x, **k),
    "flop_count_table": lambda m, x, **k: rt.tools.flop_count_table(m, x, **k),
    "largest_batch": lambda m, x, **k: rt.largest_batch(m, x, chip="l4", phases=["forward"], **k),
    "report": lambda m, x, **k: rt.report(m, x, chip="l4", **k),
    "guidance": lambda m, x, **k: rt.tools.guidance(rt.estimate(m, x, **k)),
    "sensitivity": lambda m, x, **k: rt.sensitivity(m, x, **k),
    "explain": lambda m, x, **k: rt.explain(m, x, **k),
    "form": lambda m, x, **k: rt.tools.form(m, x, **k),
    "sweep": lambda m, x, **k: rt.sweep(m, x, over={"batch": (4, 8)}, **k),
    "solve": lambda m, x, **k: rt.solve(m, x, find="batch", chip="l4", **k),
}


SLOW = {"measure compiled", "dump_model_info", "breaks", "inventory of a target"}


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("name", cases(CALLS))
def test_a_call_leaves_all_as_it_was(
    name: str, fail: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, x = Stateful(), torch.randn(4, 8, requires_grad=True)
    before = picture(module, x)
    runs = not fail or name in ("inventory", "dump_model_info")
    with contextlib.nullcontext() if runs else pytest.raises((ValueError, TraceError)):
        CALLS[name](module, x, **({"fail": True} if fail else {}))
    after = picture(module, x)
    assert [key for key, value in before.items() if after[key] != value] == []


@pytest.mark.parametrize("name", ["trace training", "breaks", "compare", "capture"])
def test_a_module_on_meta_is_as_it_was(name: str) -> None:
    module, x = Stateful().to("meta"), torch.randn(4, 8)
    flags = {path: part.training for path, part in module.named_modules()}
    gradient, states = module.body[0].weight.grad, (random.getstate(), torch.get_rng_state())
    CALLS[name](module, x)
    assert {path: part.training for path, part in module.named_modules()} == flags
    assert module.body[0].weight.grad is gradient and module.head.weight.grad is None
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


def test_a_weight_that_forward_writes_is_as_it_was() -> None:
    """nn.Embedding with max_norm scales rows of its weight; weights tied, expanded and shared."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4, max_norm=0.5)
            self.head = nn.Linear(4, 6)
            self.head.weight = self.table.weight
            self.register_buffer("wide", torch.zeros(1, 4).expand(3, 4))
            self.kept = [torch.zeros(4)]

        def forward(self, ids: Tensor) -> Tensor:
            y = self.table(ids) + self.wide[0]
            self.kept[0] += y.detach().sum((0, 1))
            return self.head(y)

    module, ids = Tied(), torch.zeros(2, 3, dtype=torch.long)
    kept, weight = module.kept[0], module.table.weight.detach().clone()
    version = module.head.bias._version
    rt.compare(module, ids)
    rt.measure(module, ids, budget_s=0.1)
    assert torch.equal(module.table.weight, weight) and module.head.weight is module.table.weight
    assert module.kept[0] is kept and not kept.any()
    assert module.head.bias._version == version  # what autograd has saved of it is still good


def test_a_backward_after_a_comparison_is_that_of_before() -> None:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)), torch.ones(3, 8)
    torch.manual_seed(7)
    module(x).sum().backward()
    expected = module[0].weight.grad.clone()
    module.zero_grad()
    torch.manual_seed(7)
    loss = module(x).sum()
    rt.compare(module, x, phases=["training"])
    rt.measure(module, x, phase="training", budget_s=0.1)
    loss.backward()
    assert torch.equal(module[0].weight.grad, expected)


# -- inside of one another -------------------------------------------------------------------------


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))


INSIDE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    name: CALLS[name]
    for name in (
        *("trace", "trace training", "trace a step", "estimate", "compare", "inventory", "diff"),
        *("breaks", "largest_batch", "summary", "profile", "form"),
    )
} | {"inventory of a target": lambda module, x: rt.inventory("gpt2")}


def captured(inner: Callable[..., Any], other: nn.Module | None) -> rt.types.OpGraph:
    module, x = small(), torch.zeros(6, 8)
    optimizer = torch.optim.AdamW(module.parameters())
    with rt.capture(module) as block:
        y = module(x)
        inner(other or module, x)
        y.sum().backward()
        inner(other or module, x)
        optimizer.step()
    return block.graph


class Hooked(nn.Module):
    """A hook of its forward calls what it holds, once."""

    def __init__(self, inner: Callable[..., Any], other: nn.Module | None) -> None:
        super().__init__()
        self.net, self.held = small(), [inner, other]
        self.net[0].register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, out: Tensor) -> None:
        inner, self.held[0] = self.held[0], None
        if inner is not None:
            inner(self.held[1] or self.net, torch.zeros(6, 8))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def traced(inner: Callable[..., Any], other: nn.Module | None) -> rt.types.OpGraph:
    return rt.trace(Hooked(inner, other), torch.zeros(6, 8), phase="training")


def look(graph: rt.types.OpGraph) -> Any:
    ops = [(op.target, op.module, op.part, op.inputs, op.outputs) for op in graph.ops]
    return ops, len(graph.values), graph.assumptions, graph.outputs


@pytest.mark.parametrize("outer", [captured, traced])
@pytest.mark.parametrize("name", cases(INSIDE))
def test_the_outer_recording_is_as_if_the_inner_one_was_not_there(
    name: str, outer: Callable[..., rt.types.OpGraph]
) -> None:
    expected = look(outer(lambda module, x: None, None))
    assert look(outer(INSIDE[name], None)) == expected
    assert look(outer(INSIDE[name], small())) == expected


@pytest.mark.parametrize("outer", [captured, traced])
@pytest.mark.parametrize("name", ["capture", "measure", "measure training"])
def test_what_cannot_stand_inside_of_a_recording_says_so(
    name: str, outer: Callable[..., rt.types.OpGraph]
) -> None:
    for other in (None, small()):
        with pytest.raises(rt.types.RequestError, match="inside of another recording"):
            outer(CALLS[name], other)


def test_a_refused_capture_leaves_the_outer_one_alone() -> None:
    module, x = small(), torch.zeros(6, 8)
    with rt.capture(module) as plain:
        module(x).sum().backward()
    with rt.capture(module) as block:
        with pytest.raises(rt.types.RequestError), rt.capture(module):
            raise AssertionError
        module(x).sum().backward()
    assert look(block.graph) == look(plain.graph)
    assert block.get_total_flops() == plain.get_total_flops() > 0
