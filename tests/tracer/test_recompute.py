"""What runs a forward again in a backward is recompute, whatever runs it; the rest is backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import rooftrace as rt
from rooftrace.tracer.graph import OpGraph
from tests.tracer.conftest import config

S, D = 16, 32
PRODUCT = 2 * S * D * D
"""FLOP of a linear layer of width D on S rows."""


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w.t(), x.t() @ grads[0]


class Inner(nn.Module):
    """What a checkpoint holds: a layer of its own, and what `kind` names."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lin = nn.Linear(D, D)
        self.weight = nn.Parameter(torch.randn(D, D))
        self.rnn = {"lstm": nn.LSTM, "gru": nn.GRU}.get(kind, nn.RNN)(D, D, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        if self.kind in ("lstm", "gru"):
            found: Tensor = self.rnn(y)[0]
            return found
        if self.kind == "function":
            made: Tensor = Product.apply(y, self.weight)  # type: ignore[no-untyped-call]
            return made
        if self.kind == "no_grad":
            with torch.no_grad():
                scale = y @ self.weight
            return F.linear(y * scale, self.weight)
        heads = y.view(1, S, 2, D // 2).transpose(1, 2)
        if self.kind == "flex":
            out = flex_attention(heads, heads, heads)
        else:
            out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).reshape(S, D)


KINDS = ["sdpa", "flex", "lstm", "gru", "function", "no_grad"]


class Outer(nn.Module):
    """`wrap(inner, x)` between two layers."""

    def __init__(self, kind: str, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.wrap = wrap
        self.first, self.inner, self.last = nn.Linear(D, D), Inner(kind), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.wrap(self.inner, self.first(x)))
        return found


def plain(inner: Any, x: Tensor) -> Any:
    return inner(x)


def reentrant(inner: Any, x: Tensor) -> Any:
    return checkpoint(inner, x, use_reentrant=True)


def saved(inner: Any, x: Tensor) -> Any:
    return checkpoint(inner, x, use_reentrant=False)


def nested(inner: Any, x: Tensor) -> Any:
    return checkpoint(saved, inner, x, use_reentrant=False)


def nested_reentrant(inner: Any, x: Tensor) -> Any:
    return checkpoint(reentrant, inner, x, use_reentrant=True)


class HandMade(torch.autograd.Function):
    """A checkpoint as training frameworks write it: with a `with` block or plain statements."""

    @staticmethod
    def forward(ctx: Any, run: Any, block: bool, x: Tensor) -> Any:
        ctx.run, ctx.block = run, block
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        if ctx.block:
            with torch.enable_grad():
                y = ctx.run(x)
        else:
            torch.set_grad_enabled(True)
            y = ctx.run(x)
            torch.set_grad_enabled(False)
        torch.autograd.backward(y, grads[0])
        return None, None, x.grad


def by_hand(inner: Any, x: Tensor) -> Any:
    return HandMade.apply(inner, True, x)  # type: ignore[no-untyped-call]


def by_statements(inner: Any, x: Tensor) -> Any:
    return HandMade.apply(inner, False, x)  # type: ignore[no-untyped-call]


class InsideGrad(HandMade):
    """A custom backward that makes its graph and its gradients in the same block."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.run(x)
            own = [p for p in ctx.run.parameters() if p.requires_grad]
            found = torch.autograd.grad(y, [x, *own], grads[0], allow_unused=True)
        for parameter, gradient in zip(own, found[1:], strict=True):
            parameter.grad = gradient
        return None, None, found[0]


def inside_grad(inner: Any, x: Tensor) -> Any:
    return InsideGrad.apply(inner, True, x)  # type: ignore[no-untyped-call]


WRAPS = [reentrant, saved, nested, nested_reentrant, by_hand, by_statements, inside_grad]


def train(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


class Counter(TorchDispatchMode):
    """Counts what runs on real tensors by torch's own formulas, and nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        return out


def useful(graph: OpGraph) -> float:
    return rt.estimate(graph, execution="eager").flops_matrix


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_again_is_no_flop_of_the_model(kind: str, wrap: Callable[..., Any]) -> None:
    x = torch.randn(S, D)
    once = rt.estimate(rt.trace(train, Outer(kind, plain), x), execution="eager")
    again = rt.estimate(rt.trace(train, Outer(kind, wrap), x), execution="eager")
    assert again.flops_matrix == once.flops_matrix
    assert again.flops_recompute - once.flops_recompute >= PRODUCT


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", ["function", "no_grad"])
def test_all_that_runs_is_what_torch_counts_on_real_tensors(
    kind: str, wrap: Callable[..., Any]
) -> None:
    model, x = Outer(kind, wrap), torch.randn(S, D)
    graph = rt.trace(train, model, x)
    with Counter() as counter:
        train(model, x)
    total = rt.estimate(graph, execution="eager").plan.total
    ours = total.flops(("matmul",), ("useful", "recompute"))
    assert ours == counter.flops


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_language_model_has_the_flops_of_the_plain_one(reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    shape = config(
        "LlamaConfig",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 64, (1, 48))
    found = []
    for checkpointed in (False, True):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(shape)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        graph = rt.trace(model, input_ids=ids, phase="training", optimizer="none")
        found.append(rt.estimate(graph, chip="h100-sxm"))
    once, again = found
    assert again.flops_matrix == once.flops_matrix
    assert again.flops_recompute > once.flops_recompute


def test_gradients_of_gradients_through_a_checkpoint() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    x = torch.randn(S, D)
    once = rt.trace(step, Outer("function", plain), x)
    again = rt.trace(step, Outer("function", saved), x)
    assert useful(again) == useful(once)


def test_what_a_block_without_stored_activations_computes_backwards_is_recompute() -> None:
    """A reversible block finds its input from its output, with gradients off."""

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, layer: Any, x: Tensor, y: Tensor) -> Any:
            ctx.layer = layer
            with torch.no_grad():
                made = y + layer(x)
            ctx.save_for_backward(x, made)
            return x.clone(), made

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            x, made = ctx.saved_tensors
            ctx.restored = made - ctx.layer(x)  # a layer that runs again, without a graph
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                again = ctx.layer(x)
            torch.autograd.backward(again, grads[1])
            return None, grads[0] + x.grad, grads[1]

    def step(model: Any, x: Tensor) -> None:
        x = model[0](x)
        first, second = Reversible.apply(model[1], x, x)  # type: ignore[no-untyped-call]
        (first + second).sum().backward()

    graph = rt.trace(step, nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)), torch.randn(S, D))
    again = [op.module for op in graph.ops if op.part == "recompute" and op.name == "aten.addmm"]
    assert again == ["1", "1"]
    assert useful(graph) == (2 + 3) * PRODUCT  # the input needs no gradient


def test_what_hooks_compute_is_no_recompute() -> None:
    def step(model: Any, x: Tensor) -> None:
        weight = model.inner.weight

        def turned(gradient: Tensor) -> Tensor:
            with torch.no_grad():
                return gradient @ weight

        y = model(x)
        y.register_hook(turned)
        model.first.register_full_backward_hook(lambda m, gi, go: (go[0] @ weight,))
        y.sum().backward()

    model = Outer("function", plain)
    x = torch.randn(S, D, requires_grad=True)
    graph = rt.trace(step, model, x)
    assert {op.part for op in graph.ops} == {"forward", "backward"}
    with Counter() as counter:
        step(model, x)
    assert useful(graph) == counter.flops


def test_an_optimizer_inside_backward_is_the_optimizer() -> None:
    def step(model: nn.Module, x: Tensor, optimizers: dict[str, Any]) -> None:
        named = dict(model.named_parameters())
        for name, optimizer in optimizers.items():
            named[name].register_post_accumulate_grad_hook(
                lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad())[1]
            )
        model(x).sum().backward()

    model = Outer("function", saved)
    optimizers = {
        name: torch.optim.AdamW([parameter]) for name, parameter in model.named_parameters()
    }
    graph = rt.trace(step, model, torch.randn(S, D), optimizers)
    assert useful(graph) == useful(rt.trace(train, Outer("function", plain), torch.randn(S, D)))
    moments = [op for op in graph.ops if "addcdiv" in op.name]
    assert moments and {op.part for op in moments} == {"optimizer"}
