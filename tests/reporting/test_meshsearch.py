"""The best mesh of some chips, and how a step scales: answers beside estimates of single meshes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rooftrace as rt
from rooftrace.errors import RequestError
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
    for row in result.rows:
        alone = rt.estimate(config, phase="training", mesh=row.mesh, seq=64, system="dgx-h100")
        assert row.seconds == alone.t_est
        assert row.peak == alone.memory.peak
        assert row.items_per_s_per_chip == pytest.approx(alone.items_per_s_per_chip)
    speeds = [row.items_per_s_per_chip for row in result.rows]
    assert speeds == sorted(speeds, reverse=True)


def test_activations_are_made_again_where_a_step_does_not_fit_without(config: str) -> None:
    plain = rt.tools.best_mesh(config, chips=2, system="dgx-h100", mesh={"dp": 1}, seq=64, batch=64)
    peak, capacity = plain.rows[0].peak, plain.rows[0].capacity
    kept = 1 - 0.9 * peak / capacity
    less = rt.tools.best_mesh(
        config, chips=2, system="dgx-h100", mesh={"dp": 1}, seq=64, batch=64, kept_free=kept
    )
    assert [row.checkpoint for row in less.rows] == ["full"]
    assert [row.checkpoint for row in less.others] == ["none"]


def test_too_few_chips_say_how_many(config: str, run: Run) -> None:
    ran = run(
        *("solve", config, "--find", "mesh", "--chips", "2", "--system", "dgx-h100"),
        *("--phase", "training", "--seq", "64", "--kept-free", "0.99999"),
    )
    assert ran.code == 1
    assert "no mesh does: 4 candidates traced" in ran.out
    assert "by capacity alone at least" in ran.out


def test_a_limit_on_the_step_holds(config: str) -> None:
    every = rt.tools.best_mesh(
        config, chips=4, system="dgx-h100", phase="decode", kv=64, over=[1, 64]
    )
    limit = sorted(row.seconds for row in every.rows)[2]
    some = rt.tools.best_mesh(
        config, chips=4, system="dgx-h100", phase="decode", kv=64, over=[1, 64], tpot=limit
    )
    assert len(every.rows) == 6
    assert sorted(row.seconds for row in some.rows) == sorted(r.seconds for r in every.rows)[:3]
    assert all(row.seconds > limit for row in some.others)


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
    graph = rt.trace(config, phase="forward", seq=4)
    with pytest.raises(RequestError, match="traced anew"):
        rt.tools.best_mesh(graph, chips=2, system="dgx-h100")
