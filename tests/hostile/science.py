"""Scientific code: solvers that look at values, derivatives of outputs, graphs, linear algebra."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from .harness import Case, pattern
from .policies import trained
from .training_steps import mlp
from .wrappers import FORWARD


@pattern
def adaptive_ode_solver() -> Case:
    """Heun with an error estimate: a step is taken or halved by what the error of real data is."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 5))

        def forward(self, y: Tensor, tolerance: float) -> Tensor:
            t, h = 0.0, 0.5
            for _ in range(100):
                if t >= 1.0 - 1e-9:
                    return y
                h = min(h, 1.0 - t)
                a = self.field(y)
                b = self.field(y + h * a)
                error = (h * (b - a) / 2).abs().max().item()
                if error <= tolerance:
                    t, y = t + h, y + h * (a + b) / 2
                h *= min(2.0, max(0.3, 0.9 * math.sqrt(tolerance / (error + 1e-12))))
            raise ArithmeticError(f"no end after 100 steps, t = {t}")

    return Case(Flow(), (torch.randn(7, 5), 0.02))


@pattern
def pinn_with_second_derivatives() -> Case:
    """A heat equation's residual: derivatives of the output by parts of the input, twice."""
    model = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: Any, x: Tensor, t: Tensor) -> Tensor:
        x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
        u = model(torch.stack([x, t], -1))
        ones = torch.ones_like(u)
        ux, ut = torch.autograd.grad(u, (x, t), ones, create_graph=True)
        (uxx,) = torch.autograd.grad(ux, x, torch.ones_like(ux), create_graph=True)
        loss = (ut - 0.1 * uxx).square().mean() + model(torch.zeros(3, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Case(step, (model, optimizer, torch.rand(5), torch.rand(5)))


@pattern
def fourier_operator() -> Case:
    """An FNO layer: rfft2, a complex einsum over the low modes into zeros, irfft2, trained."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.out = nn.Conv2d(1, 4, 1), nn.Conv2d(5, 1, 1)
            self.weight = nn.Parameter(torch.randn(4, 5, 3, 2, dtype=torch.cfloat) / 20)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(x)
            modes = torch.fft.rfft2(x)
            out = torch.zeros(len(x), 5, *modes.shape[2:], dtype=torch.cfloat, device=x.device)
            out[:, :, :3, :2] = torch.einsum("bixy,ioxy->boxy", modes[:, :, :3, :2], self.weight)
            return self.out(torch.fft.irfft2(out, s=x.shape[-2:]))

    return Case(Spectral(), (torch.randn(2, 1, 8, 6),))


@pattern
def long_convolution_by_fft() -> Case:
    """Hyena: a filter made by a small network, padded FFTs, complex pointwise product."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter, self.mix = mlp(1, 5, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            n = x.shape[1]
            h = self.filter(torch.linspace(0, 1, n)[:, None])
            y = torch.fft.irfft(
                torch.fft.rfft(x, n=2 * n, dim=1) * torch.fft.rfft(h, n=2 * n, dim=0), dim=1
            )
            return self.mix(y[:, :n])

    flops = 2 * 10 * (5 + 30) + 2 * 30 * 36
    return Case(Long(), (torch.randn(3, 10, 6),), expected=flops)


@pattern
def einsum_network() -> Case:
    """Triangle multiplication, an outer-product mean, and attention, all by einsum."""

    class Triangle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 4) for _ in range(3))
            self.core = nn.Parameter(torch.randn(4, 3, 5))

        def forward(self, z: Tensor) -> Tensor:
            a, b, c = self.a(z), self.b(z), self.c(z)
            up = torch.einsum("bikc,bjkc->bijc", a, b)
            outer = torch.einsum("bijc,bijd->bcd", up, c)
            core = torch.einsum("bcd,cef,dgh,egk->bfhk", outer, self.core, self.core, self.inner())
            return core

        def inner(self) -> Tensor:
            return torch.einsum("ief,jgf->eg", self.core, self.core).unsqueeze(-1).expand(-1, -1, 2)

    return Case(Triangle(), (torch.randn(2, 7, 7, 6),))


@pattern
def batched_linear_algebra() -> Case:
    """Cholesky, triangular and general solves, SVD and a log-determinant of features, trained."""

    class Gaussian(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            f = self.features(x)
            cov = f.transpose(1, 2) @ f + torch.eye(4)
            factor = torch.linalg.cholesky(cov)
            white = torch.linalg.solve_triangular(factor, f.transpose(1, 2), upper=False)
            mean = torch.linalg.solve(cov, f.mean(1))
            return white.square().sum() + torch.logdet(cov).sum() + mean.sum()

    return trained(Gaussian(), torch.randn(3, 7, 6))


@pattern
def singular_values_in_a_loss() -> Case:
    """A nuclear norm and a projection of points by Kabsch's SVD with a sign of a determinant."""

    class Kabsch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.move = nn.Linear(3, 3)

        def forward(self, p: Tensor, q: Tensor) -> Tensor:
            p = self.move(p)
            u, s, vh = torch.linalg.svd(p.transpose(1, 2) @ q)
            sign = torch.sign(torch.linalg.det(u @ vh))
            u = torch.cat([u[..., :-1], u[..., -1:] * sign[:, None, None]], -1)
            return ((p @ (u @ vh)) - q).square().sum() + s.sum()

    return trained(Kabsch(), torch.randn(2, 7, 3), torch.randn(2, 7, 3))


@pattern
def message_passing() -> Case:
    """Edges gather, a network makes messages, scatter sums them; `max().item()` counts nodes."""

    class Messages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = mlp(13, 9, 5), mlp(11, 8, 6)

        def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
            source, target = edges
            nodes = int(edges.max().item()) + 1
            for _ in range(2):
                m = self.message(torch.cat([x[source], x[target], weight], -1))
                total = torch.zeros(nodes, 5).index_add_(0, target, m)
                top = torch.full((nodes, 5), -1e9).scatter_reduce(
                    0, target[:, None].expand(-1, 5), m, "amax"
                )
                mixed = torch.where(top > -1e8, total + top, total)
                x = x[:nodes] + self.update(torch.cat([x[:nodes], mixed], -1))
            return x

    edges = torch.tensor([[0, 1, 2, 3, 4, 0, 2, 5], [1, 2, 3, 4, 5, 2, 0, 3]])
    flops = 2 * 2 * (8 * (13 * 9 + 9 * 5) + 6 * (11 * 8 + 8 * 6))
    return Case(Messages(), (torch.randn(6, 6), edges, torch.randn(8, 1)), expected=flops)


@pattern
def radius_graph() -> Case:
    """The edges themselves come from distances of real positions, by a threshold and nonzero."""

    class Radius(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge, self.node = mlp(1, 7, 5), nn.Linear(5, 3)

        def forward(self, positions: Tensor) -> Tensor:
            distance = torch.cdist(positions, positions)
            near = ((distance < 1.5) & (distance > 0)).nonzero()
            e = self.edge(distance[near[:, 0], near[:, 1]][:, None])
            return self.node(torch.zeros(len(positions), 5).index_add_(0, near[:, 0], e))

    return Case(Radius(), (torch.randn(9, 3),))


@pattern
def nearest_neighbours() -> Case:
    """kNN by cdist of features (a product for many points) and topk, then an edge network."""

    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.edge = nn.Linear(3, 4), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            f = self.first(x)
            near = torch.cdist(f, f).topk(3, largest=False).indices
            neighbours = torch.stack([f[b, near[b]] for b in range(len(f))])
            pair = torch.cat([neighbours, f[:, :, None].expand(-1, -1, 3, -1)], -1)
            return self.edge(pair).amax(2)

    return Case(Dynamic(), (torch.randn(2, 27, 3),))


@pattern
def kernel_ridge() -> Case:
    """An RBF kernel of learned features by pairwise squares, solved in closed form, trained."""

    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Linear(6, 4)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, y: Tensor, test: Tensor) -> Tensor:
            a, b = self.features(x), self.features(test)
            square = (a * a).sum(1)[:, None] + (a * a).sum(1)[None] - 2 * a @ a.T
            cross = (b * b).sum(1)[:, None] + (a * a).sum(1)[None] - 2 * b @ a.T
            gram = torch.exp(-square / self.scale) + 0.1 * torch.eye(len(x))
            factor = torch.linalg.cholesky(gram)
            return torch.exp(-cross / self.scale) @ torch.cholesky_solve(y, factor)

    return trained(Kernel(), torch.randn(9, 6), torch.randn(9, 2), torch.randn(5, 6))


class Adjoint(Function):
    """Euler forward without a graph; backward integrates the adjoint with a fresh graph a step."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, field: nn.Module, steps: int, *params: Tensor) -> Tensor:
        ctx.field, ctx.steps = field, steps
        with torch.no_grad():
            for _ in range(steps):
                y = y + field(y) / steps
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> Any:
        y, *params = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in params]
        for _ in range(ctx.steps):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                out = ctx.field(y)
            da, *dp = torch.autograd.grad(out, [y, *params], a)
            y = y.detach() - out.detach() / ctx.steps
            a = a + da / ctx.steps
            sums = [s + d / ctx.steps for s, d in zip(sums, dp, strict=True)]
        return (a, None, None, *sums)


@pattern(recompute=True)
def neural_ode_adjoint(recompute: bool = True) -> Case:
    """The adjoint method: a loop under no_grad, and a loop of small autograd.grads in backward."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.field = nn.Linear(6, 5), mlp(5, 9, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            if recompute:
                return Adjoint.apply(y, self.field, 4, *self.field.parameters())
            for _ in range(4):
                y = y + self.field(y) / 4
            return y

    # Forward once without a graph, once more in backward, and all gradients.
    field = 4 * (4 if recompute else 3) * 2 * 7 * 90
    return trained(Flow(), torch.randn(7, 6), expected=field + 2 * 2 * 7 * 30)


@pattern
def physics_rollout() -> Case:
    """A learned force moves particles in place; the loss is summed over time and differentiated."""
    model = mlp(4, 9, 2)

    def step(model: nn.Module, position: Tensor, speed: Tensor) -> Tensor:
        q, v = position.clone(), speed.clone()
        trace = torch.empty(6, *q.shape)
        for t in range(6):
            v = v + 0.1 * model(torch.cat([q, v], -1))
            q = q + 0.1 * v
            trace[t] = q
        loss = (trace[1:] - trace[:-1]).square().sum()
        loss.backward()
        return loss

    forward = 6 * 2 * 7 * 54
    # The first input needs no gradient.
    total = 3 * forward - 2 * 7 * 36
    return Case(step, (model, torch.randn(7, 2), torch.randn(7, 2)), expected=total)


@pattern
def equilibrium_until_converged() -> Case:
    """A DEQ iterates under no_grad until the residual of real data is small, then attaches."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 5), nn.Linear(6, 5)
            with torch.no_grad():
                self.a.weight.mul_(0.4)

        def forward(self, x: Tensor) -> Tensor:
            u = self.b(x)
            z = torch.zeros_like(u)
            with torch.no_grad():
                for _ in range(50):
                    new = torch.tanh(self.a(z) + u)
                    done = (new - z).norm() < 1e-2 * new.norm()
                    z = new
                    if done:
                        break
            return torch.tanh(self.a(z) + u)

    return trained(Equilibrium(), torch.randn(7, 6))


@pattern
def sinkhorn_until_converged() -> Case:
    """Optimal transport in the log domain until marginals fit; allclose decides."""

    class Transport(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            score = torch.sigmoid(self.a(x) @ self.a(y).T)
            plan = score
            for _ in range(100):
                plan = plan / plan.sum(1, keepdim=True)
                plan = plan / plan.sum(0, keepdim=True)
                row = plan.sum(1)
                if torch.allclose(row, torch.full_like(row, 5 / 7), atol=1e-3):
                    break
                score = score @ torch.eye(5)
            return plan @ self.a(y) + score.sum()

    return Case(Transport(), (torch.randn(7, 6), torch.randn(5, 6)))


@pattern
def jacobians_by_func() -> Case:
    """jacrev over a vmapped model, and a Hessian by forward over reverse."""

    class Derivatives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp(4, 7, 3)

        def forward(self, x: Tensor) -> Any:
            jacobian = torch.func.vmap(torch.func.jacrev(self.model))(x)
            hessian = torch.func.hessian(lambda v: self.model(v).square().sum())(x[0])
            return jacobian, hessian

    return Case(Derivatives(), (torch.randn(5, 4),))


@pattern
def forward_mode_derivatives() -> Case:
    """Dual numbers through a network: one jvp by torch.func, one by torch.autograd.forward_ad."""
    import torch.autograd.forward_ad as ad

    class Dual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = mlp()

        def forward(self, x: Tensor, tangent: Tensor) -> Any:
            one, slope = torch.func.jvp(self.model, (x,), (tangent,))
            with ad.dual_level():
                out = ad.unpack_dual(self.model(ad.make_dual(x, tangent)))
            return one + slope, out.primal, out.tangent

    # Each product has two tangents: torch multiplies by the zeros of a weight without one, too.
    data = torch.randn(7, 6), torch.randn(7, 6)
    return Case(Dual(), data, expected=2 * 3 * 7 * FORWARD)


@pattern
def hutchinson_trace() -> Case:
    """A continuous flow's divergence by a random probe: grad inside forward, trained through."""

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = mlp(5, 9, 5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().clone().requires_grad_()
                y = self.field(x)
                probe = torch.randint(0, 2, x.shape).to(x) * 2 - 1
                (vjp,) = torch.autograd.grad(y, x, probe, create_graph=True)
            return y.square().sum(1) - (vjp * probe).sum(1)

    return trained(Flow(), torch.randn(7, 5))


@pattern
def recurrence_by_hand() -> Case:
    """A linear state-space scan in Python over time, writing outputs in place, trained."""

    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 4)
            out = []
            for t in range(x.shape[1]):
                state = torch.tanh(self.a(state)) + self.b(x[:, t])
                out.append(self.c(state))
            return torch.stack(out, 1)

    steps, b = 9, 2
    # The first state is a constant.
    flops = steps * 2 * b * (3 * 16 + 2 * 24 + 3 * 12) - 2 * b * 16
    return trained(Scan(), torch.randn(b, steps, 6), expected=flops)


@pattern
def scipy_matching() -> Case:
    """A detection loss: scipy matches predictions to targets by costs on the CPU."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classes, self.boxes = nn.Linear(6, 4), nn.Linear(6, 2)

        def forward(self, x: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
            from scipy.optimize import linear_sum_assignment

            scores, boxes = self.classes(x), self.boxes(x)
            cost = torch.cdist(boxes, targets, p=1) - scores.softmax(-1)[..., labels]
            rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
            rows, columns = torch.as_tensor(rows), torch.as_tensor(columns)
            loss = F.l1_loss(boxes[rows], targets[columns])
            return loss + F.cross_entropy(scores[rows], labels[columns])

    args = torch.randn(7, 6), torch.tensor([1, 0, 3]), torch.randn(3, 2)
    return trained(Detector(), *args, expected=2 * 2 * 7 * 36)


@pattern
def symbolic_regression_step() -> Case:
    """A residual network whose depth grows with a counter in a buffer; Python floats in between."""
    model = mlp(6, 10, 6)

    def step(model: nn.Module, x: Tensor) -> float:
        total = 0.0
        for depth in range(1, 4):
            y = x
            for _ in range(depth):
                y = y + model(y) / depth
            total += float(y.square().mean())
        return total

    return Case(step, (model, torch.randn(7, 6)), expected=6 * 2 * 7 * 120)
