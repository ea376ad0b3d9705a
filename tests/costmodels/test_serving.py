"""Named rewrites: the same results on real tensors, and costs by closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import (
    KERNELS,
    REWRITES as NAMES,
    ExecutionError,
    ExecutionModel,
    execution_model,
)
from rooftrace.costmodels.fusion.plans import plan
from rooftrace.costmodels.memory.footprint import memory
from rooftrace.costmodels.ops.cost import MATRIX
from rooftrace.costmodels.ops.price import price_ops
from rooftrace.costmodels.rewrites.fused_products import joined_name
from rooftrace.costmodels.rewrites.rewrites import REWRITES, reprice, rewrite
from rooftrace.graph.graph import OpGraph
from rooftrace.tracer.lowering.stacks import roll_stacks
from tests.costmodels.conftest import DEEPSEEK, TEXT
from tests.costmodels.serving_support import (
    BATCH,
    LENGTH,
    Caches,
    Experts,
    Gated,
    Latent,
    Seen,
    changed,
    differences,
    filled,
    run,
    traced as step_of,
)
from tests.releases import with_grouped_products, with_transformers_5

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
FP32 = 1e-4
MATRIX_ONLY = dict(operations=MATRIX)


def test_the_table_has_the_names_of_execution_models_in_their_order() -> None:
    assert tuple(entry.name for entry in REWRITES) == NAMES


def test_every_rewrite_is_in_the_docs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text()
    for entry in REWRITES:
        assert f"`{entry.name}`" in page


# -- transformers' models --------------------------------------------------------------------------

LLAMA4: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, intermediate_size_mlp=56, head_dim=8,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
)  # fmt: skip


def model_of(family: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    heads = {"GPT2": "GPT2LMHeadModel", "Llama4Text": "Llama4ForCausalLM"}
    head = getattr(transformers, heads.get(family, f"{family}ForCausalLM"))
    model: nn.Module = head(getattr(transformers, f"{family}Config")(**settings))
    return model


FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3": DEEPSEEK,
    "Llama4Text": dict(LLAMA4, num_experts_per_tok=2, num_hidden_layers=2),
    "Llama": dict(TEXT, num_key_value_heads=2),
    "Qwen2": dict(TEXT, num_key_value_heads=2),  # has biases
    "GPT2": dict(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                 bos_token_id=0, eos_token_id=0),
    "Qwen3Moe": dict(TEXT, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16,
                     num_experts=8, num_experts_per_tok=2),
}  # fmt: skip
LAYER = {"fused-routing": 1, "fused-experts": 1}
LAYERS = {"fused-routing": 2, "fused-experts": 2}
CHANGED = {  # how many places each rewrite changes: in prefill, in decode
    "DeepseekV3": {
        "prefill": {**LAYER, "fused-qkv": 2, "fused-gate-up": 2, "last-logits": 1},
        "decode": {
            **LAYER,
            "absorb-latent": 2,
            "fused-qkv": 2,
            "fused-gate-up": 2,
            "static-cache": 4,
        },
    },
    "Llama4Text": {
        "prefill": {
            "routed-experts": 2,
            **LAYERS,
            "fused-qkv": 2,
            "fused-gate-up": 2,
            "last-logits": 1,
        },
        "decode": {
            "routed-experts": 2,
            **LAYERS,
            "fused-qkv": 2,
            "fused-gate-up": 2,
            "static-cache": 4,
        },
    },
    "Llama": {
        "prefill": {"fused-qkv": 2, "fused-gate-up": 2, "last-logits": 1},
        "decode": {"fused-qkv": 2, "fused-gate-up": 2, "static-cache": 4},
    },
    "Qwen2": {
        "prefill": {"fused-qkv": 2, "fused-gate-up": 2, "last-logits": 1},
        "decode": {"fused-qkv": 2, "fused-gate-up": 2, "static-cache": 4},
    },
    "GPT2": {  # query, key and value are one product in the module
        "prefill": {"last-logits": 1},
        "decode": {"static-cache": 4},
    },
    "Qwen3Moe": {  # its experts are routed, and their gate and up are one weight
        "prefill": {**LAYERS, "fused-qkv": 2, "last-logits": 1},
        "decode": {**LAYERS, "fused-qkv": 2, "static-cache": 4},
    },
}


MARKS = {  # its experts are one weight each; two products of groups take the place of all
    "DeepseekV3": with_transformers_5,
    "Qwen3Moe": with_transformers_5,
    "Llama4Text": with_grouped_products,
}


def targets(graph: OpGraph) -> list[str]:
    """What the ops of a graph are, in order."""
    return [op.target for op in graph.ops]


def counts(notes: tuple[str, ...]) -> dict[str, int]:
    """{"fused-qkv": 2} from the notes of rewrites."""
    pairs = (note.split(": ", 1) for note in notes if "nothing" not in note)
    return {name: int(rest.split()[0]) for name, rest in pairs}


@pytest.fixture(scope="module")
def steps() -> Callable[[str, str], tuple[nn.Module, OpGraph]]:
    models: dict[str, nn.Module] = {}
    graphs: dict[tuple[str, str], OpGraph] = {}

    def step(family: str, phase: str) -> tuple[nn.Module, OpGraph]:
        if family not in models:
            models[family] = filled(model_of(family, **FAMILIES[family]))
        if (family, phase) not in graphs:
            graphs[family, phase] = step_of(models[family], phase)
        return models[family], graphs[family, phase]

    return step


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in FAMILIES],
)
def test_all_rewrites_of_a_model_leave_its_results(
    family: str, phase: str, steps: Callable[[str, str], tuple[nn.Module, OpGraph]]
) -> None:
    model, graph = steps(family, phase)
    result, notes = changed(graph, *NAMES)
    assert counts(notes) == CHANGED[family][phase]
    if phase == "prefill":  # logits of the last position alone
        (whole, *_), (last, *_) = run(graph, model), run(result, model)
        assert last.shape == (BATCH, 1, whole.shape[2])
        assert torch.allclose(whole[:, -1:], last, rtol=FP32, atol=FP32 * float(whole.abs().max()))
    else:
        assert differences(graph, result, model) < FP32


def test_training_is_left_as_it_is(steps: Callable[[str, str], tuple[nn.Module, OpGraph]]) -> None:
    graph = steps("Llama", "training")[1]
    result, notes = changed(graph, *NAMES)
    assert targets(result) == targets(graph) and not notes
    _, notes = changed(graph, "fused-qkv")
    assert notes == ("fused-qkv: nothing to rewrite in training",)


# -- absorbed latents ------------------------------------------------------------------------------


def test_latent_attention_written_by_hand() -> None:
    """Keys and values of all heads stand side by side, and the rotated part comes first."""
    model = filled(Latent())
    graph = step_of(model, "decode")
    result, notes = changed(graph, "absorb-latent")
    assert notes == ("absorb-latent: 2 attentions",)
    assert 0 < differences(graph, result, model) < FP32


def test_a_prompt_keeps_its_projection_which_takes_fewer_flops() -> None:
    graph = step_of(filled(Latent()), "prefill")
    result, notes = changed(graph, "absorb-latent")
    assert targets(result) == targets(graph)
    assert notes == ("absorb-latent: nothing to rewrite",)


def test_heads_with_rotated_keys_of_their_own_are_left() -> None:
    graph = step_of(filled(Latent(own_turns=True)), "decode")
    assert targets(changed(graph, "absorb-latent")[0]) == targets(graph)


def test_caches_by_head_become_caches_of_latents() -> None:
    """Caches that hold the projections of some latents: what the step makes of either is equal."""
    model = filled(Latent(by_head=True))
    graph = step_of(model, "decode")
    result, notes = changed(graph, "absorb-latent")
    assert notes == ("absorb-latent: 2 attentions",)
    caches = Caches()
    for number, layer in enumerate(model.layers):
        names = f"cache_{2 * number}", f"cache_{2 * number + 1}"
        latent = caches.of(f"{names[0]}.latent", (BATCH, 1, LENGTH, 16), torch.float32)
        turned = caches.of(f"{names[1]}.rope", (BATCH, 1, LENGTH, 8), torch.float32)
        keys, values = layer.up(latent[:, 0]).split([4 * 16, 4 * 16], -1)
        keys = keys.view(BATCH, LENGTH, 4, 16).transpose(1, 2)
        caches[names[0]] = torch.cat((turned.expand(-1, 4, -1, -1), keys), -1).detach()
        caches[names[1]] = values.view(BATCH, LENGTH, 4, 16).transpose(1, 2).detach()
    logits, small = (run(g, model, caches)[0] for g in (graph, result))
    assert torch.allclose(logits, small, rtol=FP32, atol=FP32)
    kept = [result.values[i].shape for i in result.outputs[1:]]
    assert kept == [(BATCH, 1, LENGTH + 1, 16), (BATCH, 1, LENGTH + 1, 8)] * 2


def test_memory_is_that_of_the_latents_where_the_cache_changed() -> None:
    graph = step_of(filled(Latent(by_head=True)), "decode")
    execution = execution_model("eager", rewrites=("absorb-latent", "static-cache"))
    estimate = rt.estimate(graph, "h200-sxm", execution)
    before = BATCH * LENGTH * 4 * (24 + 16) * 4  # heads, keys and values, fp32
    after = BATCH * (LENGTH + 1) * (16 + 8) * 4  # latent and rotated key, with the new row
    assert memory(graph).kv >= 2 * before  # two layers
    assert estimate.memory.kv == 2 * after


@pytest.mark.parametrize("by_head", [False, True])
def test_other_precisions_are_absorbed_too(by_head: bool) -> None:
    graph = step_of(filled(Latent(by_head)).bfloat16(), "decode")
    for precisions in (dict(weights_dtype="fp8"), dict(kv_dtype="fp8"), dict(dtype="fp8")):
        priced = reprice(graph, **precisions)
        result, notes = changed(priced, "absorb-latent", "static-cache")
        assert counts(notes) == {"absorb-latent": 2, "static-cache": 4}
        caches = {result.values[i].dtype for i in result.outputs[1:]}
        assert caches == {priced.values[i].dtype for i in priced.outputs[1:]}


def test_flops_per_cached_position_of_deepseek() -> None:
    """2 h (2 r_kv + d_r) = 2 * 128 * (2 * 512 + 64) = 278,528."""
    batch, heads, rank, rope, nope, width = 1, 128, 512, 64, 128, 128
    flops = {}
    for length in (32, 33):
        model = model_of(
            "DeepseekV3", **{**DEEPSEEK, "num_hidden_layers": 1, "num_attention_heads": heads,
                             "num_key_value_heads": heads, "kv_lora_rank": rank,
                             "qk_rope_head_dim": rope, "qk_nope_head_dim": nope,
                             "v_head_dim": width},
        ).to("meta")  # fmt: skip
        graph = rt.trace(model, phase="decode", batch=batch, seq=length)
        flops[length] = plan(graph, "serving").total.flops(MATRIX)
    assert flops[33] - flops[32] == 278_528


# -- routed experts --------------------------------------------------------------------------------


@with_grouped_products
def test_experts_written_by_hand() -> None:
    model = filled(Experts())
    graph = step_of(model, "forward")
    result, notes = changed(graph, "routed-experts")
    assert notes == ("routed-experts: 1 expert layer",)
    assert differences(graph, result, model) < FP32
    before, after = (_product_flops(g, ("aten.bmm", "aten._grouped_mm")) for g in (graph, result))
    tokens = BATCH * LENGTH
    assert before == 2 * 2 * 8 * tokens * 16 * 24  # two products, all of 8 experts
    assert after == 2 * 2 * 2 * tokens * 16 * 24  # the two that were chosen


def _product_flops(graph: OpGraph, names: tuple[str, ...]) -> int:
    costs = price_ops(graph)[0]
    return sum(
        cost.flops(MATRIX) for op, cost in zip(graph.ops, costs, strict=True) if op.name in names
    )


@pytest.mark.parametrize("what", ["open_gate", "shifted", "overwritten"])
def test_experts_that_see_every_token_are_left(what: str) -> None:
    """A score for every expert; a number added between the products, so that zero is not left zero;
    or tokens that are other ones where the chosen rows would be taken."""
    graph = step_of(filled(Experts(**{what: True})), "forward")
    assert changed(graph, "routed-experts")[0] is graph


def test_bytes_of_llama4_experts() -> None:
    """Scout's layers: 16 experts of 3 x 5,120 x 8,192, top 1; here two layers of them."""
    model = _scout(layers=2)
    graph = rt.trace(model, phase="decode", batch=8, seq=64, dtype="bf16")
    expert = 3 * 5120 * 8192 * 2  # bytes of gate, up and down in bf16
    before, after = (
        sum(
            size
            for op, cost in zip(g.ops, price_ops(g)[0], strict=True)
            if op.name in ("aten.bmm", "aten._grouped_mm")
            for access, size in cost.traffic.items()
            if g.values[access.storage].role == "weights"
        )
        for g in (graph, changed(graph, "routed-experts")[0])
    )
    hit = 16 * (1 - (15 / 16) ** 8)  # 6.45 experts, as expected of 8 tokens
    assert before == 2 * 16 * expert
    assert 2 * int(hit) * expert <= after <= 2 * hit * expert + 2


def _scout(layers: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.Llama4TextConfig(
        num_hidden_layers=layers, vocab_size=1024, num_local_experts=16, num_experts_per_tok=1,
    )  # fmt: skip
    assert (config.hidden_size, config.intermediate_size) == (5120, 8192)
    with torch.device("meta"):
        model: nn.Module = transformers.Llama4ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model


# -- fused products --------------------------------------------------------------------------------


@pytest.mark.parametrize("product", [nn.Linear, Seen])
def test_products_with_biases_written_by_hand(product: type[nn.Linear]) -> None:
    model = filled(Gated(product=product))
    graph = step_of(model, "decode")
    result, notes = changed(graph, "fused-qkv", "fused-gate-up")
    assert notes == ("fused-qkv: 1 qkv projection", "fused-gate-up: 1 gate-up projection")
    assert differences(graph, result, model) < FP32
    names = {result.values[i].name for op in result.ops for i in op.inputs}
    assert {"ask+key+value.weight", "ask+key+value.bias", "gate+up.weight"} <= names


def test_fused_products_read_their_input_once_and_the_same_weights() -> None:
    graph = step_of(filled(Gated()), "decode")
    result, _ = changed(graph, "fused-qkv")
    before, after = (
        [cost for op, cost in zip(g.ops, price_ops(g)[0], strict=True) if op.name == "aten.addmm"]
        for g in (graph, result)
    )
    assert len(before) == len(after) + 2
    saved = sum(c.bytes() for c in before) - sum(c.bytes() for c in after)
    assert saved == 2 * BATCH * 16 * 4  # two of three reads of the input, fp32
    assert sum(c.flops() for c in before) == sum(c.flops() for c in after)


@pytest.mark.parametrize("what", ["tied", "overwritten"])
def test_a_weight_of_two_products_or_an_input_that_changes_stays_apart(what: str) -> None:
    graph = step_of(filled(Gated(**{what: True})), "decode")
    assert targets(changed(graph, "fused-gate-up")[0]) == targets(graph)


def test_a_fused_weight_takes_the_memory_of_its_parts() -> None:
    graph = step_of(filled(Gated()), "decode")
    result, _ = changed(graph, "fused-qkv", "fused-gate-up")
    assert memory(result).weights == memory(graph).weights


def test_names_of_fused_weights() -> None:
    names = [f"layers.0.attn.{part}.weight" for part in ("q", "k", "v")]
    assert joined_name(names) == "layers.0.attn.q+k+v.weight"
    assert joined_name(["gate.weight", "mlp.up.weight"]) == "gate+mlp.up.weight"


# -- logits and caches -----------------------------------------------------------------------------


def test_logits_of_a_head_that_bends_them() -> None:
    model = filled(Gated())
    graph = step_of(model, "prefill")
    result, notes = changed(graph, "last-logits")
    assert notes == ("last-logits: 1 head",)
    whole, last = run(graph, model), run(result, model)
    assert torch.allclose(whole[0][:, -1:], last[0], rtol=FP32, atol=FP32)
    assert all(torch.equal(a, b) for a, b in zip(whole[1:], last[1:], strict=True))
    head = 2 * 16 * 60  # FLOP of a position
    saved = _product_flops(graph, ("aten.addmm",)) - _product_flops(result, ("aten.addmm",))
    assert saved == BATCH * (LENGTH - 1) * head


def test_logits_that_the_step_reads_stay() -> None:
    graph = step_of(filled(Gated(read_twice=True)), "prefill")
    assert targets(changed(graph, "last-logits")[0]) == targets(graph)


def test_a_static_cache_is_what_kv_append_in_place_is() -> None:
    model = filled(Gated())
    graph = step_of(model, "decode")
    result, notes = changed(graph, "static-cache")
    other, _ = rewrite(graph, ExecutionModel(kv_append="in-place"))
    assert notes == ("static-cache: 2 cache appends",)
    assert result == other
    assert differences(graph, result, model) == 0


# -- execution models ------------------------------------------------------------------------------


def test_serving_is_efficient_with_all_rewrites() -> None:
    serving, efficient = execution_model("serving"), execution_model("efficient")
    same = replace(efficient, name="serving", rewrites=NAMES, library="vllm")
    assert same == serving
    assert (serving.attention_kernels, efficient.attention_kernels) == ("vllm", "sdpa")
    assert replace(serving, attention_library="flashinfer").attention_kernels == "flashinfer"
    assert efficient.rewrites == KERNELS
    for name in ("naive", "eager", "compiled"):
        assert execution_model(name).rewrites == ()


def test_names_of_rewrites_are_checked_and_put_in_order() -> None:
    model = ExecutionModel(rewrites=("static-cache", "absorb-latent", "static-cache"))
    assert model.rewrites == ("absorb-latent", "static-cache")
    assert ExecutionModel.from_dict({**model.to_dict(), "rewrites": [*model.rewrites]}) == model
    with pytest.raises(ExecutionError, match=r"'absorb-latents': .*; did you mean 'absorb-latent'"):
        execution_model("eager", rewrites=("absorb-latents",))
    with pytest.raises(ExecutionError, match="rewrites='absorb-latent': expected a tuple of names"):
        execution_model("eager", rewrites="absorb-latent")


def test_notes_say_what_was_saved() -> None:
    graph = step_of(filled(Latent()), "decode")
    (note,) = plan(graph, execution_model("eager", rewrites=("absorb-latent",))).notes
    words = note.split(", ")
    assert words[0] == "absorb-latent: 2 attentions"
    assert "FLOP -> " in words[1] and "B -> " in words[2]
    notes = plan(graph, execution_model("naive", rewrites=("absorb-latent",))).notes
    assert "absorb-latent: left out, since attention runs as matrix products" in notes


# -- repeats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["DeepseekV3", "Llama4Text", "Qwen2"])
def test_a_step_with_repeats_costs_what_it_costs_written_out(family: str) -> None:
    settings = {**FAMILIES[family], "num_hidden_layers": 6}
    if family == "Llama4Text":
        settings["no_rope_layers"] = [1] * 6  # alike
    flat = step_of(model_of(family, **settings), "decode").expand()
    short = roll_stacks(flat)
    assert short.repeats
    execution = execution_model("eager", rewrites=NAMES)
    one, other = plan(short, execution), plan(flat, execution)
    assert one.total.work == other.total.work
    assert one.bytes == other.bytes and one.notes == other.notes
    assert one.memory.peak == other.memory.peak


@with_transformers_5
def test_a_step_with_repeats_gives_the_same_results() -> None:
    model = filled(model_of("DeepseekV3", **{**DEEPSEEK, "num_hidden_layers": 6}))
    short = roll_stacks(step_of(model, "decode").expand())
    result, _ = changed(short, *NAMES)
    assert result.repeats and differences(short, result, model) < FP32


# -- DeepSeek-V3 -----------------------------------------------------------------------------------


@with_transformers_5
def test_decode_of_deepseek_v3_by_its_closed_form() -> None:
    """The products of every weight that a token uses, and 278,528 FLOP per cached position."""
    batch, kv, layers, dense = 8, 4096, 9, 3  # as wide as it is, with fewer layers
    graph = rt.tools.priced_graphs(
        str(CONFIGS / "deepseek-v3.json"), phases=("decode",), batch=batch, kv=kv,
        settings={"config.num_hidden_layers": layers},
    )["decode"]  # fmt: skip
    size, heads, rank, query_rank = 7168, 128, 512, 1536
    attention = (
        size * query_rank + query_rank * heads * 192  # query, down and up
        + size * (rank + 64)  # latent and rotated key
        + heads * rank * (128 + 128)  # W_UK into the query, W_UV behind attention
        + heads * 128 * size  # out
    )  # fmt: skip
    experts = 3 * size * 2048 * (8 + 1) + size * 256  # routed, shared; the router
    weights = layers * attention + dense * 3 * size * 18432 + (layers - dense) * experts
    weights += size * 129280  # the head
    expected = batch * (2 * weights + layers * (kv + 1) * 278_528)
    estimate = rt.estimate(graph, "h200-sxm", "serving")
    assert estimate.flops_matrix == pytest.approx(expected, rel=1e-9)
    assert estimate.flops == pytest.approx(expected, rel=0.01)
    efficient = rt.estimate(graph, "h200-sxm", "efficient")
    assert efficient.flops / estimate.flops > 50  # the cache is projected in every step
    assert estimate.t_est < efficient.t_est / 2
