"""Methods that give a format to each module, or group of modules, of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rooftrace.tracer.targets.quantization.fields import SKIPPED, Fields
from rooftrace.tracer.targets.quantization.schemes import (
    ROW,
    ModuleRule,
    Scheme,
    Unread,
    WeightFormat,
    pattern,
    patterns,
    weight_format,
)

KV = ("kv_cache_quant_algo", "kv_cache_scheme")
"""Fields with the format of the cache.  In Quark's older ones a way of scaling stands there."""
_CLASSES = frozenset({"Linear", "Embedding"})


def activations_in(kind: str, bits: int) -> str:
    """What products compute in whose activations are rounded to this; "" for 16 bits."""
    known = {("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8", ("int", 4): "int4"}
    if bits < 16 and (kind, bits) not in known:
        raise Unread(f"activations of {bits}-bit {kind}")
    return known.get((kind, bits), "")


def cache_in(value: object, where: str) -> str | None:
    """The precision of a cache: a record of num_bits and type, or a name such as "FP8"."""
    if value is None:
        return None
    if isinstance(value, str):
        name = value.lower().partition("_")[0]
        known = {"static": "fp8", "dynamic": "fp8", "none": None}
        known |= {name: name for name in ("fp8", "nvfp4", "int8", "int4")}
        if name not in known:
            raise Unread(f"a cache of {value!r:.40}")
        return known[name]
    settings = Fields(value, where)
    kind, bits = settings.word("type", default="float"), settings.whole("num_bits", default=8)
    return weight_format(kind, bits).element if bits < 16 else None


# -- torchao ---------------------------------------------------------------------------------------


def torchao(settings: Fields) -> Scheme:
    """torchao: one of its config classes for all modules, or one for each name."""
    rules, kind = settings.skipped(*SKIPPED), settings.of("quant_type")
    both = settings.flag("include_input_output_embeddings")
    if isinstance(kind, str):
        keywords = settings.record("quant_type_kwargs") or Fields({}, settings.where)
        own: WeightFormat | None = _of_torchao(kind.replace("_", ""), keywords)
        return Scheme("", own, rules, head=both, embeddings=both)
    inner = settings.record("quant_type")
    inner = inner and (inner.record("default") or inner)
    if inner is None:
        raise Unread("torchao without a quant_type")
    if inner.word("_type") not in ("modulefqntoconfig", "fqntoconfig"):
        return Scheme("", _one_of_torchao(inner), rules, head=both, embeddings=both)
    own = None
    data = inner.record("_data") or inner
    for name, entry in data.records("module_fqn_to_config", "fqn_to_config"):
        if name == "_default":
            own = _one_of_torchao(entry)
        else:
            rules += (ModuleRule((pattern(name, settings.where),), _one_of_torchao(entry)),)
    return Scheme("", own, rules, head=both, embeddings=both)


def _one_of_torchao(settings: Fields) -> WeightFormat:
    name = settings.word("_type").removesuffix("config")
    return _of_torchao(name, settings.record("_data") or settings)


def _of_torchao(name: str, settings: Fields) -> WeightFormat:
    """The form of a torchao config by its class name in lower case, without underscores."""
    group = settings.whole("group_size", default=128)
    rows = "perrow" in str(settings.of("granularity")).lower().replace("_", "")
    known = {
        "int4weightonly": weight_format("int", 4, group, zero=16),
        "int8weightonly": weight_format("int", 8, ROW),
        "int8dynamicactivationint8weight": weight_format("int", 8, ROW, computes="int8"),
        "int8dynamicactivationint4weight": weight_format(
            "int", 4, settings.whole("group_size", default=32), computes="int8"
        ),
        "intxweightonly": _intx(settings, ""),
        "int8dynamicactivationintxweight": _intx(settings, "int8"),
        "float8weightonly": weight_format("float", 8, ROW, scale=32),
        "float8dynamicactivationfloat8weight": weight_format(
            "float", 8, ROW if rows else 0, scale=32, computes="fp8"
        ),
        "float8staticactivationfloat8weight": weight_format("float", 8, 0, computes="fp8"),
        "float8dynamicactivationint4weight": weight_format("int", 4, group, computes="fp8"),
        "nvfp4dynamicactivationnvfp4weight": WeightFormat("nvfp4", computes="fp4"),
        "nvfp4inference": WeightFormat("nvfp4", computes="fp4"),
        "nvfp4weightonly": WeightFormat("nvfp4"),
    }
    named = known.get(name)
    if named is None:
        raise Unread(f"torchao's {name!r:.60}")
    return named


def _intx(settings: Fields, computes: str) -> WeightFormat | None:
    """Integers of torchao of any width, in groups or with a scale for a row."""
    width = re.search(r"int([1-8])\b", str(settings.of("weight_dtype")))
    group = re.search(r"group_size\W+(\d+)", str(settings.of("weight_granularity", "granularity")))
    if width is None:
        return None
    return weight_format("int", int(width[1]), int(group[1]) if group else ROW, computes=computes)


# -- formats by module -----------------------------------------------------------------------------

_ALGORITHMS: Mapping[str, WeightFormat] = {
    "fp8": WeightFormat("fp8", computes="fp8"),
    "fp8_per_channel_per_token": weight_format("float", 8, ROW, scale=32, computes="fp8"),
    "fp8_pb_wo": weight_format("float", 8, 128, rows=128, scale=32, computes="fp8"),
    "fp8_pb_real": weight_format("float", 8, 128, rows=128, scale=32, computes="fp8"),
    "nvfp4": WeightFormat("nvfp4", computes="fp4"),
    "nvfp4_awq": WeightFormat("nvfp4", computes="fp4"),
    "nvfp4_svdquant": WeightFormat("nvfp4", computes="fp4"),
    "w4a16_nvfp4": WeightFormat("nvfp4"),
    "w4a8_nvfp4_fp8": WeightFormat("nvfp4", computes="fp8"),
    "mxfp8": WeightFormat("mxfp8", computes="fp8"),
    "mxfp4": WeightFormat("mxfp4", computes="fp4"),
    "w4a8_mxfp4_fp8": WeightFormat("mxfp4", computes="fp8"),
    "w4a16_mxfp4": WeightFormat("mxfp4"),
    "int4_awq": weight_format("int", 4, 128),
    "w4a16_awq": weight_format("int", 4, 128),
    "w4a16": weight_format("int", 4, 128),
    "w4a8_awq": weight_format("int", 4, 128, computes="fp8"),
    "w4a8_awq_beta": weight_format("int", 4, 128, computes="fp8"),
    "int8_sq": weight_format("int", 8, ROW, scale=32, computes="int8"),
    "w8a8_sq_per_channel": weight_format("int", 8, ROW, scale=32, computes="int8"),
    "int8_wo": weight_format("int", 8, ROW),
    "w8a16": weight_format("int", 8, ROW),
}
"""modelopt's names of formats."""


def modelopt(settings: Fields) -> Scheme:
    """modelopt: an algorithm for all linear layers, or one for each name, and one for the cache."""
    settings = settings.record("quantization") or settings
    kv = cache_in(settings.of(*KV), settings.where)
    rules, own = settings.skipped(*SKIPPED), None
    algorithm = settings.word("quant_algo", "moe_quant_algo")
    layers = list(settings.records("quantized_layers"))
    if layers or algorithm == "mixed_precision":
        for name, entry in layers:
            rules += (ModuleRule((pattern(name, settings.where),), _of_modelopt(entry)),)
    elif algorithm in ("", "none") and "config_groups" in settings:
        rules += tuple(_groups(settings))
    elif algorithm not in ("", "none"):
        own = _of_modelopt(settings)
    return Scheme("", own, rules, kv=kv)


def _of_modelopt(settings: Fields) -> WeightFormat:
    name = settings.word("quant_algo")
    known = _ALGORITHMS.get(name)
    if known is None:
        raise Unread(f"quant_algo {settings.of('quant_algo')!r:.40}")
    group = settings.whole("group_size")
    return replace(known, group=group) if group and known.group > 0 else known


def compressed_tensors(settings: Fields) -> Scheme:
    """compressed-tensors: groups of modules, each with the format of weights and activations."""
    nested = settings.record("quantization_config")
    settings = nested if nested is not None and "config_groups" not in settings else settings
    sparsity = settings.record("sparsity_config")
    unread: tuple[str, ...] = ()
    if sparsity is not None and sparsity.word("format", default="dense") != "dense":
        unread = (f"sparsity_config {sparsity.word('format')!r}: the zeros are counted as stored",)
    rules = settings.skipped("ignore")
    if settings.word("format") != "dense":
        rules += tuple(_groups(settings))
    return Scheme("", None, rules, unread=unread)


def _groups(settings: Fields) -> Iterator[ModuleRule]:
    """The rules of config_groups: each has weights, input_activations and targets."""
    for _, group in settings.records("config_groups"):
        weights, acts = group.record("weights"), group.record("input_activations")
        if weights is None:
            continue
        computes = "" if acts is None else activations_in(
            acts.word("type", default="int"), acts.whole("num_bits", default=8))  # fmt: skip
        targets = group.of("targets") or ["Linear"]
        names = [name for name in targets if name not in _CLASSES and name != "LinearBase"]
        classes = {"Linear" if name == "LinearBase" else name for name in targets}
        packed = group.word("format") or settings.word("format")
        yield ModuleRule(
            patterns(names, f"{group.where}.targets"),
            _of_group(weights, computes, packed),
            frozenset(classes & _CLASSES),
        )


def _of_group(weights: Fields, computes: str, packed: str) -> WeightFormat:
    kind, bits = weights.word("type", default="int"), weights.whole("num_bits", default=8)
    group, strategy = weights.whole("group_size"), weights.word("strategy")
    zero = 0 if weights.flag("symmetric", default=True) else bits
    if strategy == "block" or weights.of("block_structure"):
        block = weights.of("block_structure")
        sizes = re.findall(r"\d+", str(block))[:2]
        rows, inner = map(int, sizes) if len(sizes) == 2 else (128, 128)
        return weight_format(kind, bits, inner, rows=rows, scale=32, computes=computes)
    if strategy == "channel":
        group = ROW
    elif strategy == "tensor":
        group = 0
    micro = kind == "float" and bits <= 8 and (bits, group) in {(4, 16), (4, 32), (8, 32)}
    return weight_format(kind, bits, group, scale=8 if micro else 16, zero=zero, computes=computes)


def quark(settings: Fields) -> Scheme:
    """Quark (AMD): a format for all linear layers, and others by the names of modules."""
    own = settings.record("global_quant_config")
    rules = settings.skipped(*SKIPPED)
    kv = None
    for name, entry in settings.records("layer_quant_config"):
        rules += (ModuleRule((pattern(name, settings.where),), _of_quark(entry)),)
    for _, entry in settings.records("kv_cache_quant_config"):
        outputs = entry.record("output_tensors")
        kv = _quark_kind(outputs)[1] if outputs is not None else kv
    return Scheme("", None if own is None else _of_quark(own), rules, kv=kv)


def _of_quark(settings: Fields) -> WeightFormat | None:
    weights, acts = settings.record("weight"), settings.record("input_tensors")
    if weights is None:
        return None
    kind, name = _quark_kind(weights)
    bits = int(re.sub(r"\D", "", name) or 0)
    computes = "" if acts is None else _quark_kind(acts)[1]
    scheme = weights.word("qscheme", default="per_tensor")
    group = {"per_tensor": 0, "per_channel": ROW}.get(scheme, weights.whole("group_size"))
    scale = 8 if "e8m0" in weights.word("scale_format") or (kind == "float" and bits < 8) else 16
    zero = 0 if weights.flag("symmetric", default=True) else bits
    return weight_format(kind, bits, group, scale=scale, zero=zero if kind == "int" else 0,
                computes=computes)  # fmt: skip


def _quark_kind(settings: Fields) -> tuple[str, str]:
    """Kind and plain name of Quark's dtype: fp8_e4m3, fp4, int8, uint4."""
    name = settings.word("dtype").partition("_")[0].removeprefix("u").removeprefix("mx")
    if name not in ("fp8", "fp6", "fp4", "int8", "int4", "int2"):
        raise Unread(f"Quark's dtype {settings.of('dtype')!r:.40}")
    return ("float" if name.startswith("fp") else "int"), name
