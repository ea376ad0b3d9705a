"""What a quantised checkpoint says of its weights: which modules, in which format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from rooftrace.errors import TargetError
from rooftrace.hardware.precisions import PRECISIONS

ROW = -1
"""A group that is a whole row: one scale for each output feature."""


@dataclass(frozen=True)
class WeightFormat:
    """How one weight is stored, its sizes apart.

    element: the precision of a number.  group: how many numbers of a row share a scale, and rows:
    of how many rows; 0: one scale for all, which is not counted.  scale, zero: bits of a scale and
    of a zero point.  computes: what products compute in, "" where they widen the weight.
    """

    element: str
    group: int = 0
    rows: int = 1
    scale: Fraction = Fraction(16)
    zero: Fraction = Fraction(0)
    computes: str = ""

    def name(self, inner: int) -> str:
        """The precision (see `hardware.precisions`) of a weight whose rows have `inner` numbers."""
        engine = f"_a{self.computes}" if self.computes else ""
        group = inner if self.group == ROW else min(self.group, inner)
        if not group:
            return self.element + engine
        block = f"{self.rows}x{group}" if self.rows > 1 else f"{group}"
        beside = "" if self.scale == 16 and not self.zero else f"_s{_text(self.scale)}"
        zero = f"_z{_text(self.zero)}" if self.zero else ""
        return f"{self.element}_g{block}{beside}{zero}{engine}"


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

    The micro-scaled formats have names of their own: 4-bit floats with 8-bit scales for 16 or 32
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
    """What names of modules are held against."""

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
