"""The best mesh of some chips, and how a step scales: answers beside estimates of single meshes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import rooftrace as rt
from rooftrace.errors import RequestError
from rooftrace.hardware.systems import load_system
from rooftrace.studies.solving import row_of
from tests.reporting.conftest import Run

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
CODE = """
import torch
from torch.distributed.fsdp import fully_shard
def build(mesh):
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    return fully_shard(module, mesh=mesh["dp"]), (torch.empty(8, 64, device="meta"),)
"""


pytestmark = pytest.mark.usefixtures("kept_targets")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("meshes") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_rows_are_the_estimates_of_their_meshes(config: str) -> None:
    result = rt.tools.best_mesh(config, chips=4, system="dgx-h100", seq=64)
    assert {tuple(row.mesh.items()) for row in result.rows} == {
        (("dp", 4),),
        (("dp", 2), ("tp", 2)),
        (("tp", 4),),
    }
    assert not result.others
    assert {row.global_batch for row in result.rows} == {4}
    assert {row.mesh["dp"]: row.batch for row in result.rows if "dp" in row.mesh} == {4: 1, 2: 2}
    for row in result.rows:
        alone = rt.estimate(
            config, phase="training", mesh=row.mesh, seq=64, system="dgx-h100", batch=row.batch
        )
        assert row.seconds == alone.t_est
        assert row.peak == alone.memory.peak
        assert row.items_per_s_per_chip == pytest.approx(alone.items_per_s_per_chip)
    speeds = [row.items_per_s_per_chip for row in result.rows]
    assert speeds == sorted(speeds, reverse=True)


def test_activations_are_made_again_where_a_step_does_not_fit_without(config: str) -> None:
    asked = {"chips": 2, "system": "dgx-h100", "mesh": {"dp": 1}, "seq": 64}
    plain = rt.tools.best_mesh(config, **asked, batch=64)
    peak, capacity = plain.rows[0].peak, plain.rows[0].capacity
    kept = 1 - 0.9 * peak / capacity
    less = rt.tools.best_mesh(config, **asked, batch=64, kept_free=kept)
    assert [row.checkpoint for row in less.rows] == ["full"]
    assert [row.checkpoint for row in less.others] == ["none"]
    split = rt.tools.best_mesh(config, **asked, global_batch=128, kept_free=kept)
    (row,) = split.rows  # half of it at once, twice
    assert (row.checkpoint, row.batch, row.microbatches) == ("none", 32, 2)
    assert row.global_batch == plain.rows[0].global_batch == 128


def test_gradients_of_microbatches_add_up(config: str) -> None:
    """The step of two microbatches of a user who runs two backwards."""

    def twice(module, x):
        for _ in range(2):
            module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
        x = torch.empty(16, 512)
    told = rt.estimate(rt.trace(twice, module, x), system="dgx-h100")
    once = rt.estimate(module, x, phase="training", system="dgx-h100")
    row = row_of({"training": once}, {"dp": 1}, "none", 0.0, accumulated=2)
    assert row.peak == pytest.approx(told.memory.peak, rel=0.02)
    assert row.seconds == pytest.approx(told.t_est, rel=0.05)
    assert row.mfu == pytest.approx(told.mfu, rel=0.05)


def test_too_few_chips_say_how_many(config: str, run: Run) -> None:
    ran = run(
        *("solve", config, "--find", "mesh", "--chips", "2", "--system", "dgx-h100"),
        *("--phase", "training", "--seq", "64", "--kept-free", "0.99999"),
    )
    assert ran.code == 1
    assert "no mesh does: 2 candidates traced" in ran.out
    assert "by capacity alone at least" in ran.out


def test_a_limit_on_the_step_holds(config: str) -> None:
    every = rt.tools.best_mesh(
        config, chips=4, system="dgx-h100", phase="decode", kv=64, over=[4, 64]
    )
    limit = sorted(row.seconds for row in every.rows)[2]
    some = rt.tools.best_mesh(
        config, chips=4, system="dgx-h100", phase="decode", kv=64, over=[4, 64], tpot=limit
    )
    assert len(every.rows) == 6
    assert sorted(row.seconds for row in some.rows) == sorted(r.seconds for r in every.rows)[:3]
    assert all(row.seconds > limit for row in some.others)


def test_replicas_of_a_row_are_one_row_and_an_edge_is_said(config: str, run: Run) -> None:
    asked = {"phase": "decode", "kv": 64, "system": "dgx-h100", "chips": [1, 2]}
    result = rt.tools.best_mesh(config, **asked, over=[2, 4])
    found = {(*row.mesh.items(), row.batch): row.copies for row in result.rows}
    assert found[("dp", 1), 2] == (2,)  # with four requests on two chips
    assert (("dp", 2), 2) not in found
    (row,) = (row for row in result.rows if row.mesh == {"dp": 2})
    alone = rt.estimate(
        config, phase="decode", kv=64, batch=1, mesh={"dp": 2}, system="dgx-h100",
        execution="serving",
    )  # fmt: skip
    assert row.seconds == alone.t_est
    assert row.items_per_s_per_chip == pytest.approx(alone.items_per_s_per_chip)
    assert result.best.global_batch == 4
    assert result.edges[0].startswith("global batch 4")
    told = run(
        *("solve", config, "--find", "mesh", "--chips", "2", "--system", "dgx-h100"),
        *("--phase", "decode", "--kv", "64", "--global-batch", "4"),
    )
    assert "each has 4 requests in a step over all its chips" in " ".join(told.out.split())


def test_experts_are_a_view_of_the_other_axes(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    experts = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    path.write_text(json.dumps({**CONFIG, **experts}))
    asked = {"system": "dgx-h100", "mesh": {"dp": 1, "tp": 1, "ep": 1}}
    result = rt.tools.best_mesh(str(path), chips=2, phase="decode", kv=64, **asked)
    assert {tuple(row.mesh.items()) for row in result.rows} == {
        (("dp", 2),),
        (("dp", 2), ("ep", 2)),
        (("tp", 2),),
        (("tp", 2), ("ep", 2)),
    }
    assert {(row.chips, row.global_batch) for row in result.rows} == {(2, 2)}
    with pytest.raises(RequestError, match="multiple of `tp_size`"):
        rt.trace(str(path), phase="training", seq=16, mesh={"dp": 2, "tp": 4, "ep": 2})


def test_a_mesh_that_cannot_be_is_left_out_with_its_reason(config: str) -> None:
    result = rt.tools.best_mesh(config, chips=8, system="dgx-h100", seq=64)
    assert any(reason.startswith("tp=8: ") for reason in result.left_out)


def test_code_is_built_over_each_mesh(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(CODE)
    target = f"{tmp_path}/t.py:build"
    result = rt.tools.scaling(target, chips=[1, 2, 4], system="dgx-h100", mesh={"dp": 1})
    assert [row.mesh for row in result.rows] == [{"dp": 1}, {"dp": 2}, {"dp": 4}]
    assert [row.items for row in result.rows] == [8, 16, 32]


def test_scaling_has_the_steps_of_its_meshes(config: str) -> None:
    result = rt.tools.scaling(
        config, chips=[2, 8], system="dgx-h100", mesh={"dp": 1, "tp": 2}, seq=64
    )
    assert [row.mesh for row in result.rows] == [{"dp": 1, "tp": 2}, {"dp": 4, "tp": 2}]
    assert result.weak(result.rows[0]) == result.strong(result.rows[0]) == 1
    assert 0 < result.weak(result.rows[1]) < 1
    assert result.microbatches(result.rows[0]) == 4


def test_questions_without_an_answer_are_refused_in_a_line(config: str) -> None:
    with pytest.raises(RequestError, match="multiples of 4"):
        rt.tools.scaling(config, chips=[2, 6], system="dgx-h100", mesh={"dp": 1, "tp": 4})
    with pytest.raises(RequestError, match="tpot"):
        rt.tools.best_mesh(config, chips=2, system="dgx-h100", tpot="1ms")
    with pytest.raises(RequestError, match="--global-batch 32"):
        rt.tools.best_mesh(config, chips=2, system="dgx-h100", phase="decode", kv=64, batch=32)
    graph = rt.trace(config, phase="forward", seq=4)
    with pytest.raises(RequestError, match="traced anew"):
        rt.tools.best_mesh(graph, chips=2, system="dgx-h100")


def test_a_training_is_so_many_steps_of_its_mesh(config: str) -> None:
    asked = {"seq": 64, "system": "dgx-h100", "global_batch": 8}
    run = rt.tools.training_run(config, mesh={"dp": 2, "tp": 2}, tokens="5M", **asked)
    alone = rt.estimate(
        config, phase="training", mesh={"dp": 2, "tp": 2}, seq=64, system="dgx-h100", batch=4
    )
    steps = 5e6 / (8 * 64)
    assert run.undisturbed == pytest.approx(steps * alone.t_est)
    best = rt.tools.training_run(config, chips=4, tokens=5e6, **asked)
    assert best.row == rt.tools.best_mesh(config, chips=4, **asked).best
    # bf16 weights, and in fp32 their copy and two moments: of 2 layers, embedding and head.
    h, m, v = 256, 512, 512
    parameters = 2 * (4 * h * h + 3 * h * m + 2 * h) + 2 * v * h + h
    one = rt.tools.training_run(config, mesh={"dp": 4}, tokens=5e6, **asked)
    assert one.row.saved == pytest.approx(parameters * 14, rel=0.01)


@pytest.mark.parametrize(
    ("system", "chips", "said"),
    [
        ("dgx-h100", 8, ["all_reduce, all_to_all, reduce_scatter, send measured, up to 8 ranks"]),
        ("dgx-h100", 9, ["measured, up to", "reduce_scatter, all_to_all not measured, derived ("]),
        ("hgx-h100-4nic", 16, ["measured, up to 8 ranks", "send measured, up to 2 ranks"]),
        ("dgx-b300", 8, ["nvlink of dgx-b300: not measured, bandwidth alone (NVIDIA HGX"]),
    ],
)
def test_each_level_of_a_system_says_whether_it_was_measured(
    system: str, chips: int, said: list[str]
) -> None:
    lines = list(load_system(system).origins(chips))
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True)), lines


def test_a_training_names_what_it_rests_on(config: str, run: Run) -> None:
    asked = (
        *("solve", config, "--find", "run", "--mesh", "dp=4", "--system", "dgx-h100"),
        *("--seq", "64", "--tokens", "1T"),
    )
    told = " ".join(run(*asked).out.split())
    for words in (
        "419 unexpected interruptions in 54 days", "MegaScale", "2 TB/s", "10.2 kW / 8",
        "2.69 dollar/hour (rent", "the optimum of Young", "--pue",
        "send measured, up to 8 ranks",
    ):  # fmt: skip
        assert words in told, words
    named = json.loads(run(
        *asked, "--mtbf", "100 h", "--save-time", "1 min", "--interval", "1 h",
        "--restart", "5 min",
        "--price", "3", "--power", "1000", "--pue", "1.5", "--format", "json",
    ).out)  # fmt: skip
    assert (named["mtbf"], named["save"], named["interval"], named["restart"]) == (
        360000.0, 60.0, 3600.0, 300.0
    )  # fmt: skip
    assert named["dollars"] == pytest.approx(3 * named["chip_hours"])
    assert named["joules"] == pytest.approx(1500 * 3600 * named["chip_hours"])


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ((), "a training needs its length: --tokens 15T"),
        (("--tokens", "many"), "tokens 'many': expected a number, for example 15T"),
        (("--tokens", "1T", "--mtbf", "0 s"), "mtbf '0 s': expected a time"),
        (("--tokens", "1T", "--pue", "0.9"), "pue 0.9: expected a factor of at least 1"),
        (("--tokens", "1T", "--phase", "decode"), "phase decode with --find run"),
        (("--tokens", "1T", "--kept-free", "0.99999"), "--find mesh says what does"),
        (("--tokens", "1T", "--mtbf", "1 s", "--save-time", "1 h"), "this training never ends"),
    ],
)
def test_a_training_that_cannot_be_told(
    config: str, run: Run, more: tuple[str, ...], error: str
) -> None:
    ran = run("solve", config, "--find", "run", "--mesh", "dp=2", "--system", "dgx-h100", *more)
    assert ran.code == 2
    assert error in " ".join(ran.err.split())
