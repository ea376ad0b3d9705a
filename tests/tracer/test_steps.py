"""A step that the user wrote gives the graph that the same step gives when we run its parts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.errors import RequestError, TraceError
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.api import capture
from tests.conftest import in_turn

X = torch.ones(3, 8)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def train(model: nn.Module, x: Tensor, optimizer: Any) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model(x))
    loss.backward()
    optimizer.step()
    return loss


def seen(graph: OpGraph) -> list[Any]:
    """What an op is, reads and makes, without where in which file it was called."""
    return [
        (
            op.target,
            op.module,
            op.part,
            op.kind,
            [graph.values[i].role for i in op.inputs],
            [(graph.values[i].shape, graph.values[i].role) for i in op.outputs],
        )
        for op in graph.ops
    ]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
def test_a_users_step_is_the_step_that_we_would_run(name: str) -> None:
    ours = rt.trace(net(), X, phase="training", loss=loss_of, optimizer=name)
    model = net()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    theirs = rt.trace(train, model, X, optimizer)
    assert seen(theirs) == seen(ours)
    assert theirs.phase == "training"
    assert theirs.workload == ours.workload | {"optimizer": name.lower()}
    assert [a.kind for a in theirs.assumptions] == []


def test_a_traced_step_leaves_the_users_objects_as_they_are() -> None:
    model = net().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rt.trace(train, model, X, optimizer)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer.state and not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_code_inside_a_capture_is_recorded() -> None:
    with torch.device("meta"):
        model, x = net(), torch.ones(3, 8)
    with torch.no_grad(), capture(model) as captured:
        model(x)
    # An op in the block itself has a line of its own; the module's ops are those of a trace.
    assert seen(captured.graph) == seen(rt.trace(net(), X))
    assert captured.graph.phase == "forward"
    (x_in_graph,) = captured.graph.inputs
    assert captured.graph.values[x_in_graph].shape == (3, 8)


def test_a_capture_with_a_backward_is_training() -> None:
    with torch.device("meta"):
        model, x = net(), torch.ones(3, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with capture(model) as captured:
        train(model, x, optimizer)
    ours = rt.trace(net(), X, phase="training", loss=loss_of)
    assert seen(captured.graph) == seen(ours)
    assert captured.graph.phase == "training"


def test_clipping_between_backward_and_step_belongs_to_the_optimizer() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        loss_of(model(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    graph = rt.trace(step, net(), X)
    clipping = [op.name for op in graph.ops if op.part == "optimizer"]
    # One list kernel for the norms of all gradients and one to scale them, as on a GPU.
    assert Counter(clipping)["aten._foreach_norm"] == 1
    assert Counter(clipping)["aten._foreach_mul_"] == 1
    assert {op.part for op in graph.ops} == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_runs_again_in_a_users_backward_is_recompute(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.second, self.first(x), use_reentrant=reentrant)

    def step(model: nn.Module, x: Tensor) -> None:
        loss_of(model(x)).backward()

    graph = rt.trace(step, Checkpointed(), X)
    ours = rt.trace(Checkpointed(), X, phase="training", loss=loss_of, optimizer="none")
    again = [(op.name, op.module) for op in graph.ops if op.part == "recompute"]
    assert again == [(op.name, op.module) for op in ours.ops if op.part == "recompute"]
    assert ("aten.addmm", "second.0") in again


def test_gradients_of_gradients_are_backward() -> None:
    def penalty(model: nn.Module, x: Tensor) -> None:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    parts = Counter(op.part for op in rt.trace(penalty, net(), X).ops)
    assert parts["backward"] > parts["forward"] > 0
    assert set(parts) == {"forward", "backward"}


def test_several_modules_are_named_by_their_classes() -> None:
    def translate(first: nn.Module, second: nn.Module, x: Tensor) -> Any:
        return second(first(x))

    graph = rt.trace(translate, nn.Linear(8, 8), nn.Linear(8, 4), X)
    products = [op.module for op in graph.ops if op.name == "aten.addmm"]
    assert products == ["Linear", "Linear_1"]
    assert graph.model["name"] == "Linear + Linear_1"
    assert graph.model["params"] == (8 * 8 + 8) + (8 * 4 + 4)
    assert [graph.values[i].shape for i in graph.outputs] == [(3, 4)]


def test_a_step_that_fails_names_the_module_and_the_users_line() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        model(x[:, :5]).sum().backward()

    with pytest.raises(TraceError) as caught:
        rt.trace(step, net(), X)
    first, *frames, advice = str(caught.value).splitlines()
    assert first.startswith("step step failed in module '0' (Linear) at aten.addmm: RuntimeError")
    assert "test_steps.py" in frames[-1] and "model(x[:, :5])" in frames[-1]
    assert "pass inputs that it accepts" in advice


def _early() -> None:
    with torch.device("meta"):
        model = net()
    with capture(model) as captured:
        print(captured.graph)


class _Strangers:
    optimizer: Any = None


def _strangers_optimizer() -> None:
    model = net()
    # What a class has is not copied with the step: it holds the real weights, not a copy's.
    _Strangers.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rt.trace(lambda model, x: train(model, x, _Strangers.optimizer), model, X)


def _in_a_closure(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    return lambda model, x: train(model, x, optimizer)


def _of_an_object(model: nn.Module, optimizer: Any) -> Callable[..., Any]:
    class Trainer:
        def __init__(self) -> None:
            self.optimizer = optimizer

        def step(self, model: nn.Module, x: Tensor) -> Any:
            return train(model, x, self.optimizer)

    return Trainer().step


@pytest.mark.parametrize("held", [_in_a_closure, _of_an_object])
def test_an_optimizer_that_the_step_holds_is_copied_with_it(held: Callable[..., Any]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = [p.detach().clone() for p in model.parameters()]
    graph = rt.trace(held(model, optimizer), model, X)
    passed = rt.trace(train, model, X, optimizer)
    parts = [(op.target, op.part) for op in graph.ops]
    assert parts == [(op.target, op.part) for op in passed.ops]
    assert ("optimizer" in dict(parts).values()) and not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_hooks_on_the_gradients_of_parameters_run() -> None:
    model = net()
    weight = model[0].weight
    weight.register_hook(lambda g: g @ torch.ones(g.shape[1], g.shape[1]))
    graph = rt.trace(model, X, phase="training")
    plain = rt.trace(net(), X, phase="training")
    products = [sum(op.target.startswith("aten.mm") for op in g.ops) for g in (graph, plain)]
    assert products[0] == products[1] + 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_early, "the graph of a capture is there after its block has ended"),
        (_strangers_optimizer, r"SGD steps on a parameter \[16, 8\] that is none of the captured"),
        (lambda: capture(), "no module was given to capture"),
        (lambda: capture(len), "expected modules to capture, got builtin_function"),  # type: ignore[arg-type]
        (
            lambda: rt.trace(train, net(), X, phase="training"),
            r"phases=\('training',\): a step of your own runs what it runs",
        ),
        (
            lambda: rt.trace(train, net(), X, optimizer="sgd"),
            "optimizer='sgd': a step of your own runs what it runs",
        ),
        (lambda: rt.trace(train, X), r"train: missing a required argument: 'x'; it takes model, x"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        call()


# -- optimizers that the user made -----------------------------------------------------------------


def minimise(model: nn.Module, x: Tensor, optimizer: Any) -> None:
    """A step of any optimizer, given a closure where it asks for one."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def bits(item: Any) -> Any:
    """All that an object holds, tensors as bytes, to compare it later."""
    if isinstance(item, Tensor):
        gradient = None if item.grad is None else bits(item.grad)
        return (str(item.dtype), item.detach().numpy().tobytes(), gradient)
    if isinstance(item, dict):
        return [(k if not isinstance(k, Tensor) else id(k), bits(v)) for k, v in item.items()]
    if isinstance(item, (list, tuple)):
        return [bits(part) for part in item]
    return repr(item) if isinstance(item, (int, float, str, bool, type(None))) else id(item)


OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type)
    and issubclass(kind, torch.optim.Optimizer)
    and name not in ("Optimizer", "SparseAdam")  # a sparse gradient is recorded as a dense one
)


@pytest.mark.parametrize(
    ("name", "stepped"),
    in_turn(OPTIMIZERS, [False, True], keep=[("Adam", False), ("Adam", True), ("SGD", True)]),
)
def test_every_optimizer_of_torch_steps_and_the_users_own_stays(name: str, stepped: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 4, bias=False))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    if stepped:
        minimise(model, X, optimizer)
    before = bits(list(model.parameters())), bits(vars(optimizer))
    graph = rt.trace(minimise, model, X, optimizer)
    assert (bits(list(model.parameters())), bits(vars(optimizer))) == before
    assert {op.part for op in graph.ops} >= {"forward", "backward", "optimizer"}
    products = [op for op in graph.ops if op.name == "aten.mm" and op.part == "forward"]
    assert len(products) >= 2
    assert {op.module for op in products} == {"0", "2"}


class Sharpness(torch.optim.Optimizer):
    """Steps up, then down, with an optimizer inside whose groups it shares."""

    def __init__(self, parameters: Any, base: Any, rho: float) -> None:
        super().__init__(parameters, {"rho": rho})
        self.rho = rho
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=self.rho)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
        self.base_optimizer.step()


def test_an_optimizer_of_the_users_own_keeps_its_attributes() -> None:
    def sharp(model: nn.Module, x: Tensor, optimizer: Any, scheduler: Any) -> None:
        for step in (optimizer.first_step, optimizer.step):
            loss_of(model(x)).backward()
            step()
            optimizer.zero_grad()
        scheduler.step()

    model = net()
    optimizer = Sharpness(model.parameters(), torch.optim.AdamW, rho=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.base_optimizer, 1)
    before = bits(list(model.parameters())), bits(vars(optimizer)), scheduler.last_epoch
    graph = rt.trace(sharp, model, X, optimizer, scheduler)
    assert (bits(list(model.parameters())), bits(vars(optimizer)), scheduler.last_epoch) == before
    parts = Counter(op.part for op in graph.ops if op.name in ("aten.addmm", "aten.mm"))
    assert parts == {"forward": 2 * 2, "backward": 2 * 3}


@pytest.mark.filterwarnings("error:Seems like")
@pytest.mark.parametrize("kind", ["StepLR", "CosineAnnealingLR", "OneCycleLR"])
def test_a_scheduler_steps_the_copy_of_its_optimizer(kind: str) -> None:
    def step(model: nn.Module, x: Tensor, given: dict[str, Any]) -> None:
        train(model, x, given["optimizer"])
        given["scheduler"].step()

    settings = {"StepLR": (1,), "CosineAnnealingLR": (10,), "OneCycleLR": (0.1, 10)}
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = getattr(torch.optim.lr_scheduler, kind)(optimizer, *settings[kind])
    before = scheduler.state_dict(), optimizer.param_groups[0]["lr"]
    graph = rt.trace(step, model, X, {"optimizer": optimizer, "scheduler": scheduler})
    assert (scheduler.state_dict(), optimizer.param_groups[0]["lr"]) == before
    assert not optimizer.state
    assert "optimizer" in {op.part for op in graph.ops}


def test_a_scaler_and_an_average_of_the_weights_take_part() -> None:
    def step(model: nn.Module, average: Any, x: Tensor, optimizer: Any, scaler: Any) -> None:
        scaler.scale(loss_of(model(x))).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(model)

    model = net()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    before = bits([*model.parameters(), *average.parameters()])
    graph = rt.trace(step, model, average, X, optimizer, scaler)
    assert bits([*model.parameters(), *average.parameters()]) == before
    assert not optimizer.state
    assert {op.part for op in graph.ops} == {"forward", "backward", "optimizer"}
