"""What a quantization_config says of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rooftrace as rt
from rooftrace.tracer.targets.quantization import weights_precision

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq", "bits": 8}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "fp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "quanto", "weights": "int2"}, "int2"),
    ],
)
def test_a_known_method_names_a_precision(settings: dict[str, Any], expected: str) -> None:
    assert weights_precision(SimpleNamespace(quantization_config=settings)) == (expected, None)


def test_no_quantization_says_nothing() -> None:
    assert weights_precision(SimpleNamespace()) == (None, None)


def test_an_unknown_method_is_named() -> None:
    config = SimpleNamespace(quantization_config={"quant_method": "alchemy"})
    assert weights_precision(config) == (None, "quantization method 'alchemy'")


def test_weights_of_a_quantised_config_are_priced_as_declared(root: Path, tmp_path: Path) -> None:
    config = json.loads((root / "examples" / "configs" / "gpt2.json").read_text())
    config |= {"n_layer": 1, "dtype": "bfloat16"}
    plain, quantised = tmp_path / "plain.json", tmp_path / "quantised.json"
    plain.write_text(json.dumps(config))
    quantised.write_text(
        json.dumps(
            {
                **config,
                "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128},
            }
        )
    )
    request = rt.Request(batch=1, seq=8)
    before, after = (
        rt.trace_target(path, ["prefill"], request)["prefill"] for path in (plain, quantised)
    )
    assert any(a.kind == "quantization" for a in after.assumptions)

    def weights(graph: rt.OpGraph) -> int:
        return rt.estimate(graph, execution="eager").bytes.weights

    sixteen_bits = weights(rt.reprice(before))
    assert weights(rt.reprice(after)) == pytest.approx(sixteen_bits * 4 / 16, rel=1e-6)
    assert weights(rt.reprice(after, weights_dtype="int8")) == pytest.approx(sixteen_bits * 8 / 16)
    assert weights(rt.reprice(after, dtype="fp8")) == pytest.approx(sixteen_bits * 8 / 16)
