"""The number of layers as a size: one form, few plans, equal to traces of other depths."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import rooftrace as rt
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import evaluated
from tests.conftest import mostly_heavy

DEPTHS = range(8, 16)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("depth") / "config.json"
    made = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, vocab_size=256, sliding_window=None,
        architectures=["MixtralForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    made.to_json_file(path, use_diff=False)
    return str(path)


@cache
def formed(config: str, phase: str) -> rt.types.Form:
    over = {"config.num_hidden_layers": DEPTHS}
    return rt.tools.form(config, phase=phase, over=over, batch=3, seq=24)


@pytest.mark.slow
@pytest.mark.parametrize("phase", mostly_heavy(["prefill", "training"], ["prefill"]))
def test_one_form_holds_for_all_depths(config: str, phase: str) -> None:
    size = "config.num_hidden_layers"
    form = formed(config, phase)
    assert len(form.regimes) == 1 and form.regimes[0].proven
    conditions = Conditions.of("efficient")
    points = Points({size: DEPTHS})
    assert len(list(form.plans(points, conditions))) <= 4  # not one for each depth
    chip = rt.load_chip("l4")
    table = evaluated(form, points, [chip], conditions)
    for depth in (9, 14):
        graph = rt.trace(config, phase=phase, batch=3, settings={size: depth}, seq=24)
        assert form.graph(**{size: depth}) == graph
        told = rt.estimate(graph, chip=chip, execution="efficient")
        place = depth - DEPTHS[0]
        assert table["flops"][place] == told.flops
        assert table["bytes_hbm"][place] == told.bytes.total
        assert table["peak_memory"][place] == told.memory.peak
        assert table["t_est"][place] == pytest.approx(told.t_est, rel=1e-12)


def test_a_form_of_depths_comes_back_from_its_file(config: str, tmp_path: Path) -> None:
    size = "config.num_hidden_layers"
    form = formed(config, "prefill")
    loaded = rt.types.Form.load(form.save(tmp_path / "form.json.gz"))
    assert loaded.graph(**{size: 15}) == form.graph(**{size: 15})
