"""Masks of transformers' models: each layer computes the pairs that its rule shows, at any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rooftrace as rt
from rooftrace.graph import OpGraph

SIZES = (512, 1_000, 2_047, 2_048, 2_049, 4_096, 5_000, 8_193, 16_384, 32_768, 65_537, 131_072)
SMALL = dict(
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=128,
    max_position_embeddings=1 << 18,
)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
Pairs = Callable[[int], int]


def causal(n: int) -> int:
    return n * (n + 1) // 2


def window(width: int) -> Pairs:
    return lambda n: causal(min(n, width)) + max(0, n - width) * width


def chunks(size: int) -> Pairs:
    return lambda n: n // size * causal(size) + causal(n % size)


def full(n: int) -> int:
    return n * n


def gemma3() -> Any:
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    layers = dict(num_hidden_layers=4, sliding_window=1_024, layer_types=kinds)
    return transformers.Gemma3TextConfig(**SMALL, **layers)


def gpt_oss() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    layers = dict(num_hidden_layers=2, sliding_window=128, layer_types=kinds)
    return transformers.GptOssConfig(**SMALL, **EXPERTS, **layers)


def llama4() -> Any:
    layers = dict(num_hidden_layers=4, attention_chunk_size=8_192, intermediate_size_mlp=64)
    experts = {**EXPERTS, "num_experts_per_tok": 1}
    return transformers.Llama4TextConfig(**SMALL, **experts, **layers, pad_token_id=0)


MODELS: dict[str, tuple[Callable[[], Any], Sequence[Pairs]]] = {
    "gemma-3": (gemma3, [window(1_024)] * 3 + [causal]),
    "gemma-2": (
        lambda: transformers.Gemma2Config(**SMALL, num_hidden_layers=2, sliding_window=4_096),
        [window(4_096), causal],
    ),
    "mistral": (
        lambda: transformers.MistralConfig(**SMALL, num_hidden_layers=2, sliding_window=4_096),
        [window(4_096)] * 2,
    ),
    "gpt-oss": (gpt_oss, [window(128), causal]),
    "llama-4": (llama4, [chunks(8_192)] * 3 + [causal]),
    "qwen-3": (lambda: transformers.Qwen3Config(**SMALL, num_hidden_layers=2), [causal] * 2),
    "bloom (alibi)": (
        lambda: transformers.BloomConfig(hidden_size=64, n_head=4, n_layer=2, vocab_size=128),
        [causal] * 2,
    ),
    "mpt (alibi)": (
        lambda: transformers.MptConfig(
            d_model=64, n_heads=4, n_layers=2, vocab_size=128, max_seq_len=1 << 18
        ),
        [causal] * 2,
    ),
}


def _model(name: str) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(MODELS[name][0]()).eval()


def _pairs(graph: OpGraph) -> list[int]:
    """The pairs of a head in each attention, as its kernel or the op that masks it says."""
    seen = []
    for op in graph.ops:
        pairs = op.facts.get("visible_pairs")
        if op.name == "rooftrace.attention" and pairs is None:
            rows, columns = (graph.values[i].shape[-2] for i in op.inputs[:2])
            pairs = causal(rows) if op.arguments["is_causal"] else rows * columns
        seen += [pairs] * graph.times(op) if pairs is not None else []
    return seen


def _check(name: str, size: int, batch: int) -> None:
    graph = rt.trace(_model(name), phase="prefill", batch=batch, seq=size)
    right = [layer(size) for layer in MODELS[name][1]]
    assert sorted(_pairs(graph)) == sorted(right)
    assert not [a.text for a in graph.assumptions if a.kind == "mask"]


@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_what_their_masks_show(name: str) -> None:
    for size, batch in ((2_048, 1), (2_049, 1), (9_000, 3)):
        _check(name, size, batch)


@pytest.mark.heavy
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", MODELS)
def test_layers_compute_what_their_masks_show_at_every_size(name: str, batch: int) -> None:
    for size in SIZES:
        _check(name, size, batch)


def test_bidirectional_models_see_all_keys_and_decoders_their_own() -> None:
    config = transformers.T5Config(
        d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4, vocab_size=128
    )
    with torch.device("meta"):
        model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    graph = rt.trace(model, phase="forward", batch=2, seq=5_000)
    attentions = [op for op in graph.ops if op.name == "rooftrace.attention"]
    own = [op for op in attentions if "SelfAttention" in op.module and "decoder" in op.module]
    assert [op.facts["visible_pairs"] for op in own] == [causal(5_000)] * 2
    assert all(op.facts.get("mask", "none") == "none" for op in attentions if op not in own)


def test_packed_batches_see_their_own_documents() -> None:
    lengths = [3_000, 1_000, 77, 923]
    model = _model("qwen-3")
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    tokens = torch.zeros_like(positions)
    graph = rt.trace(model, tokens, position_ids=positions, use_cache=False)
    assert _pairs(graph) == [sum(map(causal, lengths))] * 2


def test_padding_of_a_batch_is_seen() -> None:
    model, size, lengths = _model("gemma-3"), 3_000, (3_000, 1_700)
    keep = torch.stack([torch.arange(size) >= size - n for n in lengths])
    tokens = torch.zeros(2, size, dtype=torch.long)
    graph = rt.trace(model, tokens, attention_mask=keep.long(), use_cache=False)
    right = [round(sum(layer(n) for n in lengths) / 2) for layer in MODELS["gemma-3"][1]]
    assert sorted(_pairs(graph)) == sorted(right)
