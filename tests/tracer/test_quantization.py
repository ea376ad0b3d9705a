"""What a checkpoint declares of its weights: bytes by hand, the engine of products, the cache.

The model is a Llama of two layers.  Right values are written as arithmetic on its sizes: bits of a
number, and what stands beside each group (an fp16 scale 16, E4M3 or E8M0 8, fp32 32, a packed
zero point as much as a number), as the checkpoints of each method hold them.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rooftrace as rt
from rooftrace.graph import save_graphs
from rooftrace.tracer.targets.declared import METHODS
from rooftrace.tracer.values import dtype_name

VOCAB, WIDTH, INNER, LAYERS, KEYS = 512, 256, 512, 2, 64
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ATTENTION = LAYERS * (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS)
MLP = LAYERS * 3 * WIDTH * INNER
HEAD = EMBEDDING = VOCAB * WIDTH
NORMS = (2 * LAYERS + 1) * WIDTH
ROWS = LAYERS * (2 * WIDTH + 2 * KEYS + 2 * INNER + WIDTH)
"""Output features of all linear layers of the stack."""
LINEAR = ATTENTION + MLP


def bits(width: Any, group: int = 0, beside: Any = 0) -> Fraction:
    return Fraction(width) + (Fraction(beside) / group if group else 0)


def stored(
    linear: Fraction | int, head: Fraction | int = 16, embedding: Fraction | int = 16
) -> int:
    """Bytes of the model with these bits of a number; norms are bf16."""
    total = LINEAR * linear + HEAD * head + EMBEDDING * embedding + NORMS * 16
    return round(total / 8)


def rows(width: int, scale: int) -> int:
    """Bytes of the model with a scale for each output feature of the linear layers."""
    return stored(width) + ROWS * scale // 8


def group(bits_: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits_, "type": kind, **more}


def compressed(weights: Any, acts: Any = None, **more: Any) -> dict[str, Any]:
    one = {"weights": weights, "input_activations": acts, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": one},
        "ignore": ["lm_head"],
        **more,
    }


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def ao(name: str, **data: Any) -> dict[str, Any]:
    kind = {"_type": name, "_version": 1, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": kind}}


FP8, INT8 = group(8, "float", dynamic=True), group(8, "int", dynamic=True)
BLOCK = bits(8, 128 * 128, 32)

# name: (the declaration, bytes by hand, what products of the linear layers compute in on b200)
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "fp8-block": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        stored(BLOCK),
        "fp8",
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, stored(8), "fp8"),
    "fp8-skips": (
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.mlp", "lm_head"]},
        stored(8) + MLP // LAYERS,
        "fp8",
    ),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, rows(8, 32), "fp8"),
    "gptq-4": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        stored(bits(4, 128, 20)),
        "bf16",
    ),
    "gptq-8": (
        {"quant_method": "gptq", "bits": 8, "group_size": 32},
        stored(bits(8, 32, 24)),
        "bf16",
    ),
    "gptq-column": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, rows(4, 20), "bf16"),
    "gptq-head": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True},
        stored(bits(4, 128, 20), bits(4, 128, 20)),
        "bf16",
    ),
    "gptq-dynamic": (
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "dynamic": {"-:.*self_attn.*": {}, r"+:.*\.down_proj": {"bits": 8}},
        },
        stored(bits(4, 128, 20))
        + round(ATTENTION * (16 - bits(4, 128, 20)) / 8)
        + round(LAYERS * WIDTH * INNER * (bits(8, 128, 24) - bits(4, 128, 20)) / 8),
        "bf16",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True},
        stored(bits(4, 64, 20)),
        "bf16",
    ),
    "awq-old": (
        {"w_bit": 4, "q_group_size": 128, "zero_point": True},
        stored(bits(4, 128, 20)),
        "bf16",
    ),
    "auto-round": (
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}},
        },
        stored(bits(4, 128, 20)) + round(WIDTH * INNER * (16 - bits(4, 128, 20)) / 8),
        "bf16",
    ),
    "bnb-nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        stored(bits(4, 64, 32)),
        "bf16",
    ),
    "bnb-double": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        stored(bits(4, 64, 8 + Fraction(32, 256))),
        "bf16",
    ),
    "bnb-int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, rows(8, 32), "int8"),
    "w4a16": (
        compressed(group(4, "int", strategy="group", group_size=128), format="pack-quantized"),
        stored(bits(4, 128, 16)),
        "bf16",
    ),
    "w4a16-asymmetric": (
        compressed(group(4, "int", strategy="group", group_size=128, symmetric=False)),
        stored(bits(4, 128, 20)),
        "bf16",
    ),
    "w8a8-int8": (compressed(group(8, "int", strategy="channel"), INT8), rows(8, 16), "int8"),
    "fp8-dynamic": (compressed(group(8, "float", strategy="channel"), FP8), rows(8, 16), "fp8"),
    "fp8-static": (compressed(group(8, "float", strategy="tensor"), FP8), stored(8), "fp8"),
    "fp8-blocks": (
        compressed(group(8, "float", strategy="block", block_structure=[128, 128]), FP8),
        stored(BLOCK),
        "fp8",
    ),
    "w8a16-fp8": (compressed(group(8, "float", strategy="channel")), rows(8, 16), "bf16"),
    "nvfp4-compressed": (
        compressed(
            group(4, "float", strategy="tensor_group", group_size=16),
            group(4, "float", strategy="tensor_group", group_size=16, dynamic="local"),
        ),
        stored(bits(4, 16, 8)),
        "fp4",
    ),
    "nvfp4a16-compressed": (
        compressed(group(4, "float", strategy="tensor_group", group_size=16)),
        stored(bits(4, 16, 8)),
        "bf16",
    ),
    "by-regex": (
        {
            **compressed(group(8, "int", strategy="channel"), INT8),
            "ignore": ["re:.*self_attn.*", "lm_head"],
        },
        rows(8, 16) + ATTENTION - LAYERS * (2 * WIDTH + 2 * KEYS) * 2,
        "int8",
    ),
    "modelopt-fp8": (modelopt("FP8"), stored(8), "fp8"),
    "modelopt-nvfp4": (modelopt("NVFP4", group_size=16), stored(bits(4, 16, 8)), "fp4"),
    "modelopt-awq": (modelopt("W4A16_AWQ", group_size=128), stored(bits(4, 128, 16)), "bf16"),
    "modelopt-wildcard": (
        modelopt("FP8", exclude_modules=["*self_attn*"], ignore=None)
        | {"exclude_modules": ["lm_head", "*self_attn*"]},
        stored(8) + ATTENTION,
        "fp8",
    ),
    "modelopt-mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                **{
                    f"model.layers.{n}.mlp.{p}_proj": {"quant_algo": "NVFP4", "group_size": 16}
                    for n in range(LAYERS)
                    for p in ("up", "gate", "down")
                },
                **{
                    f"model.layers.{n}.self_attn.{p}_proj": {"quant_algo": "FP8"}
                    for n in range(LAYERS)
                    for p in "qkvo"
                },
            },
        },
        round((MLP * bits(4, 16, 8) + ATTENTION * 8 + 16 * (HEAD + EMBEDDING + NORMS)) / 8),
        "fp4",
    ),
    "mlx": (
        {"bits": 4, "group_size": 64},
        stored(bits(4, 64, 32), bits(4, 64, 32), bits(4, 64, 32)),
        "bf16",
    ),
    "mlx-layers": (
        {
            "bits": 4,
            "group_size": 64,
            "lm_head": {"bits": 8, "group_size": 64},
            "model.embed_tokens": False,
        },
        stored(bits(4, 64, 32), bits(8, 64, 32)),
        "bf16",
    ),
    "mlx-mxfp4": (
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        stored(bits(4, 32, 8), bits(4, 32, 8), bits(4, 32, 8)),
        "bf16",
    ),
    "ao-int4": (ao("Int4WeightOnlyConfig", group_size=128), stored(bits(4, 128, 32)), "bf16"),
    "ao-int8": (ao("Int8WeightOnlyConfig"), rows(8, 16), "bf16"),
    "ao-w8a8": (ao("Int8DynamicActivationInt8WeightConfig"), rows(8, 16), "int8"),
    "ao-fp8-row": (
        ao("Float8DynamicActivationFloat8WeightConfig", granularity=[{"_type": "PerRow"}]),
        rows(8, 32),
        "fp8",
    ),
    "ao-old": (
        {
            "quant_method": "torchao",
            "quant_type": "int4_weight_only",
            "quant_type_kwargs": {"group_size": 64},
        },
        stored(bits(4, 64, 32)),
        "bf16",
    ),
    "ao-intx": (
        ao(
            "Int8DynamicActivationIntxWeightConfig",
            weight_dtype={"_type": "torch.dtype", "_data": "int4"},
            weight_granularity={"_type": "PerGroup", "_data": {"group_size": 32}},
        ),
        stored(bits(4, 32, 16)),
        "int8",
    ),
    "quanto-int8": ({"quant_method": "quanto", "weights": "int8"}, rows(8, 16), "bf16"),
    "quanto-int4": (
        {"quant_method": "quanto", "weights": "int4"},
        stored(bits(4, 128, 32)),
        "bf16",
    ),
    "quanto-fp8": (
        {"quant_method": "quanto", "weights": "float8", "activations": "float8"},
        rows(8, 16),
        "fp8",
    ),
    "hqq": (
        {
            "quant_method": "hqq",
            "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}},
        },
        stored(bits(4, 64, 32)),
        "bf16",
    ),
    "eetq": ({"quant_method": "eetq", "weights": "int8"}, rows(8, 16), "bf16"),
    "bitnet": ({"quant_method": "bitnet"}, stored(2), "int8"),
    "aqlm": (
        {"quant_method": "aqlm", "num_codebooks": 1, "nbits_per_codebook": 16, "in_group_size": 8},
        rows(2, 16),
        "bf16",
    ),
    "fp-quant": (
        {"quant_method": "fp_quant", "forward_dtype": "mxfp4"},
        stored(bits(4, 32, 8)),
        "fp4",
    ),
    "quark-fp8": (
        {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": {
                "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
            },
        },
        stored(8),
        "fp8",
    ),
    "quark-mxfp4": (
        {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": {
                "weight": {
                    "dtype": "fp4",
                    "qscheme": "per_group",
                    "group_size": 32,
                    "scale_format": "e8m0",
                },
                "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32},
            },
        },
        stored(bits(4, 32, 8)),
        "fp4",
    ),
    "nvfp4": ({"quant_method": "nvfp4"}, stored(bits(4, 16, 8)), "fp4"),
    "mxfp8": ({"quant_method": "mxfp8"}, stored(bits(8, 32, 8)), "fp8"),
    "fouroversix": ({"quant_method": "fouroversix"}, stored(bits(4, 16, 8)), "fp4"),
    "metal": (
        {"quant_method": "metal", "bits": 8, "group_size": 64},
        stored(bits(8, 64, 32)),
        "bf16",
    ),
    "sinq": (
        {"quant_method": "sinq", "nbits": 4, "group_size": 64},
        stored(bits(4, 64, 32)),
        "bf16",
    ),
    "gemma": (
        {
            "quant_method": "gemma",
            "num_bits": 4,
            "modules_to_not_convert": ["lm_head"],
            "module_quant_configs": {r"mlp\.down_proj$": {"num_bits": 8}},
        },
        rows(4, 16) + LAYERS * WIDTH * INNER // 2,
        "bf16",
    ),
}


def written(folder: Path, settings: Any, base: dict[str, Any] = BASE, **beside: Any) -> Path:
    """A folder with a config.json that declares this, and with other files."""
    folder.mkdir(exist_ok=True)
    config = folder / "config.json"
    data = base if settings is None else {**base, "quantization_config": settings}
    config.write_text(json.dumps(data))
    for name, content in beside.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return config


def decoded(config: Path, chip: str = "b200-sxm", **options: Any) -> rt.types.Estimate:
    return rt.estimate(config, phase="decode", batch=1, kv=64, chip=chip, **options)


BUFFERS = 2 * 32 * 4  # the rotary frequencies, fp32, and their first values


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_engine_of_a_declared_format(name: str, tmp_path: Path) -> None:
    settings, right, engine = CASES[name]
    e = decoded(written(tmp_path, settings))
    assert e.memory.weights - BUFFERS == pytest.approx(right, rel=1e-3)
    products = {row.precision for row in e.rows if "mlp" in row.module and row.name == "aten.mm"}
    assert engine in products
    assert products <= {engine, "bf16"}
    assert [a.text for a in e.graph.assumptions if a.kind == "quantization"]


def test_every_method_has_a_case() -> None:
    tried = {str(s.get("quant_method", "")).replace("_", "-") for s, _, _ in CASES.values()}
    aliases = {
        "finegrained-fp8", "four-over-six", "gptqmodel", "intel/auto-round", "mlx",
        "modelopt-fp4", "modelopt-mixed", "mxfp4",
    }  # fmt: skip
    assert set(METHODS) - tried <= aliases


# -- which tensors ---------------------------------------------------------------------------------

MIXTRAL = {
    **BASE,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
EXPERTS = 4 * MLP
REST = (ATTENTION + HEAD + EMBEDDING + NORMS + LAYERS * 4 * WIDTH) * 2  # routers too


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({"quant_method": "mxfp4"}, REST + round(EXPERTS * bits(4, 32, 8) / 8)),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"},
            REST - 2 * ATTENTION + round((ATTENTION * BLOCK + EXPERTS * bits(4, 32, 8)) / 8),
        ),
        (
            {
                **compressed(group(4, "int", group_size=32)),
                "ignore": ["re:.*self_attn.*", "lm_head"],
            },
            REST + round(EXPERTS * bits(4, 32, 16) / 8),
        ),
        (
            modelopt(
                "NVFP4", exclude_modules=["lm_head", "model.layers.*.self_attn*"], ignore=None
            ),
            REST + round(EXPERTS * bits(4, 16, 8) / 8),
        ),
        (
            modelopt("FP8", ignore=["lm_head"])
            | {"exclude_modules": ["model.layers.1.block_sparse_moe.experts*"]},
            REST - ATTENTION + EXPERTS + EXPERTS // 2,
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{layer}.mlp.experts.{e}.{name}_proj": {"quant_algo": "FP8"}
                    for layer in range(LAYERS)
                    for e in range(4)
                    for name in ("gate", "up", "down")
                },
            },
            REST + EXPERTS,
        ),
    ],
)
def test_experts_follow_a_declaration(settings: Any, right: int, tmp_path: Path) -> None:
    found = rt.inventory(written(tmp_path, {k: v for k, v in settings.items() if v}, MIXTRAL))
    assert found.bytes_parameters == pytest.approx(right, rel=1e-3)


def test_a_table_that_is_the_head_too_counts_once(tmp_path: Path) -> None:
    base = {**BASE, "tie_word_embeddings": True}
    found = rt.inventory(written(tmp_path, {"bits": 4, "group_size": 64}, base))
    assert found.bytes_parameters == pytest.approx(stored(bits(4, 64, 32), 0, bits(4, 64, 32)))
    (note,) = found.notes
    assert f"({(LINEAR + HEAD) / (LINEAR + HEAD + NORMS):.1%} of the parameters)" in note
    kept = rt.inventory(written(tmp_path, {"quant_method": "fp8"}, base))
    assert kept.bytes_parameters == stored(8, 0)


def test_layers_in_other_formats_are_priced_as_what_they_are(tmp_path: Path) -> None:
    """Equal layers stand once in a graph; here every second one is quantised."""
    base = {**BASE, "num_hidden_layers": 8}
    skipped = [f"model.layers.{n}.mlp" for n in range(0, 8, 2)]
    settings = {"quant_method": "fp8", "modules_to_not_convert": [*skipped, "lm_head"]}
    config = written(tmp_path, settings, base)
    e = decoded(config)
    one = 3 * WIDTH * INNER
    right = 2 * (2 * HEAD + 17 * WIDTH) + 4 * ATTENTION + 4 * 2 * one + 4 * one
    assert e.memory.weights - BUFFERS == pytest.approx(right, rel=1e-3)
    read = sum(row.bytes_by_role.get("weights", 0) for row in e.rows if "mlp" in row.module)
    assert read == pytest.approx(4 * 3 * one, rel=1e-3)
    assert rt.inventory(config).bytes_parameters == pytest.approx(right, rel=1e-3)


def test_a_declaration_of_a_part_is_about_that_part(tmp_path: Path) -> None:
    vision = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    text = {k: v for k, v in BASE.items() if k != "architectures"}
    declared = compressed(group(4, "int", group_size=32))
    base = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": {**text, "quantization_config": declared},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 56, **vision},
        "tie_word_embeddings": False,
        "image_token_index": 500,
    }
    found = rt.inventory(written(tmp_path, None, base))
    by_format: dict[str, int] = {}
    for layer in found.layers:
        by_format[layer.dtype] = by_format.get(layer.dtype, 0) + layer.num_params
    assert by_format["int4_g32"] == LINEAR
    assert all("language_model" in x.name for x in found.layers if x.dtype == "int4_g32")
    (note,) = [note for note in found.notes if "quantization" in note]
    assert note.startswith("text_config.quantization_config (compressed-tensors)")


def test_a_file_beside_the_config_declares_weights_and_cache(tmp_path: Path) -> None:
    content = {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head"],
        },
    }
    e = decoded(written(tmp_path, None, hf_quant_config=content))
    assert e.memory.weights - BUFFERS == pytest.approx(stored(bits(4, 16, 8)), rel=1e-3)
    assert e.memory.kv == LAYERS * 2 * KEYS * 65
    (text,) = [a.text for a in e.graph.assumptions if a.kind == "quantization"]
    assert text.startswith("hf_quant_config.json (modelopt)") and "caches" in text
    wide = decoded(tmp_path / "config.json", kv_dtype="bf16")
    assert wide.memory.kv == 2 * e.memory.kv
    other = tmp_path / "other.json"  # no file of that checkpoint
    other.write_text(json.dumps(BASE))
    assert decoded(other).memory.weights - BUFFERS == stored(16)


@pytest.mark.parametrize(
    ("scheme", "right"),
    [
        ({"num_bits": 8, "type": "float"}, 1.0),
        ({"num_bits": 8, "type": "int"}, 1.0),
        ("FP8", 1.0),
        ("static", 1.0),
        ("NVFP4", 9 / 16),
        ({"num_bits": 16, "type": "float"}, 2.0),
        (None, 2.0),
    ],
)
def test_a_declared_cache(scheme: Any, right: float, tmp_path: Path) -> None:
    for settings in (modelopt("FP8"), compressed(FP8), {"quant_method": "fp8"}):
        e = decoded(written(tmp_path, {**settings, "kv_cache_scheme": scheme}))
        assert e.memory.kv == pytest.approx(LAYERS * 2 * KEYS * 65 * right, rel=1e-3)


# -- engines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "chip", "engine"),
    [
        (modelopt("NVFP4"), "b200-sxm", "fp4"),
        (modelopt("NVFP4"), "h200-sxm", "bf16"),
        (modelopt("FP8"), "h200-sxm", "fp8"),
        (modelopt("FP8"), "a100-sxm-80", "bf16"),
        (compressed(group(8, "int", strategy="channel"), INT8), "a100-sxm-80", "int8"),
        (compressed(group(4, "int", group_size=128), FP8), "h200-sxm", "fp8"),
    ],
)
def test_products_run_on_the_engine_that_a_chip_has(
    settings: Any, chip: str, engine: str, tmp_path: Path
) -> None:
    """Weights are stored alike everywhere; a chip without the engine widens them."""
    e = decoded(written(tmp_path, settings), chip)
    rows = [row for row in e.rows if "mlp" in row.module and row.name == "aten.mm"]
    assert {row.precision for row in rows} == {engine}
    if engine != "int8":  # products as long as if everything were in it
        sizes = dict(phase="prefill", batch=8, seq=512, chip=chip, execution="naive")
        mine = rt.estimate(tmp_path / "config.json", **sizes)
        plain = rt.estimate(written(tmp_path / "plain", None), dtype=engine, **sizes)
        took, other = (
            sum(r.timing.t_comp for r in each.rows if "mlp" in r.module and r.name == "aten.mm")
            for each in (mine, plain)
        )
        assert took == pytest.approx(other, rel=0.2)  # narrow weights feed tiles faster


def test_a_sweep_agrees_with_an_estimate(tmp_path: Path) -> None:
    config = written(tmp_path, {**modelopt("FP8"), "kv_cache_scheme": "FP8"})
    swept = rt.sweep(str(config), over={"batch": [1, 4]}, phase="decode", kv=64, chip="h200-sxm")
    for row in swept.frame().to_dict("records"):
        e = rt.estimate(
            config,
            phase="decode",
            batch=row["batch"],
            kv=64,
            chip="h200-sxm",
            execution="efficient",
        )
        assert row["t_est"] == pytest.approx(e.t_est, rel=1e-9)


# -- what is asked for, and what is kept -----------------------------------------------------------


def test_another_precision_can_be_asked_for(tmp_path: Path) -> None:
    config = written(tmp_path, {"quant_method": "awq", "bits": 4, "group_size": 128})
    assert decoded(config, weights_dtype="bf16").memory.weights - BUFFERS == stored(16)
    assert decoded(config, dtype="fp8").memory.weights - BUFFERS == stored(8, 8, 8) - NORMS
    asked = decoded(config, weights_dtype="int4_g128_z4")
    every = round((LINEAR + HEAD + EMBEDDING + NORMS) * bits(4, 128, 20) / 8)
    assert asked.memory.weights - BUFFERS == pytest.approx(every, rel=1e-3)


def test_formats_are_kept_in_a_saved_graph(tmp_path: Path) -> None:
    config = written(tmp_path / "model", {**modelopt("NVFP4"), "kv_cache_scheme": "FP8"})
    graphs = rt.tools.trace_target(str(config), ["decode"], rt.types.Request(batch=1, kv=64))
    saved = save_graphs(graphs, tmp_path / "graph.json.gz")
    before, after = decoded(config), rt.estimate(saved, chip="b200-sxm")
    assert after.memory == before.memory and after.t_est == before.t_est
    assert {v.stored for v in graphs["decode"].values} == {"", "nvfp4_afp4"}


# -- what is not understood ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"quant_method": "alchemy"}, "quantization method 'alchemy'"),
        ({"quant_method": "vptq"}, "quantization method 'vptq'"),
        (modelopt("W3A7"), "quant_algo 'W3A7'"),
        (ao("Int5MagicConfig"), "torchao's 'int5magic'"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
        ({**modelopt("FP8"), "kv_cache_scheme": "FP3"}, "a cache of 'FP3'"),
        ({"quant_method": "gptq", "bits": 7}, "7-bit int"),
        (compressed(group(8, "float"), group(6, "float")), "activations of 6-bit float"),
    ],
)
def test_what_is_not_understood_is_named(settings: Any, named: str, tmp_path: Path) -> None:
    e = decoded(written(tmp_path, settings))
    (text,) = [a.text for a in e.graph.assumptions if a.kind == "quantization"]
    assert named in text and "59%" not in text and "priced unquantised" in text
    assert "quantization_config" in text and "--weights-dtype" in text
    assert e.memory.weights - BUFFERS == stored(16)


def test_a_promise_of_the_name_alone_is_said(tmp_path: Path) -> None:
    config = written(tmp_path / "Llama-9-NVFP4", None)
    (text,) = [a.text for a in decoded(config).graph.assumptions if a.kind == "quantization"]
    assert "says NVFP4" in text and "hf_quant_config.json" in text
    assert not rt.inventory(written(tmp_path / "Llama-9", None)).notes


@pytest.mark.parametrize(
    ("settings", "quoted"),
    [
        (7, "expected a record"),
        ({"quant_method": "gptq", "bits": "four"}, "'four': expected a whole number"),
        ({"quant_method": "awq", "zero_point": "yes"}, "'yes': expected true or false"),
        ({"quant_method": 3}, "3: expected a word"),
        ({"quant_method": "fp8", "modules_to_not_convert": {"a": 1}}, "expected a list of names"),
        ({"quant_method": "fp8", "modules_to_not_convert": [["a"]]}, "expected the name"),
        (compressed(FP8, ignore=["re:(.|..|...)+[A-Z]$"]), "takes longer than 1 s"),
        (compressed(FP8, ignore=["re:("]), "expected a regular expression"),
    ],
)
def test_a_field_of_the_wrong_type_is_quoted(settings: Any, quoted: str, tmp_path: Path) -> None:
    with pytest.raises(rt.types.TargetError, match="quantization_config") as error:
        decoded(written(tmp_path, settings))
    assert quoted in str(error.value)


# -- the precision that the model computes in ------------------------------------------------------

PLAIN = {k: v for k, v in BASE.items() if k != "torch_dtype"}


@pytest.mark.parametrize(
    ("fields", "dtype", "said"),
    [
        ({"dtype": "float16"}, "fp16", False),
        ({"torch_dtype": "float32"}, "fp32", False),
        ({"torch_dtype": "torch.bfloat16"}, "bf16", False),
        ({"torch_dtype": "auto"}, "bf16", True),
        ({"dtype": None}, "bf16", True),
        ({}, "bf16", True),
    ],
)
def test_the_precision_is_read_or_said(fields: Any, dtype: str, said: bool, tmp_path: Path) -> None:
    e = decoded(written(tmp_path, None, {**PLAIN, **fields}))
    assert e.graph.model["dtype"] == dtype
    assert any(a.kind == "precision" for a in e.graph.assumptions) is said


def test_the_precision_of_a_part_is_that_of_the_model(tmp_path: Path) -> None:
    vision = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4)
    base = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "vision_config": {
            "model_type": "siglip_vision_model", "image_size": 56, "dtype": "float32", **vision,
        },
        "text_config": {**PLAIN, "dtype": "float16"},
        "image_token_index": 500,
    }  # fmt: skip
    found = rt.inventory(written(tmp_path, None, base))
    assert {layer.dtype for layer in found.layers} == {"fp16"}
    assert "text_config.dtype says fp16" in " ".join(found.notes)
    assert "vision_config.dtype says fp32" in " ".join(found.notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_tensors_beside_a_config_say_the_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    config = written(tmp_path, None, PLAIN)
    tensors = {"a": torch.zeros(64, 8, dtype=dtype), "b": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = rt.inventory(config)
    assert {layer.dtype for layer in found.layers} == {dtype_name(dtype)}
    assert "most of the checkpoint beside it" in " ".join(found.notes)


@pytest.mark.parametrize(("width", "dtype"), [(2, "bf16"), (4, "fp32")])
def test_an_index_without_its_shards_says_the_width(width: int, dtype: str, tmp_path: Path) -> None:
    parameters = LINEAR + HEAD + EMBEDDING + NORMS
    index = {"metadata": {"total_size": width * parameters}, "weight_map": {"a": "b.safetensors"}}
    config = written(tmp_path, None, PLAIN, **{"model.safetensors.index": index})
    found = rt.inventory(config)
    assert {layer.dtype for layer in found.layers} == {dtype}
    assert f"{width}.0 bytes a parameter, so {dtype}" in found.notes[0]
    e = decoded(config)
    assert e.graph.model["dtype"] == dtype


def test_layers_for_further_tokens_are_named(tmp_path: Path) -> None:
    found = rt.inventory(written(tmp_path, None, {**BASE, "num_nextn_predict_layers": 2}))
    (note,) = found.notes
    layer = LINEAR // LAYERS + 2 * WIDTH + 2 * WIDTH**2  # and a projection of two states
    assert note.startswith("num_nextn_predict_layers is 2")
    assert f"{2 * layer / 1e6:.2f} M parameters" in note
