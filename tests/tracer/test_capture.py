"""Where ops come from: modules, calls, parts, functions, lines; and code of unusual shapes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rooftrace as rt
from rooftrace.graph.records import Op
from tests.releases import TORCH

X = torch.ones(2, 8)


def ops_of(graph: rt.types.OpGraph, part: str) -> list[Op]:
    return [op for op in graph.ops if op.part == part]


def matmul_flops(graph: rt.types.OpGraph, *counts: str) -> int:
    return rt.plan(graph, "eager").total.flops(("matmul",), counts or ("useful",))


# -- paths -----------------------------------------------------------------------------------------


def test_a_module_called_twice_has_two_calls_and_one_weight() -> None:
    twice = nn.Linear(8, 8)
    graph = rt.trace(nn.Sequential(twice, nn.ReLU(), twice), X)
    assert [(op.module, op.call) for op in graph.ops if op.name == "aten.addmm"] == [
        ("0", 0),
        ("0", 1),
    ]
    assert [t.name for t in graph.values if t.role == "weights" and t.name] == [
        "0.weight",
        "0.bias",
    ]


def test_a_module_made_in_forward_stands_under_its_maker(module: Callable[..., nn.Module]) -> None:
    graph = rt.trace(nn.Sequential(module(lambda self, x: nn.Softmax(-1)(self.lin(x)))), X)
    assert [op.module for op in graph.ops if op.name == "aten._softmax"] == ["0.<Softmax>"]
    assert graph.modules["0.<Softmax>"] == "Softmax"


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "mixtral", "deepseek", "vit"])
def test_only_the_models_own_forward_has_no_path(name: str, model: Callable[..., Any]) -> None:
    case = model(name)
    graph = rt.trace(case.module, phase="training", optimizer="none", **case.kwargs)
    forward = ops_of(graph, "forward")
    assert all(op.module in graph.modules for op in forward)
    # The root's own code: T5 scales its decoder's output, ViT takes its class token.
    allowed = {"t5": {"aten.mul"}, "vit": {"aten.select"}}.get(name, set())
    if TORCH < (2, 11):
        allowed |= {"aten.slice"}  # of all logits: later releases skip a slice that takes all
    assert {op.name for op in forward if not op.module} <= allowed


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "deepseek", "resnet", "lstm"])
def test_a_backward_product_stands_where_its_forward_product_stands(
    name: str, model: Callable[..., Any]
) -> None:
    case = model(name)
    graph = rt.trace(case.module, *case.args, phase="training", optimizer="none", **case.kwargs)
    rules = rt.plan(graph, "eager")
    places: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for op in rules.graph.ops:
        if op.module.endswith("rotary_emb"):
            continue  # angles need no gradient; transformers 5.17 makes them by a product
        places[op.part][op.module] += rules.op_costs[op.id].flops(("matmul", "convolution"))
    forward, backward = places["forward"], places["backward"]
    # A product has a gradient for each operand, or for its weight only.
    assert {path for path, flop in backward.items() if flop} == {
        path for path, flop in forward.items() if flop
    }
    assert all(backward[path] >= flop for path, flop in forward.items())


def test_an_op_without_a_gradient_leaves_its_neighbours_origin_alone(
    module: Callable[..., nn.Module],
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.lin(x) * torch.arange(8).float()  # integers take no part in autograd

    graph = rt.trace(module(forward), X, phase="training", optimizer="none")
    product = next(op for op in ops_of(graph, "backward") if op.name == "aten.mm")
    assert (product.module, product.function) == ("lin", "AddmmBackward0")


def test_a_compiled_module_is_traced_as_it_is_written() -> None:
    wrapped = nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Linear(8, 8)))
    graph = rt.trace(wrapped, X)
    assert [(op.module, op.call) for op in graph.ops if op.name == "aten.addmm"] == [
        ("0", 0),
        ("1", 0),
    ]
    assert graph.modules == {"": "Sequential", "0": "Linear", "1": "Linear"}


# -- functions and lines ---------------------------------------------------------------------------


def test_an_op_says_which_function_and_which_line_called_it(
    module: Callable[..., nn.Module],
) -> None:
    graph = rt.trace(module(lambda self, x: torch.softmax(self.lin(x), -1)), X)
    softmax = graph.ops[-1]
    file, _, line = softmax.source.rpartition(":")
    assert softmax.function == "softmax"
    assert Path(file).name == "test_capture.py"
    assert not Path(file).is_absolute()
    assert "torch.softmax" in Path(__file__).read_text().splitlines()[int(line) - 1]


def test_a_module_that_is_all_torch_has_no_line() -> None:
    assert {op.source for op in rt.trace(nn.Linear(8, 8), X).ops} == {""}


# -- recomputation and custom functions ------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_runs_its_forward_again_in_backward(
    reentrant: bool, module: Callable[..., nn.Module]
) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: self.lin(y).relu().exp(), x, use_reentrant=reentrant)

    plain = module(lambda self, x: self.lin(x).relu().exp())
    x = torch.ones(2, 8, requires_grad=True)
    graph = rt.trace(module(forward), x, phase="training", optimizer="none")
    again = [(op.name, op.module) for op in ops_of(graph, "recompute") if op.kind == "kernel"]
    assert again[:2] == [("aten.addmm", "lin"), ("aten.relu", "")]
    without = rt.trace(plain, x, phase="training", optimizer="none")
    assert matmul_flops(graph) == matmul_flops(without)
    assert matmul_flops(graph, "recompute") == 2 * (2 * 8 * 8)
    assert matmul_flops(without, "recompute") == 0
    assert {op.module for op in ops_of(graph, "backward") if op.name == "aten.mm"} == {"lin"}


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x * x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x.square() * ctx.factor, None


def test_a_custom_function_is_seen_in_both_directions() -> None:
    class Cubing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(x, 2.0)  # type: ignore[no-any-return]

    graph = rt.trace(
        nn.Sequential(nn.Linear(8, 8), Cubing()), X, phase="training", optimizer="none"
    )
    inside = [(op.name, op.part) for op in graph.ops if op.module == "1"]
    assert inside[:3] == [("aten.mul", "forward")] * 3
    assert inside[3:] == [
        ("aten.mul", "backward"),
        ("aten.pow", "backward"),
        ("aten.mul", "backward"),
        ("aten.mul", "backward"),
    ]


# -- code of unusual shapes ------------------------------------------------------------------------


@dataclass
class Answer:
    scores: Tensor
    extra: dict[str, Any]


@pytest.mark.parametrize(
    ("forward", "shapes"),
    [
        (lambda self, *xs: self.lin(xs[0] + xs[1]), [(2, 8)]),
        (lambda self, *xs: {"n": 3, "y": [self.lin(xs[0]), None, "text"]}, [(2, 8)]),
        (lambda self, *xs: Answer(self.lin(xs[0]), {"sum": (xs[1].sum(),)}), [(2, 8), ()]),
        (lambda self, *xs: int(xs[0].shape[0]), []),
        (lambda self, *xs: None, []),
        (lambda self, *xs: (xs[0], xs[0]), [(2, 8)]),
    ],
)
def test_any_arguments_and_outputs(
    forward: Callable[..., Any], shapes: list[tuple[int, ...]], module: Callable[..., nn.Module]
) -> None:
    graph = rt.trace(module(forward), X, X.clone())
    assert [graph.values[i].shape for i in graph.outputs] == shapes


def test_nested_and_keyword_inputs_are_named(module: Callable[..., nn.Module]) -> None:
    class Nested(nn.Module):
        def forward(self, pair: Any, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
            result: Tensor = pair["first"] * scale + pair["second"][0]
            return result if mask is None else result * mask

    graph = rt.trace(Nested(), {"first": X, "second": [X.clone()]}, scale=2.0, mask=X.bool())
    assert [graph.values[i].name for i in graph.inputs] == ["pair_0", "pair_1", "mask"]
    assert graph.ops[0].arguments["other"] == 2.0


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.lin(x.cuda()),
        lambda self, x: self.lin(x.to("cuda")),
        lambda self, x: self.lin(x.to(torch.device("cuda:1"), torch.float32)),
        lambda self, x: self.lin(x) + torch.zeros(8, device="cuda"),
        lambda self, x: self.lin(x) + torch.tensor([1.0] * 8, device="cuda:0"),
        lambda self, x: self.lin(x) + torch.arange(8, device="cpu"),
        lambda self, x: self.lin(x.cpu()),
    ],
)
def test_devices_that_are_not_there_are_meta(
    forward: Callable[..., Any], module: Callable[..., nn.Module]
) -> None:
    for phase in ("forward", "training"):
        graph = rt.trace(module(forward), X, phase=phase)
        assert sum(op.name == "aten.addmm" for op in graph.ops) == 1


def test_attention_is_one_op_each_way() -> None:
    class Attend(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True)

    q = torch.ones(2, 4, 5, 8, requires_grad=True)
    graph = rt.trace(nn.Sequential(nn.Linear(8, 8)), q, phase="training", optimizer="none")
    assert graph.outputs
    parts = [op.name for op in rt.trace(Attend(), q, q).ops]
    assert parts == ["rooftrace.attention"]


def test_the_gradient_of_mish_is_one_kernel() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Mish())
    graph = rt.trace(model, torch.empty(2, 4), phase="training", optimizer="none")
    backward = [op.name for op in graph.ops if op.function == "MishBackward0"]
    assert backward == ["aten.mish_backward"]

    def twice(model: nn.Module, x: torch.Tensor) -> None:
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    again = rt.trace(twice, model, torch.empty(2, 4))
    assert "aten.mish_backward" not in {op.name for op in again.ops}  # taken apart, as on a GPU


def test_dropout_is_one_kernel_each_way() -> None:
    graph = rt.trace(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), X, phase="training", optimizer="none"
    )
    inside = [op.name for op in graph.ops if op.module == "1"]
    assert inside == ["aten.native_dropout", "aten.native_dropout_backward"]


def test_packed_sequences_run_as_many_steps_as_they_are_long() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
            return padded

    graph = rt.trace(Packed(), torch.ones(2, 5, 8))
    assert graph.values[graph.outputs[0]].shape == (2, 5, 8)
    # 5 + 3 steps of 8 -> 3 gates x 8, from the input and from the state
    assert matmul_flops(graph) == (5 + 3) * 2 * (2 * 8 * 3 * 8)


def test_a_sparse_gradient_is_followed() -> None:
    graph = rt.trace(
        nn.Embedding(10, 8, sparse=True), torch.tensor([[1, 2]]), phase="training", optimizer="none"
    )
    (gradient,) = (t for t in graph.values if t.name == "weight.grad.values")
    assert (gradient.role, gradient.elements) == ("gradients", 2 * 8)  # a row for each id
    assert [graph.values[value].shape for value in graph.outputs[1:]] == [(2, 8), (1, 2)]


def test_lazy_parameters_get_their_shapes_first() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    graph = rt.trace(lazy, X)
    assert graph.model["params"] == 8 * 4 + 4 + 4 + 4
    assert nn.parameter.is_lazy(lazy[0].weight)  # the user's own is as it was


class Odd(nn.Module):
    """Weights in every small float there is."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"):
            value = torch.ones(8, 8).to(getattr(torch, name))
            setattr(self, name, nn.Parameter(value, requires_grad=False))
        packed = torch.zeros(8, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        self.register_buffer("packed", packed)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.parameters():
            x = x @ weight.to(x.dtype)
        return x * self.packed.view(torch.uint8).sum()


def test_small_floats_have_names_and_sizes() -> None:
    graph = rt.trace(Odd(), X)
    sizes = {t.name: (t.dtype, t.nbytes) for t in graph.values if t.role == "weights" and t.name}
    assert sizes == {
        "float8_e4m3fn": ("fp8_e4m3", 64),
        "float8_e5m2": ("fp8_e5m2", 64),
        "float8_e4m3fnuz": ("fp8_e4m3", 64),
        "float8_e8m0fnu": ("fp8_e8m0", 64),
        "packed": ("fp4_x2", 32),
    }


def test_a_tensor_subclass_is_traced_as_its_shape() -> None:
    class Own(Tensor):
        pass

    linear = nn.Linear(8, 4)
    linear.weight = nn.Parameter(torch.ones(4, 8).as_subclass(Own))
    graph = rt.trace(linear, X.as_subclass(Own))
    assert [op.name for op in graph.ops] == ["aten.t", "aten.addmm"]


@pytest.mark.parametrize("part", ["input", "weight", "both", "neither"])
def test_convolutions_write_the_layout_that_they_write_on_a_device(part):
    net = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=16),
        nn.ConvTranspose2d(16, 8, 2, stride=2), nn.MaxPool2d(2),
    ).eval()  # fmt: skip
    x = torch.randn(2, 8, 12, 12)
    if part in ("weight", "both"):
        net = net.to(memory_format=torch.channels_last)
    if part in ("input", "both"):
        x = x.contiguous(memory_format=torch.channels_last)
    graph = rt.trace(net, x)
    strides = []
    for layer in net:
        x = layer(x)
        strides.append(x.stride())
    made = [graph.values[op.outputs[0]] for op in graph.ops if op.kind == "kernel"]
    assert [tensor.stride for tensor in made] == strides
