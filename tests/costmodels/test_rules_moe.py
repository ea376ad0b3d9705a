"""Experts: FLOPs by the rows that are routed, weights by the experts that some row reaches."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftrace as rt
from rooftrace.graph.graph import OpGraph
from tests.conftest import in_turn
from tests.releases import EXPERTS_HAVE_IMPLEMENTATIONS

HIDDEN, INNER, EXPERTS, CHOSEN = 32, 48, 16, 2
EXPERT = 3 * HIDDEN * INNER  # gate, up and down
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
TOKENS = (1, 4, 8, 16, 64)


@cache
def mixtral(implementation: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=1, num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, experts_implementation=implementation)  # fmt: skip
    with torch.device("meta"):
        model: torch.nn.Module = transformers.MixtralForCausalLM._from_config(
            config, dtype=torch.bfloat16
        )
    return model


@cache
def traced(tokens: int, implementation: str, routing: str, **settings: Any) -> OpGraph:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    model = mixtral(implementation)
    return rt.trace(model, input_ids=ids, assume={"routing": routing}, **settings)


def runs_as(implementation: str) -> None:
    """Skip where transformers runs experts as a loop only."""
    if implementation != "eager" and not EXPERTS_HAVE_IMPLEMENTATIONS:
        pytest.skip("experts_implementation is of transformers 5")


def in_experts(graph: OpGraph) -> list[tuple[int, Any]]:
    """(how often, cost) of the ops of the experts' module."""
    costs = rt.plan(graph, "eager").op_costs
    ops = zip(graph.ops, costs, strict=True)
    return [(graph.times(op), cost) for op, cost in ops if "experts" in op.module]


def expert_flops(graph: OpGraph) -> int:
    return sum(times * cost.flops(("matmul",)) for times, cost in in_experts(graph))


def experts_read(graph: OpGraph) -> float:
    """Weight bytes that the experts' ops read, in experts (bf16)."""
    read = sum(
        times * size
        for times, cost in in_experts(graph)
        for access, size in cost.traffic.items()
        if graph.values[access.storage].role == "weights" and not access.write
    )
    return read / (2 * EXPERT)


@cache
def simulated(tokens: int, draws: int = 2000) -> tuple[float, float]:
    """Mean and deviation of the number of experts that tokens reach, each any two of them."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(draws, tokens, EXPERTS, generator=generator)
    chosen = scores.topk(CHOSEN, dim=-1).indices.flatten(1)
    reached = torch.tensor([len(set(row)) for row in chosen.tolist()], dtype=torch.float64)
    return float(reached.mean()), float(reached.std())


@pytest.mark.parametrize(
    ("implementation", "routing"),
    in_turn(IMPLEMENTATIONS, ["expected", "balanced", "uniform", "skewed:2"]),
)
def test_every_routed_row_counts_once(implementation: str, routing: str) -> None:
    done = 0
    for _token in range(24):
        for _choice in range(CHOSEN):
            done += 2 * EXPERT
    assert expert_flops(traced(24, implementation, routing)) == done


@pytest.mark.parametrize(("tokens", "implementation"), in_turn([1, 3, 8, 40], IMPLEMENTATIONS))
def test_balanced_routing_reaches_as_many_experts_as_it_can(
    tokens: int, implementation: str
) -> None:
    reached = min(EXPERTS, tokens * CHOSEN)
    assert experts_read(traced(tokens, implementation, "balanced")) == reached


@pytest.mark.parametrize(("tokens", "implementation"), in_turn(TOKENS, IMPLEMENTATIONS))
def test_uniform_routing_reaches_the_experts_that_chance_does(
    tokens: int, implementation: str
) -> None:
    mean, deviation = simulated(tokens)
    expected = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** tokens)
    assert mean == pytest.approx(expected, abs=4 * deviation / 2000**0.5)
    # A whole number of experts: the draw that is traced is one of those next to the mean.
    assert abs(experts_read(traced(tokens, implementation, "uniform")) - mean) <= 1


@pytest.mark.parametrize(("tokens", "implementation"), in_turn(TOKENS, IMPLEMENTATIONS))
def test_expected_routing_reads_the_mean_number_of_experts(
    tokens: int, implementation: str
) -> None:
    runs_as(implementation)
    mean, deviation = simulated(tokens)
    read = experts_read(traced(tokens, implementation, "expected"))
    # A loop over experts has a whole number of turns: the one next to the mean.
    error = 0.5 if implementation == "eager" else 0.001
    assert read == pytest.approx(mean, abs=error + 4 * deviation / 2000**0.5)


@pytest.mark.parametrize("tokens", [1, 8, 40, 64])
def test_rows_that_share_an_experts_weights(tokens: int) -> None:
    """Grouped: rows over the experts reached.  A loop: each expert's own.  Batched: none share."""

    def rows(implementation: str) -> list[int]:
        work = [
            key
            for _, cost in in_experts(traced(tokens, implementation, "balanced", repeats=False))
            for key in cost.work
        ]
        return [key.rows for key in work if key.operation == "matmul"]

    runs_as("grouped_mm")
    routed, reached = tokens * CHOSEN, min(EXPERTS, tokens * CHOSEN)
    assert set(rows("grouped_mm")) == {routed / reached}
    assert sum(rows("eager")) == 2 * routed  # gate and up are one product, down the other
    assert set(rows("batched_mm")) == {1}


# -- written by hand -------------------------------------------------------------------------------


class Moe(torch.nn.Module):
    """Experts of one product each, run in one of three ways."""

    def __init__(self, how: str, experts: int, k: int, width: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, experts, bias=False, dtype=torch.bfloat16)
        self.weights = torch.nn.Parameter(torch.empty(experts, width, width, dtype=torch.bfloat16))
        self.how, self.k = how, k

    def forward(self, x: Tensor) -> Tensor:
        ids = self.gate(x).topk(self.k, dim=-1).indices.flatten()
        if self.how == "gather":
            rows = x.repeat_interleave(self.k, 0)
            return torch.bmm(rows[:, None], self.weights[ids])[:, 0]
        if self.how == "index_select":
            rows = x.repeat_interleave(self.k, 0)
            return torch.bmm(rows[:, None], self.weights.index_select(0, ids))[:, 0]
        order = ids.argsort()
        rows = x[order // self.k]
        counts = torch.bincount(ids, minlength=len(self.weights))
        if self.how == "grouped":
            offsets = counts.cumsum(0).to(torch.int32)
            return torch._grouped_mm(rows, self.weights, offsets)  # type: ignore[no-any-return]
        parts, first = [], 0
        for expert, count in enumerate(counts.tolist()):
            if count:
                parts.append(rows[first : first + count] @ self.weights[expert])
                first += count
        return torch.cat(parts)


def hand_written(how: str, tokens: int = 8, phase: str = "forward", **settings: Any) -> OpGraph:
    with torch.device("meta"):
        x = torch.empty(tokens, 32, dtype=torch.bfloat16, requires_grad=True)
        module = Moe(how, settings.pop("experts", 64), settings.pop("k", 8), 32)
    return rt.trace(module, x, phase=phase, **settings)


def reading(graph: OpGraph, name: str, write: bool = False) -> float:
    """Bytes that all ops read (or write) of a parameter, in experts of 32 x 32 bf16 numbers."""
    total = sum(
        graph.times(op) * size
        for op, cost in zip(graph.ops, rt.plan(graph, "eager").op_costs, strict=True)
        for access, size in cost.traffic.items()
        if graph.values[access.storage].name == name and access.write == write
    )
    return total / (2 * 32 * 32)


def expert_products(graph: OpGraph) -> int:
    """FLOPs of matrix products but the gate's."""
    costs = rt.plan(graph, "eager").op_costs
    return sum(
        graph.times(op) * cost.flops(("matmul",))
        for op, cost in zip(graph.ops, costs, strict=True)
        if not op.module.startswith("gate")
    )


@pytest.mark.parametrize("how", ["grouped", "gather", "index_select", "loop"])
@pytest.mark.parametrize("policy", ["expected", "balanced", "uniform", "skewed:1.5", [3] * 64])
def test_weights_of_a_decode_step_are_those_of_the_distinct_experts(how: str, policy: Any) -> None:
    graph = hand_written(how, assume={"routing": policy})
    (facts,) = (a.facts for a in graph.assumptions if a.kind == "routing")
    closed = 64 * (1 - (1 - 8 / 64) ** 8)  # 42.0 of 64
    if policy == "expected" or isinstance(policy, list):
        assert facts["distinct"] == pytest.approx(closed)
    elif policy == "balanced":
        assert facts["distinct"] == 64
    else:
        assert facts["distinct"] < (closed + 0.5 if policy == "uniform" else 0.9 * closed)
    number = facts["drawn"] if how == "loop" else facts["distinct"]
    assert reading(graph, "weights") == pytest.approx(number, abs=1e-3)
    assert expert_products(graph) == 2 * 8 * 8 * 32 * 32  # whatever the policy


def test_the_rows_of_an_active_expert_feed_the_tiles() -> None:
    graph = hand_written("grouped", experts=256)
    distinct = 256 * (1 - (1 - 8 / 256) ** 8)  # 57.42
    (cost,) = (
        cost
        for op, cost in zip(graph.ops, rt.plan(graph, "eager").op_costs, strict=True)
        if op.name == "aten._grouped_mm"
    )
    (work,) = cost.work
    assert work.rows == pytest.approx(8 * 8 / distinct)  # 1.11
    assert cost.work[work] == 2 * 64 * 32 * 32


@pytest.mark.parametrize("how", ["grouped", "gather", "index_select"])
def test_a_training_step_reads_and_writes_the_expected_experts(how: str) -> None:
    graph = hand_written(how, phase="training", optimizer="none")
    closed = 64 * (1 - (1 - 8 / 64) ** 8)
    costs = list(zip(graph.ops, rt.plan(graph, "eager").op_costs, strict=True))
    if how == "grouped":  # forward and the gradient of the rows
        assert reading(graph, "weights") == pytest.approx(2 * closed, abs=1e-3)
        gradient = [
            key.inner
            for op, cost in costs
            for key in cost.work
            if op.name == "aten._grouped_mm" and graph.values[op.outputs[0]].shape[0] == 64
            if len(graph.values[op.outputs[0]].shape) == 3
        ]
        assert gradient == [pytest.approx(8 * 8 / closed)]
        return
    assert reading(graph, "weights") == pytest.approx(closed, abs=1e-3)
    (written,) = (
        size
        for op, cost in costs
        for access, size in cost.traffic.items()
        if op.name in ("aten.index_put", "aten.index_put_", "aten._index_put_impl_",
                       "aten.index_add", "aten.index_add_")
        if access.write and op.part == "backward"
    )  # fmt: skip
    assert written / (2 * 32 * 32) in (
        pytest.approx(closed, abs=1e-3),
        pytest.approx(64 + closed, abs=1e-3),  # out of place: the zeros are copied first
    )


KINDS = {
    "MixtralConfig": ("MixtralForCausalLM", dict(num_local_experts=16, num_experts_per_tok=2)),
    "Qwen3MoeConfig": (
        "Qwen3MoeForCausalLM",
        dict(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=8),
    ),
    "DeepseekV3Config": (
        "DeepseekV3ForCausalLM",
        dict(
            n_routed_experts=16, num_experts_per_tok=2, moe_intermediate_size=48, n_group=4,
            topk_group=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "phase"), in_turn(KINDS, ["decode", "training"]))
def test_models_of_transformers_reach_the_expected_experts(kind: str, phase: str) -> None:
    transformers = pytest.importorskip("transformers")
    runs_as("grouped_mm")
    name, sizes = KINDS[kind]
    config = getattr(transformers, kind)(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        num_key_value_heads=4 if kind == "DeepseekV3Config" else 2, num_hidden_layers=4,
        experts_implementation="grouped_mm", **sizes)  # fmt: skip
    with torch.device("meta"):
        model = getattr(transformers, name)._from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(4, 3, dtype=torch.long)
    tokens = 4 if phase == "decode" else 4 * 3
    closed = 16 * (1 - (14 / 16) ** tokens)
    folded, flat = (
        rt.trace(model, input_ids=ids, phase=phase, repeats=repeats) for repeats in (True, False)
    )
    grouped = [op for op in flat.ops if op.name == "aten._grouped_mm"]
    layers = 3 if kind == "DeepseekV3Config" else 4
    assert len(grouped) == layers * 2 * (3 if phase == "training" else 1)
    assert [op.facts["groups_touched"] for op in grouped] == [pytest.approx(closed)] * len(grouped)
    for short, long in ((folded, folded.expand()), (folded, flat)):
        one, other = rt.estimate(short, "h200-sxm"), rt.estimate(long, "h200-sxm")
        assert (one.flops, one.bytes_hbm) == (other.flops, other.bytes_hbm)
        assert one.t_est == pytest.approx(other.t_est)
