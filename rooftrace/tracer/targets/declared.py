"""Where a config, and the files next to it, declare how the weights of a checkpoint are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from rooftrace.tracer.targets import quantized_modules
from rooftrace.tracer.targets.quantized_modules import (
    KV,
    ROW,
    SKIPPED,
    Fields,
    ModuleRule,
    NamePattern,
    Scheme,
    Unread,
    WeightFormat,
    activations_in,
    pattern,
    patterns,
    weight_format,
)

BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files next to a config that declare it: of modelopt, of AutoGPTQ, of AutoAWQ."""
_PLACES = ("quantization_config", "compression_config", "quantization")
_NAMED = re.compile(
    r"(?<![a-z0-9])(nvfp4|mxfp[468]|fp8|fp4|int[248]|w\d{1,2}a\d{1,2}|awq|gptq|gguf|bnb|[248]-?bit)"
    r"(?![a-z0-9])",
    re.IGNORECASE,
)

Read = Callable[[str], Any]
"""The contents of a JSON file next to a config, by its name; None where there is none."""


@dataclass(frozen=True)
class Declared:
    """One declaration: where it stands, the config whose modules it is about, its scheme.

    part: the name of the config inside of the config, "" for the outer.  scheme: None where it is
    not understood; problem says why.
    """

    where: str
    part: str
    scheme: Scheme | None
    problem: str = ""


def declared_in(data: Mapping[str, Any], read: Read, name: str) -> tuple[Declared, ...]:
    """The declarations of a config, outermost first; the files next to it where it has none.

    data: of a config.json.  name: of the model, which may promise what no file declares.  Raises
    TargetError for a field of the wrong type.
    """
    declarations = [_of(record, data, where, part) for where, part, record in _records(data, "")]
    if not declarations:
        for file in BESIDE:
            record = read(file)
            if record is not None:
                declarations.append(_of(record, data, file, ""))
                break
    promised = _NAMED.search(name)
    if not declarations and promised:
        problem = f"the name {name!r:.60} says {promised[0]}, and no file declares a quantisation"
        declarations.append(Declared("", "", None, problem))
    return tuple(declarations)


def _records(data: Mapping[str, Any], part: str) -> Iterator[tuple[str, str, Any]]:
    """Declarations of a config and of the configs inside: where, of which part, and the record."""
    for place in _PLACES:
        if data.get(place):
            yield f"{part}.{place}".lstrip("."), part, data[place]
            break
    for name, value in data.items():
        if isinstance(value, Mapping) and name.endswith("config") and name not in _PLACES:
            yield from _records(value, f"{part}.{name}".lstrip("."))


def _of(record: Any, data: Mapping[str, Any], where: str, part: str) -> Declared:
    settings = Fields(record, where)
    if "expert_dtype" in Fields(data, where) and "expert_dtype" not in settings:
        settings = Fields({**settings.data, "expert_dtype": data["expert_dtype"]}, where)
    try:
        return Declared(where, part, scheme_of(settings))
    except Unread as unread:
        return Declared(where, part, None, f"{where}: {unread}")


# -- methods ---------------------------------------------------------------------------------------
# The quantisation methods: how each writes down its formats, and which modules follow them.
#
# A method is a function from its record to a Scheme.  Sources: the quantisation configs of
# transformers 5 and the formats that their kernels read; modelopt's hf_quant_config.json as vLLM
# and TensorRT-LLM read it; the compressed-tensors specification; MLX's `nn.quantize`.  Scales and
# zero points are those that the checkpoints hold: GPTQ and AWQ an fp16 scale and a packed zero
# point for each group, bitsandbytes an fp32 maximum for each block (8 bits and an fp32 one for 256
# of them with double quantisation), NVFP4 an E4M3 scale for 16, the MX formats an E8M0 one for 32.


Method = Callable[[Fields], Scheme]


def scheme_of(settings: Fields) -> Scheme:
    """The scheme of a record.  Raises Unread for an unknown method."""
    name = settings.word("quant_method")
    if not name:
        producer = settings.record("producer")
        of_modelopt = producer is not None and producer.word("name") == "modelopt"
        name = (
            "modelopt" if of_modelopt or "quant_algo" in settings
            else "compressed-tensors" if "config_groups" in settings
            else "awq" if "w_bit" in settings or "q_group_size" in settings
            else "bitsandbytes" if "load_in_4bit" in settings or "load_in_8bit" in settings
            else "gptq" if "desc_act" in settings
            else "mlx" if "bits" in settings and "group_size" in settings
            else ""
        )  # fmt: skip
    method = METHODS.get(name) or METHODS.get(name.replace("_", "-"))
    if method is None:
        raise Unread(f"quantization method {name!r}")
    if settings.flag("dequantize"):
        return Scheme(name, None)
    scheme = method(settings)
    kv = scheme.kv or quantized_modules.cache_in(settings.of(*KV), settings.where)
    return replace(scheme, method=name, kv=kv)


# -- checkpoints in one format ---------------------------------------------------------------------


def _gptq(settings: Fields) -> Scheme:
    form = _grouped(settings, zero=True)
    rules = []
    for name, entry in settings.records("dynamic"):  # of GPTQModel: "-:" leaves out, "+:" changes
        matched = (_searched(name.removeprefix("+:").removeprefix("-:"), settings.where),)
        changed = None if name.startswith("-:") else _grouped(entry, zero=True, base=settings)
        rules.append(ModuleRule(matched, changed))
    head = settings.flag("lm_head")
    only = settings.of("modules_in_block_to_quantize")
    if only:
        names = [name for item in only for name in ([item] if isinstance(item, str) else item)]
        names += ["lm_head"] if head else []
        rules.append(ModuleRule(patterns(names, settings.where), form))
    return Scheme("", None if only else form, tuple(rules), head=head, blocks=True)


def _awq(settings: Fields) -> Scheme:
    zero = settings.flag("zero_point", default=True)
    form = _grouped(settings, zero=zero)
    return Scheme("", form, settings.skipped(*SKIPPED), head=False, blocks=True)


def _auto_round(settings: Fields) -> Scheme:
    rules = settings.skipped(*SKIPPED)
    for name, entry in settings.records("extra_config"):
        matched = (pattern(name, settings.where), _searched(name, settings.where))
        rules += (ModuleRule(matched, _rounded(entry, settings)),)
    return Scheme("", _rounded(settings, settings), rules, head=False, blocks=True)


def _rounded(settings: Fields, base: Fields) -> WeightFormat | None:
    """The form of auto-round: data_type is int, fp, nv_fp or mx_fp, with a width behind or not."""
    bits = settings.integer("bits", default=base.integer("bits", default=4))
    if bits >= 16:
        return None
    kind = settings.word("data_type", default=base.word("data_type", default="int"))
    group = settings.integer("group_size", default=base.integer("group_size", default=128))
    acts = settings.integer("act_bits", default=base.integer("act_bits", default=16))
    act_kind = settings.word("act_data_type", default=base.word("act_data_type", default=kind))
    computes = activations_in("int" if act_kind.startswith("int") else "float", acts)
    if kind.startswith("int"):
        return weight_format("int", bits, group, zero=bits, computes=computes)
    scale = 8 if kind.startswith(("mx", "nv")) else 16
    return weight_format("float", bits, group, scale=scale, computes=computes)


def _grouped(settings: Fields, *, zero: bool, base: Fields | None = None) -> WeightFormat:
    """Packed integers in groups with fp16 scales; with zero points as wide as the numbers."""
    base = base or settings
    names = ("bits", "w_bit", "nbits", "wbits")
    bits = settings.integer(*names, default=base.integer(*names, default=4))
    sizes = ("group_size", "q_group_size")
    group = settings.integer(*sizes, default=base.integer(*sizes, default=128))
    return weight_format("int", bits, group, zero=bits if zero else 0)


def _bitsandbytes(settings: Fields) -> Scheme:
    skipped = settings.skipped("llm_int8_skip_modules")
    if settings.flag("load_in_4bit", "_load_in_4bit"):
        kind = {"nf4": "nf", "fp4": "float"}.get(
            settings.word("bnb_4bit_quant_type", default="fp4")
        )
        if kind is None:
            raise Unread(f"bnb_4bit_quant_type {settings.of('bnb_4bit_quant_type')!r:.40}")
        twice = settings.flag("bnb_4bit_use_double_quant")
        scale = 8 + Fraction(32, 256) if twice else Fraction(32)
        form = weight_format(
            kind, 4, settings.integer("bnb_4bit_blocksize", default=64), scale=scale
        )
    elif settings.flag("load_in_8bit", "_load_in_8bit"):
        form = weight_format("int", 8, ROW, scale=32, computes="int8")  # outliers apart, in 16 bits
    else:
        return Scheme("", None)
    return Scheme("", form, skipped, head=bool(skipped))


def _fp8(settings: Fields) -> Scheme:
    """Blocks of 128 x 128 with fp32 scales (DeepSeek), or one scale for all."""
    rows, group = _block(settings)
    form = weight_format("float", 8, group, rows=rows, scale=32, computes="fp8")
    rules = settings.skipped(*SKIPPED)
    if settings.word("expert_dtype") in ("fp4", "mxfp4"):
        packed = weight_format("float", 4, 32, scale=8, computes="fp8")
        rules += (ModuleRule((re.compile(r".*\.experts(\..*)?$"),), packed),)
    return Scheme("", form, rules, head=False)


def _block(settings: Fields) -> tuple[int, int]:
    """Rows and columns of a block with one scale; (1, 0): one scale for all."""
    block = settings.of("weight_block_size")
    if block is None:
        return 1, 0
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        raise Unread(f"weight_block_size {block!r:.40}")
    sizes = Fields({"rows": block[0], "columns": block[1]}, f"{settings.where}.weight_block_size")
    return sizes.integer("rows"), sizes.integer("columns")


def _fbgemm(settings: Fields) -> Scheme:
    form = weight_format("float", 8, ROW, scale=32, computes="fp8")
    return Scheme("", form, settings.skipped(*SKIPPED), head=False)


def _mxfp4(settings: Fields) -> Scheme:
    return Scheme(
        "", weight_format("float", 4, 32, scale=8), settings.skipped(*SKIPPED), experts=True
    )


def _in_one(kind: str, bits: int, group: int, computes: str = "") -> Method:
    """The method of one format for every linear layer but those that are named."""
    form = weight_format(kind, bits, group, computes=computes)
    return lambda settings: Scheme("", form, settings.skipped(*SKIPPED), head=False)


def _quanto(settings: Fields) -> Scheme:
    acts = {"": "", "none": "", "int8": "int8", "float8": "fp8"}
    computes, weights = acts.get(settings.word("activations")), settings.word("weights")
    if computes is None or weights not in ("float8", "int8", "int4", "int2"):
        raise Unread(f"quanto weights {weights!r} with activations {settings.of('activations')!r}")
    bits = int(weights[-1])
    if bits == 8:
        form = weight_format("float" if weights == "float8" else "int", 8, ROW, computes=computes)
    else:
        form = weight_format("int", bits, 128, zero=16, computes=computes)
    return Scheme("", form, settings.skipped(*SKIPPED), head=False)


def _hqq(settings: Fields) -> Scheme:
    nested = settings.record("quant_config") or settings
    nested = nested.record("weight_quant_params") or nested

    def of(entry: Fields) -> WeightFormat:
        entry = entry.record("weight_quant_params") or entry
        group = entry.integer("group_size", default=nested.integer("group_size", default=64))
        return weight_format("int", entry.integer("nbits", default=4), group, zero=16)

    rules = settings.skipped("skip_modules", *SKIPPED)
    dynamic = list(settings.records("dynamic_config"))
    for name, entry in dynamic:
        rules += (ModuleRule((pattern(name, settings.where),), of(entry)),)
    form = None if dynamic and "nbits" not in nested else of(nested)
    return Scheme("", form, rules, head=False)


def _affine(settings: Fields) -> Scheme:
    """Groups with a scale and an offset, both of 16 bits."""
    form = weight_format("int", settings.integer("bits", "nbits", default=4),
               settings.integer("group_size", default=64), zero=16)  # fmt: skip
    return Scheme("", form, settings.skipped(*SKIPPED), head=False)


def _mlx(settings: Fields) -> Scheme:
    """MLX: linear layers and embeddings; a record, or false, under the name of a module."""
    rules = []
    for name, entry in settings.data.items():
        if isinstance(entry, Mapping) or entry is False:
            changed = None if entry is False else _of_mlx(Fields(entry, settings.where), settings)
            rules.append(ModuleRule((pattern(name, settings.where),), changed))
    return Scheme("", _of_mlx(settings, settings), tuple(rules), embeddings=True)


def _of_mlx(settings: Fields, base: Fields) -> WeightFormat:
    mode = settings.word("mode", default=base.word("mode", default="affine"))
    if mode != "affine":
        if mode not in ("mxfp4", "mxfp8", "nvfp4"):
            raise Unread(f"mode {mode!r}")
        return WeightFormat(mode)
    bits = settings.integer("bits", default=base.integer("bits", default=4))
    group = settings.integer("group_size", default=base.integer("group_size", default=64))
    return weight_format("int", bits, group, zero=16)


def _bitnet(settings: Fields) -> Scheme:
    """Ternary numbers, four to a byte; activations are rounded to 8 bits."""
    if settings.word("quantization_mode", default="offline") == "online":
        return Scheme("", None)
    form = weight_format("int", 2, computes="int8")
    return Scheme("", form, settings.skipped(*SKIPPED), head=False)


def _aqlm(settings: Fields) -> Scheme:
    """Codes of groups; codebooks and the scale of a row are small against them."""
    codes = settings.integer("num_codebooks", default=1)
    bits = Fraction(
        codes * settings.integer("nbits_per_codebook", default=16),
        settings.integer("in_group_size", default=8)
        * settings.integer("out_group_size", default=1),
    )
    if bits.denominator != 1:
        raise Unread(f"{float(bits):.3g} bits a weight")
    skipped = settings.skipped("linear_weights_not_to_quantize")
    return Scheme("", weight_format("int", int(bits), ROW), skipped, head=False)


def _fp_quant(settings: Fields) -> Scheme:
    name = settings.word("forward_dtype", "weight_dtype", "dtype", default="nvfp4")
    if name not in ("nvfp4", "mxfp4"):
        raise Unread(f"weights of {name!r}")
    if settings.flag("store_master_weights", "keep_master_weights"):
        raise Unread("master weights beside the quantised ones")
    form = WeightFormat(name, computes="" if settings.flag("pseudoquantization") else "fp4")
    return Scheme("", form, settings.skipped(*SKIPPED), head=False)


def _gemma(settings: Fields) -> Scheme:
    """Integers with a scale for each row; the width of a module by regular expressions."""
    bits = settings.integer("num_bits", default=4)
    rules = settings.skipped(*SKIPPED)
    for name, entry in settings.records("module_quant_configs"):
        matched = (_searched(name, settings.where),)
        rules += (
            ModuleRule(matched, weight_format("int", entry.integer("num_bits", default=bits), ROW)),
        )
    embeds = settings.flag("quantize_embeddings")
    return Scheme("", weight_format("int", bits, ROW), rules, embeddings=embeds)


def _searched(text: str, where: str) -> NamePattern:
    """A regular expression that may hold anywhere in a name."""
    return pattern(f"re:.*(?:{text.removeprefix('re:')})", where)


METHODS: Mapping[str, Method] = {
    "aqlm": _aqlm,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "awq": _awq,
    "bitnet": _bitnet,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": quantized_modules.compressed_tensors,
    "eetq": _in_one("int", 8, ROW),
    "fbgemm-fp8": _fbgemm,
    "fouroversix": _fp_quant,
    "four-over-six": _fp_quant,
    "fp-quant": _fp_quant,
    "fp8": _fp8,
    "finegrained-fp8": _fp8,
    "gemma": _gemma,
    "gptq": _gptq,
    "gptqmodel": _gptq,
    "hqq": _hqq,
    "metal": _affine,
    "mlx": _mlx,
    "modelopt": quantized_modules.modelopt,
    "modelopt-fp4": quantized_modules.modelopt,
    "modelopt-mixed": quantized_modules.modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _in_one("mxfp8", 8, 0, computes="fp8"),
    "nvfp4": _in_one("nvfp4", 4, 0, computes="fp4"),
    "quanto": _quanto,
    "quark": quantized_modules.quark,
    "sinq": _affine,
    "torchao": quantized_modules.torchao,
}
"""By the name in `quant_method`, with dashes."""
