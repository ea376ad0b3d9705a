"""Execution models: presets, what they refuse, and JSON there and back."""

import json

import pytest

from rooftrace.costmodels.fusion.executions import (
    PRESETS,
    SUMMARIES,
    ExecutionError,
    ExecutionModel,
    Utilization,
    WeightResidency,
    execution_model,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_comes_back_from_json(name):
    preset = PRESETS[name]
    assert ExecutionModel.from_dict(json.loads(json.dumps(preset.to_dict()))) == preset
    assert preset.name == name and SUMMARIES[name]


def test_the_presets_differ_where_they_say():
    naive, eager, efficient = (PRESETS[n] for n in ("naive", "eager", "efficient"))
    assert (naive.attention, eager.attention) == ("materialised", "flash")
    assert naive.fusion == eager.fusion == "none" and efficient.fusion == "detected"
    assert (eager.dispatch, PRESETS["compiled"].dispatch, efficient.dispatch) == (
        "eager", "compiled", "graph"
    )  # fmt: skip
    assert eager.kv_append == "as-run" and efficient.kv_append == "in-place"


def test_the_seeds_factors():
    seed = PRESETS["seed-efficient"]
    assert seed.weight_residency == WeightResidency(attention=4, dense=4, moe=2)
    assert (seed.activation_fusion, seed.elementwise) == (0.5, 0.7)
    assert seed.utilization == PRESETS["seed-naive"].utilization == Utilization(64, 0.35, False)


def test_weight_residency_by_family():
    residency = WeightResidency(attention=4, dense=3, moe=2)
    families = ("attention", "moe", "dense", "head", "embedding")
    assert [residency.of(family) for family in families] == [4, 2, 3, 3, 3]


def test_utilization_saturates():
    seed = Utilization(b_sat=64)
    assert [seed.eta(rows) for rows in (0, 1, 32, 64, 1000)] == [1 / 64, 1 / 64, 0.5, 1, 1]
    assert Utilization().eta(1) == seed.eta(None) == 1


@pytest.mark.parametrize(
    "knobs, message",
    [
        (dict(attention="sparse"), "attention='sparse': expected one of flash, materialised"),
        (dict(fusion="all"), "fusion='all': expected one of none, detected, factor"),
        (dict(dispatch="lazy"), "dispatch='lazy': expected one of eager, compiled, graph"),
        (dict(kv_append="copy"), "kv_append='copy': expected one of as-run, in-place"),
        (dict(fusion="factor", elementwise=0), "elementwise=0: expected a factor above 0"),
        (dict(fusion="factor", elementwise=0.0), "elementwise=0.0: expected a factor above 0"),
        (dict(fusion="factor", elementwise="half"), "elementwise='half': expected a factor"),
        (dict(fusion="detected", activation_fusion=0.5), "describe the same effect"),
        (dict(fusion="none", elementwise=0.5), "describe the same effect"),
        (dict(weight_residency=WeightResidency(moe=0)), "weight_residency.moe=0: expected a numb"),
        (dict(weight_residency=WeightResidency(moe=float("nan"))), "weight_residency.moe=nan"),
        (dict(utilization=Utilization(b_sat=-1)), "utilization.b_sat=-1: expected a number above"),
        (dict(utilization=Utilization(eta_scalar=float("inf"))), "utilization.eta_scalar=inf"),
    ],
)
def test_what_contradicts_itself_is_refused(knobs, message):
    with pytest.raises(ExecutionError) as caught:
        ExecutionModel(**knobs)
    assert message in str(caught.value)


def test_unknown_names_are_errors_that_list_the_known():
    with pytest.raises(ExecutionError, match="did you mean 'efficient'"):
        execution_model("eficient")
    with pytest.raises(ExecutionError, match=r"'fuse' is no execution knob; .* are .*fusion"):
        ExecutionModel.from_dict({"fuse": True})
    with pytest.raises(ExecutionError, match=r"'weight_residency\.mlp' is no .* attention, dense"):
        ExecutionModel.from_dict({"weight_residency": {"mlp": 2}})
    with pytest.raises(ExecutionError, match="'speed' is no execution knob"):
        execution_model("efficient", speed=2)


def test_a_preset_with_a_knob_changed():
    changed = execution_model("efficient", tf32=True)
    assert changed.tf32 and changed.fusion == "detected"
    assert execution_model(changed) is changed
    assert execution_model(changed, tf32=False) == PRESETS["efficient"]


def test_one_field_of_a_record_is_changed_by_its_dotted_name() -> None:
    made = execution_model("seed-efficient", **{"weight_residency.moe": 3, "utilization.b_sat": 32})
    assert (made.weight_residency.moe, made.weight_residency.dense) == (3, 4)
    assert (made.utilization.b_sat, made.utilization.eta_scalar) == (32, 0.35)
    assert made.factors_changed == {"weight_residency.moe": 3, "utilization.b_sat": 32}
    again = execution_model(made, **{"weight_residency.moe": 2})
    assert again.factors_changed == {"utilization.b_sat": 32}
    assert execution_model("eager").factors_changed == {}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("weight_residency.mo", 2, "'weight_residency.mo' is no execution knob"),
        ("weight_residency.moe", 0, "weight_residency.moe=0: expected a number above 0"),
        ("traffic.moe", 2, "'traffic.moe' is no execution knob; with a dot"),
    ],
)
def test_a_dotted_name_that_is_no_field_is_refused(name: str, value: int, said: str) -> None:
    with pytest.raises(ExecutionError, match=said):
        execution_model("eager", **{name: value})
