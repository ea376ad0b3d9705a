"""Factors on bytes: runs made up from known factors give them back; what nothing tells is said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import rooftrace as rt
from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.ops import BYTE_KINDS, bytes_by_kind, kinds_of
from rooftrace.measured.fit import Measured, StepBytes, byte_factors, step_bytes
from rooftrace.measured.fit.byfactors import shared

CHIP = rt.load_chip("h100-sxm")
BANDWIDTH = 3e12
KNOBS = Knobs("plain", overlap=3.0, launch=0.0)
DRAWS = 200


class Layer(nn.Module):
    """Attention, a dense half, and a few experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        heads = [t.unflatten(-1, (8, -1)).transpose(1, 2) for t in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


@cache
def planned(phase: str = "forward", tokens: int = 16) -> Plan:
    with torch.device("meta"):
        model = nn.Sequential(*[Layer(1024) for _ in range(8)])
        graph = rt.trace(model, torch.empty(2, tokens, 1024), phase=phase)
    return rt.plan(graph.expand(), "compiled")


def made_up(plan: Plan, factors: dict[str, float], noise: float, seed: int) -> list[float]:
    """Bytes of each kernel by known factors, each off by a noise whose mean is 1."""
    random = np.random.default_rng(seed)
    moved = []
    for group, cost in zip(plan.groups, plan.costs, strict=True):
        kind = kinds_of(plan.graph, group.ops, plan.op_costs)
        whole = sum(factors[k] * b for k, b in bytes_by_kind(cost.traffic, kind).items())
        moved.append(group.times * whole * np.exp(noise * random.normal() - noise**2 / 2))
    return moved


def factors_of(plan: Plan, measured: Measured):
    return byte_factors([step_bytes(plan, plan, measured, CHIP, KNOBS, BANDWIDTH)])


@cache
def counted_step(phase: str) -> StepBytes:
    """A step whose kernels were all counted, on empty caches."""
    plan = planned(phase)
    counted = Measured(counted=[0.0] * len(plan.groups), flushed=True)
    return step_bytes(plan, plan, counted, CHIP, KNOBS, BANDWIDTH)


def with_bytes(step: StepBytes, moved: list[float | None]) -> StepBytes:
    kernels = zip(step.kernels, moved, strict=True)
    return replace(step, kernels=tuple(replace(kernel, moved=size) for kernel, size in kernels))


def drawn(seed: int) -> dict[str, float]:
    random = np.random.default_rng(1000 + seed)
    return {kind: float(np.exp(random.normal(0.0, 0.5))) for kind in BYTE_KINDS}


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("phase", ["forward", "training"])
def test_counted_bytes_give_their_factors_back(phase, noise):
    plan, inside, told = planned(phase), dict.fromkeys(BYTE_KINDS, 0), dict.fromkeys(BYTE_KINDS, 0)
    for seed in range(DRAWS):
        truth = drawn(seed)
        step = with_bytes(counted_step(phase), made_up(plan, truth, noise, seed))
        for kind, factor in byte_factors([step]).factors.identified.items():
            told[kind] += 1
            inside[kind] += abs(factor.factor - truth[kind]) <= 2 * factor.error
            assert factor.by == "counters"
    assert told["attention weights"] == told["dense weights"] == DRAWS
    assert told["activations"] > 0.9 * DRAWS
    for kind, times in told.items():
        if times:
            assert inside[kind] >= 0.95 * times, (kind, inside[kind], times)


def test_seconds_of_memory_bound_kernels_give_them_back():
    plan, inside, told = planned(tokens=4), 0, 0
    for seed in range(DRAWS):
        truth = {kind: min(factor, 1.0) for kind, factor in drawn(seed).items()}
        truth = {kind: truth["activations"] if kind not in ("attention weights", "dense weights")
                 else truth[kind] for kind in truth}  # fmt: skip
        seconds = [size / BANDWIDTH for size in made_up(plan, truth, 0.05, seed)]
        for kind, factor in factors_of(plan, Measured(seconds=seconds)).factors.identified.items():
            told += 1
            inside += abs(factor.factor - truth[kind]) <= 2 * factor.error
            assert factor.by == "seconds"
    assert told >= 1.8 * DRAWS
    assert inside >= 0.95 * told


def test_what_nothing_tells_is_said_to_be_so_in_every_draw():
    plan, step = planned(), counted_step("forward")
    products = {g for g, group in enumerate(plan.groups)
                if any(plan.graph.ops[op].family == "attention" for op in group.ops)}  # fmt: skip
    for seed in range(DRAWS):
        counted = made_up(plan, drawn(seed), 0.05, seed)
        known = [None if g in products else size for g, size in enumerate(counted)]
        found = byte_factors([with_bytes(step, known)]).factors
        assert not found.factors["attention weights"].identified
        assert "in no kernel whose bytes were measured" in found.unknown["attention weights"]
        assert found.factors["attention weights"].applied == 1.0
        assert found.factors["dense weights"].identified


def test_without_measurements_nothing_is_identified():
    found = factors_of(planned(), Measured()).factors
    assert not found.identified
    assert all("no kernel's bytes were measured" in why for why in found.unknown.values())


def test_kernels_that_were_interrupted_are_left_out():
    plan, truth = planned(), dict.fromkeys(BYTE_KINDS, 0.8)
    moved = made_up(plan, truth, 0.02, 1)
    for number in (3, 9, 20):
        moved[number] *= 40
    found = factors_of(plan, Measured(counted=moved, flushed=True))
    assert found.apart == 3
    weights = found.factors.factors["dense weights"]
    assert weights.factor == pytest.approx(0.8, abs=2 * weights.error)
    assert weights.error < 0.05


def test_a_total_alone_tells_what_most_bytes_are_of_and_nothing_else():
    """Weights are nine tenths of these bytes: half of all bytes is half of them, about."""
    plan = planned(tokens=1)
    by_rule = plan.bytes
    assert by_rule.weights > 0.9 * by_rule.total
    whole = 0.5 * by_rule.total
    cold = replace(CHIP, l2_capacity=None)
    step = step_bytes(plan, plan, Measured(total=whole), cold, KNOBS, BANDWIDTH)
    assert all(kernel.moved is None for kernel in step.kernels) and step.by == "counters"
    found = byte_factors([step]).factors
    assert set(found.identified) <= {"dense weights", "attention weights"}
    for factor in found.identified.values():
        assert factor.factor == pytest.approx(0.5, abs=2 * factor.error)
    assert not found.factors["activations"].identified


def test_residency_is_the_product_of_its_causes():
    with torch.device("meta"):
        table = nn.Embedding(1000, 64)
        graph = rt.trace(table, torch.zeros(10, dtype=torch.long))
    plan = rt.plan(graph.expand(), "compiled")
    moved = made_up(plan, dict.fromkeys(BYTE_KINDS, 1.0), 0.0, 0)
    step = step_bytes(plan, plan, Measured(counted=moved, flushed=True), CHIP, KNOBS, 1e12)
    weights = byte_factors([step, step, step]).factors.factors["dense weights"]
    # One row, as all indices are zero, or as many as ten distinct ones: the rule says which.
    read = plan.bytes.weights
    assert weights.rows == pytest.approx(1000 * 64 * 4 / read)
    assert weights.residency == pytest.approx(weights.rows / weights.unfused)


def test_layers_have_their_own_factors():
    plan = planned()
    moved = made_up(plan, dict.fromkeys(BYTE_KINDS, 1.0), 0.01, 2)
    for number, group in enumerate(plan.groups):
        if plan.graph.ops[group.ops[0]].module.startswith("3."):
            moved[number] *= 0.5
    step = step_bytes(plan, plan, Measured(counted=moved, flushed=True), CHIP, KNOBS, 1e12)
    by_layer = byte_factors([step], by_layer=True).by_layer
    assert by_layer["dense weights of 3"].factor == pytest.approx(0.5, abs=0.1)
    assert by_layer["dense weights of 4"].factor == pytest.approx(1.0, abs=0.1)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 30),
    st.integers(0, 2**32 - 1),
    st.floats(0.0, 2.0),
)
def test_shares_add_up_and_scale(columns, rows, seed, noise):
    """No byte of the kernels that took part is lost, where they tell all factors."""
    random = np.random.default_rng(seed)
    used = random.lognormal(10, 2, (rows, columns)) * (random.random((rows, columns)) < 0.7)
    used[:, 0] += 1.0
    moved = used @ random.lognormal(0, 0.5, columns) * random.lognormal(0, noise, rows)
    found = shared(used, moved)
    assert np.isfinite(found.factors).all() and np.isfinite(found.errors).all()
    assert (found.factors >= 0).all() and (found.errors >= 0).all()
    assert len(found.kept) == rows
    if noise < 0.1 and rows > 4 * columns:
        expected, whole = used[found.kept] @ found.factors, moved[found.kept].sum()
        assert expected.sum() == pytest.approx(whole, rel=0.05)


def test_the_factors_take_part_in_a_step_and_its_floor_stays_visible(tmp_path):
    plan = planned()
    truth = dict.fromkeys(BYTE_KINDS, 0.6)
    found = factors_of(plan, Measured(counted=made_up(plan, truth, 0.01, 3), flushed=True))
    knobs = replace(KNOBS, traffic=found.factors)
    result = rt.report(plan.source, chip="h100-sxm", knobs=knobs)
    assert result.executions == ("naive", "detected", "efficient")
    detected, calibrated = (result.estimate("forward", e) for e in ("detected", "efficient"))
    assert calibrated.bytes_hbm == pytest.approx(0.6 * detected.bytes_hbm, rel=0.03)
    assert calibrated.below_floor and not detected.below_floor
    assert calibrated.plan.by_rules.bytes == detected.bytes
    text = str(result)
    assert "WRF attention" in text and "below the floor" in text
    result.write(tmp_path, ("md", "json"))
    page = (tmp_path / "report.md").read_text()
    assert "## Calibrated bytes" in page
    assert "is the least that any execution moves" in page


def test_a_knob_file_keeps_the_factors(tmp_path):
    from rooftrace.costmodels.kernels import dump_knobs, load_knobs

    plan = planned()
    found = factors_of(plan, Measured(counted=made_up(plan, drawn(1), 0.05, 3), flushed=True))
    path = tmp_path / "mine.toml"
    path.write_text(dump_knobs(replace(KNOBS, traffic=found.factors)))
    again = load_knobs(path).traffic
    assert again is not None and again.factors.keys() == found.factors.factors.keys()
    for kind, factor in found.factors.factors.items():
        assert again.factors[kind].factor == pytest.approx(factor.factor, rel=1e-4)
        assert again.factors[kind].why == factor.why


def test_the_seeds_preset_takes_what_was_measured():
    plan = planned()
    truth = drawn(4) | {"attention weights": 0.5, "dense weights": 0.9, "activations": 0.7}
    found = factors_of(plan, Measured(counted=made_up(plan, truth, 0.01, 3), flushed=True)).factors
    knobs = replace(KNOBS, traffic=found)
    seed = rt.tools.execution_model("seed-efficient", knobs=knobs)
    assert seed.knobs is None
    assert seed.weight_residency.attention == pytest.approx(2.0, rel=0.1)
    assert seed.weight_residency.dense == pytest.approx(1 / 0.9, rel=0.1)
    assert (
        seed.weight_residency.moe == rt.tools.execution_model("seed-efficient").weight_residency.moe
    )
    unfused = plan.unfused.bytes.activations
    assert seed.activation_fusion == pytest.approx(0.7 * plan.bytes.activations / unfused, rel=0.1)


def test_a_factor_above_one_by_seconds_is_left_to_the_rates():
    plan = planned(tokens=4)
    seconds = [2 * s / BANDWIDTH for s in made_up(plan, dict.fromkeys(BYTE_KINDS, 1.0), 0.02, 5)]
    found = factors_of(plan, Measured(seconds=seconds)).factors
    weights = found.factors["dense weights"]
    assert weights.factor == pytest.approx(2.0, rel=0.1)
    assert weights.applied == 1.0 and found.scale("dense weights") == 1.0


def moved_by_rule(plan: Plan) -> Measured:
    return Measured(counted=made_up(plan, dict.fromkeys(BYTE_KINDS, 1.0), 0.0, 0), flushed=True)


def test_experts_that_were_not_routed_are_a_cause_of_their_own():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
        graph = rt.trace(model, input_ids=torch.zeros(1, 4, dtype=torch.long), phase="decode")
    plan = rt.plan(graph.expand(), "compiled")
    weights = factors_of(plan, moved_by_rule(plan)).factors.factors["moe weights"]
    assert weights.experts == pytest.approx(4.0, rel=0.01)  # two of eight, and the router
    assert weights.rows == weights.precision == 1.0
    assert weights.residency == pytest.approx(weights.experts, rel=0.01)
    assert weights.unexplained == pytest.approx(1.0, rel=0.01)


def test_weights_that_are_stored_narrow_are_a_cause_of_their_own():
    plan = rt.plan(rt.tools.reprice(planned().source, weights_dtype="int8").expand(), "compiled")
    weights = factors_of(plan, moved_by_rule(plan)).factors.factors["dense weights"]
    assert weights.precision == pytest.approx(4.0, rel=0.02)  # fp32 activations
    assert weights.residency == pytest.approx(weights.precision, rel=0.02)


def test_weights_that_stay_in_a_cache_are_a_cause_of_their_own():
    """4 MB of weights in steps that follow each other: L2 of 50 MB holds all of them."""
    with torch.device("meta"):
        graph = rt.trace(
            nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), torch.empty(1, 512)
        )
    plan = rt.plan(graph.expand(), "compiled")
    truth = {kind: 0.01 for kind in BYTE_KINDS}
    counted = Measured(counted=made_up(plan, truth, 0.0, 0), flushed=False)
    weights = factors_of(plan, counted).factors.factors["dense weights"]
    assert weights.cache > 100
    flushed = replace(counted, counted=made_up(plan, truth, 0.0, 0), flushed=True)
    assert factors_of(plan, flushed).factors.factors["dense weights"].cache == 1.0


def test_kernels_that_read_from_a_cache_tell_nothing_of_memory_by_their_seconds():
    """16 MB of weights stay in 50 MB of L2: their kernels are quick, those of larger models not."""
    with torch.device("meta"):
        layers = [nn.Linear(1024, 1024) for _ in range(4)]
        graph = rt.trace(nn.Sequential(*layers), torch.empty(1, 1024))
    plan = rt.plan(graph.expand(), "compiled")
    seconds = Measured(seconds=[1e-5 for _ in plan.groups])
    found = factors_of(plan, seconds).factors.factors["dense weights"]
    assert not found.identified and found.applied == 1.0 and found.cache > 10
