"""Calibrated constants: the fraction of its datasheet peaks a chip reaches, per kernel class.

A kernel takes  (t_comp^p + t_hbm^p)^(1/p) + launch,  with
  t_comp = FLOP of whole tiles and waves / (compute * share of its class * datasheet peak),
  t_hbm  = (bytes + hidden layout copies) / (memory * share of its class * datasheet bandwidth),
           or, where that is longer, the time of the memory without that share, in which bytes that
           the last cache still holds (see `reuse`) count 1 / cache each.
So a cache makes no kernel faster than the rate at which its own code asks for bytes, which is the
memory's unless its share is above 1.
compute and memory are what a chip sustains; the shares differ little between chips of a kind.
Attention forward takes the seconds of `attention_time` instead, where the chip's SM count is
known; its shares are for the rest.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rooftrace._escapes import to_toml
from rooftrace.costmodels.knobs.classes import CLASSES, LAST
from rooftrace.hardware import Chip

SCHEMA = "rooftrace.knobs/1"
_SHIPPED = Path(__file__).parent / "fitted"


class KnobsError(ValueError):
    """A knob file that cannot be read: names the file, the key, and what was expected."""


@dataclass(frozen=True, slots=True)
class Share:
    """Fractions of the chip's sustained rates that kernels of one class reach."""

    compute: float = 1.0
    memory: float = 1.0
    engine: str = "matrix"  # "vector" for products beside it, as of depthwise convolutions
    layout: float = 0.0  # hidden copies into another layout, in multiples of activation bytes
    spread: float = 0.0  # relative standard deviation of measured kernels around the prediction


PLAIN = Share()


@dataclass(frozen=True, slots=True)
class Tiling:
    """Fitted constants of the tiles of matrix products."""

    prologue: float = 0.0  # steps of K that filling and draining a tile's pipeline takes
    split: float = 0.0  # seconds that a product takes on top where its K is split
    feed: float = 1.0  # share of the L2 bandwidth that tiles get
    busy: float = float("inf")  # share of HBM bandwidth that one block per SM reaches; may pass 1


@dataclass(frozen=True, slots=True)
class AttentionKnobs:
    """Fitted constants of attention kernels.

    products may pass 1: it is high where a kernel hides exponentials, which are counted in full.
    convert holds at a head width of 128; steps of wider heads hold fewer keys, so it grows with it.
    """

    products: float = 1.0  # share of the sustained matrix rate inside a step
    convert: float = 0.0  # what an fp8 step takes beside its products, over those in bf16
    stream: float = 1.0  # share of the sustained bandwidth
    start: float = 0.0  # seconds of a block
    combine: float = 0.0  # seconds of the kernel that adds up splits
    prepare: float = 0.0  # seconds of the kernels that copy queries, with a paged cache
    request: float = 0.0  # seconds of one more request, with a paged cache


USUAL = "usual"
"""Stands for the numbers that are usual for the chip's generation."""


@dataclass(frozen=True)
class Knobs:
    """Calibrated constants of one chip, and the measurements that they come from."""

    title: str
    compute: float = 1.0  # sustained over datasheet
    memory: float = 1.0
    overlap: float = math.inf  # p of the formula above; infinite: compute and memory overlap fully
    launch: float | None = None  # seconds of a kernel on the device; None: the chip's
    dispatch: float | None = None  # seconds of an op on the host; None: the chip's
    spread: float = 0.0  # relative standard deviation that all kernels of a step share
    cache: float = 1.0  # bandwidth of the last cache over the memory's; 1: it adds nothing
    tiling: Tiling = field(default_factory=Tiling)
    shares: Mapping[str, Share] = field(default_factory=dict, hash=False)  # by class of kernels
    # Free text by key (from, cases, date, error ...); shown, never computed with.
    source: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)
    attention: AttentionKnobs | str = field(default_factory=AttentionKnobs)  # or "usual"

    def __post_init__(self) -> None:
        for name in ("compute", "memory", "overlap"):
            _check(name, getattr(self, name), above=0.0)
        _check("cache", self.cache, least=1.0)
        for name in ("launch", "dispatch"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), least=0.0)
        if self.overlap < 1:
            raise KnobsError(f"overlap={self.overlap!r}: expected at least 1 (1: none at all)")
        for name in self.shares:
            if name not in CLASSES:
                raise KnobsError(f"share {name!r}: expected one of {'; '.join(CLASSES)}")
        _check_attention(self.attention)

    def share(self, name: str) -> Share:
        """The share of a class of kernels; of the class without layout where it has none."""
        share = self.shares.get(name)
        return share or self.shares.get(name.removesuffix(LAST), PLAIN)

    def with_shares(self, **changes: Mapping[str, Any]) -> Knobs:
        """Knobs with some shares of classes changed: with_shares(compute={"mm": 0.9})."""
        shares = dict(self.shares)
        for number, by_class in changes.items():
            for name, value in by_class.items():
                shares[name] = replace(shares.get(name, PLAIN), **{number: value})
        return replace(self, shares=shares)

    def launch_on(self, chip: Chip) -> float:
        """Seconds that a kernel takes on this chip on top of its work."""
        return chip.kernel_gap.value if self.launch is None else self.launch

    def to_dict(self) -> dict[str, Any]:
        """A plain dict with the keys of a knob file."""
        result: dict[str, Any] = {"schema": SCHEMA, "title": self.title}
        for name in ("compute", "memory", "cache", "overlap", "launch", "dispatch", "spread"):
            value = getattr(self, name)
            if value is not None and value != math.inf and (name, value) != ("cache", 1.0):
                result[name] = value
        tiling = _changed(self.tiling, Tiling())
        if tiling:
            result["tiling"] = tiling
        if isinstance(self.attention, str):
            result["attention"] = self.attention
        elif attention := _changed(self.attention, AttentionKnobs()):
            result["attention"] = attention
        if self.source:
            result["source"] = dict(self.source)
        result["share"] = {name: _changed(share, PLAIN) for name, share in self.shares.items()}
        return result

    @staticmethod
    def from_dict(data: Mapping[str, Any], where: str = "knobs") -> Knobs:
        """The inverse of `to_dict`.  Raises KnobsError naming `where` and the key."""
        values = dict(data)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise KnobsError(f"{where}: schema {schema!r}: expected {SCHEMA!r}")
        try:
            shares = {
                name: _made(Share, table, f"share.{name}")
                for name, table in dict(values.pop("share", {})).items()
            }
            tiling = _made(Tiling, values.pop("tiling", {}), "tiling")
            attention = values.pop("attention", {})
            if not isinstance(attention, str):
                attention = _made(AttentionKnobs, attention, "attention")
            records = {"shares": shares, "tiling": tiling, "attention": attention}
            made: Knobs = _made(Knobs, {**values, **records}, "knobs")
            return made
        except KnobsError as error:
            raise KnobsError(f"{where}: {error}") from None


_RECORDS = ("source", "shares", "tiling", "attention")
"""Values of Knobs that are neither numbers nor text."""


def _changed(record: Any, default: Any) -> dict[str, Any]:
    """The fields of a record that differ from those of `default`."""
    names = [f.name for f in fields(record)]
    return {n: getattr(record, n) for n in names if getattr(record, n) != getattr(default, n)}


def _made(kind: type[Any], values: Any, where: str) -> Any:
    names = {f.name: f for f in fields(kind)}
    if not isinstance(values, Mapping):
        raise KnobsError(f"{where}: expected a table, got {values!r}")
    for key, value in values.items():
        if key not in names:
            raise KnobsError(f"{where}: {key!r} is no knob; there are {', '.join(names)}")
        text = key in ("title", "engine")
        if text != isinstance(value, str) and key not in _RECORDS:
            raise KnobsError(f"{where}.{key}={value!r}: expected a {'text' if text else 'number'}")
    if kind is Share:
        for key in ("compute", "memory"):
            _check(f"{where}.{key}", values.get(key, 1.0), above=0.0)
        if values.get("engine", "matrix") not in ("matrix", "vector"):
            raise KnobsError(f"{where}.engine={values['engine']!r}: expected matrix or vector")
    if kind is Knobs and "title" not in values:
        raise KnobsError("title: expected a text that says what was fitted")
    return kind(**values)


def _check_attention(attention: Any) -> None:
    if isinstance(attention, str):
        if attention != USUAL:
            raise KnobsError(f"attention={attention!r}: expected a table of numbers, or {USUAL!r}")
        return
    for name in (f.name for f in fields(attention)):
        share = name in ("products", "stream")
        bound = {"above": 0.0} if share else {"least": 0.0}
        _check(f"attention.{name}", getattr(attention, name), **bound)


def _check(name: str, value: Any, above: float | None = None, least: float | None = None) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if number and (above is None or value > above) and (least is None or value >= least):
        return
    bound = f"above {above:g}" if above is not None else f"of at least {least:g}"
    raise KnobsError(f"{name}={value!r}: expected a number {bound}")


# -- files -----------------------------------------------------------------------------------------


def load_knobs(name: str | os.PathLike[str]) -> Knobs:
    """Knobs by path, or by the name of a file that comes with rooftrace.  Raises KnobsError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    path = Path(name)
    own = _SHIPPED / f"{os.fspath(name)}.toml"
    if not path.suffix and own.is_file():
        path = own
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shipped = "".join(f", or {name}" for name in shipped_knobs())
        raise KnobsError(
            f"knobs {os.fspath(name)!r}: there is no such file; expected a TOML file written by "
            f"`rooftrace calibrate`{shipped}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KnobsError(f"{path}: not TOML: {error}") from None
    return Knobs.from_dict(data, str(path))


def shipped_knobs() -> tuple[str, ...]:
    """Names of the knob files that come with rooftrace."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.toml")))


def dump_knobs(knobs: Knobs) -> str:
    """The TOML text of a knob file; `load_knobs` reads it back."""
    data = knobs.to_dict()
    shares = data.pop("share")
    names = [n for n in ("source", "tiling", "attention") if isinstance(data.get(n), Mapping)]
    tables = {name: data.pop(name) for name in names}
    lines = [f"{key} = {_toml(value)}" for key, value in data.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(k)} = {_toml(v)}" for k, v in table.items())]
    if shares:
        lines += ["", "[share]"]
        lines += [f"{_key(name)} = {_toml(share)}" for name, share in shares.items()]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    plain = name.replace("_", "").replace("-", "").isalnum() and name.isascii()
    return name if plain else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return to_toml(value)
    if isinstance(value, float):
        return "inf" if value == math.inf else repr(float(f"{value:.6g}"))
    if isinstance(value, int):
        return str(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise TypeError(f"{value!r} has no TOML form")
