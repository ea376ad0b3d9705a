"""Experts over processes: what they send, get and compute, with the choices of all in balance."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.timing import collective_seconds, expert_exchange_seconds
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import load_system
from rooftrace.tracer.phases import running
from rooftrace.tracer.values import masks
from tests.conftest import in_turn
from tests.tracer.expert_models import DEEPSEEK, MIXTRAL, needs_plans, spread_graph

pytestmark = needs_plans
HIDDEN = 64
CONFIGS = {"mixtral": (MIXTRAL, 8, 2, 2), "deepseek": (DEEPSEEK, 16, 4, 2)}
"""Each with its experts, those of a token, and its layers with experts."""


def rows_sent(graph: Any) -> list[Any]:
    """The exchanges of rows."""
    made = [op for op in graph.expand().ops if op.collective]
    return [
        op
        for op in made
        if op.collective.kind == "all_to_all" and op.collective.dtype in ("fp32", "bf16")
    ]


def grouped(graph: Any) -> list[Any]:
    return [op for op in graph.expand().ops if op.name == "aten._grouped_mm"]


@pytest.mark.parametrize(
    ("mesh", "phase", "name"),
    in_turn(
        [{"dp": 4, "ep": 4}, {"dp": 2, "ep": 2}, {"dp": 8, "ep": 4}],
        ["prefill", "decode"],
        CONFIGS,
    ),
)
def test_every_process_sends_and_gets_as_many_rows(
    name: str, phase: str, mesh: Mapping[str, int]
) -> None:
    config, _, chosen, layers = CONFIGS[name]
    batch, seq = 6, 7
    graph = spread_graph(config, mesh, phase, batch, seq)
    rows = batch * (seq if phase == "prefill" else 1) * chosen
    sent = rows_sent(graph)
    assert len(sent) == 2 * layers  # there, and back
    for op in sent:
        assert op.collective.bytes == rows * HIDDEN * 4
        splits = op.collective.splits or (op.collective.bytes // 4 // HIDDEN // mesh["ep"],)
        mean = rows / mesh["ep"]
        assert all(abs(split - mean) <= 1 for split in splits)
        assert len(splits) == 1 or sum(splits) == rows
    plain = spread_graph(config, {}, phase, batch, seq)
    assert {op.facts["rows_routed"] for op in grouped(graph)} == {rows}
    assert [op.facts["rows_routed"] for op in grouped(plain)] == [rows] * 2 * layers


@pytest.mark.parametrize(
    ("batch", "phase", "name"), in_turn([1, 3, 8], ["decode", "prefill"], CONFIGS)
)
def test_experts_of_a_shared_batch_compute_their_share(name: str, phase: str, batch: int) -> None:
    config, experts, chosen, _ = CONFIGS[name]
    config = {**config, "num_key_value_heads": 4}
    graph = spread_graph(config, {"tp": 4, "ep": 4}, phase, batch, 5)
    assert not rows_sent(graph)  # they are added up
    tokens = batch * (5 if phase == "prefill" else 1)
    expected = experts * (1 - (1 - chosen / experts) ** tokens)
    for op in grouped(graph):
        assert op.facts["rows_routed"] == tokens * chosen / 4
        assert op.facts["groups_touched"] == pytest.approx(expected / 4)


@pytest.mark.parametrize("mesh", [{"dp": 4, "ep": 4}, {"dp": 2, "tp": 2, "ep": 4}])
@pytest.mark.parametrize("batch", [2, 5])
def test_a_process_reaches_as_many_of_its_experts_as_draws_do(
    mesh: Mapping[str, int], batch: int
) -> None:
    config, experts, chosen, _ = CONFIGS["deepseek"]
    graph = spread_graph(config, mesh, "decode", batch, 3)
    tokens = mesh["dp"] * batch  # of all processes
    generator = torch.Generator().manual_seed(1)
    draws = torch.rand(4000, tokens, experts, generator=generator).topk(chosen).indices
    reached = [len(own[own < experts // 4].unique()) for own in draws.flatten(1)]
    mean = sum(reached) / len(reached)
    sent = -(-batch // mesh.get("tp", 1)) * chosen  # of this process, the first of its slices
    for op in grouped(graph):
        assert op.facts["rows_routed"] == sent
        if not batch % mesh.get("tp", 1):
            assert op.facts["groups_touched"] == pytest.approx(mean, rel=0.02)


def test_where_all_prefer_the_same_experts_their_process_gets_more() -> None:
    config, _, chosen, _ = CONFIGS["mixtral"]
    mesh, assume = {"dp": 4, "ep": 4}, {"routing": "skewed:1.5"}
    graph = spread_graph(config, mesh, "prefill", 8, 16, assume=assume)
    plain = spread_graph(config, {}, "prefill", 8, 16, assume=assume)
    assert {op.facts["rows_routed"] for op in grouped(plain)} == {8 * 16 * chosen}
    assert all(op.facts["rows_routed"] > 1.5 * 8 * 16 * chosen for op in grouped(graph))


def test_the_balance_is_an_assumption_of_the_result() -> None:
    graph = spread_graph(CONFIGS["mixtral"][0], {"dp": 4, "ep": 4}, "decode", 4, 3)
    said = [a for a in graph.assumptions if a.facts.get("processes") == 4]
    assert len(said) == 2
    assert all("sends as many rows to each" in a.text and a.kind == "routing" for a in said)
    resting = {n for op in grouped(graph) for n in op.assumptions}
    assert {a.id for a in said} <= resting


@pytest.mark.parametrize("name", CONFIGS)
def test_the_choices_of_all_come_back_from_a_file(name: str, tmp_path: Path) -> None:
    """Mixtral's 2 of 8 experts on 4 processes: half an expert of each is chosen."""
    graph = spread_graph(CONFIGS[name][0], {"dp": 4, "ep": 4}, "decode", 3, 5)
    rt.save(graph, tmp_path / "graph.json")
    assert rt.load(tmp_path / "graph.json") == graph


@pytest.mark.parametrize(("name", "mesh"), in_turn(CONFIGS, [{}, {"dp": 4, "ep": 4}, {"tp": 2}]))
def test_a_prompt_of_which_the_cache_is_read_routes_no_token(
    name: str, mesh: Mapping[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it is that behind a prompt that is run in full."""
    config = {**CONFIGS[name][0], "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = partial(rt.trace, str(tmp_path / "config.json"), mesh=mesh or None, phase="decode")
    many = run(batch=3, kv=masks.MAX_CHOSEN)  # choices of more tokens are not followed
    assert {op.facts["rows_routed"] for op in grouped(many)} <= {6, 3, 12}
    short = run(batch=3, kv=6)
    monkeypatch.setattr(running, "without_experts", lambda *_: nullcontext())
    assert run(batch=3, kv=6) == short


def test_experts_that_do_not_divide_are_refused_in_a_line() -> None:
    with pytest.raises(RequestError, match=r"^--mesh ep=3: 8 experts .* are 2, 4, 8 "):
        spread_graph(CONFIGS["mixtral"][0], {"dp": 3, "ep": 3}, "decode", 4, 3)


@pytest.mark.parametrize("how", ["deepep", "deepep-low-latency"])
def test_exchanges_by_the_kernels_of_deepep_take_their_measured_seconds(how: str) -> None:
    config, experts, chosen, layers = CONFIGS["deepseek"]
    system = load_system("dgx-h100")
    graph = spread_graph(config, {"dp": 8, "ep": 8}, "prefill", 2, 32)
    model = rt.tools.execution_model("serving", exchange=how)
    made = rt.estimate(graph, chip=system.joined_chip, execution=model)
    mode = {"deepep": "normal"}.get(how, "low-latency")
    for way in ("dispatch", "combine"):
        (row,) = (r for r in made.communication if r.kind == f"{way} (DeepEP {mode})")
        one = expert_exchange_seconds(
            system, 2 * 32, HIDDEN * 4, chosen, range(8), mode, way, experts
        )
        assert row.calls == layers
        assert row.seconds == pytest.approx(layers * one.seconds)
    assert not any(row.kind == "all_to_all" for row in made.communication)


def test_without_a_choice_the_module_sends_as_it_does() -> None:
    system = load_system("dgx-h100")
    graph = spread_graph(CONFIGS["mixtral"][0], {"dp": 8, "ep": 8}, "decode", 4, 3)
    made = rt.estimate(graph, chip=system.joined_chip, execution="serving")
    (row,) = made.communication
    seconds = sum(
        collective_seconds(system, "all_to_all", op.collective.bytes, range(8)).seconds
        for op in graph.expand().ops
        if op.collective
    )
    assert row.kind == "all_to_all"
    assert row.seconds == pytest.approx(seconds)


def test_more_ranks_than_were_measured_are_said() -> None:
    config, _, _, _ = CONFIGS["deepseek"]
    wide = {**config, "n_routed_experts": 128}
    graph = spread_graph(wide, {"dp": 128, "ep": 128}, "decode", 4, 3)
    model = rt.tools.execution_model("serving", exchange="deepep-low-latency")
    made = rt.estimate(graph, chip=load_system("dgx-h100").joined_chip, execution=model)
    beyond = {row.beyond for row in made.communication if "dispatch" in row.kind}
    assert beyond == {"128 ranks; measured up to 64"}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_counts_are_known_for_more_choices_than_other_numbers_are_carried(
    phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _, chosen, _ = CONFIGS["deepseek"]
    usual = spread_graph(config, {"dp": 4, "ep": 4}, phase, 6, 21)
    monkeypatch.setattr(masks, "MAX_INTEGERS", 6 * 20 * chosen)
    few = spread_graph(config, {"dp": 4, "ep": 4}, phase, 6, 21)
    assert [op.facts for op in grouped(few)] == [op.facts for op in grouped(usual)]
    assert [item.text for item in few.assumptions] == [item.text for item in usual.assumptions]
