"""Attention written by hand is one kernel: equal results, and only where the structure is it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

import rooftrace as rt
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.ops.cost import MATRIX
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.rewrites.attention_kernels import (
    attention_kernels,
    flash_from_products,
    masks_as_numbers,
    share_heads,
)
from rooftrace.costmodels.rewrites.attention_products import materialise_attention
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.rebuild import to_fx
from tests.costmodels.attention_support import CAP, KV, SCALE, B, E, H, S, Written, shown, told
from tests.costmodels.serving_support import Latent, changed, differences, filled, traced

EXACT = dict(rtol=1e-12, atol=1e-12)
SINKS = ("column", "shifted column", "first column", "denominator", "bare denominator")
CAPS = ("divided", "in place", "folded")


def step(model: Written, kind: str = "causal", number: int = 0) -> tuple[OpGraph, list[Tensor]]:
    """The graph of a model in fp64, with what is known of its mask, and its inputs."""
    model.double().eval()
    mask = shown(kind, S, S, number)
    added = torch.zeros(S, S, dtype=torch.float64).masked_fill(~mask, -1e30)
    inputs = [torch.randn(B, S, H * E, dtype=torch.float64), mask[None, None]]
    if model.mask in ("added", "twice"):
        inputs[1] = added[None, None]
    return told(rt.trace(model, *inputs), mask, kind), inputs


def check(graph: OpGraph, model: Written, inputs: list[Tensor]) -> None:
    graph.verify()
    torch.testing.assert_close(
        to_fx(graph, model.state_dict())(*inputs)[0], model(*inputs), **EXACT
    )


def kernel(graph: OpGraph) -> Any:
    (op,) = (op for op in graph.ops if op.name == "rooftrace.attention")
    return op


# -- equal results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", ["", *SINKS])
@pytest.mark.parametrize("cap", ["", "divided"])
def test_each_form_of_sinks_is_the_same_attention(sinks: str, cap: str) -> None:
    model = Written(sinks=sinks, cap=cap)
    graph, inputs = step(model)
    result, count = attention_kernels(graph)
    assert count == 1 and not any(op.name == "aten.bmm" for op in result.ops)
    arguments = kernel(result).arguments
    assert ("sinks" in arguments) == bool(sinks)
    assert arguments["scale"] == pytest.approx(SCALE)
    assert arguments.get("softcap", 0) == pytest.approx(CAP if cap else 0)
    check(result, model, inputs)


@pytest.mark.parametrize("cap", CAPS)
def test_each_form_of_soft_caps_is_the_same_attention(cap: str) -> None:
    model = Written(cap=cap)
    graph, inputs = step(model)
    result, count = attention_kernels(graph)
    arguments = kernel(result).arguments
    assert (count, arguments["softcap"]) == (1, pytest.approx(CAP))
    assert arguments["scale"] == pytest.approx(SCALE)
    check(result, model, inputs)


@pytest.mark.parametrize(
    "mask", ["none", "filled", "filled with a number", "where", "where not", "added"]
)
def test_each_form_of_masks_is_the_same_attention(mask: str) -> None:
    model = Written(mask=mask, sinks="column")
    graph, inputs = step(model)
    result, count = attention_kernels(graph)
    assert count == 1
    check(result, model, inputs)


@pytest.mark.parametrize("scale", ["tensor", "by head"])
def test_a_scale_that_is_a_tensor_is_on_the_query(scale: str) -> None:
    model = Written(scale=scale, cap="")
    graph, inputs = step(model)
    result, count = attention_kernels(graph)
    assert count == 1 and kernel(result).arguments["scale"] == 1
    check(result, model, inputs)


@pytest.mark.parametrize("mask", ["none", "added"])
@pytest.mark.parametrize(("beta", "count"), [(0, 1), (1, 0)])
def test_a_product_that_scales_is_the_same_attention_where_it_adds_nothing(
    mask: str, beta: int, count: int
) -> None:
    model = Written(mask=mask, scale=beta)
    graph, inputs = step(model)
    result, made = attention_kernels(graph)
    assert made == count
    assert not count or kernel(result).arguments["scale"] == pytest.approx(SCALE)
    check(result, model, inputs)


def test_keys_and_values_of_shared_heads_are_read_as_stored() -> None:
    model = Written(sinks="column", cap="divided")
    graph, inputs = step(model)
    result, count = share_heads(attention_kernels(graph)[0])
    operands = [result.values[kernel(result).arguments[n].id].shape for n in ("key", "value")]
    assert count == 1 and operands == [(B, KV, S, E)] * 2
    assert not any(
        op.name == "aten.clone" and len(result.values[op.inputs[0]].shape) == 5 for op in result.ops
    )
    check(result, model, inputs)


class OneHead(nn.Module):
    """Written-out attention with sinks whose queries share one head of keys and values."""

    mask = "added"

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(H))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query = x.view(B, S, H, E).transpose(1, 2)
        shared = query[:, :1, None].expand(B, 1, H, S, E).reshape(B, H, S, E)
        scores = query @ shared.transpose(-1, -2) * SCALE + mask
        column = self.sinks.view(1, H, 1, 1).expand(B, H, S, 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        return weights @ shared


def test_one_head_for_all_queries_is_read_as_stored() -> None:
    model: Any = OneHead()
    graph, inputs = step(model)
    result, count = share_heads(attention_kernels(graph)[0])
    operands = [result.values[kernel(result).arguments[n].id].shape for n in ("key", "value")]
    assert count == 1 and operands == [(B, 1, S, E)] * 2
    copied = [result.values[op.outputs[0]] for op in result.ops if op.name == "aten.clone"]
    assert all(value.shape[1] == 1 for value in copied)
    check(result, model, inputs)


MASKS = [
    ("causal", 0, {"is_causal": True}),
    ("sliding-window", 3, {"window": 3}),
    ("chunked", 4, {"chunk": 4}),
]


@pytest.mark.parametrize("kind, number, options", MASKS)
@pytest.mark.parametrize("mask", ["added", "filled", "where not"])
def test_masks_with_a_number_are_not_read(kind: str, number: int, options: Any, mask: str) -> None:
    model = Written(mask=mask, sinks="column")
    graph, inputs = step(model, kind, number)
    result, count = masks_as_numbers(attention_kernels(graph)[0])
    arguments = kernel(result).arguments
    assert count == 1 and arguments["mask"] is None and arguments.items() >= options.items()
    assert kernel(result).facts["visible_pairs"] == shown(kind, S, S, number).sum()
    check(result, model, inputs)


OTHERS: list[dict[str, Any]] = [
    {"visible_pairs": 20}, {"mask": "full"}, {"mask": "prefix"},
    {"window": 2, "mask": "sliding-window"},
]  # fmt: skip


@pytest.mark.parametrize("facts", OTHERS)
def test_masks_that_no_number_says_are_read(facts: dict[str, Any]) -> None:
    graph, _ = step(Written())
    graph, _ = attention_kernels(graph)
    ops = [
        replace(op, facts={**op.facts, **facts}) if op.name == "rooftrace.attention" else op
        for op in graph.ops
    ]
    other = graph.replace(ops=tuple(ops))
    assert masks_as_numbers(other) == (other, 0)


@pytest.mark.parametrize("kind", ["padding", "packed", "chunked"])
def test_masks_that_stand_for_lengths_stay_and_no_kernel_reads_them(kind: str) -> None:
    model = Written(sinks="column")
    graph, inputs = step(model)
    ops = [
        replace(op, facts={**op.facts, "mask": kind}) if "mask" in op.facts else op
        for op in graph.ops
    ]
    read = attention_kernels(graph.replace(ops=tuple(ops)))[0]
    result, count = masks_as_numbers(read)
    costs = [price_ops(g)[0][kernel(g).id].bytes() for g in (read, result)]
    assert (count, costs[0] - costs[1]) == (1, S * S * 8)
    check(result, model, inputs)


@pytest.mark.parametrize("kind, number, options", [("none", 0, {}), *MASKS])
@pytest.mark.parametrize("sinks, cap", [("column", ""), ("", "divided"), ("column", "divided")])
def test_as_products_it_is_the_same_attention(
    kind: str, number: int, options: Any, sinks: str, cap: str
) -> None:
    model = Written(sinks=sinks, cap=cap)
    graph, inputs = step(model, *((kind, number) if options else ("causal", 0)))
    one = attention_kernels(graph)[0]
    if options:
        one = masks_as_numbers(share_heads(one)[0])[0]
    result, count = materialise_attention(one)
    assert count == 1 and not any("attention" in op.target for op in result.ops)
    masks = {t.name: shown(kind, S, S, number) for t in result.values if "_mask_" in t.name}
    assert len(masks) == bool(options)
    result.verify()
    out = to_fx(result, {**model.state_dict(), **masks})(*inputs)[0]
    torch.testing.assert_close(out, model(*inputs), **EXACT)


# -- models of transformers ------------------------------------------------------------------------

TINY: dict[str, Any] = dict(
    hidden_size=H * E, num_attention_heads=H, num_key_value_heads=KV, head_dim=E,
    num_hidden_layers=2, intermediate_size=16, vocab_size=32, sliding_window=4, pad_token_id=0,
)  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    # module, prefix of its classes, settings, width of the rotation
    "gpt-oss": ("gpt_oss", "GptOss", {"num_local_experts": 2}, E // 2),
    "MiMo-V2-Flash": ("mimo_v2_flash", "MiMoV2Flash", {"v_head_dim": E}, E),
    "Flint": ("flint", "Flint", {}, E),
    "Gemma 2": ("gemma2", "Gemma2", {"attn_logit_softcapping": CAP}, E),
    "VaultGemma": ("vaultgemma", "VaultGemma", {"attn_logit_softcapping": CAP}, E),
}


class Alone(nn.Module):
    """An attention module of transformers without its probabilities."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, turns: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        out: Tensor = self.inner(x, position_embeddings=turns, attention_mask=mask)[0]
        return out


@pytest.mark.parametrize("name", MODELS)
def test_it_is_found_in_models_of_several_authors(name: str) -> None:
    folder, prefix, settings, width = MODELS[name]
    package = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(package, f"{prefix}Config")(**{**TINY, **settings})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    dtype = torch.float32 if name == "Flint" else torch.float64  # its scores are in fp32
    model = Alone(getattr(package, f"{prefix}Attention")(config, layer_idx=1)).to(dtype).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    x, turns = torch.randn(B, S, H * E, dtype=dtype), torch.randn(2, B, S, width, dtype=dtype)
    mask = torch.zeros(1, 1, S, S, dtype=dtype).masked_fill(~shown("causal", S, S), -1e30)
    inputs = x, (turns[0], turns[1]), mask
    graph = rt.trace(model, *inputs)
    result, count = attention_kernels(graph)
    arguments = kernel(result).arguments
    assert count == 1 and {"sinks", "softcap"} & arguments.keys()
    again, shared = share_heads(result)
    assert shared == (name != "MiMo-V2-Flash")  # whose heads have keys of their own here
    again.verify()
    out = to_fx(again, dict(model.named_parameters()))(x, *turns, mask)[0]
    # All but gpt-oss have their softmax in fp32.
    tolerance = EXACT if name == "gpt-oss" else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, model(*inputs), **tolerance)


def test_latents_are_absorbed_with_their_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    def sunk(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Tensor:
        scores = q @ k.transpose(-2, -1) * scale
        sinks = torch.arange(q.shape[1], dtype=q.dtype, device=q.device).view(1, -1, 1, 1)
        both = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        return both.softmax(-1)[..., :-1] @ v

    monkeypatch.setattr(F, "scaled_dot_product_attention", sunk)
    model = filled(Latent(), torch.float64)
    graph = traced(model, "decode")
    result, notes = changed(graph, "written-attention", "absorb-latent")
    names = [op.name for op in result.ops if "attention" in op.name]
    assert names == ["rooftrace.latent_attention"] * 2 and len(notes) == 2
    assert differences(graph, result, model) < 1e-12


# -- what it costs ---------------------------------------------------------------------------------


def test_flops_and_bytes_by_hand() -> None:
    model = Written(sinks="column", cap="divided")
    graph, _ = step(model, "sliding-window", 3)
    result = masks_as_numbers(share_heads(attention_kernels(graph)[0])[0])[0]
    cost = price_ops(result)[0][kernel(result).id]
    pairs = 1 + 2 + 3 + 3 + 3 + 3
    assert cost.flops(MATRIX, ("useful",)) == B * H * pairs * (2 * E + 2 * E)
    assert cost.flops(MATRIX, ("masked",)) == B * H * (S * S - pairs) * (2 * E + 2 * E)
    # scale, maximum, subtract, exp, add; tanh and its product; a sink's three, divisions
    assert cost.flops(("vector",)) == B * H * (pairs * (5 + 2) + S * (3 + E))
    query, shared, rows = B * H * S * E, B * KV * S * E, B * H * S
    # query, keys, values, sinks read; the result written, and fp32 log-sum-exps
    assert cost.bytes() == 8 * (query + 2 * shared + H + query) + 4 * rows


def test_one_query_reads_the_rows_of_its_window() -> None:
    rows, window = 50, 7

    class Last(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, mask)

    q, k = torch.empty(B, H, 1, E), torch.empty(B, H, rows, E)
    mask = shown("sliding-window", 1, rows, window)
    graph = told(rt.trace(Last(), q, k, k, mask[None, None]), mask, "sliding-window")
    result, count = masks_as_numbers(graph)
    assert (count, kernel(result).arguments["window"]) == (1, window)
    cost = price_ops(result)[0][kernel(result).id]
    assert cost.bytes() == 4 * B * H * (E + 2 * window * E + E + 1)  # one fp32 log-sum-exp


def test_products_that_stay_say_which_pairs_a_mask_shows() -> None:
    graph, _ = step(Written(sinks="read again"), "sliding-window", 3)
    pairs = 1 + 2 + 3 + 3 + 3 + 3
    for execution in ("naive", "eager", "efficient"):
        rewritten = plan(graph, execution)
        work = [rewritten.op_costs[op.id] for op in rewritten.graph.ops if op.name == "aten.bmm"]
        assert [c.flops(MATRIX, ("useful",)) for c in work] == [2 * B * H * pairs * E] * 2
        assert [c.flops(MATRIX) for c in work] == [2 * B * H * S * S * E] * 2


# -- other structures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": "by query"}, {"sinks": "other shift"}, {"sinks": "read again"},
        {"sinks": "wrong column"}, {"cap": "after the mask"}, {"mask": "twice"},
    ],
)  # fmt: skip
def test_what_only_looks_like_it_stays(options: dict[str, str]) -> None:
    graph, _ = step(Written(**options))
    assert attention_kernels(graph) == (graph, 0)


@pytest.mark.parametrize(
    "options", [{"sinks": "column"}, {"cap": "divided"}, {"sinks": "denominator"}]
)
def test_compilers_know_no_sinks_and_no_soft_caps(options: dict[str, str]) -> None:
    graph, _ = step(Written(**options))
    assert flash_from_products(graph) == (graph, 0)


@pytest.mark.parametrize(
    ("scale", "masked", "count"),
    [("scores * 0.2", 1, 0), ("scores / 5.0", 1, 1), ("query * 0.2", 1, 0), ("", 1, 1),
     ("scores * 0.2", 0, 1), ("query * 0.2", 0, 1)],
)  # fmt: skip
def test_compilers_know_masks_on_divided_scores(scale: str, masked: bool, count: int) -> None:
    """The counts are `counters["inductor"]["fuse_attention"]` of torch 2.13 after the same code."""

    def attend(x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (x.view(B, S, H, E).transpose(1, 2) for _ in range(3))
        if scale.startswith("query"):
            query = query * 0.2
        scores = query @ key.transpose(-2, -1)
        if scale.startswith("scores"):
            scores = scores / 5.0 if "/" in scale else scores * 0.2
        return (scores + mask if masked else scores).softmax(-1) @ value

    inputs = [torch.empty(B, S, H * E, device="meta"), torch.empty(1, H, S, S, device="meta")]
    assert flash_from_products(rt.trace(attend, *inputs))[1] == count


@pytest.mark.parametrize("compiled", [True, False])
def test_attention_between_compiled_graphs_stays_as_it_is_written(compiled: bool) -> None:
    """A script compiles its attention, or what comes after it."""

    def attend(x: Tensor) -> Tensor:
        return (x @ x.transpose(-2, -1)).softmax(-1) @ x

    def twice(x: Tensor) -> Tensor:
        return F.silu(x) * 2

    first, second = (torch.compile(attend), twice) if compiled else (attend, torch.compile(twice))
    graph = rt.trace(lambda x: second(first(x)), torch.empty(B, H, S, E, device="meta"))
    rows = rt.estimate(graph, execution="mixed", chip="h100-sxm").rows
    assert sum("attention" in row.name for row in rows) == compiled
    assert sum("softmax" in row.name for row in rows) != compiled
