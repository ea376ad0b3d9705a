"""Published checkpoints: weights within 1 %, a token of cache to the byte, and the page of both."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import rooftrace as rt
from tests.conftest import mostly_heavy
from tests.tracer.published_models import (
    FOLDER,
    PAGE,
    Published,
    cached,
    counted,
    models,
    page,
    row,
    value,
)

pytest.importorskip("transformers")

MODELS = models()
METHODS = {"fp8": "fp8", "awq": "int4", "gptq": "int4", "bitsandbytes": "nf4", "mxfp4": "mxfp4"}
"""Of some methods the precision that a note on the weights has to name."""


CACHES = (
    "meta-llama--Llama-3.1-8B",  # heads that share keys
    "moonshotai--Kimi-K2.5",  # latents
    "nvidia--Gemma-4-31B-IT-NVFP4",  # windows, fp8
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4",  # states beside it, fp8
    "openai--gpt-oss-20b",  # a window in each second layer
    "openai--whisper-large-v3",  # of a decoder
)


def by_name(model: Published) -> str:
    return model.folder


@cache
def inventory(path: str) -> rt.types.ModelInfo:
    return rt.inventory(path)


def declarations(folder: Path) -> list[Any]:
    """What the files of a checkpoint declare of their quantisation, wherever it stands."""
    config = json.loads((folder / "config.json").read_text())
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    found = [
        part[k] for part in parts for k in ("quantization_config", "quantization") if k in part
    ]
    beside = folder / "hf_quant_config.json"
    return [*found, *([json.loads(beside.read_text())] if beside.exists() else [])]


def test_the_table_and_the_folders_are_the_same() -> None:
    names = [model.folder for model in MODELS]
    assert len(set(names)) == len(names) >= 36
    assert {path.name for path in FOLDER.iterdir() if path.is_dir()} == set(names)


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_weights_are_those_of_the_published_checkpoint(model: Published) -> None:
    ours = counted(model, inventory(model.config)) + value(model.beside)
    assert ours == pytest.approx(value(model.published), rel=0.01)


@pytest.mark.parametrize("model", [m for m in MODELS if m.predictors], ids=by_name)
def test_layers_that_are_not_built_are_named_with_their_size(model: Published) -> None:
    (text,) = [n for n in inventory(model.config).notes if "predict further tokens" in n]
    scale = {"M": 1e6, "G": 1e9, "B": 1e9}
    unit = r"([\d.]+) ([MB]) parameters" if model.in_parameters else r"([\d.]+) ([MG])B"
    sizes = [float(number) * scale[prefix] for number, prefix in re.findall(unit, text)]
    if model.in_parameters and model.folder.startswith("nvidia--DeepSeek"):
        sizes = [size + 2 * 129_280 * 7_168 for size in sizes]  # tables, which it names in bytes
    assert any(size == pytest.approx(value(model.beside), rel=0.02) for size in sizes), text


@pytest.mark.parametrize("model", MODELS, ids=by_name)
def test_what_a_checkpoint_declares_is_said(model: Published) -> None:
    notes = inventory(model.config).notes
    found = declarations(Path(model.config).parent)
    said = [note for note in notes if "weights are stored as" in note]
    assert bool(said) == bool(found)
    for method in (d.get("quant_method", "") for d in found):
        assert METHODS.get(method, "") in said[0]
    assert any("no file declares a quantisation" in note for note in notes) == model.undeclared
    if model.undated:
        assert any("nothing says what the model computes in" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    mostly_heavy(
        (m for m in MODELS if m.cache),
        [m for m in MODELS if m.folder in CACHES],
    ),
    ids=by_name,
)
def test_a_token_takes_as_much_cache_as_by_hand(model: Published) -> None:
    assert cached(model) == value(model.cache)


@pytest.mark.slow
def test_the_page_is_what_make_published_writes() -> None:
    rows = [row(m, inventory(m.config), value(m.cache) if m.cache else None) for m in MODELS]
    assert PAGE.read_text(encoding="utf-8") == page(rows), "run make published"
