"""Whose bytes a tensor is, and which tensors share them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftrace as rt
from rooftrace.graph.records import Tensor as Value
from tests.releases import with_transformers_5


def owners(graph: rt.types.OpGraph, role: str) -> list[Value]:
    """The tensors of a role that own bytes."""
    return [t for i, t in enumerate(graph.values) if t.storage == i and t.role == role]


def entries(graph: rt.types.OpGraph, role: str) -> list[Value]:
    """The tensors of a role that no op made."""
    return [graph.values[i] for i in graph.external if graph.values[i].role == role]


# -- the cache -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        # 2 layers, each keys and values: [batch, heads, length, width]
        ("llama", [(2, 2, 9, 8), (2, 2, 9, 8)] * 2),
        ("gpt2", [(2, 4, 9, 8), (2, 4, 9, 8)] * 2),
        # the latent that keys and values are made of, 16 wide, and 8 for rope
        pytest.param("deepseek", [(2, 1, 8, 16), (2, 1, 8, 8)] * 2, marks=with_transformers_5),
    ],
)
def test_prefill_returns_the_cache_that_decode_reads(
    name: str, shapes: list[tuple[int, ...]], model: Callable[..., Any]
) -> None:
    case = model(name)
    prefill = rt.trace(case.module, phase="prefill", **case.kwargs)
    decode = rt.trace(case.module, phase="decode", **case.kwargs)
    returned = [prefill.values[i] for i in prefill.outputs if prefill.owner(i).role == "kv"]
    assert [t.shape for t in returned] == shapes
    assert [t.shape for t in entries(decode, "kv")] == shapes
    assert decode.values[decode.inputs[0]].shape == (2, 1)  # one token for each of 2 sequences
    logits = decode.values[decode.outputs[0]]
    assert logits.shape == (2, 1, 64)


def test_decode_appends_one_position_to_every_layer(model: Callable[..., Any]) -> None:
    case = model("llama")
    decode = rt.trace(case.module, phase="decode", **case.kwargs)
    grown = [decode.values[i].shape for i in decode.outputs if decode.owner(i).role == "kv"]
    assert grown == [(2, 2, 10, 8)] * 4


def test_an_encoder_hands_its_output_on_beside_the_cache(model: Callable[..., Any]) -> None:
    case = model("t5")
    decode = rt.trace(case.module, phase="decode", **case.kwargs)
    # 2 layers x (own keys and values of 7, cross keys and values of 9)
    lengths = sorted(t.shape[2] for t in entries(decode, "kv"))
    assert lengths == [7, 7, 7, 7, 9, 9, 9, 9]
    assert "encoder_outputs" in [decode.values[i].name for i in decode.inputs]


def test_a_forward_without_a_cache_has_none(model: Callable[..., Any]) -> None:
    case = model("bert")
    assert not owners(rt.trace(case.module, **case.kwargs), "kv")


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["perceptron", "gpt2", "resnet"])
def test_every_parameter_has_one_gradient_and_two_adamw_states(
    name: str, model: Callable[..., Any]
) -> None:
    case = model(name)
    graph = rt.trace(case.module, *case.args, phase="training", **case.kwargs)
    parameters = dict(case.module.named_parameters())
    gradients = owners(graph, "gradients")
    assert len(gradients) == len(parameters)
    assert {g.name: g.elements for g in gradients} == {
        f"{n}.grad": p.numel() for n, p in parameters.items()
    }
    states = entries(graph, "optimizer")
    assert {s.name for s in states} == {
        f"{n}.{state}" for n in parameters for state in ("exp_avg", "exp_avg_sq")
    }


def test_weights_below_fp32_have_fp32_states_and_masters() -> None:
    graph = rt.trace(
        nn.Linear(8, 4, dtype=torch.bfloat16),
        torch.ones(2, 8, dtype=torch.bfloat16),
        phase="training",
    )
    states = {t.name: t.dtype for t in entries(graph, "optimizer")}
    assert states == {
        f"{name}.{state}": "fp32"
        for name in ("weight", "bias")
        for state in ("master", "exp_avg", "exp_avg_sq")
    }
    gradients = {g.name: g.dtype for g in owners(graph, "gradients")}
    assert gradients == {
        "weight.grad": "bf16",
        "bias.grad": "bf16",
        "weight.master.grad": "fp32",
        "bias.master.grad": "fp32",
    }


def test_fp32_weights_that_will_be_priced_lower_get_masters_too() -> None:
    plain = rt.trace(nn.Linear(8, 4), torch.ones(2, 8), phase="training")
    priced = rt.trace(nn.Linear(8, 4), torch.ones(2, 8), phase="training", dtype="bf16")
    assert len(entries(plain, "optimizer")) == 2 * 2
    assert len(entries(priced, "optimizer")) == 2 * 3


@pytest.mark.parametrize(
    ("optimizer", "states"), [("none", 0), ("sgd", 0), ("adam", 2), ("rmsprop", 1), ("Adadelta", 2)]
)
def test_an_optimizer_has_its_own_states(optimizer: str, states: int) -> None:
    graph = rt.trace(nn.Linear(8, 4), torch.ones(2, 8), phase="training", optimizer=optimizer)
    assert len(entries(graph, "optimizer")) == 2 * states
    assert any(op.part == "optimizer" for op in graph.ops) == (optimizer != "none")


def test_a_frozen_parameter_has_no_gradient_and_no_state() -> None:
    linear = nn.Linear(8, 4)
    linear.bias.requires_grad_(False)
    graph = rt.trace(linear, torch.ones(2, 8), phase="training")
    assert [g.name for g in owners(graph, "gradients")] == ["weight.grad"]
    assert {t.name.partition(".")[0] for t in entries(graph, "optimizer")} == {"weight"}


# -- weights, constants, views ---------------------------------------------------------------------


def test_tied_weights_are_one_tensor(model: Callable[..., Any]) -> None:
    case = model("gpt2")  # the head is the embedding
    graph = rt.trace(case.module, **case.kwargs)
    names = [t.name for t in entries(graph, "weights")]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert sum(t.elements for t in entries(graph, "weights")) == graph.model["params"]


class Tables(nn.Module):
    """A persistent buffer, one that is not, and a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("positions", torch.arange(8.0), persistent=False)
        self.shift = torch.full((8,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.positions + self.shift


def test_what_a_checkpoint_holds_is_weights_and_what_code_makes_is_constant() -> None:
    graph = rt.trace(Tables(), torch.ones(2, 8))
    assert {t.name: t.role for t in graph.values if t.name} == {
        "scale": "weights",
        "positions": "constants",
        "shift": "constants",
        "x": "activations",
    }


def test_what_depends_on_no_data_is_constant(module: Callable[..., nn.Module]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        mask = torch.arange(8) > 3
        return self.lin(x) * mask

    graph = rt.trace(module(forward), torch.ones(2, 8))
    roles = {op.name: graph.values[op.outputs[0]].role for op in graph.ops}
    assert roles["aten.arange"] == roles["aten.gt"] == "constants"
    assert roles["aten.mul"] == "activations"


def test_a_cast_of_weights_is_temporary(module: Callable[..., nn.Module]) -> None:
    graph = rt.trace(module(lambda self, x: x @ self.lin.weight.half()), torch.ones(2, 8).half())
    cast = next(op for op in graph.ops if op.name == "aten._to_copy")
    assert graph.values[cast.outputs[0]].role == "temporary"


@pytest.mark.parametrize("name", ["llama", "vit_example", "t5"])
def test_views_own_no_bytes_and_other_ops_own_theirs(name: str, model: Callable[..., Any]) -> None:
    case = model(name)
    graph = (
        rt.trace(case.module, **case.kwargs) if case.kwargs else rt.trace(case.module, *case.args)
    )
    for op in graph.ops:
        reading = {graph.values[i].storage for i in op.inputs}
        for output in op.outputs:
            shares = graph.values[output].storage in reading
            assert shares == (op.kind == "view" or op.name.endswith("_")), op


def test_an_op_in_place_writes_the_bytes_that_it_reads(module: Callable[..., nn.Module]) -> None:
    graph = rt.trace(module(lambda self, x: self.lin(x).add_(1).relu_()), torch.ones(2, 8))
    product, add, relu = graph.ops[-3:]
    storages = {graph.values[op.outputs[0]].storage for op in (product, add, relu)}
    assert (add.name, relu.name) == ("aten.add_", "aten.relu_")
    assert len(storages) == 1
    assert graph.outputs == relu.outputs
