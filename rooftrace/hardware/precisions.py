"""Knows number formats: bits stored, which hardware rate they use; knows no chip and no tensor.

Storage and compute are two questions. `storage_bytes` answers the first, block scales included;
`compute_family` and `widest` answer the second, with the key under which a chip lists its rates.

A quantised format is written as its element, then scales, zero points and compute precision:

    int4_g128_s16_z4      4-bit integers, with a 16-bit scale and a 4-bit zero point for each 128
    fp8_g128x128_s32_afp8 8-bit floats with an fp32 scale for each block of 128 x 128; products
                          round the other operand to fp8, too, and compute in fp8 (W8A8)
    fp8_afp8_static       one scale for all; that of the other operand was found before

`_g` without `_s` means scales of 16 bits. Without `_a` a product widens the weight and computes in
the precision of the activations (W4A16).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from rooftrace.errors import Worded, hint

Kind = Literal["float", "int", "bool", "complex"]


class PrecisionError(ValueError, Worded):
    """A name that is no number format."""


@dataclass(frozen=True)
class Precision:
    """One number format. `bits`: of one element in memory, its share of the scales included.

    element: the format without scales and compute precision. computes: the precision that a
    product rounds its other operand to, and computes in; "" where it widens this one.  static:
    whether the scale of that operand was found before.  blocked: whether a row has several scales.
    """

    name: str
    bits: Fraction
    kind: Kind
    note: str = ""
    element: str = ""
    computes: str = ""
    static: bool = False
    blocked: bool = False

    @property
    def width(self) -> int:
        """Bits of one element by itself: scales lie elsewhere."""
        return int(PRECISIONS[self.element].bits)


def _table() -> dict[str, Precision]:
    mx = "OCP Microscaling 1.0: one 8-bit scale (E8M0) per 32 elements"
    formats: list[tuple[str, Fraction | int, Kind, str]] = [
        ("fp64", 64, "float", ""),
        ("fp32", 32, "float", ""),
        ("tf32", 32, "float", "compute only: 19 bits are used, 32 are stored"),
        ("bf16", 16, "float", ""),
        ("fp16", 16, "float", ""),
        ("fp8", 8, "float", "either 8-bit float; scales per tensor, not counted"),
        ("fp8_e4m3", 8, "float", ""),
        ("fp8_e5m2", 8, "float", ""),
        ("fp8_e8m0", 8, "float", "a power of two, the scale of the MX formats"),
        ("mxfp8", 8 + Fraction(8, 32), "float", mx),
        ("fp6", 6, "float", "either 6-bit float, no scales counted"),
        ("mxfp6", 6 + Fraction(8, 32), "float", mx),
        ("fp4", 4, "float", "E2M1, no scales counted"),
        ("mxfp4", 4 + Fraction(8, 32), "float", mx),
        ("nvfp4", 4 + Fraction(8, 16), "float", "one 8-bit scale (E4M3) per 16 elements"),
        ("nf4", 4, "float", "16 quantiles of a normal distribution (QLoRA), no scales counted"),
        ("fp4_x2", 8, "float", "two fp4 values in one byte, as torch.float4_e2m1fn_x2"),
        ("bool", 8, "bool", "one byte per element, as torch stores it"),
        ("complex32", 32, "complex", "two fp16"),
        ("complex64", 64, "complex", "two fp32"),
        ("complex128", 128, "complex", "two fp64"),
    ]
    formats += [(f"int{bits}", bits, "int", "") for bits in (64, 32, 16, 8, 6, 5, 4, 3, 2, 1)]
    formats += [(f"uint{bits}", bits, "int", "") for bits in (64, 32, 16, 8, 4, 3, 2, 1)]
    return {
        name: Precision(name, Fraction(bits), kind, note, name)
        for name, bits, kind, note in formats
    }


PRECISIONS: Mapping[str, Precision] = _table()

# torch's names, and the ones in model configs.
ALIASES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "single": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "tfloat32": "tf32",
    "float8": "fp8",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e4m3fnuz": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e5m2fnuz": "fp8_e5m2",
    "e5m2": "fp8_e5m2",
    "float8_e8m0fnu": "fp8_e8m0",
    "e8m0": "fp8_e8m0",
    "float4_e2m1fn_x2": "fp4_x2",
    "float4": "fp4",
    "e2m1": "fp4",
    "float6": "fp6",
    "byte": "uint8",
    "char": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "qint8": "int8",
    "quint8": "uint8",
    "qint32": "int32",
    "boolean": "bool",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
}


_QUANTISED = re.compile(
    r"(?P<element>\w+?)"
    r"(_g(?P<group>\d{1,9}(x\d{1,9})?)(_s(?P<scale>\d{1,3}(\.\d{1,9})?))?"
    r"(_z(?P<zero>\d{1,3}(\.\d{1,9})?))?)?"
    r"(_a(?P<computes>fp4|fp8|int8|int4)(?P<static>_static)?)?"
)
_BLOCK = 256
"""Numbers from which on a group is a whole row."""
_SCALE = "16"
"""Bits of a scale where a name does not say."""


def precision(name: str) -> Precision:
    """The format called `name`; torch's names and prefixes ("torch.bfloat16") are understood.

    Raises PrecisionError for a name that is none.
    """
    return PRECISIONS.get(name) or _precision(name)  # nearly all names are in the table


@lru_cache(maxsize=4096)
def _precision(name: str) -> Precision:
    key = name.strip().lower().removeprefix("torch.")
    plain = PRECISIONS.get(ALIASES.get(key, key)) or _quantised(key)
    if plain is not None:
        return plain
    close = hint(key, {**{name: name for name in PRECISIONS}, **ALIASES})
    raise PrecisionError(
        f'precision "{name}": expected one of {", ".join(PRECISIONS)}, or a torch dtype{close}'
    )


def _quantised(key: str) -> Precision | None:
    """The format of an element with scales, zero points or an engine; None for another name."""
    parts = _QUANTISED.fullmatch(key)
    if parts is None:
        return None
    element = PRECISIONS.get(ALIASES.get(parts["element"], parts["element"]))
    rows, _, columns = (parts["group"] or "1").partition("x")
    group = int(rows) * int(columns or 1)
    if element is None or not group:
        return None
    scales = Fraction(0)  # bits of a group's scale and zero point
    if parts["group"]:
        scales = Fraction(parts["scale"] or _SCALE) + Fraction(parts["zero"] or 0)
    return Precision(
        key,
        element.bits + scales / group,
        element.kind,
        note=f"{element.name} with scales" if parts["group"] else element.note,
        element=element.name,
        computes=parts["computes"] or "",
        static=bool(parts["static"]),
        blocked=element.bits != int(element.bits)
        or "x" in (parts["group"] or "")
        or 1 < group <= _BLOCK,
    )


def bytes_per_element(name: str) -> Fraction:
    """Bytes one element takes in memory, exactly: nvfp4 is 9/16."""
    return precision(name).bits / 8


def storage_bytes(name: str, elements: int) -> int:
    """Whole bytes that `elements` of this format take: ceil(elements * bits / 8)."""
    if elements < 0:
        raise PrecisionError(f"elements = {elements}: expected 0 or more")
    bits = precision(name).bits
    return -(-(elements * int(bits)) // 8) if bits == int(bits) else -int(-(elements * bits) // 8)


# The key under which chips list a rate. A complex product is counted in real FLOPs of its parts.
FAMILIES: Mapping[str, str] = {
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_e8m0": "fp8",
    "mxfp8": "fp8",
    "mxfp6": "fp6",
    "mxfp4": "fp4",
    "nvfp4": "fp4",
    "nf4": "fp4",
    "fp4_x2": "fp4",
    "complex32": "fp16",
    "complex64": "fp32",
    "complex128": "fp64",
    "bool": "int8",
}
FLOAT_ORDER: tuple[str, ...] = ("fp4", "fp6", "fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
_COMPUTED = ("int4", "fp4", "int8", "fp8")
COMPLEX_OF: Mapping[str, str] = {"fp16": "complex32", "fp64": "complex128"}  # others: complex64


def compute_family(name: str) -> str:
    """The key under which a chip lists its rate: fp8_e4m3 -> fp8, nvfp4 -> fp4, uint8 -> int8.

    A format that names a compute precision has that: bf16_afp8 -> fp8.
    """
    stored = precision(name)
    plain = stored.computes or stored.element
    return FAMILIES.get(plain, plain.removeprefix("u"))


def widest(*names: str) -> str:
    """The precision in which operands of these formats compute, whatever their order.

    Floats beat integers, whose width then does not matter: int4 weights with bf16 activations
    compute in bf16. bf16 with fp16 is fp32, since neither holds the other. If one operand names a
    compute precision, that is kept for chips that have it: bf16 with fp8_afp8 is bf16_afp8, with
    fp8_g128x128_afp8 bf16_g128_afp8.
    """
    if not names:
        raise PrecisionError("widest(): expected at least one precision")
    formats = {precision(name).name: precision(name) for name in names}
    computing = [item for item in formats.values() if item.computes]
    if computing:
        elements = {item.element for item in computing}
        computed = sorted({item.computes for item in computing})
        others = [item.element for item in formats.values() if not item.computes] or elements
        scales = "_g128" if any(item.blocked for item in computing) else ""
        static = "_static" if all(item.static for item in computing) else ""
        return f"{widest(*others)}{scales}_a{max(computed, key=_COMPUTED.index)}{static}"
    if len(formats) == 1:
        return next(iter(formats.values())).element
    kinds = {item.kind for item in formats.values()}
    if kinds <= {"int", "bool"}:
        # Of equal widths the signed one ("int8" sorts before "uint8"); bool is the narrowest.
        integers = [item for item in formats.values() if item.kind == "int"]
        return min(integers, key=lambda item: (-item.bits, item.name)).element
    computing = [item for item in formats.values() if item.kind in ("float", "complex")]
    if len(computing) == 1:
        return computing[0].element
    families = {compute_family(item.name) for item in computing}
    family = max(families, key=FLOAT_ORDER.index)
    if {"fp16", "bf16"} <= families:
        family = max(family, "fp32", key=FLOAT_ORDER.index)
    if "complex" in kinds:
        return COMPLEX_OF.get(family, "complex64")
    return family
