"""Declarations of quantised checkpoints: which modules are stored in which format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

from rooftrace.errors import TargetError
from rooftrace.hardware.precisions import PRECISIONS

ROW = -1
"""A group that is a row: one scale for each output feature."""


@dataclass(frozen=True)
class WeightFormat:
    """How one weight is stored, its sizes apart.

    element: the precision of a number.  group: how many numbers of a row share a scale, and rows:
    of how many rows; 0: one scale for all, which is not counted.  scale, zero: bits of a scale and
    of a zero point.  computes: the precision of products, "" where they widen the weight.  static:
    whether the scales of activations are part of the checkpoint.
    """

    element: str
    group: int = 0
    rows: int = 1
    scale: Fraction = Fraction(16)
    zero: Fraction = Fraction(0)
    computes: str = ""
    static: bool = False

    def name(self, inner: int) -> str:
        """The precision (see `hardware.precisions`) of a weight whose rows have `inner` numbers."""
        engine = f"_a{self.computes}{'_static' * self.static}" if self.computes else ""
        group = inner if self.group == ROW else min(self.group, inner)
        if not group:
            return self.element + engine
        block = f"{self.rows}x{group}" if self.rows > 1 else f"{group}"
        suffix = "" if self.scale == 16 and not self.zero else f"_s{_text(self.scale)}"
        zero = f"_z{_text(self.zero)}" if self.zero else ""
        return f"{self.element}_g{block}{suffix}{zero}{engine}"


def _text(bits: Fraction) -> str:
    return f"{float(bits):.6f}".rstrip("0").rstrip(".")


def weight_format(
    kind: str,
    bits: int,
    group: int = 0,
    *,
    rows: int = 1,
    scale: Fraction | int = 16,
    zero: Fraction | int = 0,
    computes: str = "",
) -> WeightFormat:
    """The form of numbers of this kind ("int", "float" or "nf") and width.

    The micro-scaled formats have their own names: 4-bit floats with 8-bit scales for 16 or 32
    are nvfp4 and mxfp4.  Raises TargetError for a width that nothing stores.
    """
    if kind == "float" and scale == 8 and (bits, group) in _MICROSCALED:
        return WeightFormat(_MICROSCALED[bits, group], computes=computes)
    element = {"int": f"int{bits}", "float": f"fp{bits}", "nf": f"nf{bits}"}.get(kind, kind)
    if element not in PRECISIONS or bits > 8:
        raise Unread(f"{bits}-bit {kind}")
    return WeightFormat(element, group, rows, Fraction(scale), Fraction(zero), computes)


_MICROSCALED: Mapping[tuple[int, int], str] = {
    (4, 16): "nvfp4", (4, 32): "mxfp4", (6, 32): "mxfp6", (8, 32): "mxfp8",
}  # fmt: skip


class NamePattern(Protocol):
    """A pattern for names of modules."""

    def match(self, name: str, /) -> Any:
        """Something true where it holds from the start of a name."""


class Unread(Exception):
    """A part of a declaration that is not understood, in words."""


@dataclass(frozen=True)
class ModuleRule:
    """Modules whose name matches one of `patterns` are stored in `form`; None: not quantised."""

    patterns: tuple[NamePattern, ...]
    form: WeightFormat | None
    classes: frozenset[str] = frozenset()

    def holds(self, names: Iterable[str], kind: str) -> bool:
        """Whether the rule is for a module of a class that has one of these names."""
        return kind in self.classes or any(p.match(name) for name in names for p in self.patterns)


@dataclass(frozen=True)
class Scheme:
    """A declared quantisation.

    The first of `rules` that holds for a module decides, else `form` does.  head, embeddings:
    whether the output and input embeddings follow `form`, too.  blocks: whether modules outside of
    the stack of layers are left out; experts: whether all but experts are.  kv: of the cache.
    unread: parts that are not understood.
    """

    method: str
    form: WeightFormat | None
    rules: tuple[ModuleRule, ...] = ()
    head: bool = True
    embeddings: bool = False
    blocks: bool = False
    experts: bool = False
    kv: str | None = None
    unread: tuple[str, ...] = ()


# -- names -----------------------------------------------------------------------------------------

_ROOTS = re.compile(r"(?:(?:base_model|model|language_model|backbone|transformer)\.)+")
_LONGEST = 300
"""Characters of a pattern, of which a config may have thousands."""


def plain(name: str) -> str:
    """A module's path without the parts that differ between checkpoints and classes.

    "model.language_model.layers.0.mlp", "backbone.layers.0.mlp" and (of older checkpoints)
    "model.layers.0.block_sparse_moe" are "layers.0.mlp".
    """
    prefix = _ROOTS.match(name)
    inner = name[prefix.end() :] if prefix else name
    return inner.replace("block_sparse_moe", "mlp")


def pattern(text: str, where: str) -> NamePattern:
    """The names that one entry of a list means: a module and all inside of it.

    "re:..." is a regular expression, "*" stands for anything, and a name without its parents
    ("lm_head", "mlp.gate") may stand anywhere.  Raises TargetError for an entry that is none.
    """
    if not isinstance(text, str) or len(text) > _LONGEST:
        raise TargetError(f"{where}: {text!r:.60}: expected the name of a module, or a pattern")
    if text.startswith("re:"):
        return _expression(text[3:], where)
    rooted = plain(text)
    anywhere = "" if rooted != text else r"(?:.*\.)?"
    body = "".join(".*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", rooted))
    body = body.removesuffix(r"\.weight")
    return re.compile(rf"{anywhere}{body}(?:\..*)?$")


@dataclass(frozen=True)
class _Expression:
    """A regular expression of a file, which may take forever on a name: it has a second."""

    compiled: Any
    where: str

    def match(self, name: str) -> bool:
        """Whether it holds from the start of a name.  Raises TargetError where that takes long."""
        try:
            return self.compiled.match(name, timeout=1) is not None
        except TimeoutError:
            text = self.compiled.pattern
            raise TargetError(
                f"{self.where}: {text!r:.60}: a regular expression that takes longer than 1 s"
            ) from None


def _expression(text: str, where: str) -> _Expression:
    """A regular expression of a file.  Raises TargetError for one that is none."""
    import regex  # transformers needs it, too

    try:
        return _Expression(regex.compile(text), where)
    except (regex.error, RecursionError, OverflowError) as error:
        raise TargetError(
            f"{where}: {text!r:.60}: expected a regular expression: {error}"
        ) from None


def patterns(items: Any, where: str) -> tuple[NamePattern, ...]:
    """The patterns of a list of a file; none for None.  Raises TargetError for no list."""
    if items is None:
        return ()
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, (list, tuple)):
        raise TargetError(f"{where}: {items!r:.60}: expected a list of names of modules")
    return tuple(pattern(item, where) for item in items)


# -- fields ----------------------------------------------------------------------------------------

SKIPPED = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "exclude")
"""Fields with the modules that stay as they are."""


class Fields:
    """A record of a file and where it stands, for errors.  Fields have several names in the wild.

    Each reader takes the names of one field, and raises TargetError for a value of another type.
    """

    def __init__(self, data: Any, where: str) -> None:
        if hasattr(data, "to_dict"):
            data = data.to_dict()
        if not isinstance(data, Mapping):
            raise TargetError(f"{where}: {data!r:.60}: expected a record")
        self.data, self.where = data, where

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def of(self, *names: str) -> Any:
        """The first field that is there, of any type; None without."""
        return next((self.data[n] for n in names if self.data.get(n) is not None), None)

    def integer(self, *names: str, default: int = 0) -> int:
        """An integer."""
        value = self.of(*names)
        if value is None:
            return default
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,9}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**31:
            raise TargetError(f"{self.where}.{names[0]}: {value!r:.60}: expected a whole number")
        return value

    def word(self, *names: str, default: str = "") -> str:
        """A word, in lower case."""
        value = self.of(*names)
        value = default if value is None else getattr(value, "value", value)
        if not isinstance(value, str):
            raise TargetError(f"{self.where}.{names[0]}: {value!r:.60}: expected a word")
        return value.lower().removeprefix("torch.")

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false."""
        value = self.of(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise TargetError(f"{self.where}.{names[0]}: {value!r:.60}: expected true or false")
        return value

    def skipped(self, *names: str) -> tuple[ModuleRule, ...]:
        """The rule for modules that are not quantised; none without."""
        skipped = [p for n in names for p in patterns(self.of(n), f"{self.where}.{n}")]
        return (ModuleRule(tuple(skipped), None),) if skipped else ()

    def record(self, *names: str) -> Fields | None:
        """A record inside; None without."""
        value = self.of(*names)
        name = next((n for n in names if n in self), names[0])
        return None if value is None else Fields(value, f"{self.where}.{name}")

    def records(self, *names: str) -> Iterator[tuple[str, Fields]]:
        """The records of a record or a list inside, each with its name."""
        value, where = self.of(*names), f"{self.where}.{names[0]}"
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        for name, item in {} if inner is None else Fields(inner, where).data.items():
            yield str(name), Fields(item, f"{where}.{name}")


# -- by module -------------------------------------------------------------------------------------
# Methods that give a format to each module, or group of modules, of a checkpoint.

KV = ("kv_cache_quant_algo", "kv_cache_scheme")
"""Fields with the format of the cache.  In Quark's older ones a way of scaling stands there."""
_CLASSES = frozenset({"Linear", "Embedding"})


def activations_in(kind: str, bits: int) -> str:
    """The precision of products whose activations are rounded to this; "" for 16 bits."""
    engines = {("float", 8): "fp8", ("float", 4): "fp4", ("int", 8): "int8", ("int", 4): "int4"}
    if bits < 16 and (kind, bits) not in engines:
        raise Unread(f"activations of {bits}-bit {kind}")
    return engines.get((kind, bits), "")


def cache_in(value: object, where: str) -> str | None:
    """The precision of a cache: a record of num_bits and type, or a name such as "FP8"."""
    if value is None:
        return None
    if isinstance(value, str):
        name = value.lower().partition("_")[0]
        formats = {"static": "fp8", "dynamic": "fp8", "none": None}
        formats |= {name: name for name in ("fp8", "nvfp4", "int8", "int4")}
        if name not in formats:
            raise Unread(f"a cache of {value!r:.40}")
        return formats[name]
    settings = Fields(value, where)
    kind, bits = settings.word("type", default="float"), settings.integer("num_bits", default=8)
    return weight_format(kind, bits).element if bits < 16 else None


# -- torchao ---------------------------------------------------------------------------------------


def torchao(settings: Fields) -> Scheme:
    """torchao: one of its config classes for all modules, or one for each name."""
    rules, kind = settings.skipped(*SKIPPED), settings.of("quant_type")
    both = settings.flag("include_input_output_embeddings")
    if isinstance(kind, str):
        keywords = settings.record("quant_type_kwargs") or Fields({}, settings.where)
        form: WeightFormat | None = _of_torchao(kind.replace("_", ""), keywords)
        return Scheme("", form, rules, head=both, embeddings=both)
    inner = settings.record("quant_type")
    inner = inner and (inner.record("default") or inner)
    if inner is None:
        raise Unread("torchao without a quant_type")
    if inner.word("_type") not in ("modulefqntoconfig", "fqntoconfig"):
        return Scheme("", _one_of_torchao(inner), rules, head=both, embeddings=both)
    form = None
    data = inner.record("_data") or inner
    for name, entry in data.records("module_fqn_to_config", "fqn_to_config"):
        if name == "_default":
            form = _one_of_torchao(entry)
        else:
            rules += (ModuleRule((pattern(name, settings.where),), _one_of_torchao(entry)),)
    return Scheme("", form, rules, head=both, embeddings=both)


def _one_of_torchao(settings: Fields) -> WeightFormat:
    name = settings.word("_type").removesuffix("config")
    return _of_torchao(name, settings.record("_data") or settings)


def _of_torchao(name: str, settings: Fields) -> WeightFormat:
    """The form of a torchao config by its class name in lower case, without underscores."""
    group = settings.integer("group_size", default=128)
    rows = "perrow" in str(settings.of("granularity")).lower().replace("_", "")
    formats = {
        "int4weightonly": weight_format("int", 4, group, zero=16),
        "int8weightonly": weight_format("int", 8, ROW),
        "int8dynamicactivationint8weight": weight_format("int", 8, ROW, computes="int8"),
        "int8dynamicactivationint4weight": weight_format(
            "int", 4, settings.integer("group_size", default=32), computes="int8"
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
    named = formats.get(name)
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
    "fp8": WeightFormat("fp8", computes="fp8", static=True),
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
    rules, form = settings.skipped(*SKIPPED), None
    algorithm = settings.word("quant_algo", "moe_quant_algo")
    layers = list(settings.records("quantized_layers"))
    if layers or algorithm == "mixed_precision":
        for name, entry in layers:
            rules += (ModuleRule((pattern(name, settings.where),), _of_modelopt(entry)),)
    elif algorithm in ("", "none") and "config_groups" in settings:
        rules += tuple(_groups(settings))
    elif algorithm not in ("", "none"):
        form = _of_modelopt(settings)
    return Scheme("", form, rules, kv=kv)


def _of_modelopt(settings: Fields) -> WeightFormat:
    name = settings.word("quant_algo")
    form = _ALGORITHMS.get(name)
    if form is None:
        raise Unread(f"quant_algo {settings.of('quant_algo')!r:.40}")
    group = settings.integer("group_size")
    return replace(form, group=group) if group and form.group > 0 else form


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
            acts.word("type", default="int"), acts.integer("num_bits", default=8))  # fmt: skip
        targets = group.of("targets") or ["Linear"]
        names = [name for name in targets if name not in _CLASSES and name != "LinearBase"]
        classes = {"Linear" if name == "LinearBase" else name for name in targets}
        packed = group.word("format") or settings.word("format")
        form = _of_group(weights, computes, packed)
        if acts is not None and acts.of("dynamic") in (None, False):  # "local": by block
            form = replace(form, static=acts.word("strategy", default="tensor") == "tensor")
        yield ModuleRule(
            patterns(names, f"{group.where}.targets"),
            form,
            frozenset(classes & _CLASSES),
        )


def _of_group(weights: Fields, computes: str, packed: str) -> WeightFormat:
    kind, bits = weights.word("type", default="int"), weights.integer("num_bits", default=8)
    group, strategy = weights.integer("group_size"), weights.word("strategy")
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
    default = settings.record("global_quant_config")
    rules = settings.skipped(*SKIPPED)
    kv = None
    for name, entry in settings.records("layer_quant_config"):
        rules += (ModuleRule((pattern(name, settings.where),), _of_quark(entry)),)
    for _, entry in settings.records("kv_cache_quant_config"):
        outputs = entry.record("output_tensors")
        kv = _quark_kind(outputs)[1] if outputs is not None else kv
    return Scheme("", None if default is None else _of_quark(default), rules, kv=kv)


def _of_quark(settings: Fields) -> WeightFormat | None:
    weights, acts = settings.record("weight"), settings.record("input_tensors")
    if weights is None:
        return None
    kind, name = _quark_kind(weights)
    bits = int(re.sub(r"\D", "", name) or 0)
    computes = "" if acts is None else _quark_kind(acts)[1]
    scheme = weights.word("qscheme", default="per_tensor")
    group = {"per_tensor": 0, "per_channel": ROW}.get(scheme, weights.integer("group_size"))
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
