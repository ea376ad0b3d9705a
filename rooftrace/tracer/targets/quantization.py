"""The storage precision of weights that a config's quantization_config declares.

The module is traced in the precision that it computes in; the weights are then priced in this one
(`costmodels.rewrite.reprice`) unless another is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_METHOD = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "finegrained_fp8": "fp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "bitnet": "int2",
    "quanto": None,
    "compressed-tensors": None,
}


def weights_precision(config: Any) -> tuple[str | None, str | None]:
    """(storage precision of the quantised weights, text of what was not understood).

    (None, None) for a config without quantization.  Sources: the fields that transformers' own
    quantization configs define (quant_method, bits, load_in_4bit, weights).
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None, None
    if hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if not isinstance(settings, Mapping):
        return None, f"quantization_config {settings!r:.60}"
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method", "")))
    precision = _BY_METHOD.get(method)
    if precision is None and method in ("gptq", "awq", "auto-round", "hqq", "eetq", "vptq"):
        bits = settings.get("bits") or settings.get("nbits") or (8 if method == "eetq" else None)
        precision = {2: "int2", 4: "int4", 8: "int8"}.get(int(bits)) if bits else None
    if precision is None and method == "bitsandbytes":
        precision = (
            "fp4"
            if settings.get("load_in_4bit")
            else "int8"
            if settings.get("load_in_8bit")
            else None
        )
    if precision is None and method == "quanto":
        precision = {"int2": "int2", "int4": "int4", "int8": "int8", "float8": "fp8"}.get(
            str(settings.get("weights"))
        )
    return (precision, None) if precision else (None, f"quantization method {method!r}")
