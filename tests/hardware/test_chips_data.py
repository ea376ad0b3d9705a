"""The bundled chips: each file is checked by itself, so that adding one adds its tests.

The tables below say once more what vendors' tables say, for chips that were checked by hand; a chip
that is in none of them is held to what is true of any.
"""

import math
import re
from importlib import resources

import pytest

from rooftrace.hardware import precisions as precision
from rooftrace.hardware.chipfile import available_chips, lint_chip, load_chip

pytestmark = pytest.mark.quick

CHIPS = available_chips()


def test_the_chips_we_promise_are_there():
    promised = "a100-sxm-80 h100-sxm h200-sxm b200-sxm l40s l4 rtx-3090 rtx-4090 rtx-5090 mi300x"
    assert set(promised.split()) <= set(CHIPS)


@pytest.mark.parametrize("name", CHIPS)
def test_it_loads_under_its_own_name_and_lints_clean(name):
    assert load_chip(name).name == name
    assert [finding for finding in lint_chip(name) if finding.severity != "note"] == []


@pytest.mark.parametrize("name", CHIPS)
def test_every_fact_names_a_document_or_says_that_it_is_a_guess(name):
    for place, fact in load_chip(name).facts():
        assert len(fact.source) > 15, place
        if fact.kind == "datasheet":
            assert re.search(r"https://", fact.source), f"{place}: {fact.source}"
        if fact.text.endswith("FLOP/s"):
            assert fact.kind != "guess", place


@pytest.mark.parametrize("name", CHIPS)
def test_every_source_in_the_file_is_used(name):
    text = resources.files("rooftrace.hardware").joinpath(f"chips/{name}.toml").read_text("utf-8")
    block = text.partition("[sources]\n")[2].partition("\n\n")[0]
    for line in block.splitlines():
        assert f'source = "{line.split(" = ")[0]}"' in text, line


def test_no_name_means_two_chips():
    names = [name for chip in CHIPS for name in (chip, *load_chip(chip).aliases)]
    assert len(names) == len(set(names))


# chip: SMs, fp32 lanes in each, clock [Hz], as the vendor's tables give them; typed in here again.
VECTOR = {
    "a100-sxm-80": (108, 64, 1.410e9),
    "a100-sxm-40": (108, 64, 1.410e9),
    "a100-pcie-80": (108, 64, 1.410e9),
    "a100-pcie-40": (108, 64, 1.410e9),
    "h100-sxm": (132, 128, 1.980e9),
    "h200-sxm": (132, 128, 1.980e9),
    "b200-sxm": (148, 128, 1.965e9),
    "l40s": (142, 128, 2.520e9),
    "l4": (58, 128, 2.040e9),
    "rtx-3090": (82, 128, 1.695e9),
    "rtx-4090": (128, 128, 2.520e9),
    "rtx-5090": (170, 128, 2.407e9),
    "rtx-pro-6000": (188, 128, 2.617e9),
    "rtx-pro-6000-max-q": (188, 128, 2.280e9),
    "mi300x": (304, 128, 2.100e9),
}
# chip: dense bf16 multiply-adds per SM and clock with fp32 accumulation, tensor clock [Hz].
MATRIX = {
    "a100-sxm-80": (1024, 1.410e9),
    "a100-sxm-40": (1024, 1.410e9),
    "a100-pcie-80": (1024, 1.410e9),
    "a100-pcie-40": (1024, 1.410e9),
    "h100-sxm": (2048, 1.830e9),
    "h200-sxm": (2048, 1.830e9),
    "b200-sxm": (4096, 1.860e9),
    "l40s": (512, 2.520e9),
    "l4": (512, 2.040e9),
    "rtx-3090": (256, 1.695e9),
    "rtx-4090": (256, 2.520e9),
    "rtx-5090": (256, 2.407e9),
    "rtx-pro-6000": (512, 2.617e9),
    "rtx-pro-6000-max-q": (512, 2.280e9),
    "mi300x": (1024, 2.100e9),
}
# chip: pins, bit/s on each
MEMORY = {
    "a100-sxm-80": (5120, 3.186e9),
    "a100-sxm-40": (5120, 2.430e9),
    "a100-pcie-80": (5120, 3.024e9),
    "a100-pcie-40": (5120, 2.430e9),
    "h100-sxm": (5120, 5.238e9),
    "l40s": (384, 18e9),
    "l4": (192, 12.5e9),
    "rtx-3090": (384, 19.5e9),
    "rtx-4090": (384, 21e9),
    "rtx-5090": (512, 28e9),
    "rtx-pro-6000": (512, 28e9),
    "rtx-pro-6000-max-q": (512, 28e9),
    "mi300x": (8192, 5.2e9),
}


def test_the_tables_above_name_chips_that_there_are():
    assert {*VECTOR, *MATRIX, *MEMORY} <= set(CHIPS)


def gpus_with(*facts):
    """Bundled GPUs that state these facts and a dense rate for bf16, not a measured one."""
    chips = [load_chip(name) for name in CHIPS]
    return [
        chip.name
        for chip in chips
        if chip.kind == "gpu"
        and all(getattr(chip, fact) is not None for fact in facts)
        and chip.has_peak("matrix", "bf16")
        and chip.find_peak("matrix", "bf16").rate.kind != "measured"
    ]


@pytest.mark.parametrize("name", gpus_with("sm_count", "clock"))
def test_a_multiprocessor_does_a_power_of_two_of_multiply_adds_in_a_clock(name):
    chip = load_chip(name)
    per_clock = chip.peak("matrix", "bf16") / (2 * chip.sm_count.value * chip.clock.value)
    whole = 2 ** math.ceil(math.log2(per_clock) - 0.02)
    # Tensor cores of large chips are rated at up to a seventh below the boost clock (H100 NVL).
    assert 0.86 <= per_clock / whole <= 1.02, f"{per_clock:.0f} of bf16"
    assert 128 <= whole <= 16384


@pytest.mark.parametrize("name", gpus_with())
def test_rates_of_half_the_bits_are_twice_or_equal_and_never_less(name):
    chip = load_chip(name)
    for wide, narrow in (("fp64", "tf32"), ("tf32", "bf16"), ("bf16", "fp8"), ("fp8", "fp4")):
        if chip.has_peak("matrix", wide) and chip.has_peak("matrix", narrow):
            assert chip.peak("matrix", narrow) >= chip.peak("matrix", wide), (wide, narrow)


@pytest.mark.parametrize("name", gpus_with())
def test_a_gpu_needs_tens_to_a_thousand_flop_per_byte_to_be_compute_bound(name):
    assert 35 <= load_chip(name).ridge("matrix", "bf16") <= 1000


@pytest.mark.parametrize("name", sorted(VECTOR))
def test_vector_fp32_is_sms_times_lanes_times_two_times_clock(name):
    sms, lanes, clock = VECTOR[name]
    chip = load_chip(name)
    assert chip.sm_count.value == sms
    assert chip.clock.value == pytest.approx(clock)
    assert chip.peak("vector", "fp32") == pytest.approx(sms * lanes * 2 * clock, rel=0.015)


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_matrix_bf16_is_dense(name):
    per_clock, clock = MATRIX[name]
    chip = load_chip(name)
    expected = chip.sm_count.value * per_clock * 2 * clock
    assert chip.peak("matrix", "bf16") == pytest.approx(expected, rel=0.015)


@pytest.mark.parametrize("name", sorted(MEMORY))
def test_bandwidth_is_pins_times_rate(name):
    pins, rate = MEMORY[name]
    expected = pins * rate / 8
    assert load_chip(name).memory_bandwidth.value == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "engine", "of", "tflops"),
    [
        # Famous mistakes: the sparse rate as the dense one, fp16 accumulation on GeForce.
        ("a100", "matrix", "bf16", 312),
        ("h100", "matrix", "bf16", 989.4),
        ("h100", "matrix", "fp8", 1978.9),
        ("b200", "matrix", "fp4", 9000),
        ("l4", "matrix", "fp16", 121),
        ("l40s", "matrix", "fp8", 733),
        ("rtx-3090", "matrix", "fp16", 71),
        ("rtx-4090", "matrix", "fp16", 165.2),
        ("rtx-5090", "matrix", "fp8", 419),
        ("mi300x", "matrix", "fp8", 2614.9),
        ("mi300x", "vector", "fp32", 163.4),
    ],
)
def test_known_rates(name, engine, of, tflops):
    assert load_chip(name).peak(engine, of) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("a100", 300), ("h100", 450), ("h200", 450), ("b200", 900)]
)
def test_nvlink_is_given_per_direction(name, gigabytes):
    assert load_chip(name).link("intra").bandwidth.value == gigabytes * 1e9


@pytest.mark.parametrize("name", CHIPS)
def test_precisions_are_known(name):
    for peak in load_chip(name).peaks:
        assert precision.compute_family(peak.precision) == peak.precision
