"""Kernels of state-space models: found by structure, equal on real tensors, priced by hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import KERNELS, execution_model
from rooftrace.costmodels.ops.cost import Cost
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.rewrites.indexing import SumAxis
from rooftrace.costmodels.rewrites.rewrites import rewrite
from rooftrace.graph.graph import OpGraph
from rooftrace.graph.records import Op
from tests.costmodels import scan_support as layers
from tests.costmodels.serving_support import changed, differences, filled, traced
from tests.releases import with_transformers_5

OURS = ("causal-conv1d", "selective-scan", "ssd")
EXACT = 1e-13  # of the largest number, in fp64
FP32 = 1e-5  # transformers computes parts in fp32, whatever the model is in


def changes(graph: OpGraph, *names: str) -> tuple[OpGraph, dict[str, int]]:
    """The graph after these rewrites, and how many places each of them changed."""
    result, notes = changed(graph, *names)
    heads = (note.split(": ", 1) for note in notes)
    return result, {name: int(rest.split()[0]) for name, rest in heads if rest[0].isdigit()}


# -- layers by hand --------------------------------------------------------------------------------

BY_HAND = {
    layers.Minimal: {"causal-conv1d": 1, "selective-scan": 1},
    layers.ByToken: {"causal-conv1d": 1, "selective-scan": 1},
    layers.Padded: {"causal-conv1d": 1, "selective-scan": 1},
    layers.Parallel: {"causal-conv1d": 1, "selective-scan": 1},
    layers.Remembering: {"causal-conv1d": 1, "selective-scan": 1},
    layers.Skewed: {"causal-conv1d": 1},
    layers.Listing: {"ssd": 1},
    layers.Decayed: {"ssd": 1},
    layers.Watched: {"causal-conv1d": 1},
    layers.Squashed: {"causal-conv1d": 1},
    layers.Sigmoid: {"causal-conv1d": 1},
    layers.Backwards: {"causal-conv1d": 1},
    layers.Centred: {"selective-scan": 1},
    layers.Mixing: {"selective-scan": 1},
    layers.Forgetful: {},
    layers.Gates: {},
}
"""What is found in each layer: all of them compute something else than the one above it."""


@pytest.mark.parametrize("kind", BY_HAND, ids=lambda kind: kind.__name__)
def test_layers_by_hand_are_found_where_they_are_what_a_kernel_computes(kind: Any) -> None:
    module = filled(kind(), torch.float64)
    graph = traced(module, "forward", length=8)
    result, count = changes(graph, *OURS)
    assert count == BY_HAND[kind]
    assert differences(graph, result, module) < EXACT


@pytest.mark.parametrize("length", (8, 1024))
def test_a_scan_in_place_sees_the_first_token_from_the_last(length: int) -> None:
    graph = traced(filled(layers.Nearsighted()), "forward", length=length)
    assert changes(graph, "selective-scan") == (graph, {})
    graph = traced(filled(layers.Parallel()), "forward", length=length)
    assert changes(graph, "selective-scan")[1] == {"selective-scan": 1}


def test_a_prompt_that_is_no_whole_number_of_chunks() -> None:
    class Behind(layers.Listing):
        def scan(self, x: Any, a: Any, b: Any, c: Any) -> Any:
            rest = -x.shape[1] % self.chunk
            x, b, c = (nn.functional.pad(t, (0, 0, 0, 0, 0, rest)) for t in (x, b, c))
            y = super().scan(x, nn.functional.pad(a, (0, 0, 0, rest)), b, c)
            return y[:, : y.shape[1] - rest]

    module = filled(Behind(), torch.float64)
    graph = traced(module, "forward", length=10)
    result, count = changes(graph, "ssd")
    assert count == {"ssd": 1} and differences(graph, result, module) < EXACT
    (output,) = (op for op in result.ops if op.name == "rooftrace.ssd_output")
    assert result.values[output.outputs[0]].shape == (2, 10, 4, 3)  # not 12 tokens


def test_a_training_step_is_left_as_it_is() -> None:
    module = filled(layers.Minimal()).train()
    graph = rt.trace(module.to("meta"), torch.zeros(2, 8, dtype=torch.long), phase="training")
    assert changes(graph, *OURS) == (graph, {})


# -- models of transformers ------------------------------------------------------------------------

SMALL = dict(vocab_size=60, hidden_size=32)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
DUAL = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=6, mamba_chunk_size=4)
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "mamba": (dict(**SMALL, num_hidden_layers=2, state_size=6), {"selective-scan": 2}),
    "falcon_mamba": (dict(**SMALL, num_hidden_layers=2, state_size=6), {"selective-scan": 2}),
    "jamba": (
        dict(**SMALL, **HEADS, intermediate_size=48, num_hidden_layers=3, attn_layer_period=3,
             attn_layer_offset=1, num_experts=1, mamba_d_state=6, mamba_dt_rank=4,
             use_mamba_kernels=False),
        {"selective-scan": 2},
    ),
    "mamba2": (
        dict(**SMALL, num_hidden_layers=2, state_size=6, num_heads=8, head_dim=8, n_groups=2,
             chunk_size=4),
        {"ssd": 2},
    ),
    "bamba": (
        dict(**SMALL, **HEADS, **DUAL, intermediate_size=48, num_hidden_layers=2,
             attn_layer_indices=[1]),
        {"ssd": 1},
    ),
    "falcon_h1": (
        dict(**SMALL, **HEADS, **DUAL, intermediate_size=48, num_hidden_layers=2, head_dim=8,
             mamba_d_ssm=64),
        {"ssd": 2},
    ),
    "zamba2": (
        dict(**SMALL, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=4, n_mamba_heads=8, mamba_d_state=6, mamba_ngroups=2, chunk_size=4,
             layers_block_type=["mamba", "hybrid", "mamba"], hybrid_layer_ids=[1],
             num_mem_blocks=1),
        {"ssd": 3},
    ),
    "nemotron_h": (
        dict(**SMALL, **HEADS, intermediate_size=48, layers_block_type=["mamba", "attention"],
             head_dim=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=6,
             chunk_size=4),
        {"ssd": 1},
    ),
}  # fmt: skip
"""Configs of small models, and what is found in each: as many convolutions as recurrences."""


@cache
def model(name: str) -> nn.Module:
    """A small model of transformers, with decays of the order of one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields, _ = MODELS[name]
    module = filled(
        AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields)), torch.float64
    )
    with torch.no_grad():
        for path, weight in module.named_parameters():
            if path.endswith("A_log"):
                weight.copy_(torch.linspace(0, 1, weight.numel()).reshape(weight.shape))
    return module


@with_transformers_5
@pytest.mark.parametrize("phase", ("prefill", "decode"))
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_give_the_same_results(name: str, phase: str) -> None:
    graph = traced(model(name), phase, length=10)
    result, count = changes(graph, *OURS)
    recurrences = MODELS[name][1]
    assert count == recurrences | {"causal-conv1d": sum(recurrences.values())}
    assert differences(graph, result, model(name)) < FP32
    left = {op.name for op in result.ops}
    assert not left & {"aten.convolution", "aten.cumsum", "aten.softplus", "aten.exp"}


@with_transformers_5
def test_efficient_and_serving_ask_for_these_kernels_and_say_what_they_saved() -> None:
    graph = traced(model("mamba"), "prefill", length=10)
    for name in ("efficient", "serving"):
        assert set(OURS) <= set(execution_model(name).rewrites)
        notes = rt.estimate(graph, "h100-sxm", name).notes
        assert any(note.startswith("selective-scan: 2 selective scans, ") for note in notes)
    assert not {"compiled", "eager"} & {n for n in ("compiled", "eager") if OURS[0] in
                                        execution_model(n).rewrites}  # fmt: skip
    assert set(OURS) <= set(KERNELS)


def test_axes_of_sums_are_no_axes_of_values() -> None:
    assert SumAxis(170, 0) not in {(170, 0)}  # the axes of value 170 are pairs


# -- prices ----------------------------------------------------------------------------------------


def priced(module: nn.Module, length: int, *names: str) -> dict[str, tuple[Op, Cost, OpGraph]]:
    """Our ops by name after some rewrites, with their costs."""
    graph, _ = rewrite(
        traced(filled(module), "forward", length=length), execution_model("eager", rewrites=names)
    )
    pairs = zip(graph.ops, price_ops(graph)[0], strict=True)
    return {op.name: (op, cost, graph) for op, cost in pairs if op.name.startswith("rooftrace.")}


def test_a_selective_scan_by_hand() -> None:
    _, cost, _ = priced(layers.Minimal(), 8, "selective-scan")["rooftrace.selective_scan"]
    tokens, inner, state = 2 * 8, 12, 5
    # dt A, exp, times B, decay and add, times C and add: 7 for each number of the state
    flop = tokens * inner * state * 7
    flop += tokens * inner * (1 + 2 + 6)  # dt x; D x and its sum; z (1 / (1 + exp(-z))), and y
    flop += tokens * inner * (1 + 5)  # a bias; softplus: > threshold, exp, log1p, scales by beta
    assert cost.flops() == flop
    numbers = 4 * tokens * inner + 2 * tokens * state  # x, dt, z, y; B, C
    numbers += inner * state + 2 * inner  # A; D, the bias
    last = 2 * inner * state
    assert cost.bytes() == 4 * (numbers + last)


def test_state_space_duality_by_hand() -> None:
    costs = {name: cost for name, (_, cost, _) in priced(layers.Listing(), 8, "ssd").items()}
    batch, heads, width, state, groups, length, chunks = 2, 4, 3, 5, 2, 4, 2
    tokens = batch * chunks * length
    states = batch * chunks * heads * width * state
    matrix = {name.removeprefix("rooftrace.ssd_"): cost.flops(("matmul",)) for name, cost in
              costs.items()}  # fmt: skip
    assert matrix == {
        "steps": 0,
        "states": 2 * tokens * heads * width * state,
        "passing": 0,
        "products": 2 * tokens * length * groups * state,  # all pairs of a chunk
        "output": 2 * batch * chunks * heads * width * (1 + 2 + 3 + 4)  # pairs with s <= l
        + 2 * tokens * heads * width * state,
    }
    sums = 4 * tokens * heads
    assert costs["rooftrace.ssd_states"].bytes() == (
        4 * tokens * (heads * width + groups * state) + 2 * sums + 4 * states
    )
    last = 4 * batch * heads * width * state
    ends = sums // length  # of the running sums, the last of each chunk
    assert costs["rooftrace.ssd_passing"].bytes() == 2 * 4 * states + ends + last


def test_a_causal_convolution_by_hand() -> None:
    _, cost, _ = priced(layers.Minimal(), 8, "causal-conv1d")["rooftrace.causal_conv1d"]
    results, channels, window = 2 * 8 * 12, 12, 4
    assert cost.flops() == results * (2 * window + 1 + 5)  # products, bias, SiLU
    assert cost.bytes() == 4 * (2 * results + channels * window + channels)


def test_pairs_of_tokens_in_chunks() -> None:
    from rooftrace.costmodels.rules.recurrences import _pairs

    for tokens, chunk in ((8, 4), (10, 4), (3, 4), (1, 1), (7, 7)):
        every = [(one, two) for one in range(tokens) for two in range(tokens)]
        seen = [one <= two and one // chunk == two // chunk for one, two in every]
        assert _pairs(tokens, chunk) == sum(seen)


@pytest.mark.parametrize("kind", (layers.Steps, layers.NewSteps), ids=lambda kind: kind.__name__)
def test_a_step_that_sums_the_last_columns_by_hand(kind: Any) -> None:
    module = filled(kind(), torch.float64)
    graph = traced(module, "decode")
    result, count = changes(graph, "causal-conv1d")
    assert count == {"causal-conv1d": 1} and differences(graph, result, module) < EXACT
    assert not {"aten.mul", "aten.sum", "aten.cat", "aten.roll", "aten.copy_"} & {
        op.name for op in result.ops
    }
    prompt, found_ = changes(traced(module, "prefill"), "causal-conv1d")
    assert found_ == {"causal-conv1d": 1}
    assert differences(traced(module, "prefill"), prompt, module) < EXACT


def test_a_step_that_keeps_other_columns_is_none() -> None:
    graph = traced(filled(layers.WrongSteps()), "decode")
    assert changes(graph, "causal-conv1d") == (graph, {})
