"""Our matrix and convolution FLOPs against what torch counts while the model runs."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.tracer.values.trees import tensors_in
from tests.conftest import in_turn

EVERY = (
    "gpt2",
    "llama",
    "bert",
    "t5",
    "vit",
    "resnet",
    "vit_example",
    "control_flow",
    "transformer",
    "perceptron",
    "mixtral",
    "deepseek",
)


def ours(case: Any, phase: str) -> int:
    graph = rt.trace(case.module, *case.args, phase=phase, optimizer="none", **case.kwargs)
    return rt.plan(graph, "eager").total.flops(("matmul", "convolution"))


def counted_by_torch(module: nn.Module, case: Any, phase: str) -> int:
    """What FlopCounterMode counts in a run on real tensors.

    It has no formula for the CPU's fused attention and encoder layer, so both are switched off.
    """
    training = phase == "training"
    module.train(training)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
            torch.set_grad_enabled(training),
        ):
            output = module(*case.args, **case.kwargs)
            if training:
                losses = [t for t in tensors_in(output) if t.requires_grad]
                torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        module.eval()
    return counter.get_total_flops()


# In training an encoder has no fast path, and in forward a convolution no gradient.
@pytest.mark.parametrize(
    ("name", "phase"),
    in_turn(
        EVERY, ["training", "forward"], keep=[("transformer", "forward"), ("resnet", "training")]
    ),
)
def test_matrix_flops_are_what_torch_counts(
    name: str, phase: str, model: Callable[..., Any]
) -> None:
    case = model(name)
    assert ours(case, phase) == counted_by_torch(case.module, case, phase) > 0


@pytest.mark.parametrize("phase", ["forward", "training"])
def test_a_recurrent_network_costs_what_its_unrolled_steps_cost(
    phase: str, model: Callable[..., Any]
) -> None:
    """FlopCounterMode has no formula for a whole LSTM; on meta it sees each step's products."""
    case = model("lstm")
    unrolled = model("lstm").module.to("meta")
    on_meta = case._replace(args=(case.args[0].to("meta"),))
    by_step = counted_by_torch(unrolled, on_meta, phase)
    # One kernel also makes the gradient of the first hidden state, which autograd leaves out:
    # 2 layers x 2 directions, each [2, 4 gates x 16] @ [4 gates x 16, 16].
    first_state = 2 * 2 * (2 * 2 * (4 * 16) * 16) if phase == "training" else 0
    assert ours(case, phase) == by_step + first_state


@pytest.mark.parametrize(
    ("name", "phase"), in_turn(["mixtral", "deepseek"], ["training", "forward"])
)
def test_experts_cost_the_same_however_they_are_called(
    name: str, phase: str, model: Callable[..., Any]
) -> None:
    """FlopCounterMode has no formula for grouped_mm; the same experts in a loop are counted."""
    looped = ours(model(name, "eager"), phase)
    assert ours(model(name, "grouped_mm"), phase) == looped
    assert ours(model(name, "batched_mm"), phase) == looped


def test_a_gradient_of_a_gradient_costs_what_torch_counts() -> None:
    """A penalty on the gradient of a convolution: its backward is differentiated again."""

    def step(module: nn.Module, images: torch.Tensor) -> None:
        images = images.detach().requires_grad_()
        scores = module(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        (slope.pow(2).sum() + scores.pow(2).mean()).backward()

    def critic() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 49, 1))

    class Whole(contextlib.nullcontext[None]):
        parents = frozenset({"Global"})  # its own tree of modules cannot follow autograd.grad

    images = torch.ones(2, 4, 9, 9)
    graph = rt.trace(step, critic(), images)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = Whole()
    with counter:
        step(critic(), images)
    assert rt.plan(graph, "eager").total.flops(("matmul", "convolution")) == (
        counter.get_total_flops()
    )
    assert counter.get_total_flops() > 0
