"""Sweeps, answers, elasticities and explanations say what an estimate says, on meshes too."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rooftrace as rt
from rooftrace.costmodels.fusion.executions import execution_model
from rooftrace.hardware.chip import Chip
from rooftrace.hardware.systems import load_system
from rooftrace.studies.explaining.steps import critical_of
from rooftrace.studies.forms import Conditions, Points
from rooftrace.studies.sweeps import evaluated
from tests.tracer.expert_models import MIXTRAL, needs_plans

pytestmark = pytest.mark.slow  # each traces a step several times
DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, int] | None, str | None]] = {
    "one chip": (DENSE, None, None),
    "tp": (DENSE, {"tp": 2}, None),
    "dp": (DENSE, {"dp": 4}, None),
    "dp and tp": (DENSE, {"dp": 2, "tp": 2}, None),
    "two nodes": (DENSE, {"dp": 16}, "dgx-h100"),
    "experts": (MIXTRAL, {"dp": 2, "ep": 2}, "dgx-h100"),
}
PHASES: dict[str, dict[str, Any]] = {
    "decode": {"kv": 64},
    "training": {"seq": 32},
}
BATCHES = range(1, 17)
EXACT = {"rel": 1e-12, "abs": 0}


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("configs")
    for name, config in (("llama", DENSE), ("mixtral", MIXTRAL)):
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


def chip_of(system: str | None) -> Chip:
    return rt.load_chip("h100-sxm") if system is None else load_system(system).joined_chip


@cache
def form_of(folder: Path, case: str, phase: str) -> rt.types.Form:
    config, mesh, _ = CASES[case]
    path = str(folder / f"{config['model_type']}.json")
    spread = {} if mesh is None else {"mesh": mesh}
    return rt.tools.form(path, phase=phase, over={"batch": BATCHES}, **spread, **PHASES[phase])


def marks_of(case: str, phase: str) -> list[pytest.MarkDecorator]:
    heavy = phase == "training" and case in ("dp and tp", "two nodes", "experts")
    experts = [needs_plans] if case == "experts" else []
    return [*experts, *([pytest.mark.heavy] if heavy else [])]


each_case = pytest.mark.parametrize(
    ("case", "phase"),
    [pytest.param(case, phase, marks=marks_of(case, phase)) for case in CASES for phase in PHASES],
)


@each_case
def test_a_sweep_is_an_estimate_at_each_point(configs: Path, case: str, phase: str) -> None:
    execution = "efficient" if phase == "training" else "compiled"
    form, chip = form_of(configs, case, phase), chip_of(CASES[case][2])
    table = evaluated(form, Points({"batch": BATCHES}), [chip], Conditions.of(execution))
    for place, batch in list(enumerate(BATCHES))[:: len(BATCHES) // 3]:
        alone = form.estimate(chip, execution, batch=batch)
        for name in ("t_comp", "t_hbm", "t_net", "t_bound", "t_serial", "t_est"):
            expected = pytest.approx(getattr(alone.times, name), **EXACT)
            assert table[name][place] == expected, (name, batch)
        assert table["peak"][place] == alone.peak
        told = table["t_low"][place], table["t_high"][place]
        assert told == pytest.approx(alone.t_interval, rel=1e-12)


DISTURBED = {"expert_imbalance": 1.5, "stragglers": 0.05, "interference": 0.2}


@pytest.mark.parametrize(
    ("case", "phase", "exchange"),
    [
        ("tp", "training", "as-run"),
        pytest.param("experts", "training", "deepep", marks=[needs_plans, pytest.mark.heavy]),
        pytest.param("experts", "decode", "deepep-low-latency", marks=needs_plans),
    ],
)
def test_what_ifs_and_kernels_of_experts_at_each_point(
    configs: Path, case: str, phase: str, exchange: str
) -> None:
    form, chip = form_of(configs, case, phase), chip_of(CASES[case][2])
    plain = execution_model("efficient")
    disturbed = replace(plain.disturbances, **DISTURBED)
    model = replace(plain, exchange=exchange, disturbances=disturbed)
    table = evaluated(form, Points({"batch": BATCHES}), [chip], Conditions(model))
    told = [form.estimate(chip, model, batch=batch).t_est for batch in BATCHES]
    assert table["t_est"] == pytest.approx(np.array(told), **EXACT)
    calm = evaluated(form, Points({"batch": BATCHES}), [chip], Conditions(plain))
    assert (table["t_est"] > calm["t_est"]).all()


@each_case
def test_answers_elasticities_and_explanations_rest_on_the_same_seconds(
    configs: Path, case: str, phase: str
) -> None:
    form, chip = form_of(configs, case, phase), chip_of(CASES[case][2])
    alone = form.estimate(chip, "efficient", batch=8)
    limits = rt.solve(form, find="rates", at={"batch": 8}, chip=chip, execution="efficient")
    assert limits.step == pytest.approx(alone.t_est, **EXACT)
    assert limits.seconds == pytest.approx(dict(alone.times.regime_seconds), rel=1e-12, abs=1e-18)
    slopes = rt.sensitivity(form, over={"batch": 8}, chip=chip, execution="efficient")
    twice = next(s for s in slopes.of("batch").steps if s.change == "x2")
    more = form.estimate(chip, "efficient", batch=16)
    assert twice.t_est == pytest.approx(more.t_est / alone.t_est, rel=1e-9)
    critical = critical_of(
        form, "batch", range(1, 17), {"batch": 8}, chip, Conditions.of("efficient")
    )
    regimes = more.times.regime_seconds
    assert critical.limiter == max(regimes, key=regimes.__getitem__)
