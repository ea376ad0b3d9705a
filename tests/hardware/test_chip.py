import dataclasses
import json
import pickle

import pytest

from rooftrace.hardware import load_host
from rooftrace.hardware.chip import Chip, Fact, Link, MissingPeakError, Peak
from rooftrace.hardware.chipfile import load_chip

pytestmark = pytest.mark.quick


def fact(text, unit):
    return Fact.of(text, unit, "made up for this test", "guess")


def make_chip(**changes):
    chip = Chip(
        name="toy",
        title="Toy",
        vendor="Nobody",
        kind="gpu",
        peaks=(
            Peak("matrix", "bf16", fact("100 TFLOP/s", "FLOP/s"), fact("200 TFLOP/s", "FLOP/s")),
            Peak("vector", "fp32", fact("10 TFLOP/s", "FLOP/s")),
        ),
        memory_capacity=fact("16 GiB", "byte"),
        memory_bandwidth=fact("1 TB/s", "byte/s"),
        kernel_gap=fact("1 us", "second"),
        **load_host("typical").facts,
        links=(Link("intra", fact("50 GB/s", "byte/s"), fact("2 us", "second")),),
    )
    return dataclasses.replace(chip, **changes)


def test_a_peak_is_found_by_its_compute_family():
    chip = load_chip("h100")
    assert chip.peak("matrix", "fp8_e4m3") == chip.peak("matrix", "mxfp8") == 1978.9e12
    assert chip.peak("matrix", "torch.bfloat16") == 989.4e12
    assert chip.peak("vector", "complex64") == chip.peak("vector", "fp32")


def test_a_missing_peak_raises_and_lists_what_there_is():
    chip = load_chip("h100-sxm")
    assert not chip.has_peak("matrix", "nvfp4")
    with pytest.raises(MissingPeakError) as error:
        chip.peak("matrix", "nvfp4")
    message = str(error.value)
    assert message.startswith("h100-sxm has no (matrix, fp4 (asked as nvfp4)) rate; it has: ")
    assert "matrix: fp64, tf32, bf16, fp16, fp8, int8; vector: fp64, fp32, fp16, bf16" in message
    assert "TOML" in message
    with pytest.raises(LookupError, match=r"has no \(matrix, fp32\) rate"):
        chip.peak("matrix", "fp32")


def test_an_unknown_engine_is_named():
    with pytest.raises(MissingPeakError, match="engine 'scalar': expected matrix or vector"):
        load_chip("h100").peak("scalar", "fp32")


def test_the_ridge_is_where_compute_and_memory_take_equally_long():
    assert make_chip().ridge("matrix", "bf16") == 100e12 / 1e12


def test_json_keeps_value_source_and_kind():
    data = json.loads(json.dumps(make_chip().to_dict()))
    assert data["memory_bandwidth"] == {
        "value": 1e12,
        "text": "1 TB/s",
        "source": "made up for this test",
        "kind": "guess",
    }
    assert data["peaks"][0]["quoted"]["value"] == 200e12
    assert data["power"] is None
    assert data["links"][0]["latency"]["value"] == 2e-6


def test_the_headline_is_one_line():
    assert make_chip().headline() == (
        "Toy, 100.0 TFLOP/s bf16 dense, 1000 GB/s, 16.0 GiB, ridge 100.0 FLOP/byte"
    )


def test_chips_are_values():
    assert make_chip() == make_chip()
    assert hash(make_chip()) == hash(make_chip())
    assert pickle.loads(pickle.dumps(make_chip())) == make_chip()
    assert make_chip().link("intra").bandwidth.value == 50e9
    assert make_chip().link("inter") is None
