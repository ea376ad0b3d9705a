"""A config.json is data: no field of it loads code or asks the hub, unless the user trusts it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.tracer.targets import configs
from rooftrace.tracer.targets.configs import check_config, without_code
from tests.releases import with_transformers_5

pytestmark = pytest.mark.quick

transformers = pytest.importorskip("transformers")

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16}
KERNEL = "someone/some-kernel"
LOADS = {
    "private": {"_attn_implementation": KERNEL},
    "public": {"attn_implementation": KERNEL},
    "internal": {"_attn_implementation_internal": KERNEL},
    "revision": {"_attn_implementation": f"{KERNEL}@main:attention"},
    "paged": {"_attn_implementation": f"paged|{KERNEL}"},
    "by part": {"attn_implementation": {"text_config": KERNEL}},
    "of a part": {"text_config": {"model_type": "gpt2", "_attn_implementation": KERNEL}},
    "in a list": {"parts": [{"attn_implementation": KERNEL}]},
    "experts": {"_experts_implementation": "sonicmoe"},
    "experts of a part": {"text_config": {"experts_implementation": "deepgemm"}},
    "backbone": {"backbone": "someone/backbone"},
    "backbone of the hub": {"use_timm_backbone": False, "backbone": "resnet50"},
    "timm backbone": {"backbone_config": {"backbone": "hf-hub:someone/model"}},
    "timm": {"model_type": "timm_wrapper", "architecture": "hf-hub:someone/model"},
    "timm folder": {"model_type": "timm_wrapper", "architecture": "local-dir:/tmp/model"},
    "pickle": {"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "x.pth"}},
}


def config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**GPT2, **fields}))
    return path


@pytest.mark.parametrize("fields", LOADS.values(), ids=LOADS)
def test_a_field_that_loads_code_is_refused(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("code of the hub is loaded")

    hub = transformers.integrations.hub_kernels
    if hasattr(hub, "is_kernels_available"):
        monkeypatch.setattr(hub, "is_kernels_available", lambda: True)
    else:  # transformers 4
        monkeypatch.setattr(hub, "_kernels_available", True)
    monkeypatch.setattr(hub, "get_kernel", loaded, raising=False)
    with pytest.raises(rt.types.TargetError, match="pass --trust-remote-code") as error:
        rt.trace(str(config(tmp_path, **fields)), batch=1, seq=4, phase="prefill")
    name = list(fields)[-1]
    assert name in str(error.value) and "config.json" in str(error.value)


@with_transformers_5  # before, it asks for the package `kernels` first
def test_with_trust_transformers_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def kernel(name: str, *args: Any, **kwargs: Any) -> None:
        asked.append(name)
        raise ValueError("no such kernel")

    flash = transformers.modeling_flash_attention_utils
    monkeypatch.setattr(flash, "_lazy_imports", kernel)
    path = config(tmp_path, _attn_implementation=KERNEL)
    with pytest.raises(rt.types.TargetError, match="no such kernel"):
        rt.trace(str(path), batch=1, seq=4, phase="prefill", trust_remote_code=True)
    assert asked == [KERNEL]


def test_what_is_torchs_own_is_taken(tmp_path: Path) -> None:
    for name in ("eager", "sdpa"):
        path = config(tmp_path, _attn_implementation=name)
        assert rt.trace(str(path), batch=1, seq=4, phase="prefill").ops
    check_config({"backbone": "resnet50", "use_timm_backbone": True, "backbone_config": None}, "x")
    check_config({"_attn_implementation": None, "_attn_implementation_autoset": True}, "x")


def test_a_class_in_a_repository_is_never_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auto = {"AutoModelForCausalLM": "someone/code--modeling.Model", "AutoModel": "modeling.Model"}
    part = {**GPT2, "auto_map": auto}
    assert without_code({"a": [part], "text_config": part}) == {"a": [GPT2], "text_config": GPT2}

    def prompt(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("transformers would ask whether to run the code")

    factory = transformers.models.auto.auto_factory
    monkeypatch.setattr(factory, "resolve_trust_remote_code", prompt)
    parts = {"model_type": "encoder-decoder", "encoder": {**GPT2, "model_type": "bert"}}
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts["encoder"] |= {**small, "intermediate_size": 8, "auto_map": auto}
    parts["decoder"] = {**parts["encoder"], "is_decoder": True, "add_cross_attention": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**parts, "is_encoder_decoder": True}))
    assert rt.trace(str(path), batch=1, seq=4, phase="forward").ops
    path.write_text(json.dumps(part))
    assert rt.trace(str(path), batch=1, seq=4, phase="prefill").ops


@pytest.mark.parametrize("fields", [LOADS["private"], {"architectures": ["pipeline"]}])
def test_a_config_of_the_hub_is_checked_too(fields: dict[str, Any], tmp_path: Path) -> None:
    config(tmp_path, **fields, auto_map={"AutoModel": "modeling.Model"})
    if "architectures" in fields:  # no model: the first head of the type is taken
        assert rt.trace(f"hf:{tmp_path}", batch=1, seq=4, phase="prefill").ops
        return
    with pytest.raises(rt.types.TargetError, match="pass --trust-remote-code"):
        rt.trace(f"hf:{tmp_path}", batch=1, seq=4, phase="prefill")


@pytest.mark.parametrize("dtype", ["_dynamo", "hub", "load", "Tensor", "int8", 3])
def test_a_dtype_is_the_name_of_one(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(rt.types.TargetError):
        rt.trace(str(config(tmp_path, dtype=dtype)), batch=1, seq=4, phase="prefill")


FLASH = "flash_attention_2"


@pytest.mark.parametrize(
    "fields",
    [
        {"_attn_implementation": FLASH},
        {"attn_implementation": "flash_attention_3"},
        {"_attn_implementation_internal": FLASH},
        {"attn_implementation": {"text_config": FLASH, "": "sdpa"}},
    ],
)
def test_flash_attention_is_what_the_model_was_saved_with(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    """It asks for no package: attention runs as torch's own, which is a flash kernel."""
    graph = rt.trace(str(config(tmp_path, **fields, n_embd=16)), batch=1, seq=64, phase="prefill")
    names = [row.name for row in rt.estimate(graph, chip="h100-sxm").rows]
    assert any("flash attention" in name for name in names)
    (text,) = [a.text for a in graph.assumptions if a.kind == "attention"]
    assert "flash_attention" in text


def test_models_that_load_kernels_by_themselves_are_known() -> None:
    """The list holds every model of the installed transformers that calls the hub's loader."""
    models = Path(transformers.__file__).parent / "models"
    call = re.compile(rb"\bget_kernel\(")
    found = {p.parent.name for p in models.glob("*/modeling_*.py") if call.search(p.read_bytes())}
    assert found <= set(configs._kernels())


def test_a_type_that_loads_no_kernels_imports_nothing_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(configs, "_kernels", lambda: pytest.fail("looks for its kernels"))
    check_config({"model_type": "llama", "text_config": {"model_type": "bert"}}, "config.json")
