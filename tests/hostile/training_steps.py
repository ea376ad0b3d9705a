"""Whole training steps, as papers and trainers write them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .harness import Case, pattern


def mlp(a: int = 6, b: int = 10, c: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c))


def mlp_flops(rows: int, a: int = 6, b: int = 10, c: int = 3, first: bool = False) -> int:
    """Forward, weight gradients, and input gradients, of the input itself only if `first`."""
    return 2 * rows * (2 * (a * b + b * c) + b * c + (a * b if first else 0))


@pattern
def gradient_accumulation() -> Case:
    """Three uneven micro-batches before one optimizer step, scaled by their share."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        for part, target in zip(x.split(4), y.split(4), strict=True):
            loss = F.cross_entropy(model(part), target) * len(part) / len(x)
            loss.backward()
        optimizer.step()

    data = torch.randn(11, 6), torch.randint(3, (11,))
    return Case(step, (model, optimizer, *data), expected=mlp_flops(11))


@pattern
def gan_with_two_optimizers() -> Case:
    """The critic runs three times, once on a detached fake; once its own gradients are waste."""
    generator, critic = mlp(5, 9, 7), mlp(7, 13, 1)
    first = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))

    def step(generator: nn.Module, critic: nn.Module, first: Any, second: Any, x: Tensor) -> Tensor:
        fake = generator(torch.randn(len(x), 5))
        second.zero_grad()
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(x)).mean()
        loss.backward()
        second.step()
        first.zero_grad()
        loss = F.softplus(-critic(fake)).mean()
        loss.backward()
        first.step()
        return loss

    return Case(
        step, (generator, critic, first, second, torch.randn(4, 7)),
        expected=mlp_flops(4, 5, 9, 7) + 2 * mlp_flops(4, 7, 13, 1)
        + mlp_flops(4, 7, 13, 1, first=True),
    )  # fmt: skip


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer, as its best known package has it."""

    def __init__(self, params: Iterable[Tensor], base: Any, rho: float = 0.05, **kwargs: Any):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        norms = [p.grad.norm(p=2) for g in self.param_groups for p in g["params"]]
        norm = torch.norm(torch.stack(norms), p=2)
        for group in self.param_groups:
            scale = group["rho"] / (norm + 1e-12)
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        self.zero_grad()
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()


@pattern
def sharpness_aware_step() -> Case:
    """An optimizer around an optimizer: perturbs weights, calls a closure, puts `p.data` back."""
    model = mlp()
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step(model: nn.Module, optimizer: SAM, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        loss = closure()
        optimizer.step(closure)
        return loss

    data = torch.randn(7, 6), torch.randn(7, 3)
    return Case(step, (model, optimizer, *data), expected=2 * mlp_flops(7))


@pattern
def gradient_penalty() -> Case:
    """WGAN-GP: a gradient of the input is part of the loss, so backward runs through backward."""
    critic = mlp(7, 13, 1)

    def step(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
        alpha = torch.rand(len(real), 1)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_()
        score = critic(mixed)
        (slope,) = torch.autograd.grad(
            score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True
        )
        penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
        loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        loss.backward()
        return loss

    return Case(step, (critic, torch.randn(4, 7), torch.randn(4, 7)))


@pattern
def averaged_weights() -> Case:
    """An EMA copy made by deepcopy is updated in place, and evaluated in the same step."""
    model = mlp()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, ema: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        ema.update_parameters(model)
        with torch.no_grad():
            return F.mse_loss(ema(x), y)

    data = torch.randn(7, 6), torch.randn(7, 3)
    forward = 2 * 7 * (60 + 30)
    return Case(step, (model, ema, optimizer, *data), expected=mlp_flops(7) + forward)


@pattern
def scaler_autocast_and_clipping() -> Case:
    """GradScaler asks for `found_inf.item()`; clipping uses foreach norms; products run in bf16."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, y: Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        scaler.step(optimizer)
        scaler.update()
        return float(norm)

    data = torch.randn(7, 6), torch.randint(3, (7,))
    return Case(step, (model, optimizer, scaler, *data), expected=mlp_flops(7))


@pattern(named=("branch", "value"))
def lbfgs_with_closure() -> Case:
    """How often the closure runs depends on values: curvature, tolerance, line search."""
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Case(step, (model, optimizer, torch.randn(7, 6), torch.randn(7, 3)))


@pattern
def optimizer_in_backward() -> Case:
    """Each parameter has its own optimizer, which runs from a hook and frees the gradient."""
    model = mlp()
    optimizers = {p: torch.optim.Adam([p], lr=1e-3, foreach=False) for p in model.parameters()}

    def apply(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(apply)

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    data = torch.randn(7, 6), torch.randn(7, 3)
    return Case(step, (model, *data), expected=mlp_flops(7))


@pattern
def distillation() -> Case:
    """The frozen teacher comes from a closure, runs without grad, and has more layers."""
    student = mlp()
    teacher = nn.Sequential(mlp(6, 17, 17), mlp(17, 19, 3)).requires_grad_(False).eval()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = F.softmax(teacher(x) / 2, -1)
        loss = F.kl_div(F.log_softmax(model(x) / 2, -1), target, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    forward = 2 * 7 * (6 * 17 + 17 * 17 + 17 * 19 + 19 * 3)
    return Case(step, (student, optimizer, torch.randn(7, 6)), expected=mlp_flops(7) + forward)


class MoCo(nn.Module):
    """Momentum contrast with a queue and a pointer among the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.momentum = mlp(6, 10, 5), mlp(6, 10, 5)
        self.momentum.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(5, 12), dim=0))
        self.register_buffer("pointer", torch.tensor([8]))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        query = F.normalize(self.online(a), dim=1)
        with torch.no_grad():
            for p, m in zip(self.online.parameters(), self.momentum.parameters(), strict=True):
                m.data = m.data * 0.99 + p.data * 0.01
            key = F.normalize(self.momentum(b), dim=1)
        positive = torch.einsum("nc,nc->n", query, key)[:, None]
        negative = torch.einsum("nc,ck->nk", query, self.queue.clone().detach())
        logits = torch.cat([positive, negative], 1) / 0.07
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[:, at : at + len(key)] = key.T
            self.pointer[0] = (at + len(key)) % self.queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))


@pattern
def contrastive_with_queue() -> Case:
    """A pointer in a buffer says where to write in another; `m.data` is bound anew in forward."""
    options = {"phase": "training", "loss": lambda loss: loss}
    return Case(MoCo(), (torch.randn(4, 6), torch.randn(4, 6)), options=options)


@pattern
def mixup_with_numpy() -> Case:
    """The mixing weight is drawn by numpy, the pairs by randperm, and both are used as indices."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(80, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
        weight = float(np.random.beta(0.4, 0.4))
        order = torch.randperm(len(x))
        size = 1 + int(3 * np.sqrt(1 - weight)) % 3
        x = x.clone()
        x[:, :, :size, :size] = x[order, :, :size, :size]
        out = model(weight * x + (1 - weight) * x[order])
        loss = weight * F.cross_entropy(out, y) + (1 - weight) * F.cross_entropy(out, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    data = torch.randn(4, 3, 6, 6), torch.randint(7, (4,))
    convolution, linear = 2 * 4 * 5 * 16 * 27, 2 * 4 * 80 * 7
    return Case(step, (model, optimizer, *data), expected=2 * convolution + 3 * linear)


@pattern
def per_sample_gradients() -> Case:
    """DP-SGD by torch.func: vmap of grad of functional_call, then clipping and noise."""
    model = mlp()

    def step(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        params = {k: v.detach() for k, v in model.named_parameters()}

        def loss(params: Any, sample: Tensor, target: Tensor) -> Tensor:
            out = functional_call(model, params, (sample[None],))
            return F.cross_entropy(out, target[None])

        each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        return {
            k: torch.einsum("b,b...->...", factor, g) + 0.1 * torch.randn(g.shape[1:])
            for k, g in each.items()
        }

    return Case(step, (model, torch.randn(5, 6), torch.randint(3, (5,))))


@pattern
def maml_inner_loop() -> Case:
    """Meta-learning: inner gradient steps are differentiated; weights are a dict of non-leaves."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(model: nn.Module, optimizer: Any, support: Tensor, query: Tensor) -> Tensor:
        total = torch.zeros(())
        for s, q in zip(support, query, strict=True):
            weights = dict(model.named_parameters())
            for _ in range(2):
                loss = functional_call(model, weights, (s,)).square().mean()
                slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {
                    k: w - 0.01 * g for (k, w), g in zip(weights.items(), slopes, strict=True)
                }
            total = total + functional_call(model, weights, (q,)).square().mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        return total

    return Case(step, (model, optimizer, torch.randn(2, 4, 6), torch.randn(2, 7, 6)))


class CellModel(nn.Module):
    """A cell that is stepped by hand, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(5, 7), nn.Linear(7, 3)


@pattern
def truncated_backpropagation() -> Case:
    """State is detached after every window; the last window is short; one step per window."""
    model = CellModel()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)

    def step(model: CellModel, optimizer: Any, x: Tensor) -> None:
        h = c = torch.zeros(x.shape[1], 7)
        for window in x.split(4):
            loss = torch.zeros(())
            for item in window:
                h, c = model.cell(item, (h, c))
                loss = loss + model.head(h).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            h, c = h.detach(), c.detach()

    cell_x, cell_h, head = 2 * 2 * 5 * 28, 2 * 2 * 7 * 28, 2 * 2 * 7 * 3
    steps, windows = 11, 3
    total = steps * (2 * cell_x + 3 * cell_h + 3 * head) - windows * cell_h
    return Case(step, (model, optimizer, torch.randn(11, 2, 5)), expected=total)


class LoRA(nn.Module):
    """A frozen linear layer and a low-rank correction."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


@pattern
def low_rank_adapters() -> Case:
    """Layers are swapped in a finished model; the optimizer knows only the adapters."""
    model = mlp(6, 11, 5)
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, LoRA(child, 2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    n = 7
    first = 2 * n * (66 + 2 * 6 * 2 + 3 * 2 * 11)
    second = 2 * n * (2 * 55 + 3 * 2 * 11 + 3 * 2 * 5)
    return Case(step, (model, optimizer, torch.randn(n, 6)), expected=first + second)


@pattern
def parametrized_weights() -> Case:
    """Weights are computed on access; spectral norm runs power iterations in place in training."""
    model = nn.Sequential(
        weight_norm(nn.Linear(6, 11)), nn.ReLU(), spectral_norm(nn.Linear(11, 5)),
        spectral_norm(nn.Conv1d(1, 3, 2)),
    )  # fmt: skip
    model[3].register_forward_pre_hook(lambda module, args: (args[0][:, None],))
    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    return Case(model, (torch.randn(7, 6),), options=options)


@pattern
def pruned_weights() -> Case:
    """Pruning keeps `weight_orig` and a mask, and sets a plain `weight` in a pre-hook."""
    model = mlp()
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    prune.ln_structured(model[2], "weight", amount=0.5, n=2, dim=0)
    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    return Case(model, (torch.randn(7, 6),), options=options, expected=mlp_flops(7))


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz iterations: matrix products in the optimizer."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.02) -> None:
        super().__init__(params, dict(lr=lr, momentum=0.95))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"]).bfloat16()
                if x.size(0) > x.size(1):
                    x = x.T
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    a = x @ x.T
                    b = -4.775 * a + 2.0315 * a @ a
                    x = 3.4445 * x + b @ x
                if p.size(0) > p.size(1):
                    x = x.T
                p.add_(x.to(p.dtype), alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


@pattern
def optimizer_with_products() -> Case:
    """An optimizer of one's own whose step is mostly matrix products (Muon)."""
    model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 3, bias=False))
    optimizer = Muon(model.parameters())

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def newton(m: int, n: int) -> int:
        return 5 * 2 * (m * m * n + m**3 + m * m * n)

    total = mlp_flops(7) + newton(6, 10) + newton(3, 10)
    return Case(step, (model, optimizer, torch.randn(7, 6)), expected=total)


@pattern
def hessian_vector_products() -> Case:
    """Power iteration on the Hessian by double backward, with dots of flat gradients."""
    model = mlp()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        params = list(model.parameters())
        slopes = torch.autograd.grad(model(x).square().mean(), params, create_graph=True)
        flat = torch.cat([g.reshape(-1) for g in slopes])
        vector = torch.randn(len(flat))
        for _ in range(3):
            product = torch.autograd.grad(flat @ vector, params, retain_graph=True)
            vector = torch.cat([g.reshape(-1) for g in product])
            vector = vector / vector.norm()
        return vector

    return Case(step, (model, torch.randn(7, 6)))


@pattern(named=("value",))
def skipped_steps() -> Case:
    """A step that is skipped when its loss is an outlier, by `.item()` against a running mean."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    history = [5.0, 4.0]

    def step(model: nn.Module, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> None:
        for part, target in zip(x.split(4), y.split(4), strict=True):
            loss = F.mse_loss(model(part), target)
            if not torch.isfinite(loss) or loss.item() > 2 * sum(history) / len(history):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()

    x = torch.randn(11, 6)
    y = torch.randn(11, 3)
    y[4:8] *= 100
    kept, skipped = mlp_flops(4) + mlp_flops(3), 2 * 4 * 90
    return Case(step, (model, optimizer, scheduler, x, y), expected=kept + skipped)


@pattern
def gradient_surgery() -> Case:
    """PCGrad: gradients of two tasks are flattened and projected where their dot is negative."""
    model = mlp()

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        flat = []
        for loss in (F.mse_loss(out, y), (out + y).square().mean()):
            slopes = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            flat.append(torch.cat([g.flatten() for g in slopes]))
        dot = torch.dot(flat[0], flat[1])
        if dot < 0:
            flat[0] = flat[0] - dot / flat[1].dot(flat[1]) * flat[1]
        start = 0
        for p in model.parameters():
            p.grad = (flat[0] + flat[1])[start : start + p.numel()].view_as(p)
            start += p.numel()
        return flat[0]

    return Case(step, (model, torch.randn(7, 6), torch.randn(7, 3)))


@pattern
def copied_inside_the_step() -> Case:
    """Lookahead: the step itself deep-copies the model, trains the copy, and blends it back."""
    model = mlp()

    def step(model: nn.Module, x: Tensor) -> None:
        fast = copy.deepcopy(model)
        optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
        for part in x.split(5):
            optimizer.zero_grad()
            fast(part).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            for slow, quick in zip(model.parameters(), fast.parameters(), strict=True):
                slow.lerp_(quick, 0.5)

    return Case(step, (model, torch.randn(8, 6)), expected=mlp_flops(8))
