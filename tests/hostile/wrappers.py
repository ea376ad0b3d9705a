"""What people put around a module, and what they hand back from it."""

from __future__ import annotations

import types
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from .harness import Case, pattern
from .training_steps import mlp, mlp_flops

FORWARD = 2 * (6 * 10 + 10 * 3)
"""FLOP of a forward of `mlp()` for one row."""


@pattern
def compiled() -> Case:
    """torch.compile around a module and, inside of another, around one layer."""
    model = mlp()
    inner = nn.Sequential(torch.compile(model[0], backend="eager"), *model[1:])
    wrapped = torch.compile(inner, backend="eager")
    x = torch.randn(7, 6)
    return Case(wrapped, (x,), real=lambda: model(x), expected=7 * FORWARD)


@pattern
def scripted_with_a_loop() -> Case:
    """TorchScript: no Python runs, and a loop and a branch on values are inside."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, turns: int) -> Tensor:
            for _ in range(turns):
                x = torch.tanh(self.linear(x))
            if bool(x.sum() > 1e6):
                x = self.linear(x)
            return x

    model = torch.jit.script(Loop())
    return Case(model, (torch.randn(7, 6), 3), expected=3 * 2 * 7 * 36)


@pattern
def jit_traced() -> Case:
    """torch.jit.trace: parameters are there, children have no Python forward."""
    x = torch.randn(7, 6)
    model = torch.jit.trace(mlp().eval(), x)
    return Case(model, (x,), expected=7 * FORWARD)


@pattern
def frozen_script() -> Case:
    """torch.jit.freeze makes the weights constants of the code: the module has no parameters."""
    model = torch.jit.freeze(torch.jit.script(mlp().eval()))
    return Case(model, (torch.randn(7, 6),), expected=7 * FORWARD)


@pattern
def data_parallel() -> Case:
    """DataParallel with no GPU there runs its module in place."""
    model = nn.DataParallel(mlp())
    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    return Case(model, (torch.randn(7, 6),), options=options, expected=mlp_flops(7))


@pattern
def other_weights_by_functional_call() -> Case:
    """A module is run with weights of a hypernetwork, through functional_call in a forward."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.target = nn.Linear(5, 4).requires_grad_(False)
            self.make = nn.Linear(3, 24)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            flat = self.make(context)
            weights = {"weight": flat[:20].view(4, 5), "bias": flat[20:]}
            return functional_call(self.target, weights, (x,))

    x, context = torch.randn(7, 5), torch.randn(3)
    return Case(Hyper(), (x, context), expected=2 * 3 * 24 + 2 * 7 * 20)


@pattern
def ensemble_by_vmap() -> Case:
    """Weights of three models are stacked, and a skeleton on meta is vmapped over them."""

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            params, _ = stack_module_state([mlp() for _ in range(3)])
            self.stacked = nn.ParameterDict(
                {k.replace(".", "_"): nn.Parameter(v.detach()) for k, v in params.items()}
            )
            self.skeleton = [mlp().to("meta")]

        def forward(self, x: Tensor) -> Tensor:
            weights = {k.replace("_", "."): v for k, v in self.stacked.items()}
            call = partial(functional_call, self.skeleton[0])
            return vmap(lambda w, x: call(w, (x,)), in_dims=(0, None))(weights, x).mean(0)

    return Case(Ensemble(), (torch.randn(7, 6),), expected=3 * 7 * FORWARD)


@pattern
def lazily_built() -> Case:
    """Layers whose sizes, or which themselves, come to be in the first forward."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(10)
            self.second: nn.Module | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if self.second is None:
                self.second = nn.Linear(x.shape[-1], 3)
            return self.second(x)

    return Case(Lazy(), (torch.randn(7, 6),), expected=7 * FORWARD)


@pattern
def dispatch_by_name() -> Case:
    """A ModuleDict is asked by strings that stand in a list of the call."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"a": nn.Linear(6, 10), "b": nn.Linear(6, 3)})

        def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
            out: dict[str, list[Tensor]] = {}
            for row, name in zip(batch["x"], batch["task"], strict=True):
                out.setdefault(name, []).append(self.heads[name](row[None]))
            return {k: torch.cat(v) for k, v in out.items()}

    batch = {"x": torch.randn(5, 6), "task": ["a", "b", "a", "a", "b"]}
    return Case(Heads(), (batch,), expected=2 * 6 * (3 * 10 + 2 * 3))


@pattern
def tied_weights_three_ways() -> Case:
    """One weight is embedding, head, and, transposed, an input projection."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            soft = F.softmax(self.head(x), -1)
            return self.head(soft @ self.embedding.weight)

    options = {"phase": "training", "loss": lambda out: out.square().mean()}
    ids = torch.randint(11, (4, 5))
    return Case(Tied(), (ids,), options=options, expected=9 * 2 * 20 * 66)


@pattern
def hooks_that_compute() -> Case:
    """Pre-hooks with keywords replace inputs by products; a forward hook replaces the output."""
    model = mlp()
    extra = nn.Linear(6, 6)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (extra(kwargs.pop("input")),), kwargs

    def after(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> Tensor:
        return out @ out.T

    model[0].register_forward_pre_hook(before, with_kwargs=True)
    model[2].register_forward_hook(after, with_kwargs=True)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model[2](self.model[0](input=x))

    x = torch.randn(7, 6)
    return Case(Outer(), (x,), expected=7 * FORWARD + 2 * 7 * 36 + 2 * 7 * 7 * 3)


@pattern
def backward_hooks_that_compute() -> Case:
    """Hooks on tensors and modules multiply gradients by matrices; a probe keeps activations."""
    model = mlp()
    basis = torch.randn(10, 10)
    model[0].kept = []
    model[0].register_forward_hook(lambda m, a, out: m.kept.append(out.detach()))
    model[2].register_full_backward_hook(lambda m, gi, go: (gi[0] @ basis,))
    model[2].weight.register_hook(lambda g: g @ basis)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model(x).square().mean().backward()
        seen = model[0].kept.pop()
        return seen.T @ seen

    extra = 2 * 7 * 100 + 2 * 3 * 100 + 2 * 7 * 100
    return Case(step, (model, torch.randn(7, 6)), expected=mlp_flops(7) + extra)


@pattern
def patched_forward() -> Case:
    """`forward` of instances is replaced by a closure that runs the old one twice."""
    model = mlp()

    def patch(layer: nn.Module) -> None:
        old = layer.forward

        @wraps(old)
        def new(self: nn.Module, x: Tensor) -> Tensor:
            return old(x) + old(x.flip(0))

        layer.forward = types.MethodType(new, layer)  # type: ignore[method-assign]

    patch(model[0])
    patch(model[2])
    return Case(model, (torch.randn(7, 6),), expected=2 * 7 * FORWARD)


@pattern
def own_call() -> Case:
    """`__call__` is overridden, does work before and after forward, and skips hooks."""

    class Called(nn.Linear):
        def __call__(self, x: Tensor, *, times: int = 1) -> Tensor:
            for _ in range(times):
                x = self.forward(x)
            return x @ self.weight

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Called(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, times=2)

    return Case(Outer(), (torch.randn(7, 5),), expected=3 * 2 * 7 * 25)


@pattern
def method_of_a_wrapper() -> Case:
    """The step is a partial of a bound method of a trainer that is no module."""

    class Trainer:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            self.losses: list[float] = []

        def step(self, model: nn.Module, x: Tensor, scale: float) -> Tensor:
            self.optimizer.zero_grad()
            loss = scale * model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

    model = mlp()
    trainer = Trainer(model)
    return Case(partial(trainer.step, scale=2.0), (model, torch.randn(7, 6)), expected=mlp_flops(7))


Named = namedtuple("Named", "logits, aux")


@dataclass
class Output:
    """An output that is no pytree."""

    logits: Tensor
    parts: list[Named]
    extra: dict[str, Tensor]


@pattern
def structured_outputs() -> Case:
    """Outputs in a dataclass of namedtuples, dicts and lists; the loss picks one of them."""

    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 10), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Output:
            a = self.a(x)
            return Output(a, [Named(self.b(x), None)], OrderedDict(scores=a @ a.T))

    options = {"phase": "training", "loss": lambda out: out.parts[0].logits.square().mean()}
    flops = 2 * 7 * 60 + 2 * 2 * 7 * 18 + 2 * 49 * 10
    return Case(Structured(), (torch.randn(7, 6),), options=options, expected=flops)


@pattern
def generator_output() -> Case:
    """forward is a generator: nothing runs until somebody iterates."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, steps: int) -> Iterator[Tensor]:
            for _ in range(steps):
                x = self.linear(x)
                yield x

    model, x = Stream(), torch.randn(7, 6)
    real = Case(model, (x, 4), expected=4 * 2 * 7 * 36)
    real.real = lambda: list(model(x, 4))
    return real


@pattern
def modules_in_plain_lists() -> Case:
    """Layers in a list and in a closure: `parameters()` does not know them."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = [nn.Linear(6, 6) for _ in range(3)]
            self.shared = (lambda layer: lambda x: layer(x))(nn.Linear(6, 10))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.shared(x)

    return Case(Plain(), (torch.randn(7, 6),), expected=2 * 7 * (3 * 36 + 60))


@pattern
def weights_made_in_forward() -> Case:
    """Fourier features: a frozen random matrix is drawn, cached on self, and reused."""

    class Features(nn.Module):
        cache: dict[int, Tensor] = {}  # noqa: RUF012 - a cache of the class, as people write it

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(16, 3)
            self.basis: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.basis is None:
                generator = torch.Generator().manual_seed(3)
                self.basis = torch.randn(x.shape[-1], 8, generator=generator)
            angles = x @ self.basis
            return self.head(torch.cat([angles.sin(), angles.cos()], -1))

    return Case(Features(), (torch.randn(7, 6),), expected=2 * 7 * (48 + 48))
