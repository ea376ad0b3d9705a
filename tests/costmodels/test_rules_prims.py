"""Forward-mode derivatives, torch's primitive ops, and distances by a product."""

import importlib

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rooftrace as rt
from rooftrace.costmodels.ops.opview import find_rule


def net(x, a, b, gain):
    """Two layers, a norm and a softmax, as a function: counters cannot hook a module here."""
    hidden = F.layer_norm(torch.tanh(F.linear(x, a)), (16,), gain)
    return F.softmax(F.gelu(F.linear(hidden, b)), -1)


def dual(f, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


DERIVATIVES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "dual numbers": dual,
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x[0]),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x[0]),
    "vmapped": lambda f, x: torch.func.vmap(torch.func.jacfwd(f))(x),
}


class Derivative(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name = name
        self.a, self.b = nn.Parameter(torch.ones(16, 8)), nn.Parameter(torch.ones(4, 16))
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x):
        return DERIVATIVES[self.name](lambda x: net(x, self.a, self.b, self.gain), x)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_count_as_torch_does_on_real_tensors(name):
    x = torch.randn(3, 8)
    model = Derivative(name)
    estimate = rt.estimate(rt.trace(model, x), execution="eager")
    with FlopCounterMode(display=False) as counter:
        DERIVATIVES[name](lambda x: net(x, model.a, model.b, model.gain), x)
    assert estimate.flops_matrix == counter.get_total_flops() > 0
    assert estimate.unsupported_ops() == ()


def test_a_function_under_a_transform_may_make_tensors():
    """The gradient of sum(x * c) + x[0] + x[1] is c + (1, 1, 0): the ops are those of torch."""

    class Made(nn.Module):
        def forward(self, x):
            def f(x):
                rows = torch.tensor([0, 1])
                return (x * torch.tensor([1.0, 2.0, 3.0])).sum() + x[rows].sum()

            return torch.func.grad(f)(x)

    x = torch.zeros(3)
    assert Made()(x).tolist() == [2.0, 3.0, 3.0]
    graph = rt.trace(Made(), x)
    assert graph.values[graph.outputs[0]].shape == (3,)
    assert [op.name for op in graph.ops].count("aten.index") == 1
    assert not graph.assumptions  # the rows are known


def test_every_primitive_op_has_a_rule():
    names = getattr(torch._C, "_dispatch_get_all_op_names", list)()
    found = {n.split(".")[0].replace("::", ".") for n in names if n.startswith("prims::")}
    # The compiler has some for itself: they stand in programs that it made, which are not traced.
    ops = vars(importlib.import_module("torch._inductor.inductor_prims")).values()
    own = {f"prims.{op._opname}" for op in ops if isinstance(op, torch._ops.OpOverload)}
    assert {n for n in found - own if find_rule(f"{n}.default") is None} == set()


class Distances(nn.Module):
    def forward(self, x, y):
        return torch.cdist(x, y)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_euclidean_distances_of_many_rows_are_a_product(shape):
    p, r, m = 64, 40, 16
    x, y = torch.randn(*shape, p, m), torch.randn(*shape, r, m)
    estimate = rt.estimate(rt.trace(Distances(), x, y), "h100-sxm", "eager")

    def padded(x, y):  # what torch/aten/src/ATen/native/Distance.cpp does
        squares = x.pow(2).sum(-1, keepdim=True), y.pow(2).sum(-1, keepdim=True)
        left = torch.cat([x.mul(-2), squares[0], torch.ones_like(squares[0])], -1)
        right = torch.cat([y, torch.ones_like(squares[1]), squares[1]], -1)
        return left.matmul(right.mT).clamp_min(0).sqrt()

    with FlopCounterMode(display=False) as counter:
        expected = padded(x, y)
    torch.testing.assert_close(expected, torch.cdist(x, y), atol=1e-4, rtol=1e-4)
    assert estimate.flops_matrix == counter.get_total_flops()
    assert estimate.unsupported_ops() == ()


def test_the_gradient_of_distances_is_counted():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.y = (nn.Parameter(torch.randn(n, 16)) for n in (64, 40))

        def forward(self, scale):
            return (torch.cdist(self.x, self.y) * scale).sum()

    scale = torch.ones(())
    graph = rt.trace(Loss(), scale, phase="training", optimizer="none")
    with FlopCounterMode(display=False) as counter:
        Loss()(scale).backward()
    known = sum(op.flops_torch or 0 for op in graph.ops)
    assert known == counter.get_total_flops()
    first = 2 * 64 * 40 * (16 + 2)
    assert rt.estimate(graph, execution="eager").flops_matrix == known + first
