"""Steps of optimizers that a fused kernel takes: known by what they do to a few numbers."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.rewrites import with_fused_optimizer
from rooftrace.graph import OpGraph

Update = Callable[[nn.Parameter, torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Writes into a weight, and its moments, by its gradient."""


def adam(p: nn.Parameter, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-4)


def adamw_with_operators(
    p: nn.Parameter, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    m.copy_(m + (g - m) * (1 - 0.95))
    v.copy_(0.98 * v + (1 - 0.98) * g**2)
    step = (m / (1 - 0.95**7)) * torch.rsqrt(v / (1 - 0.98**7) + 0.0)
    p.sub_(3e-4 * (step + 0.1 * p))


def nesterov(p: nn.Parameter, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    d = g + 1e-4 * p
    m.mul_(0.9).add_(d)
    p.sub_((d + m * 0.9) * 0.1)


def lion(p: nn.Parameter, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    p.sub_((0.9 * m + 0.1 * g).sign() * 1e-4)
    m.lerp_(g, 0.01)


def lamb(p: nn.Parameter, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    step = m / (v.sqrt() + 1e-6)
    p.sub_(step * (p.norm() / step.norm() * 1e-3))


def of_the_moment_before(
    p: nn.Parameter, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-4)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)


def traced(step_of: Callable[[nn.Module], Callable[[], object]], clips: bool = False) -> OpGraph:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        x, after = torch.empty(4, 64), step_of(model)

        def step() -> None:
            model(x).sum().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            after()

        return rt.trace(step)


def by_hand(update: Update) -> Callable[[nn.Module], Callable[[], object]]:
    def of(model: nn.Module) -> Callable[[], object]:
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]

        @torch.no_grad()
        def step() -> None:
            for p, (m, v) in zip(model.parameters(), moments, strict=True):
                assert p.grad is not None
                update(p, p.grad, m, v)
                p.grad = None

        return step

    return of


def of_torch(name: str, **how: Any) -> Callable[[nn.Module], Callable[[], object]]:
    def of(model: nn.Module) -> Callable[[], object]:
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **how)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step

    return of


def fused(graph: OpGraph) -> list[tuple[str, int]]:
    ops = with_fused_optimizer(graph).ops
    return [(op.name, len(op.outputs)) for op in ops if "_fused_" in op.target]


def updates(graph: OpGraph) -> int:
    return sum(op.part == "optimizer" and op.kind == "kernel" for op in graph.ops)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_steps_of_torch_that_have_a_fused_kernel_become_it(
    name: str, foreach: bool, clips: bool
) -> None:
    how: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    apart = traced(of_torch(name, foreach=foreach, weight_decay=0.1, **how), clips)
    kind = "aten._fused_sgd_" if name == "SGD" else "aten._fused_adamw_"
    assert fused(apart) == [(kind, 6)]
    counter = 0 if name == "SGD" else 1  # of steps, which fused kernels keep on the device
    wanted = updates(traced(of_torch(name, fused=True, weight_decay=0.1, **how), clips)) - counter
    assert updates(with_fused_optimizer(apart)) == wanted


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop", "Adadelta"])
@pytest.mark.parametrize("foreach", [False, True])
def test_other_steps_of_torch_stay(name: str, foreach: bool) -> None:
    graph = traced(of_torch(name, foreach=foreach))
    assert with_fused_optimizer(graph) is graph


@pytest.mark.parametrize("update", [adam, adamw_with_operators, nesterov])
def test_a_step_by_hand_becomes_the_fused_one_at_its_price(update: Update) -> None:
    name: str
    how: dict[str, Any]
    name, how = (
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4})
        if update is nesterov
        else ("AdamW", {})
    )
    graphs = traced(by_hand(update)), traced(of_torch(name, fused=True, **how))
    planted, mended = (rt.estimate(graph, "h100-sxm", "eager") for graph in graphs)
    told = [w for w in rt.tools.guidance(planted).options if w.lever == "optimizer"]
    assert "test_fused_optimizers.py:" in told[0].source
    assert told[0].gain == pytest.approx(planted.t_est - mended.t_est, rel=0.1)


@pytest.mark.parametrize("update", [lion, lamb, of_the_moment_before])
def test_steps_by_hand_that_only_look_like_it_stay(update: Update) -> None:
    graph = traced(by_hand(update))
    assert with_fused_optimizer(graph) is graph


def test_lists_of_foreach_by_hand_become_it() -> None:
    def of(model: nn.Module) -> Callable[[], object]:
        def zeros() -> Iterable[torch.Tensor]:
            return [torch.zeros_like(p) for p in model.parameters()]

        params: list[torch.Tensor] = [*model.parameters()]
        m, v = [*zeros()], [*zeros()]

        @torch.no_grad()
        def step() -> None:
            grads = [p.grad for p in params if p.grad is not None]
            torch._foreach_lerp_(m, grads, 0.1)
            torch._foreach_mul_(v, 0.999)
            torch._foreach_addcmul_(v, grads, grads, 0.001)
            roots = torch._foreach_sqrt(v)
            torch._foreach_add_(roots, 1e-8)
            torch._foreach_addcdiv_(params, m, roots, -1e-3)

        return step

    assert fused(traced(of)) == [("aten._fused_adamw_", 6)]
