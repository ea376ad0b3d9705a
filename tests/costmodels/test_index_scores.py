"""The indexer of sparse attention as one kernel: the same scores, and costs by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rooftrace.costmodels.ops.price import price_ops
from rooftrace.graph.graph import OpGraph
from tests.costmodels.serving_support import (
    BATCH,
    LENGTH,
    TOKENS,
    changed,
    differences,
    filled,
    traced,
)

WIDTH, HEADS, SIZE = 16, 4, 8
NAME = "index-scores"


class Indexer(nn.Module):
    """Queries of several heads and keys that they share; the best keys of each query."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.ask = nn.Linear(WIDTH, HEADS * SIZE, bias=False)
        self.key = nn.Linear(WIDTH, HEADS * SIZE if how == "own_keys" else SIZE, bias=False)
        self.weigh = nn.Linear(WIDTH, HEADS, bias=False)
        self.how = how

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        query, key = self.ask(x).unflatten(-1, (HEADS, SIZE)), self.key(x)
        weights = self.weigh(x) * HEADS**-0.5
        scores: Any = getattr(self, self.how)(query, key, weights)
        return scores

    def matmul(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        heads = torch.matmul(query, key.transpose(-1, -2).unsqueeze(1)) * SIZE**-0.5
        return torch.matmul(weights.unsqueeze(-2), heads.relu()).squeeze(-2)

    def summed(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        heads = (query @ key.mT[:, None]).relu() / SIZE**0.5
        return (heads * weights[..., None]).sum(dim=2)

    def not_cut_off(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        heads = query @ key.mT[:, None]
        return (heads * weights[..., None]).sum(dim=2)

    def own_keys(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        keys = key.unflatten(-1, (HEADS, SIZE)).permute(0, 2, 3, 1)
        heads = (query.transpose(1, 2) @ keys).relu().transpose(1, 2)
        return (heads * weights[..., None]).sum(dim=2)

    def turned_over(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        heads = ((query @ key.mT[:, None]) * -1.0).relu()  # a scale below zero
        return (heads * weights[..., None]).sum(dim=2)

    def read_twice(self, query: Tensor, key: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        heads = (query @ key.mT[:, None]).relu()
        return (heads * weights[..., None]).sum(dim=2), heads.amax(2)

    def over_keys(self, query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        heads = (query @ key.mT[:, None]).relu()
        return (heads * weights[..., None]).sum(dim=3)


def names(graph: OpGraph) -> list[str]:
    return [op.name for op in graph.ops if op.kind == "kernel"]


@pytest.mark.parametrize("how", ["matmul", "summed"])
def test_scores_of_an_indexer_are_one_kernel(how: str) -> None:
    model = filled(Indexer(how), torch.float64)
    graph = traced(model, "forward")
    result, notes = changed(graph, NAME)
    assert notes == ("index-scores: 1 indexer",)
    assert differences(graph, result, model) < 1e-12
    assert not {"aten.bmm", "aten.relu", "aten.clone", "aten.sum"} & set(names(result))
    (cost,) = [
        cost for op, cost in zip(result.ops, price_ops(result)[0], strict=True)
        if op.name == "rooftrace.index_scores"
    ]  # fmt: skip
    pairs = BATCH * LENGTH * LENGTH
    assert cost.flops(("matmul",)) == 2 * pairs * HEADS * SIZE
    assert cost.flops(("vector",)) == 3 * pairs * HEADS + BATCH * LENGTH * HEADS
    read = BATCH * LENGTH * (HEADS * SIZE + SIZE + HEADS)  # queries, keys, weights, once
    assert cost.bytes() == 8 * (read + pairs)


@pytest.mark.parametrize(
    "how", ["not_cut_off", "own_keys", "turned_over", "read_twice", "over_keys"]
)
def test_other_scores_stay_as_they_are(how: str) -> None:
    graph = traced(filled(Indexer(how)), "forward")
    assert names(changed(graph, NAME)[0]) == names(graph)


SPARSE: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2,
    n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=8, index_topk=4, index_n_heads=2, index_head_dim=16,
    pad_token_id=0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_models_of_transformers_have_indexers(family: str, phase: str) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"{family} is of another release")
    config = getattr(transformers, f"{family}Config")(**SPARSE)
    model = filled(getattr(transformers, f"{family}ForCausalLM")(config))
    graph = traced(model, phase)
    result, notes = changed(graph, NAME)
    assert notes == ("index-scores: 2 indexers",)
    assert differences(graph, result, model) < 1e-5
