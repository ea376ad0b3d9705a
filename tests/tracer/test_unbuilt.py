"""What a checkpoint holds beyond the model of its config, and parts that no config describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.quick

WIDTHS: dict[str, Any] = dict(
    hidden_size=256,
    intermediate_size=256,
    moe_intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=512,
    torch_dtype="bfloat16",
)
DEEPSEEK = WIDTHS | dict(
    model_type="deepseek_v3",
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    q_lora_rank=128,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=64,
    num_nextn_predict_layers=1,
)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def notes_of(folder: Path, config: dict[str, Any], **beside: Any) -> list[str]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name, record in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(record))
    return list(rt.inventory(str(folder / "config.json")).notes)


def predictors(notes: list[str]) -> tuple[float, float, float]:
    """Parameters of the layers for further tokens, their bytes, and those with embeddings."""
    (text,) = [note for note in notes if "predict further tokens" in note]
    found = re.findall(r"([\d.]+) ([MGk])(?:B| parameters)", text)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9}
    params, alone, whole = [float(number) * scale[unit] for number, unit in found]
    return params, alone, whole


def parameters(**changes: Any) -> int:
    """Parameters of such a model, as torch counts them."""
    import torch

    fields = DEEPSEEK | changes
    del fields["model_type"], fields["torch_dtype"]
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields))
    return sum(p.numel() for p in model.parameters())


PROJECTION, TABLES = 2 * 256 * 256, 2 * 512 * 256


def test_a_predictor_is_a_layer_more_a_projection_and_perhaps_two_tables(tmp_path: Path) -> None:
    layer = parameters(num_hidden_layers=4) - parameters()
    params, alone, whole = predictors(notes_of(tmp_path / "plain", DEEPSEEK))
    assert params == pytest.approx(layer + PROJECTION, rel=5e-3)
    assert alone == pytest.approx(2 * (layer + PROJECTION), rel=5e-3)
    assert whole == pytest.approx(2 * (layer + PROJECTION + TABLES), rel=5e-3)


def test_a_predictor_has_the_format_of_all_layers(tmp_path: Path) -> None:
    layer = parameters(num_hidden_layers=4) - parameters()
    _, alone, _ = predictors(notes_of(tmp_path / "fp8", DEEPSEEK | {"quantization_config": FP8}))
    assert alone < 1.1 * layer + 2 * PROJECTION


@pytest.mark.parametrize("name", ["mtp*", "model.layers.3*", "re:.*layers.3.*"])
def test_a_predictor_that_is_left_out_by_name_stays_as_it_is(name: str, tmp_path: Path) -> None:
    layer = parameters(num_hidden_layers=4) - parameters()
    settings = FP8 | {"modules_to_not_convert": [name]}
    config = DEEPSEEK | {"quantization_config": settings}
    _, alone, _ = predictors(notes_of(tmp_path / "skipped", config))
    assert alone == pytest.approx(2 * (layer + PROJECTION), rel=5e-3)


def test_a_predictor_that_no_list_of_layers_names_stays_as_it_is(tmp_path: Path) -> None:
    layer = parameters(num_hidden_layers=4) - parameters()
    layers = {f"model.layers.{i}.mlp.experts": {"quant_algo": "NVFP4"} for i in (1, 2)}
    record = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
    }
    notes = notes_of(tmp_path / "named", DEEPSEEK, hf_quant_config=record)
    assert any("nvfp4" in note for note in notes)
    _, alone, _ = predictors(notes)
    assert alone == pytest.approx(2 * (layer + PROJECTION), rel=5e-3)


def test_a_part_without_a_config_is_named(tmp_path: Path) -> None:
    text = WIDTHS | dict(model_type="qwen2_vl_text", num_hidden_layers=1)
    whole = dict(model_type="qwen2_vl", text_config=text, torch_dtype="bfloat16")
    vision = dict(depth=1, embed_dim=64, hidden_size=256, num_heads=4)
    said = [n for n in notes_of(tmp_path / "without", whole) if "config has no" in n]
    assert len(said) == 1 and "no vision_config" in said[0] and "Qwen2VLVisionConfig" in said[0]
    assert not any(
        "config has no" in note
        for note in notes_of(tmp_path / "with", whole | {"vision_config": vision})
    )


def test_an_older_config_has_its_text_part_outside(tmp_path: Path) -> None:
    flat = WIDTHS | dict(model_type="qwen2_vl", num_hidden_layers=1)
    vision = dict(depth=1, embed_dim=64, hidden_size=256, num_heads=4)
    notes = notes_of(tmp_path / "flat", flat | {"vision_config": vision})
    assert not any("config has no" in note for note in notes)
