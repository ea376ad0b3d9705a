"""Steps of requests of different lengths: the same results and costs as of each request alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.rewrites import rewrite
from rooftrace.errors import RequestError
from rooftrace.tracer import RequestLengths
from rooftrace.tracer.lowering import to_fx
from rooftrace.tracer.request import read_lengths
from tests.conftest import in_turn

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config: Any
    if kind == "llama":  # of so many layers some are not run
        config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 4})
    elif kind == "window":
        config = transformers.MistralConfig(**SIZES, sliding_window=6)
    elif kind == "mixed":
        config = transformers.Gemma3TextConfig(
            **SIZES,
            head_dim=8,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        )
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97)
    else:
        config = transformers.DeepseekV3Config(**LATENT)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def cached_tensors(cache: Any) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize(
    ("kind", "rewrites"),
    in_turn(
        ["llama", "window", "mixed", "gpt2", "latent"],
        [(), ("static-cache", "absorb-latent")],
        keep=[("latent", ("static-cache", "absorb-latent"))],
    ),
)
def test_the_graph_computes_what_each_request_computes_alone(
    kind: str, rewrites: tuple[str, ...]
) -> None:
    """The graph on real weights and caches, beside transformers' own loop over the requests."""
    model, lengths = built(kind), RequestLengths((9, 3, 0, 5), (1, 2, 4, 3))
    if kind == "latent":  # prompts take their own keys and values
        lengths = RequestLengths((9, 13, 1, 5), (1, 1, 1, 1))
    torch.manual_seed(1)
    prompts = [torch.randint(0, 97, (1, n)) for n in lengths.cached]
    tokens = [torch.randint(0, 97, (1, n)) for n in lengths.new]
    alone, caches = [], []
    with torch.no_grad():
        for prompt, new in zip(prompts, tokens, strict=True):
            cache = transformers.DynamicCache(config=model.config)
            if prompt.numel():
                model(prompt, past_key_values=cache, use_cache=True)
                caches.append([tensor.clone() for tensor in cached_tensors(cache)])
            alone.append(model(new, past_key_values=cache, use_cache=True).logits)
    packed = [torch.cat(rows, dim=-2) for rows in zip(*caches, strict=True)]

    graph = rt.trace(model, cached=lengths.cached, new=lengths.new)
    changed, _ = rewrite(graph, rt.tools.execution_model("eager", rewrites=rewrites))
    assert rewrites == () or changed != graph
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state |= {f"cache_{number}": tensor for number, tensor in enumerate(packed)}
    inputs = {
        "input_ids": torch.cat(tokens, 1),
        "position_ids": torch.tensor([lengths.positions()]),
    }
    names = [graph.values[index].name for index in graph.inputs]
    logits = to_fx(changed, state)(*(inputs[name] for name in names))[0]
    torch.testing.assert_close(logits.detach(), torch.cat(alone, 1), rtol=1e-4, atol=1e-5)


@cache
def traced(kind: str, cached: tuple[int, ...], new: tuple[int, ...]) -> rt.types.OpGraph:
    return rt.trace(built(kind).to("meta"), cached=cached, new=new)


def costs(kind: str, requests: Sequence[tuple[int, int]], execution: str) -> rt.types.Estimate:
    graph = traced(kind, tuple(c for c, _ in requests), tuple(n for _, n in requests))
    return rt.estimate(graph, chip="h200-sxm", execution=execution)


@pytest.mark.parametrize(
    ("kind", "execution"),
    in_turn(
        ["llama", "window", "mixed", "latent"], ["eager", "compiled", "efficient", "serving"],
    ),
)  # fmt: skip
def test_a_batch_is_the_sum_of_its_requests_but_for_shared_weights(
    kind: str, execution: str
) -> None:
    """FLOP of norms' weights and rotary tables, the same for every request, run once, too."""
    requests = [(20, 1), (3, 7), (0, 9), (11, 2)]
    if kind == "latent":  # a step decides once whether it runs on latents
        requests = [(20, 1), (3, 1), (11, 1)]
    whole = costs(kind, requests, execution)
    parts = [costs(kind, [request], execution) for request in requests]
    assert whole.flops_matrix == sum(part.flops_matrix for part in parts)
    again = sum(part.flops for part in parts) - whole.flops
    assert 0 <= again < 0.002 * whole.flops and again % (len(parts) - 1) == 0
    assert again == 0 or kind == "mixed"
    assert whole.bytes.kv == sum(part.bytes.kv for part in parts)
    assert whole.bytes.activations == sum(part.bytes.activations for part in parts)
    for shared in ("weights", "constants", "temporary"):
        sizes = [getattr(part.bytes, shared) for part in parts]
        assert max(sizes) <= getattr(whole.bytes, shared) <= sum(sizes)
    assert whole.bytes.weights < 1.05 * max(part.bytes.weights for part in parts)
    assert whole.kernels == max(part.kernels for part in parts)


def test_requests_of_one_length_are_a_batch_of_decode() -> None:
    model = built("llama").to("meta")
    step = costs("llama", [(24, 1)] * 5, "serving")
    batch = rt.estimate(model, chip="h200-sxm", phase="decode", batch=5, kv=24, execution="serving")
    assert (step.flops_matrix, step.kernels) == (batch.flops_matrix, batch.kernels)
    assert step.bytes.kv == batch.bytes.kv
    assert step.bytes_hbm == pytest.approx(batch.bytes_hbm, rel=0.01)  # positions are an input
    assert step.t_est == pytest.approx(batch.t_est, rel=0.01)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=5),
    st.integers(0, 9),
)
def test_pairs_are_those_of_a_loop(requests: list[tuple[int, int]], window: int) -> None:
    window = 0 if window == 1 else window
    lengths = RequestLengths(tuple(c for c, _ in requests), tuple(n for _, n in requests))
    rows = [min(c, window - 1) if window else c for c, _ in requests]
    seen = [min(c + j + 1, window) if window else c + j + 1 for c, n in requests for j in range(n)]
    assert lengths.visible(window) == sum(seen)
    assert lengths.pairs(window) == sum(
        (r + n) * n for r, (_, n) in zip(rows, requests, strict=True)
    )
    assert lengths.keys(window) == sum(rows) + lengths.tokens
    assert sum(count for *_, count in lengths.groups()) == len(requests)
    assert len(lengths.positions()) == lengths.tokens


@pytest.mark.parametrize(
    ("cached", "new", "said"),
    [
        ((1, 2, 3), (1, 2), "--new has 2 numbers, --cached has 3"),
        (-1, None, "--cached -1: expected whole numbers of at least 0"),
        (4, 0, "--new 0: expected whole numbers of at least 1"),
        ((), 1, "--cached: expected a number for each request, got none"),
        ("8", 1, "--cached 8: expected whole numbers"),
        ([5] * 70_000, 1, "70,000 requests"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(cached: Any, new: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        read_lengths(cached, new)


def test_one_number_is_for_all_requests() -> None:
    assert read_lengths((5, 6), 2) == RequestLengths((5, 6), (2, 2))
    assert read_lengths(None, (5, 6)) == RequestLengths((0, 0), (5, 6))
    assert read_lengths(7, None) == RequestLengths((7,), (1,))


class Bare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"cached": 4, "batch": 2}, "--batch 2: requests that --cached"),
        ({"cached": 4, "phase": "decode"}, "it is of --phase requests"),
        ({"phase": "requests"}, "its requests are missing"),
        ({"cached": 2000}, "a position table of 1,024 entries"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        rt.trace("gpt2", **asked)


def test_a_model_without_rows_for_tokens_is_refused() -> None:
    with torch.device("meta"):
        mamba = transformers.MambaForCausalLM(transformers.MambaConfig(num_hidden_layers=2))
        bloom = transformers.BloomForCausalLM(transformers.BloomConfig(n_layer=2))
    with pytest.raises(RequestError, match="that is no row for each token"):
        rt.trace(mamba, cached=(8, 4), new=1)
    before = bloom.config._attn_implementation
    with pytest.raises(RequestError, match="its attention is written out"):
        rt.trace(bloom, cached=(8, 4), new=1)
    assert bloom.config._attn_implementation == before
    with pytest.raises(RequestError):
        rt.trace(Bare(), torch.zeros(2), cached=4)
