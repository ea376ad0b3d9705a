"""What runs a forward again in a backward is recompute, whatever runs it; the rest is backward."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import rooftrace as rt
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.sharding import huggingface
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


@cache
def run_once(kind: str) -> rt.types.Estimate:
    graph = rt.trace(train, Outer(kind, plain), torch.randn(S, D))
    return rt.estimate(graph, execution="eager")


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_runs_again_is_no_flop_of_the_model(kind: str, wrap: Callable[..., Any]) -> None:
    once = run_once(kind)
    again = rt.estimate(rt.trace(train, Outer(kind, wrap), torch.randn(S, D)), execution="eager")
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


# -- what modes of the user's see ------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """The names of the ops that a mode of the user's is shown."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


_SCALED = "_scaled_dot_product"


@pytest.mark.parametrize(
    ("kind", "dtype", "forward", "backward"),
    [
        ("sdpa", torch.bfloat16, "flash_attention", "flash_attention_backward"),
        ("sdpa", torch.float32, "efficient_attention", "efficient_attention_backward"),
        ("flex", torch.float32, "flex_attention", "flex_attention_backward"),
        ("lstm", torch.float32, "_cudnn_rnn", "_cudnn_rnn_backward"),
        ("gru", torch.float32, "_cudnn_rnn", "_cudnn_rnn_backward"),
    ],
)
def test_a_mode_of_the_users_sees_the_ops_that_a_gpu_would_show(
    kind: str, dtype: torch.dtype, forward: str, backward: str
) -> None:
    seen = Seen()

    def step(model: nn.Module, x: Tensor) -> None:
        with seen:
            model(x).sum().backward()

    x = torch.randn(S, D, dtype=dtype)
    graph = rt.trace(step, Outer(kind, plain).to(dtype), x)
    prefix = f"{_SCALED}_" if kind == "sdpa" else ""
    assert seen.names.count(prefix + forward) == seen.names.count(prefix + backward) == 1
    assert not any("rooftrace" in name for name in seen.names)
    # What is recorded does not depend on who looked on.
    unseen = rt.trace(train, Outer(kind, plain).to(dtype), x)
    assert [op.name for op in graph.ops] == [op.name for op in unseen.ops]


@pytest.mark.parametrize(
    ("region", "name"),
    [("EFFICIENT_ATTENTION", "efficient"), ("CUDNN_ATTENTION", "cudnn")],
)
def test_a_region_that_chooses_the_attention_kernel_is_kept_to(region: str, name: str) -> None:
    attention = pytest.importorskip("torch.nn.attention")
    seen = Seen()

    def step(model: nn.Module, x: Tensor) -> None:
        with seen, attention.sdpa_kernel(getattr(attention.SDPBackend, region)):
            model(x).sum().backward()

    rt.trace(step, Outer("sdpa", plain).bfloat16(), torch.randn(S, D, dtype=torch.bfloat16))
    assert f"{_SCALED}_{name}_attention" in seen.names
    assert f"{_SCALED}_{name}_attention_backward" in seen.names


ATTENTION = [
    getattr(torch.ops.aten, f"{_SCALED}_{name}_attention").default
    for name in ("flash", "efficient", "cudnn")
]


def every_second_product() -> Any:
    """The policy of a well-known trainer: attention is saved, and every second product."""
    count = 0

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        saves = op in (*ATTENTION, flex_attention_hop)
        if op is torch.ops.aten.mm.default:
            count += 1
            saves = count % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def a_list_of_ops() -> Any:
    return create_selective_checkpoint_contexts([*ATTENTION, flex_attention_hop])


class Attending(nn.Module):
    """Four products without bias and an attention, under a selective checkpoint."""

    def __init__(self, contexts: Callable[[], Any], flex: bool) -> None:
        super().__init__()
        self.contexts, self.flex = contexts, flex
        self.parts = nn.ModuleList([nn.Linear(D, D, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inside, x, use_reentrant=False, context_fn=self.contexts)

    def inside(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).view(1, S, 2, D // 2).transpose(1, 2) for part in self.parts[:3])
        attend: Any = flex_attention if self.flex else F.scaled_dot_product_attention
        found: Tensor = self.parts[3](attend(q, k, v).transpose(1, 2).reshape(S, D)).exp()
        return found


@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize(("contexts", "again"), [(every_second_product, 2), (a_list_of_ops, 4)])
def test_a_selective_checkpoint_saves_what_its_policy_names(
    contexts: Callable[[], Any], again: int, flex: bool
) -> None:
    x = torch.randn(S, D)
    graph = rt.trace(train, Attending(contexts, flex), x)
    recomputed = [op.name for op in graph.ops if op.part == "recompute"]
    assert recomputed.count("aten.mm") == again
    assert not any("attention" in name for name in recomputed)


class Fp8(torch.autograd.Function):
    """A product whose operands a training library casts to fp8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        one = torch.ones((), device=x.device)
        low = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t()
        return torch._scaled_mm(*low, scale_a=one, scale_b=one, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].t() @ x


class Deep(nn.Module):
    """Layers of four products in fp8, whose last result no gradient needs."""

    def __init__(self, contexts: Callable[[], Any], layers: int) -> None:
        super().__init__()
        self.contexts = contexts
        self.layers = nn.ParameterList(
            torch.empty(4, D, D, dtype=torch.bfloat16) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        run = torch.compile(self.inside)
        for weights in self.layers:
            x = x + run(x, weights)
        return x.float()

    def inside(self, x: Tensor, weights: Tensor) -> Any:
        return checkpoint(self.within, x, weights, use_reentrant=False, context_fn=self.contexts)

    @staticmethod
    def within(x: Tensor, weights: Tensor) -> Tensor:
        for weight in weights.unbind():
            x = Fp8.apply(x.tanh(), weight)
        return x


def ours() -> Any:
    """The policy of `--checkpoint selective`."""

    class Model:
        def gradient_checkpointing_enable(self, how: Any) -> None:
            self.how = how

    huggingface.keep_less(model := Model(), "selective")
    return model.how["context_fn"]()


def test_a_selective_checkpoint_counts_products_in_fp8() -> None:
    graph = rt.trace(train, Deep(ours, 1), torch.empty(S, D, dtype=torch.bfloat16))
    parts = [op.part for op in graph.ops if op.name == "aten._scaled_mm"]
    assert parts == ["forward"] * 4 + ["recompute"] * 2


def every_product() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten._scaled_mm.default])


def test_compiled_code_keeps_of_a_selective_checkpoint_what_backward_reads() -> None:
    graph = rt.trace(train, Deep(every_product, 5), torch.empty(4096, D, dtype=torch.bfloat16))

    def saved(execution: str) -> int:
        moments = rt.estimate(graph, "h100-sxm", execution=execution).memory.timeline.moments
        return next(m.by_kind["saved"] for m in moments if m.part == "backward")

    assert saved("eager") - saved("mixed") == 5 * 4096 * D * 2  # the last result of each layer


def test_a_counter_of_the_users_counts_attention_inside_the_step() -> None:
    counts = []

    def step(model: nn.Module, x: Tensor) -> None:
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        counts.append(counter.get_total_flops())

    rt.trace(step, Outer("sdpa", plain), torch.randn(S, D))
    layers = 3 * 3 - 1  # the input needs no gradient
    scores = 2 * S * S * D  # Q K^T; forward has two products of this size, backward five
    assert counts == [layers * PRODUCT + (2 + 5) * scores]
