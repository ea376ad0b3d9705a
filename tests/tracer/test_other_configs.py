"""Files of models that are no configs of transformers: read by their library, or named."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import nn

import rooftrace as rt

gguf = pytest.importorskip("gguf")
Q = gguf.GGMLQuantizationType

NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "index": ({"metadata": {"total_size": 8}, "weight_map": {"a": "b"}}, "the index of a sharded"),
    "peft": (
        {"peft_type": "LORA", "r": 16, "base_model_name_or_path": "org/base"},
        r"a PEFT adapter \(LORA, r=16\) of 'org/base'",
    ),
    "mistral": (
        {"dim": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 8},
        "params.json of Mistral",
    ),
    "modelopt": ({"quantization": {"quant_algo": "FP8"}}, "a declaration of quantisation"),
    "gptq": ({"bits": 4, "group_size": 128, "desc_act": False}, "a declaration of quantisation"),
    "timm": ({"architecture": "resnet50", "num_classes": 10}, "a timm config of 'resnet50'"),
    "timm hub": ({"architecture": "hf-hub:someone/model"}, "expected the name of a timm model"),
    "timm pickle": (
        {"architecture": "resnet50", "model_args": {"checkpoint_path": "x.pth"}},
        "expected sizes, no checkpoint",
    ),
    "diffusers": ({"_class_name": "UNet2DModel"}, "a config of diffusers' UNet2DModel"),
    "pipeline": (
        {"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]},
        r"a pipeline of diffusers \(vae\)",
    ),
    "trace": ({"schemaVersion": 1, "traceEvents": []}, "`rooftrace validate FILE --target"),
    "run": ({"schema": "rooftrace.run/1"}, "a file of measurements, which names no model"),
    "another": ({"learning_rate": 0.1}, "has a model_type; this one has none"),
}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither timm nor diffusers is installed."""
    for name in ("timm", "diffusers"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.usefixtures("without")
def test_a_file_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    fields, named = NAMED[name]
    path, packed = tmp_path / "config.json", tmp_path / "config.json.gz"
    path.write_text(json.dumps(fields))
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(rt.types.TargetError, match=named):
        rt.estimate(str(packed), chip="h100-sxm")
    for ask in (rt.inventory, lambda p: rt.estimate(p, chip="h100-sxm")):
        with pytest.raises(rt.types.TargetError, match=named) as error:
            ask(str(path))
        assert "\n" not in str(error.value) and str(path) in str(error.value)


class Library(ModuleType):
    """timm, and diffusers, as far as a config needs them."""

    __version__ = "0"

    class Net(nn.Linear):
        """A model of either."""

        @classmethod
        def from_config(cls, data: dict[str, Any]) -> nn.Module:
            return cls(data["width"], 4)

    @staticmethod
    def create_model(name: str, pretrained: bool, num_classes: int, **sizes: int) -> nn.Module:
        assert not pretrained
        made = nn.Sequential(nn.Flatten(), nn.Linear(sizes["width"], num_classes))
        made.pretrained_cfg = {"input_size": (1, 1, sizes["width"])}  # type: ignore[assignment]
        return made


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from importlib.machinery import ModuleSpec

    for name in ("timm", "diffusers"):
        library = Library(name)
        library.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, library)
    yield


@pytest.mark.usefixtures("libraries")
def test_a_library_builds_its_own(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"architecture": "net", "num_classes": 3, "model_args": {"width": 16}})
    )
    assert rt.inventory(str(path)).total_params == 16 * 3 + 3
    e = rt.estimate(str(path), batch=8, chip="h100-sxm")
    assert e.macs == 8 * 16 * 3
    path.write_text(json.dumps({"_class_name": "Net", "width": 16}))
    assert rt.inventory(str(path)).total_params == 16 * 4 + 4
    e = rt.estimate(str(path), inputs={"input": "8,16:fp32"}, chip="h100-sxm")
    assert e.macs == 8 * 16 * 4
    path.write_text(json.dumps({"_class_name": "Library", "width": 16}))
    with pytest.raises(rt.types.TargetError, match="'Library' is no model of diffusers"):
        rt.inventory(str(path))


# -- GGUF ------------------------------------------------------------------------------------------

LAYERS, WIDTH, INNER, VOCAB, KEYS = 2, 256, 512, 512, 64


def tensors() -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Names, shapes and types, mixed as llama.cpp's Q4_K_M mixes them."""
    yield "token_embd.weight", (VOCAB, WIDTH), Q.Q4_K
    yield "output.weight", (VOCAB, WIDTH), Q.Q6_K
    yield "output_norm.weight", (WIDTH,), Q.F32
    for n in range(LAYERS):
        yield f"blk.{n}.attn_q.weight", (WIDTH, WIDTH), Q.Q4_K
        yield f"blk.{n}.attn_k.weight", (KEYS, WIDTH), Q.Q4_0
        yield f"blk.{n}.attn_v.weight", (KEYS, WIDTH), Q.Q6_K if n else Q.Q5_K
        yield f"blk.{n}.attn_output.weight", (WIDTH, WIDTH), Q.IQ4_XS
        yield f"blk.{n}.ffn_gate.weight", (INNER, WIDTH), Q.Q8_0
        yield f"blk.{n}.ffn_up.weight", (INNER, WIDTH), Q.Q3_K
        yield f"blk.{n}.ffn_down.weight", (WIDTH, INNER), Q.BF16
        yield f"blk.{n}.attn_norm.weight", (WIDTH,), Q.F32
        yield f"blk.{n}.ffn_norm.weight", (WIDTH,), Q.F32


def write_gguf(path: Path) -> int:
    """Write a Llama as a GGUF file; the bytes of its tensors, as that library counts them."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(64)
    writer.add_vocab_size(VOCAB)
    total = 0
    for name, shape, kind in tensors():
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        raw = np.zeros((*shape[:-1], shape[-1] // numbers * size), np.uint8)
        total += raw.nbytes
        if kind is Q.F32:
            writer.add_tensor(name, np.zeros(shape, np.float32))
        else:
            writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return total


def test_a_gguf_file_has_the_type_of_each_tensor(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    right = write_gguf(path)
    found = rt.inventory(str(path))
    assert found.bytes_parameters == right
    assert "Q4_K" in found.notes[1] and "Q6_K" in found.notes[1]
    e = rt.estimate(str(path), phase="decode", batch=1, kv=64, chip="h200-sxm")
    assert e.memory.weights == pytest.approx(right, rel=1e-3)
    read = {row.module: row.bytes_by_role["weights"] for row in e.rows if row.name == "aten.mm"}
    assert read["model.layers.0.mlp.up_proj"] == INNER * WIDTH * 110 // 256
    assert {r.precision for r in e.rows if r.name == "aten.mm"} == {"bf16"}


def test_a_gguf_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    for content, named in ((b"GGML", "expected a GGUF file"), (b"GGUF\3\0\0\0", "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(rt.types.TargetError, match=named):
            rt.inventory(str(path))


def test_a_gguf_file_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(rt.types.TargetError, match="pip install 'rooftrace"):
        rt.inventory(str(path))
