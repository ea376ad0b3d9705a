"""Layers that are repeated under gradients: the graph is that of a run of them all."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.rebuild import to_fx
from rooftrace.tracer.recording.recorder import Recorder
from rooftrace.tracer.repeats.gradients import Layers

WIDTH, COUNT = 16, 5


class Layer(nn.Module):
    """A block of a transformer: attention and two products, with a norm before each."""

    def __init__(self, number: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.number = number
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        scores = torch.softmax(q @ k.transpose(-1, -2) / 4, -1)
        x = x + self.dropout(self.out(scores @ v))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Stack(nn.Module):
    """Layers one behind the other, and a head."""

    kind: type[Layer] = Layer

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([self.kind(number) for number in range(COUNT)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = self.step(layer, x)
        return self.head(x)

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = layer(x)
        return made


# -- stacks whose layers are repeated --------------------------------------------------------------


class AfterNorm(Stack):
    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            x = self.norms[0](x + self.out(torch.tanh(self.qkv(x).chunk(3, -1)[1])))
            return self.norms[1](x + self.down(torch.relu(self.up(x))))

    kind = Kind


class WithDropout(Stack):
    class Kind(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number, 0.1)

    kind = Kind


class Between(Stack):
    """Something is done between the layers."""

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = torch.sin(layer(x)) * 2
        return made


class Tuples(Stack):
    """A layer returns a second result, which leads to the loss; and its input."""

    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), {"norm": (x * x).mean(), "given": x}

    kind = Kind

    def forward(self, x: Tensor) -> Any:
        x, losses = self.first(x), []
        for layer in self.layers:
            x, beside = layer(x)
            losses.append(beside["norm"])
        return self.head(x), torch.stack(losses).sum()


class Masked(Stack):
    """A layer takes a mask that needs no gradient, and has a buffer."""

    class Kind(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor, mask: Any = None) -> Any:
            return super().forward(x.masked_fill(mask, 0.0) * self.scale)

    kind = Kind

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class Unseen(Stack):
    """What a mask of attention shows is not known: backward takes it as visible, too."""

    class Kind(Layer):
        def forward(self, x: Tensor, mask: Any = None) -> Any:
            q, k, v = self.qkv(x)[:, None].chunk(3, -1)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return super().forward(x + seen[:, 0])

    kind = Kind

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        first = x[0].detach()
        mask = first @ first.T >= 0
        for layer in self.layers:
            x = layer(x, mask=mask)
        return self.head(x)


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.get_submodule("qkv").requires_grad_(False)


class Autocast(Stack):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x)


class Detached(Stack):
    """Backward ends in the middle."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(x.detach() if number == 3 else x)
        return self.head(x)


class Unused(Stack):
    """A weight of each layer gets no gradient."""

    class Kind(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.unused = nn.Parameter(torch.ones(2))

    kind = Kind


class OfTorch(Stack):
    """Layers of torch itself."""

    def __init__(self) -> None:
        super().__init__()
        layers = (
            nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True) for _ in range(COUNT)
        )
        self.layers = nn.ModuleList(layers)


REPEATED = [AfterNorm, WithDropout, Between, Tuples, Masked, Unseen, Frozen, Unused, OfTorch]


# -- stacks of which some or all layers have to be run ---------------------------------------------


class Numbered(Stack):
    """Layers read their number, so that they differ in pairs."""

    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return torch.tanh(x) if self.number % 2 else x

    kind = Kind


class Collected(Stack):
    """What each layer returns is read once more."""

    def forward(self, x: Tensor) -> Any:
        x, seen = self.first(x), []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return self.head(sum(seen))


class Skips(Stack):
    def forward(self, x: Tensor) -> Any:
        x, seen = self.first(x), []
        for number, layer in enumerate(self.layers):
            x = layer(x + seen.pop() if number > 3 else x)
            seen.append(x)
        return self.head(x)


class Crossed(Stack):
    """All layers read one tensor that needs a gradient."""

    class Kind(Layer):
        def forward(self, x: Tensor, beside: Any = None) -> Any:
            return super().forward(x + beside)

    kind = Kind

    def forward(self, x: Tensor) -> Any:
        x = beside = self.first(x)
        for layer in self.layers:
            x = layer(x, beside)
        return self.head(x)


class Shared(Stack):
    """One layer stands in two places, and two layers have a weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3] = self.layers[1]
        self.layers[4].get_submodule("up").weight = self.layers[2].get_submodule("up").weight  # type: ignore[assignment]


class Backwards(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


class Early(Stack):
    """The last layer runs, and its result is thrown away."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            y = layer(x)
            x = x if number == COUNT - 1 else y
        return self.head(x)


class Checkpointed(Stack):
    reentrant = False

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(layer, x, use_reentrant=self.reentrant)  # type: ignore[no-untyped-call]
        return made


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointInside(Stack):
    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-untyped-call]

    kind = Kind


class Doubled(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        Doubled.runs += 1
        return grad * 2 if Doubled.runs % 2 else grad + grad


class OwnFunction(Stack):
    """Backward is code of the user's, which does another thing in every second layer."""

    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            return Doubled.apply(super().forward(x))  # type: ignore[no-untyped-call]

    kind = Kind

    def forward(self, x: Tensor) -> Any:
        Doubled.runs = 0
        return super().forward(x)


class TensorHook(Stack):
    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            x.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return x * 1.5

    kind = Kind


class HookInside(Stack):
    """A hook of one layer alone."""

    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            y = self.out(x)
            if self.number == 2 and y.requires_grad:
                y.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return super().forward(y)

    kind = Kind


class WeightHook(Stack):
    def __init__(self) -> None:
        super().__init__()
        weight: Any = self.layers[2].get_submodule("up").weight
        weight.register_hook(lambda gradient: gradient * 0.5)


def _halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(0.5)


class Accumulated(Stack):
    """A hook behind the accumulation of every weight."""

    def __init__(self) -> None:
        super().__init__()
        for weight in self.layers.parameters():
            weight.register_post_accumulate_grad_hook(_halve)


class Stashed(Stack):
    """A list of the stack keeps what is inside of the layers."""

    class Kind(Layer):
        kept: list[Tensor]

        def forward(self, x: Tensor) -> Any:
            y = self.up(x)
            self.kept.append(y)
            return super().forward(x) + self.down(y)

    kind = Kind

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        for layer in self.layers:
            layer.kept = kept
        return super().forward(x), torch.stack(kept).mean()


class InPlace(Stack):
    """What a layer got and what it returns is written to."""

    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            x = x * 1
            x.add_(1.0)
            return super().forward(x).mul_(0.5)

    kind = Kind

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = layer(x)
        return made.add_(1.0)


class Twice(Stack):
    """Gradients of gradients, inside of every layer."""

    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                y = super().forward(x)
                (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + slope

    kind = Kind


class Views(Stack):
    """A layer returns a view of what it has made, and one of what it got."""

    class Kind(Layer):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).transpose(0, 1).contiguous().transpose(0, 1)

    kind = Kind


class Norms(Stack):
    """Layers that are small, and read beside it what they get."""

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = x + layer(x)
        return made


class Rolled(Stack):
    """Python's own random numbers decide."""

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        made: Tensor = layer(x)
        return made if float(torch.rand(1)) < 2 else x


OTHERS = [
    Autocast, Detached, Numbered, Collected, Skips, Crossed, Shared, Backwards, Early, Checkpointed,
    Reentrant, CheckpointInside, OwnFunction, TensorHook, HookInside, WeightHook, Accumulated,
    Stashed, InPlace, Twice, Views, Norms, Rolled,
]  # fmt: skip


def traced(kind: type[Stack]) -> OpGraph:
    optimizer = "adamw" if kind in REPEATED else "none"
    graph: OpGraph = rt.trace(
        kind(), torch.zeros(2, 4, WIDTH), phase="training", optimizer=optimizer
    )
    return graph


def of_each(kind: type[Stack]) -> OpGraph:
    """The graph with every layer run."""

    def nothing(self: Recorder) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "trained", nothing)
        return traced(kind)


def repeated(kind: type[Stack]) -> tuple[OpGraph, set[str]]:
    """The graph, and the paths of layers that were repeated."""
    paths: set[str] = set()
    verify = Layers.verify

    def noted(self: Layers) -> None:
        verify(self)  # raises where layers have to be run after all
        paths.update(self._paths)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layers, "verify", noted)
        return traced(kind), paths


@pytest.mark.parametrize("kind", [*REPEATED, *OTHERS])
def test_layers_that_are_repeated_do_what_a_run_of_each_does(kind: type[Stack]) -> None:
    graph, paths = repeated(kind)
    flat = graph.expand()
    if kind in REPEATED:
        assert len(paths) == COUNT - 2
        assert graph == of_each(kind)
    else:  # some or all of them differ, and are run
        assert flat == of_each(kind).expand()
    if kind not in (WithDropout, Autocast, OwnFunction):
        its_gradients_are_those_of_autograd(kind, flat)


def its_gradients_are_those_of_autograd(kind: type[Stack], graph: OpGraph) -> None:
    """The graph runs on real tensors; what it computes is set beside a real backward."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 4, WIDTH)
    ops = tuple(op for op in graph.ops if op.part != "optimizer")
    made = {value for op in ops for value in op.outputs}
    last = {t.storage: i for i, t in enumerate(graph.values) if t.role == "gradients" and i in made}
    names = [graph.values[storage].name.removesuffix(".grad") for storage in last]
    state = {n: t.detach().clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    replay = to_fx(graph.replace(ops=ops, outputs=tuple(last.values())), state)
    with torch.no_grad():
        found = dict(zip(names, replay(x), strict=True))
    outputs = model(x)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
