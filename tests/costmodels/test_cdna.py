"""AMD's data-center GPUs: a generation by its architecture, and kernels of ROCm's libraries."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

import rooftrace as rt
from rooftrace.costmodels.kernels.attention import (
    AOTRITON_RATES,
    LIBRARIES,
    ROCM_RATES,
    SDPA,
    attention_engine,
    attention_knobs,
    attention_seconds,
    library_on,
)
from rooftrace.costmodels.kernels.knobs import Knobs
from rooftrace.hardware import load_chip
from rooftrace.hardware.chipfile.reading import chips_called

MI300X, MI355X = load_chip("mi300x"), load_chip("mi355x")


@pytest.mark.parametrize(
    ("name", "generation"),
    [("mi300x", "cdna3"), ("mi325x", "cdna3"), ("mi350x", "cdna4"), ("mi355x", "cdna4")],
)
def test_a_generation_goes_by_the_architecture(name: str, generation: str) -> None:
    chip = load_chip(name)
    assert Knobs.generation(chip) == generation
    for compiled in (False, True):
        assert f"CDNA {generation[-1]}" in Knobs.typical(chip, compiled).title
    assert Knobs.generation(replace(chip, architecture="gfx90a")) is None
    assert Knobs.generation(replace(chip, architecture="")) is None


def test_gpus_in_virtual_machines_have_their_names() -> None:
    for name in ("AMD Instinct MI300X", "AMD Instinct MI300X VF"):
        assert chips_called(name) == ("mi300x",)


def test_what_was_measured_on_another_chip_says_so() -> None:
    """Of CDNA 4 products alone were measured."""
    parts = "mi300x, mi355x (products)"
    for name, measured in (("mi325x", "mi300x"), ("mi350x", parts), ("mi355x", parts)):
        chip = load_chip(name)
        words = Knobs.typical(chip, compiled=False).borrowed(chip)
        assert f"measured on {measured}, not on {name}" in words
    assert not Knobs.typical(MI300X, compiled=False).borrowed(MI300X)


def product_seconds(chip: str, m: int, n: int, k: int) -> float:
    layer = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16, device="meta")
    x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    (row,) = rt.estimate(rt.trace(layer, x), chip=chip, execution="eager").rows
    return row.timing.t_device


@pytest.mark.parametrize(
    ("chip", "sizes", "seconds"),
    [
        ("mi300x", (8944, 1024, 2816), 99e-6),  # hipBLASLt in a step of Qwen1.5
        ("mi300x", (32, 24576, 4096), 67e-6),  # and of decode under SGLang
        ("mi355x", (32768, 8192, 28672), 10.1e-3),  # a kernel of AITER
        ("mi355x", (64, 6144, 7168), 25e-6),
    ],
)
def test_products_take_about_what_they_took(
    chip: str, sizes: tuple[int, int, int], seconds: float
) -> None:
    assert product_seconds(chip, *sizes) == pytest.approx(seconds, rel=0.2)


def attention(queries: int, keys: int, **other: float) -> dict[str, np.ndarray]:
    sizes = {
        "batch": 8, "queries": queries, "keys": keys, "visible": queries * keys, "heads": 32,
        "kv_heads": 8, "width": 128, "value_width": 128, "size": 2, "kv_size": 2, "masked": 0,
        "paged": 1, "rate": MI300X.peak("matrix", "bf16"), **other,
    }  # fmt: skip
    sizes["bytes"] = 8 * 2 * 128 * (2 * queries * 32 + 2 * keys * 8)
    return {name: np.array([float(value)]) for name, value in sizes.items()}


def seconds(library: str, queries: int, keys: int, **other: float) -> float:
    on = attention_engine(MI300X)
    assert on is not None
    name = library_on(library, MI300X)
    sizes = attention(queries, keys, library=LIBRARIES.index(name), **other)
    knobs = attention_knobs("usual", MI300X, library)
    return float(attention_seconds(sizes, on, knobs, 0.53, 0.78, 3.0).device[0])


def test_pytorch_and_engines_run_kernels_of_rocm() -> None:
    assert library_on(SDPA, MI300X) == library_on(SDPA, MI355X) == "aotriton"
    assert library_on("vllm", MI300X) == library_on("flash3", MI300X) == "rocm"
    assert library_on("triton", MI300X) == "triton"
    assert attention_knobs("usual", MI300X) == AOTRITON_RATES
    assert attention_knobs("usual", MI300X, "vllm") == ROCM_RATES
    assert "rocm" not in {library_on("vllm", load_chip(name)) for name in ("h100", "a100", "l4")}


def test_attn_fwd_takes_masks_of_numbers() -> None:
    masked = seconds(SDPA, 512, 512, masked=1.0)
    assert masked == seconds(SDPA, 512, 512) < float("inf")


@pytest.mark.parametrize(("library", "queries"), [(SDPA, 0), ("vllm", 0), ("vllm", 1)])
def test_more_keys_never_take_less(library: str, queries: int) -> None:
    """queries: 0: as many as there are keys."""
    lengths = [*range(60, 140), *range(250, 262), *range(1000, 1030), 4096, 16384]
    took = [seconds(library, queries or keys, keys) for keys in lengths]
    assert all(before <= after * (1 + 1e-9) for before, after in pairwise(took))
    assert took[-1] > 2 * took[0]
