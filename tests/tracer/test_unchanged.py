"""Tracing leaves the user's module and tensors as they were."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.errors import TraceError
from rooftrace.tracer.values.copies import inputs_on_meta, on_meta
from rooftrace.tracer.values.masks import REAL
from rooftrace.tracer.values.trees import tensors_in


class Stateful(nn.Module):
    """Running statistics, a counter, and a plain tensor that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.seen = torch.zeros(8)
        self.calls = 0

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        self.calls += 1
        self.seen += x.sum(0)
        if fail:
            raise ValueError("as asked")
        return self.drop(self.norm(self.lin(x)))


def picture(module: nn.Module) -> dict[str, Any]:
    """All that a user could see of a module: identities, values, flags, gradients, attributes."""
    tensors = {
        **dict(module.named_parameters()),
        **dict(module.named_buffers()),
        "seen": module.seen,
    }
    return {
        "identity": {name: id(t) for name, t in tensors.items()},
        "value": {name: t.detach().clone().tolist() for name, t in tensors.items()},
        "version": {name: t._version for name, t in tensors.items()},
        "marks": {name: sorted(t.__dict__) for name, t in tensors.items()},
        "gradient": {
            name: None if t.grad is None else t.grad.tolist() for name, t in tensors.items()
        },
        "training": {path: part.training for path, part in module.named_modules()},
        "attributes": sorted(vars(module)),
        "calls": module.calls,
        "hooks": [
            len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()
        ],
    }


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("phase", ["forward", "training"])
@pytest.mark.parametrize("train", [True, False])
def test_a_module_is_afterwards_what_it_was(phase: str, train: bool, fail: bool) -> None:
    module = Stateful().train(train)
    module.norm.eval()
    module.lin.weight.grad = torch.ones(8, 8)
    x = torch.randn(4, 8)
    before, given = picture(module), x.clone()
    if fail:
        with pytest.raises(TraceError, match="as asked"):
            rt.trace(module, x, fail=True, phase=phase)
    else:
        rt.trace(module, x, phase=phase)
    assert picture(module) == before
    assert torch.equal(x, given)
    assert not x.__dict__


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_meta_tensors_keep_no_marks(phase: str) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        x = torch.empty(4, 8, requires_grad=True)
    module[0].weight.grad = gradient = torch.empty(8, 8, device="meta")
    rt.trace(module, x, phase=phase)
    for tensor in (x, *module.parameters(), *module.buffers()):
        assert not tensor.__dict__
    assert x.grad is None
    assert module[0].weight.grad is gradient
    assert module[0].bias.grad is None
    assert module.training


def test_modes_and_kernels_are_afterwards_what_they_were() -> None:
    q = torch.empty(1, 2, 3, 8, device="meta")
    rt.trace(nn.Linear(8, 8), torch.ones(1, 8))
    attend = torch.nn.functional.scaled_dot_product_attention
    assert attend(q, q, q).shape == (1, 2, 3, 8)
    original = torch.autocast.__init__
    with pytest.raises(TraceError):
        rt.trace(nn.Linear(8, 8), torch.ones(1, 9))
    assert torch.autocast.__init__ is original
    assert not torch.nn.modules.module._global_forward_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def storages(module: nn.Module) -> set[int]:
    return {
        t.untyped_storage().data_ptr()
        for t in tensors_in((*module.state_dict().values(), getattr(module, "seen", None)))
        if t.device.type == "cpu"
    }


def test_a_copy_on_meta_holds_no_weight() -> None:
    module = Stateful()
    moved = on_meta(module)
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}
    assert moved.seen.device.type == "meta"
    assert type(moved) is Stateful
    assert moved.lin is not module.lin
    kept = [
        value
        for t in (*moved.buffers(), *moved.parameters(), moved.seen)
        for name, value in vars(t).items()
        if name != REAL
    ]
    assert kept  # small buffers keep their values ...
    assert not {t.untyped_storage().data_ptr() for t in kept} & storages(module)  # ... as copies
    assert all(set(vars(parameter)) == {REAL} for parameter in moved.parameters())  # a reference


def test_a_module_on_meta_is_taken_as_it_is() -> None:
    with torch.device("meta"):
        module = nn.Linear(8, 8)
    assert on_meta(module) is module


def test_ties_survive_the_copy(model: Callable[..., Any]) -> None:
    module = model("gpt2").module
    moved: Any = on_meta(module)
    assert moved.lm_head.weight is moved.transformer.wte.weight
    assert len(list(moved.parameters())) == len(list(module.parameters()))


def test_a_module_that_cannot_be_copied_says_what_to_do() -> None:
    module = nn.Linear(8, 8)
    module.stream = (item for item in ())  # type: ignore[assignment]
    with pytest.raises(TraceError, match=r"Linear cannot be copied .*with torch.device"):
        rt.trace(module, torch.ones(1, 8))


def test_inputs_become_twins_each_once() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    ids = torch.tensor([[1, 2]])
    moved = inputs_on_meta({"a": x, "b": [x, ids], "n": 3})
    assert moved["a"] is moved["b"][0]
    assert moved["a"].requires_grad
    assert moved["a"].shape == (2, 3)
    assert moved["n"] == 3
    assert {t.device.type for t in tensors_in(moved)} == {"meta"}


def test_tracing_twice_gives_the_same_graph(model: Callable[..., Any]) -> None:
    case = model("deepseek")
    first = rt.trace(case.module, phase="training", **case.kwargs)
    again = rt.trace(copy.deepcopy(case.module), phase="training", **case.kwargs)
    assert first == again


def test_numbers_drawn_on_the_host_are_the_same_in_every_trace(
    module: Callable[..., nn.Module],
) -> None:
    def masked(self: Any, x: torch.Tensor) -> Any:
        rows = [
            random.randrange(1, 100),
            int(numpy.random.randint(1, 100)),
            int(torch.randint(1, 100, (), device="cpu")),
        ]
        return [self.lin(x.expand(n, 8)) for n in rows]

    random.seed(5)
    before = random.getstate()
    first, second = (rt.trace(module(masked), torch.randn(1, 8)) for _ in range(2))
    assert first == second
    assert random.getstate() == before


def test_tables_that_a_module_makes_when_it_runs_are_made_again(
    module: Callable[..., nn.Module],
) -> None:
    def cached(self: Any, x: torch.Tensor) -> torch.Tensor:
        if "table" not in self.tables:
            self.tables["table"] = torch.arange(8, device=x.device) * 2.0
            self.made = True
        found: torch.Tensor = self.lin(x) + self.tables["table"]
        return found

    traced = module(cached, tables={}).to("meta")
    first, second = (rt.trace(traced, torch.randn(2, 8)) for _ in range(2))
    assert first == second
    assert "arange" in str([op.target for op in first.ops])
    assert traced.tables == {}
    assert not hasattr(traced, "made")


class Keeper:
    """What an offloading hook is: an object with settings, a count, a set and a way to run."""

    def __init__(self) -> None:
        self.calls, self.device, self.seen, self.order = 0, "unset", {1}, [[]]

    def before(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        self.device = args[0].device
        self.seen.add(2)
        self.order[0].append(self.calls)


def hooked(keeper: Keeper, way: str) -> nn.Module:
    """A module on meta, which is traced itself, with a hook that keeps state."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 4))
    count = [0]
    calls = 0

    def closure(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        count.append(calls)
        keeper.before(module, args)

    if way == "attribute":
        module.keeper = keeper
        layer: Any = module[0]
        forward = layer.forward

        def wrapped(x: Tensor) -> Tensor:
            module.keeper.before(layer, (x,))
            return forward(x)

        layer.forward = wrapped
    elif way == "method":
        module[0].register_forward_pre_hook(keeper.before)
    else:
        module[0].register_forward_pre_hook(closure)
    module.state = lambda: (calls, list(count))
    return module


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("way", ["attribute", "method", "closure"])
def test_what_hooks_of_a_meta_module_keep_is_as_before(way: str, step: bool) -> None:
    keeper = Keeper()
    module = hooked(keeper, way)
    x = torch.empty(2, 6, device="meta")
    before = copy.deepcopy(vars(keeper)), module.state()
    run = (lambda module, x: module(x), module) if step else (module,)
    graph = rt.trace(*run, x)
    assert any(op.name == "aten.addmm" for op in graph.ops)
    assert (vars(keeper), module.state()) == before
    module(x)
    assert keeper.calls == 1 and keeper.order == [[1]]  # it was run here, and not there
