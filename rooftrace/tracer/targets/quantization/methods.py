"""The quantisation methods: how each writes down its formats, and which modules follow them.

A method is a function from its record to a Scheme.  Sources: the quantisation configs of
transformers 5 and the formats that their kernels read; modelopt's hf_quant_config.json as vLLM and
TensorRT-LLM read it; the compressed-tensors specification; MLX's `nn.quantize`.  Scales and zero
points are those that the checkpoints hold: GPTQ and AWQ an fp16 scale and a packed zero point for
each group, bitsandbytes an fp32 maximum for each block (8 bits and an fp32 one for 256 of them with
double quantisation), NVFP4 an E4M3 scale for 16, the MX formats an E8M0 one for 32.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from rooftrace.tracer.targets.quantization.schemes import (
    ROW,
    Form,
    Rule,
    Scheme,
    Unread,
    form,
    pattern,
    patterns,
)
from rooftrace.tracer.targets.quantization.settings import Settings

Method = Callable[[Settings], Scheme]
_CLASSES = frozenset({"Linear", "Embedding"})
_SKIPPED = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "exclude")


def scheme_of(settings: Settings) -> Scheme:
    """The scheme of a record.  Raises Unread for a method that is not known."""
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
    return replace(method(settings), method=name)


def activations(kind: str, bits: int) -> str:
    """What products compute in whose activations are rounded to this; "" for 16 bits."""
    known = {("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8", ("int", 4): "int4"}
    if bits < 16 and (kind, bits) not in known:
        raise Unread(f"activations of {bits}-bit {kind}")
    return known.get((kind, bits), "")


def cache(value: object, where: str) -> str | None:
    """The precision of a cache: a record of num_bits and type, or a name such as "FP8"."""
    if value is None:
        return None
    if isinstance(value, str):
        name = value.lower().partition("_")[0]
        known = {"fp8": "fp8", "nvfp4": "nvfp4", "int8": "int8", "int4": "int4", "none": None}
        if name not in known:
            raise Unread(f"a cache of {value!r:.40}")
        return known[name]
    settings = Settings(value, where)
    kind, bits = settings.word("type", default="float"), settings.whole("num_bits", default=8)
    return form(kind, bits).element if bits < 16 else None


# -- whole checkpoints in one format ---------------------------------------------------------------


def _gptq(settings: Settings) -> Scheme:
    own = _grouped(settings, zero=True)
    rules = []
    for name, entry in settings.records("dynamic"):  # of GPTQModel: "-:" leaves out, "+:" changes
        found = (_searched(name.removeprefix("+:").removeprefix("-:"), settings.where),)
        changed = None if name.startswith("-:") else _grouped(entry, zero=True, base=settings)
        rules.append(Rule(found, changed))
    head = settings.flag("lm_head")
    only = settings.of("modules_in_block_to_quantize")
    if only:
        names = [name for item in only for name in ([item] if isinstance(item, str) else item)]
        names += ["lm_head"] if head else []
        rules.append(Rule(patterns(names, settings.where), own))
    return Scheme("", None if only else own, tuple(rules), head=head, blocks=True)


def _awq(settings: Settings) -> Scheme:
    zero = settings.flag("zero_point", default=True)
    own = _grouped(settings, zero=zero)
    return Scheme("", own, settings.skipped(*_SKIPPED), head=False, blocks=True)


def _auto_round(settings: Settings) -> Scheme:
    rules = settings.skipped(*_SKIPPED)
    for name, entry in settings.records("extra_config"):
        found = (pattern(name, settings.where), _searched(name, settings.where))
        rules += (Rule(found, _rounded(entry, settings)),)
    return Scheme("", _rounded(settings, settings), rules, head=False, blocks=True)


def _rounded(settings: Settings, base: Settings) -> Form | None:
    """The form of auto-round: data_type is int, fp, nv_fp or mx_fp, with a width behind or not."""
    bits = settings.whole("bits", default=base.whole("bits", default=4))
    if bits >= 16:
        return None
    kind = settings.word("data_type", default=base.word("data_type", default="int"))
    group = settings.whole("group_size", default=base.whole("group_size", default=128))
    acts = settings.whole("act_bits", default=base.whole("act_bits", default=16))
    act_kind = settings.word("act_data_type", default=base.word("act_data_type", default=kind))
    computes = activations("int" if act_kind.startswith("int") else "float", acts)
    if kind.startswith("int"):
        return form("int", bits, group, zero=bits, computes=computes)
    scale = 8 if kind.startswith(("mx", "nv")) else 16
    return form("float", bits, group, scale=scale, computes=computes)


def _grouped(settings: Settings, *, zero: bool, base: Settings | None = None) -> Form:
    """Packed integers in groups with fp16 scales; with zero points as wide as the numbers."""
    base = base or settings
    names = ("bits", "w_bit", "nbits", "wbits")
    bits = settings.whole(*names, default=base.whole(*names, default=4))
    sizes = ("group_size", "q_group_size")
    group = settings.whole(*sizes, default=base.whole(*sizes, default=128))
    return form("int", bits, group, zero=bits if zero else 0)


def _bitsandbytes(settings: Settings) -> Scheme:
    skipped = settings.skipped("llm_int8_skip_modules")
    if settings.flag("load_in_4bit", "_load_in_4bit"):
        kind = {"nf4": "nf", "fp4": "float"}.get(
            settings.word("bnb_4bit_quant_type", default="fp4")
        )
        if kind is None:
            raise Unread(f"bnb_4bit_quant_type {settings.of('bnb_4bit_quant_type')!r:.40}")
        twice = settings.flag("bnb_4bit_use_double_quant")
        scale = 8 + Fraction(32, 256) if twice else Fraction(32)
        own = form(kind, 4, settings.whole("bnb_4bit_blocksize", default=64), scale=scale)
    elif settings.flag("load_in_8bit", "_load_in_8bit"):
        own = form("int", 8, ROW, scale=32, computes="int8")  # outliers apart, in 16 bits
    else:
        return Scheme("", None)
    return Scheme("", own, skipped, head=bool(skipped))


def _fp8(settings: Settings) -> Scheme:
    """Blocks of 128 x 128 with fp32 scales (DeepSeek), or one scale for all."""
    rows, group = _block(settings)
    own = form("float", 8, group, rows=rows, scale=32, computes="fp8")
    rules = settings.skipped(*_SKIPPED)
    if settings.word("expert_dtype") in ("fp4", "mxfp4"):
        packed = form("float", 4, 32, scale=8, computes="fp8")
        rules += (Rule((re.compile(r".*\.experts(\..*)?$"),), packed),)
    return Scheme("", own, rules, head=False)


def _block(settings: Settings) -> tuple[int, int]:
    """Rows and columns of a block with one scale; (1, 0): one scale for all."""
    block = settings.of("weight_block_size")
    if block is None:
        return 1, 0
    if not isinstance(block, (list, tuple)) or len(block) != 2:
        raise Unread(f"weight_block_size {block!r:.40}")
    sizes = Settings({"rows": block[0], "columns": block[1]}, f"{settings.where}.weight_block_size")
    return sizes.whole("rows"), sizes.whole("columns")


def _fbgemm(settings: Settings) -> Scheme:
    own = form("float", 8, ROW, scale=32, computes="fp8")
    return Scheme("", own, settings.skipped(*_SKIPPED), head=False)


def _mxfp4(settings: Settings) -> Scheme:
    return Scheme("", form("float", 4, 32, scale=8), settings.skipped(*_SKIPPED), experts=True)


def _in_one(
    kind: str, bits: int, group: int, head: bool = False, scale: int = 16, computes: str = ""
) -> Method:
    """The method of one format for every linear layer but those that are named."""

    def method(settings: Settings) -> Scheme:
        own = form(kind, bits, group, scale=scale, computes=computes)
        return Scheme("", own, settings.skipped(*_SKIPPED), head=head)

    return method


def _quanto(settings: Settings) -> Scheme:
    acts = {"": "", "none": "", "int8": "int8", "float8": "fp8"}
    computes, weights = acts.get(settings.word("activations")), settings.word("weights")
    if computes is None or weights not in ("float8", "int8", "int4", "int2"):
        raise Unread(f"quanto weights {weights!r} with activations {settings.of('activations')!r}")
    bits = int(weights[-1])
    if bits == 8:
        own = form("float" if weights == "float8" else "int", 8, ROW, computes=computes)
    else:
        own = form("int", bits, 128, zero=16, computes=computes)
    return Scheme("", own, settings.skipped(*_SKIPPED), head=False)


def _hqq(settings: Settings) -> Scheme:
    nested = settings.record("quant_config") or settings
    nested = nested.record("weight_quant_params") or nested

    def of(entry: Settings) -> Form:
        entry = entry.record("weight_quant_params") or entry
        group = entry.whole("group_size", default=nested.whole("group_size", default=64))
        return form("int", entry.whole("nbits", default=4), group, zero=16)

    rules = settings.skipped("skip_modules", *_SKIPPED)
    dynamic = list(settings.records("dynamic_config"))
    for name, entry in dynamic:
        rules += (Rule((pattern(name, settings.where),), of(entry)),)
    own = None if dynamic and "nbits" not in nested else of(nested)
    return Scheme("", own, rules, head=False)


def _affine(settings: Settings) -> Scheme:
    """Groups with a scale and an offset, both of 16 bits."""
    own = form("int", settings.whole("bits", "nbits", default=4),
               settings.whole("group_size", default=64), zero=16)  # fmt: skip
    return Scheme("", own, settings.skipped(*_SKIPPED), head=False)


def _mlx(settings: Settings) -> Scheme:
    """MLX: linear layers and embeddings; a record, or false, under the name of a module."""
    rules = []
    for name, entry in settings.data.items():
        if isinstance(entry, Mapping) or entry is False:
            changed = None if entry is False else _of_mlx(Settings(entry, settings.where), settings)
            rules.append(Rule((pattern(name, settings.where),), changed))
    return Scheme("", _of_mlx(settings, settings), tuple(rules), embeddings=True)


def _of_mlx(settings: Settings, base: Settings) -> Form:
    mode = settings.word("mode", default=base.word("mode", default="affine"))
    if mode != "affine":
        if mode not in ("mxfp4", "mxfp8", "nvfp4"):
            raise Unread(f"mode {mode!r}")
        return Form(mode)
    bits = settings.whole("bits", default=base.whole("bits", default=4))
    group = settings.whole("group_size", default=base.whole("group_size", default=64))
    return form("int", bits, group, zero=16)


def _bitnet(settings: Settings) -> Scheme:
    """Ternary numbers, four to a byte; activations are rounded to 8 bits."""
    if settings.word("quantization_mode", default="offline") == "online":
        return Scheme("", None)
    own = form("int", 2, computes="int8")
    return Scheme("", own, settings.skipped(*_SKIPPED), head=False)


def _aqlm(settings: Settings) -> Scheme:
    """Codes of whole groups; codebooks and the scale of a row are small beside them."""
    codes = settings.whole("num_codebooks", default=1)
    bits = Fraction(
        codes * settings.whole("nbits_per_codebook", default=16),
        settings.whole("in_group_size", default=8) * settings.whole("out_group_size", default=1),
    )
    if bits.denominator != 1:
        raise Unread(f"{float(bits):.3g} bits a weight")
    skipped = settings.skipped("linear_weights_not_to_quantize")
    return Scheme("", form("int", int(bits), ROW), skipped, head=False)


def _fp_quant(settings: Settings) -> Scheme:
    name = settings.word("forward_dtype", "weight_dtype", "dtype", default="nvfp4")
    if name not in ("nvfp4", "mxfp4"):
        raise Unread(f"weights of {name!r}")
    if settings.flag("store_master_weights", "keep_master_weights"):
        raise Unread("master weights beside the quantised ones")
    own = Form(name, computes="" if settings.flag("pseudoquantization") else "fp4")
    return Scheme("", own, settings.skipped(*_SKIPPED), head=False)


def _gemma(settings: Settings) -> Scheme:
    """Integers with a scale for each row; the width of a module by regular expressions."""
    bits = settings.whole("num_bits", default=4)
    rules = settings.skipped(*_SKIPPED)
    for name, entry in settings.records("module_quant_configs"):
        found = (_searched(name, settings.where),)
        rules += (Rule(found, form("int", entry.whole("num_bits", default=bits), ROW)),)
    embeds = settings.flag("quantize_embeddings")
    return Scheme("", form("int", bits, ROW), rules, embeddings=embeds)


def _searched(text: str, where: str) -> re.Pattern[str]:
    """A regular expression that may hold anywhere in a name."""
    return pattern(f"re:.*(?:{text.removeprefix('re:')})", where)


# -- torchao ---------------------------------------------------------------------------------------


def _torchao(settings: Settings) -> Scheme:
    rules, kind = settings.skipped(*_SKIPPED), settings.of("quant_type")
    both = settings.flag("include_input_output_embeddings")
    if isinstance(kind, str):
        given = settings.record("quant_type_kwargs") or Settings({}, settings.where)
        own: Form | None = _of_torchao(kind.replace("_", ""), given)
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
            rules += (Rule((pattern(name, settings.where),), _one_of_torchao(entry)),)
    return Scheme("", own, rules, head=both, embeddings=both)


def _one_of_torchao(settings: Settings) -> Form:
    name = settings.word("_type").removesuffix("config")
    return _of_torchao(name, settings.record("_data") or settings)


def _of_torchao(name: str, settings: Settings) -> Form:
    """The form of a torchao config by its class name in lower case, without underscores."""
    group = settings.whole("group_size", default=128)
    rows = "perrow" in str(settings.of("granularity")).lower().replace("_", "")
    known = {
        "int4weightonly": form("int", 4, group, zero=16),
        "int8weightonly": form("int", 8, ROW),
        "int8dynamicactivationint8weight": form("int", 8, ROW, computes="int8"),
        "int8dynamicactivationint4weight": form(
            "int", 4, settings.whole("group_size", default=32), computes="int8"
        ),
        "int8dynamicactivationintxweight": None,
        "float8weightonly": form("float", 8, ROW, scale=32),
        "float8dynamicactivationfloat8weight": form(
            "float", 8, ROW if rows else 0, scale=32, computes="fp8"
        ),
        "float8staticactivationfloat8weight": form("float", 8, 0, computes="fp8"),
        "float8dynamicactivationint4weight": form("int", 4, group, computes="fp8"),
        "nvfp4dynamicactivationnvfp4weight": Form("nvfp4", computes="fp4"),
        "nvfp4inference": Form("nvfp4", computes="fp4"),
        "nvfp4weightonly": Form("nvfp4"),
    }
    found = known.get(name)
    if found is None:
        raise Unread(f"torchao's {name!r:.60}")
    return found


# -- formats by module -----------------------------------------------------------------------------

_ALGORITHMS: Mapping[str, Form] = {
    "fp8": Form("fp8", computes="fp8"),
    "fp8_per_channel_per_token": form("float", 8, ROW, scale=32, computes="fp8"),
    "fp8_pb_wo": form("float", 8, 128, rows=128, scale=32, computes="fp8"),
    "fp8_pb_real": form("float", 8, 128, rows=128, scale=32, computes="fp8"),
    "nvfp4": Form("nvfp4", computes="fp4"),
    "nvfp4_awq": Form("nvfp4", computes="fp4"),
    "nvfp4_svdquant": Form("nvfp4", computes="fp4"),
    "w4a16_nvfp4": Form("nvfp4"),
    "w4a8_nvfp4_fp8": Form("nvfp4", computes="fp8"),
    "mxfp8": Form("mxfp8", computes="fp8"),
    "mxfp4": Form("mxfp4", computes="fp4"),
    "w4a8_mxfp4_fp8": Form("mxfp4", computes="fp8"),
    "w4a16_mxfp4": Form("mxfp4"),
    "int4_awq": form("int", 4, 128),
    "w4a16_awq": form("int", 4, 128),
    "w4a16": form("int", 4, 128),
    "w4a8_awq": form("int", 4, 128, computes="fp8"),
    "w4a8_awq_beta": form("int", 4, 128, computes="fp8"),
    "int8_sq": form("int", 8, ROW, scale=32, computes="int8"),
    "w8a8_sq_per_channel": form("int", 8, ROW, scale=32, computes="int8"),
    "int8_wo": form("int", 8, ROW),
    "w8a16": form("int", 8, ROW),
}
"""modelopt's names of formats."""


def _modelopt(settings: Settings) -> Scheme:
    settings = settings.record("quantization") or settings
    kv = cache(settings.of("kv_cache_quant_algo", "kv_cache_scheme"), settings.where)
    rules, own = settings.skipped(*_SKIPPED), None
    algorithm = settings.word("quant_algo", "moe_quant_algo")
    layers = list(settings.records("quantized_layers"))
    if layers or algorithm == "mixed_precision":
        for name, entry in layers:
            rules += (Rule((pattern(name, settings.where),), _of_modelopt(entry)),)
    elif algorithm in ("", "none") and "config_groups" in settings:
        rules += tuple(_groups(settings))
    elif algorithm not in ("", "none"):
        own = _of_modelopt(settings)
    return Scheme("", own, rules, kv=kv)


def _of_modelopt(settings: Settings) -> Form:
    name = settings.word("quant_algo")
    known = _ALGORITHMS.get(name)
    if known is None:
        raise Unread(f"quant_algo {settings.of('quant_algo')!r:.40}")
    group = settings.whole("group_size")
    return replace(known, group=group) if group and known.group > 0 else known


def _compressed(settings: Settings) -> Scheme:
    nested = settings.record("quantization_config")
    settings = nested if nested is not None and "config_groups" not in settings else settings
    kv = cache(settings.of("kv_cache_scheme"), settings.where)
    sparsity = settings.record("sparsity_config")
    unread: tuple[str, ...] = ()
    if sparsity is not None and sparsity.word("format", default="dense") != "dense":
        unread = (f"sparsity_config {sparsity.word('format')!r}: the zeros are counted as stored",)
    rules = settings.skipped("ignore")
    if settings.word("format") != "dense":
        rules += tuple(_groups(settings))
    return Scheme("", None, rules, kv=kv, unread=unread)


def _groups(settings: Settings) -> Iterator[Rule]:
    """The rules of config_groups: each has weights, input_activations and targets."""
    for _, group in settings.records("config_groups"):
        weights, acts = group.record("weights"), group.record("input_activations")
        if weights is None:
            continue
        computes = "" if acts is None else activations(
            acts.word("type", default="int"), acts.whole("num_bits", default=8))  # fmt: skip
        targets = group.of("targets") or ["Linear"]
        names = [name for name in targets if name not in _CLASSES and name != "LinearBase"]
        classes = {"Linear" if name == "LinearBase" else name for name in targets}
        packed = group.word("format") or settings.word("format")
        yield Rule(
            patterns(names, f"{group.where}.targets"),
            _of_group(weights, computes, packed),
            frozenset(classes & _CLASSES),
        )


def _of_group(weights: Settings, computes: str, packed: str) -> Form:
    kind, bits = weights.word("type", default="int"), weights.whole("num_bits", default=8)
    group, strategy = weights.whole("group_size"), weights.word("strategy")
    zero = 0 if weights.flag("symmetric", default=True) else bits
    if strategy == "block" or weights.of("block_structure"):
        block = weights.of("block_structure")
        sizes = re.findall(r"\d+", str(block))[:2]
        rows, inner = map(int, sizes) if len(sizes) == 2 else (128, 128)
        return form(kind, bits, inner, rows=rows, scale=32, computes=computes)
    if strategy == "channel":
        group = ROW
    elif strategy == "tensor":
        group = 0
    micro = kind == "float" and bits <= 8 and (bits, group) in {(4, 16), (4, 32), (8, 32)}
    return form(kind, bits, group, scale=8 if micro else 16, zero=zero, computes=computes)


def _quark(settings: Settings) -> Scheme:
    own = settings.record("global_quant_config")
    rules = settings.skipped(*_SKIPPED)
    kv = None
    for name, entry in settings.records("layer_quant_config"):
        rules += (Rule((pattern(name, settings.where),), _of_quark(entry)),)
    for _, entry in settings.records("kv_cache_quant_config"):
        outputs = entry.record("output_tensors")
        kv = _quark_kind(outputs)[1] if outputs is not None else kv
    return Scheme("", None if own is None else _of_quark(own), rules, kv=kv)


def _of_quark(settings: Settings) -> Form | None:
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
    return form(kind, bits, group, scale=scale, zero=zero if kind == "int" else 0,
                computes=computes)  # fmt: skip


def _quark_kind(settings: Settings) -> tuple[str, str]:
    """Kind and plain name of Quark's dtype: fp8_e4m3, fp4, int8, uint4."""
    name = settings.word("dtype").partition("_")[0].removeprefix("u").removeprefix("mx")
    if name not in ("fp8", "fp6", "fp4", "int8", "int4", "int2"):
        raise Unread(f"Quark's dtype {settings.of('dtype')!r:.40}")
    return ("float" if name.startswith("fp") else "int"), name


METHODS: Mapping[str, Method] = {
    "aqlm": _aqlm,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
    "awq": _awq,
    "bitnet": _bitnet,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
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
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "modelopt-mixed": _modelopt,
    "mxfp4": _mxfp4,
    "mxfp8": _in_one("mxfp8", 8, 0, computes="fp8"),
    "nvfp4": _in_one("nvfp4", 4, 0, computes="fp4"),
    "quanto": _quanto,
    "quark": _quark,
    "sinq": _affine,
    "torchao": _torchao,
}
"""By the name in `quant_method`, with dashes."""
