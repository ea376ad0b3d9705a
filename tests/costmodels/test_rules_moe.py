"""Experts: FLOPs by the rows that are routed, weights by the experts that some row reaches."""

from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.tracer.graph.graph import OpGraph

HIDDEN, INNER, EXPERTS, CHOSEN = 32, 48, 16, 2
EXPERT = 3 * HIDDEN * INNER  # gate, up and down
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def traced(tokens: int, implementation: str, routing: str, **settings: Any) -> OpGraph:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=1, num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN, experts_implementation=implementation)  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    return rt.trace(model, input_ids=ids, assume={"balanced-routing": routing}, **settings)


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


def simulated(tokens: int, draws: int = 2000) -> tuple[float, float]:
    """Mean and deviation of the number of experts that tokens reach, each any two of them."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(draws, tokens, EXPERTS, generator=generator)
    chosen = scores.topk(CHOSEN, dim=-1).indices.flatten(1)
    reached = torch.tensor([len(set(row)) for row in chosen.tolist()], dtype=torch.float64)
    return float(reached.mean()), float(reached.std())


@pytest.mark.parametrize("routing", ["balanced", "uniform"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_routed_row_counts_once(implementation: str, routing: str) -> None:
    done = 0
    for _token in range(24):
        for _choice in range(CHOSEN):
            done += 2 * EXPERT
    assert expert_flops(traced(24, implementation, routing)) == done


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 40])
def test_balanced_routing_reaches_as_many_experts_as_it_can(
    tokens: int, implementation: str
) -> None:
    reached = min(EXPERTS, tokens * CHOSEN)
    assert experts_read(traced(tokens, implementation, "balanced")) == reached


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 64])
def test_uniform_routing_reaches_the_experts_that_chance_does(
    tokens: int, implementation: str
) -> None:
    mean, deviation = simulated(tokens)
    expected = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** tokens)
    assert mean == pytest.approx(expected, abs=4 * deviation / 2000**0.5)
    # A whole number of experts: the draw that is traced is one of those next to the mean.
    assert abs(experts_read(traced(tokens, implementation, "uniform")) - mean) <= 1


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

    routed, reached = tokens * CHOSEN, min(EXPERTS, tokens * CHOSEN)
    assert set(rows("grouped_mm")) == {routed // reached}
    assert sum(rows("eager")) == 2 * routed  # gate and up are one product, down the other
    assert set(rows("batched_mm")) == {1}
