"""nn.RMSNorm is one kernel on CUDA from torch 2.9 on, and one op here, forward and backward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.tracer.lowering.rebuild import to_fx
from rooftrace.tracer.recording.recurrent import RMS_NORM_IS_ONE_KERNEL

pytestmark = [
    pytest.mark.skipif(not RMS_NORM_IS_ONE_KERNEL, reason="before torch 2.9"),
    pytest.mark.quick,
]
ROWS, WIDTH = 16, 64


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, **options)
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def norms(graph: rt.types.OpGraph) -> list[str]:
    return [op.name for op in graph.ops if op.module == "norm" and op.kind == "kernel"]


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}])
def test_it_is_one_op_forward_and_one_backward(options: dict[str, Any]) -> None:
    graph = rt.trace(Net(**options), torch.ones(ROWS, WIDTH), phase="training", optimizer="none")
    assert norms(graph) == ["rooftrace.rms_norm", "rooftrace.rms_norm_backward"]
    rows = [row for row in rt.estimate(graph, execution="eager").rows if row.family == "norm"]
    assert [row.name for row in rows] == ["rms norm", "rms norm backward"]


def test_it_reads_and_writes_once_what_the_spelled_norm_moves_five_times() -> None:
    graph = rt.trace(Net(), torch.ones(ROWS, WIDTH))
    estimate = rt.estimate(graph, execution="eager")
    (row,) = (row for row in estimate.rows if row.family == "norm")
    assert row.bytes == 4 * (ROWS * WIDTH + WIDTH + ROWS * WIDTH + ROWS)  # x, w; y, rstd
    # Squares, n - 1 adds and a division, eps, a root, two products: what the ops taken apart do.
    assert row.flops == ROWS * (WIDTH + WIDTH + 2 + WIDTH + WIDTH)


def test_replay_is_bit_exact() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(ROWS, WIDTH)
    tensors = dict(model.named_parameters())
    graph = rt.trace(model, x)
    (found,) = to_fx(graph, {k: v.detach() for k, v in tensors.items()})(x)
    assert torch.equal(found, model(x))


def test_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    w = torch.randn(8, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    torch.rms_norm(leaves[0], (8,), leaves[1], 1e-6).backward(g)
    out, rstd = torch.ops.rooftrace.rms_norm(x, (8,), w, 1e-6)
    found = torch.ops.rooftrace.rms_norm_backward(g, x, (8,), rstd, w, 1e-6, [True, True])
    torch.testing.assert_close(out, torch.rms_norm(x, (8,), w, 1e-6), rtol=0, atol=0)
    torch.testing.assert_close(found[0], leaves[0].grad)
    torch.testing.assert_close(found[1], leaves[1].grad)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.ones(2, 8, dtype=torch.bfloat16), torch.ones(8)),
        (torch.ones(2, 8, dtype=torch.complex64), torch.ones(8, dtype=torch.complex64)),
        (torch.ones(2, 4, 3, 8).to(memory_format=torch.channels_last), torch.ones(8)),
    ],
    ids=["a weight of another type", "complex", "channels last"],
)
def test_what_cuda_takes_apart_too_is_taken_apart(x: Tensor, weight: Tensor) -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return torch.rms_norm(x, (8,), weight, 1e-6)

    graph = rt.trace(Norm(), x, weight)
    assert "aten.rsqrt" in {op.name for op in graph.ops}
    assert "rooftrace.rms_norm" not in {op.name for op in graph.ops}


class Derived(nn.Module):
    """Gradients of gradients, and a derivative forward, through the norm."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.ones(WIDTH))

    def net(self, x: Tensor) -> Tensor:
        hidden = torch.rms_norm(x, (WIDTH,), self.weight, 1e-6)
        return (hidden @ hidden.T).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "jvp":
            return torch.func.jvp(self.net, (x,), (torch.ones_like(x),))[1]
        if self.how == "grad":
            return torch.func.grad(self.net)(x)
        if self.how == "vmap":
            return torch.func.vmap(self.net)(x.reshape(4, -1, WIDTH))
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (first,) = torch.autograd.grad(self.net(x), x, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), x)
        return second


@pytest.mark.parametrize("how", ["jvp", "grad", "vmap", "twice"])
def test_derivatives_go_through_it(how: str) -> None:
    x = torch.randn(ROWS, WIDTH)
    graph = rt.trace(Derived(how), x)
    with FlopCounterMode(display=False) as counter:
        Derived(how)(x)
    assert rt.estimate(graph, execution="eager").flops_matrix == counter.get_total_flops()


class Logging(TorchDispatchMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"{func.namespace}.{func._opname}")
        return func(*args, **(kwargs or {}))


def test_modes_of_the_users_see_the_op_of_cuda() -> None:
    seen: list[str] = []

    class Watched(Net):
        def forward(self, x: Tensor) -> Tensor:
            with Logging(seen):
                return super().forward(x)

    graph = rt.trace(Watched(), torch.ones(ROWS, WIDTH))
    assert "aten._fused_rms_norm" in seen
    assert not any(name.startswith("rooftrace.") for name in seen)
    assert norms(graph) == ["rooftrace.rms_norm"]
