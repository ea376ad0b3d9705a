"""Knobs of kernels, and intervals from how far measured steps were from their predictions.

A residual is log(measured / predicted) of a step that no fit had seen, in standard deviations of
that step (`Knobs.spread` and those of classes, by its time).  Intervals are conformal: their ends
are order statistics of such residuals, with the correction for how many there are, so that they
hold their share whatever the distribution is, as long as the next model is drawn like the others
(Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005).  Models of one family
are alike, so a family counts as one and its members share its weight (Lee, Barber and Willett,
"Distribution-free inference with hierarchical data", 2023).
"""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

from rooftrace._escapes import toml_key
from rooftrace._plain import Plain
from rooftrace._reading import FileKind, record_of, text_of, toml_of
from rooftrace._shown import short
from rooftrace.costmodels.kernels.numbers import (
    LEAST_SHARE,
    PLAIN,
    WIDEST,
    AttentionKnobs,
    KnobsError,
    ProductKnobs,
    Share,
    Tiling,
    check_knobs,
    knob,
    knobs_of,
)
from rooftrace.costmodels.ops import KINDS, ByteFactor, ByteFactors
from rooftrace.errors import hint
from rooftrace.hardware import Chip
from rooftrace.hardware.chip import ENGINES
from rooftrace.hardware.chipfile import toml_sections
from rooftrace.hardware.precisions import PRECISIONS, compute_family

LEVEL = 0.9
"""The share of steps that an interval holds, by default."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
"""The shares that files have ends for; between them ends are interpolated."""
NO_FIT, ONE_FACTOR, FITTED = "no fit", "one factor", "fitted"
USES = (NO_FIT, ONE_FACTOR, FITTED)
"""Fitted to the chip of a step: nothing, one factor on all, or more than that."""
FEW = 10
"""Below so many families an interval is a guess made wider, and says so."""
_PRIOR_WEIGHT = 4.0
"""Families that the usual spread counts for, added to the measured ones."""


class ResidualsError(ValueError):
    """Ends of intervals that contradict each other, or a share of steps that has none."""


@dataclass(frozen=True, slots=True)
class Residuals:
    """The ends of intervals at some levels, and the steps that they come from."""

    levels: tuple[float, ...]  # shares of steps, rising
    low: tuple[float, ...]  # of each level, in standard deviations; at most 0
    high: tuple[float, ...]  # at least 0
    spread: float = 0.0  # the standard deviation of a step: `Knobs.spread` in this use
    count: int = 0  # steps
    groups: int = 0  # families of models that were left out together
    of: str = ""  # which steps

    def __post_init__(self) -> None:
        sizes = {len(self.levels), len(self.low), len(self.high)}
        if sizes != {len(self.levels)} or not self.levels:
            raise ResidualsError(
                "levels, low and high: expected as many ends as levels, and one level"
            )
        for name, values, least, most in (
            ("levels", self.levels, 0.0, 1.0),
            ("low", self.low, -_FARTHEST, 0.0),
            ("high", self.high, 0.0, _FARTHEST),
        ):
            if not all(least <= value <= most for value in values):
                raise ResidualsError(
                    f"{name}={values!r:.60}: expected numbers of {least:g} to {most:g}"
                )
            if list(values) != sorted(values, reverse=name == "low"):
                raise ResidualsError(
                    f"{name}={values!r:.60}: expected wider ends for higher levels"
                )
        if not 0 <= self.spread <= _FARTHEST or self.count < 0 or self.groups < 0:
            raise ResidualsError(
                f"spread={self.spread!r}, count={self.count!r}, groups={self.groups!r}: "
                "expected numbers of at least 0"
            )

    @property
    def few(self) -> bool:
        """Whether they are too few for an interval that holds its stated share."""
        return self.groups < FEW

    @property
    def basis(self) -> str:
        """Number of steps and families, and whether few of them make an interval wider."""
        steps = f"{self.count:,} steps of {self.groups:,} families that no fit had seen"
        return f"{steps}: so few that it is made wider" if self.few else steps

    def ends(self, level: float = LEVEL) -> tuple[float, float]:
        """Ends of an interval for this share of steps, in standard deviations.

        Raises ResidualsError outside of `levels`.
        """
        _check_level(level, self.levels)
        return _between(level, self.levels, self.low), _between(level, self.levels, self.high)

    @staticmethod
    def of_steps(
        values: Sequence[float], groups: Sequence[str], usual: float = 1.0, of: str = ""
    ) -> Residuals:
        """The residuals of left-out steps.

        values: log(measured / predicted) over the standard deviation of each step.  groups: the
        family of each.  usual: the prior standard deviation of such values, for few families.
        """
        sizes = Counter(groups)
        weights = [1 / (len(sizes) * sizes[group]) for group in groups]
        ends = [_ends(level, values, weights, len(sizes), usual) for level in LEVELS]
        low, high = ([_rounded(end[side]) for end in ends] for side in (0, 1))
        for number in range(1, len(LEVELS)):  # a rule for fewer families may be the narrower one
            low[number] = min(low[number], low[number - 1])
            high[number] = max(high[number], high[number - 1])
        return Residuals(
            levels=LEVELS, low=tuple(low), high=tuple(high), count=len(values),
            groups=len(sizes), of=of,
        )  # fmt: skip


_FARTHEST = 1000.0
"""The largest standard deviations, and ends in them, that are accepted."""


def normal_ends(level: float = LEVEL) -> tuple[float, float]:
    """Ends of a normal distribution in standard deviations, for knobs without residuals."""
    _check_level(level, LEVELS)
    end = NormalDist().inv_cdf((1 + level) / 2)
    return -end, end


def _check_level(level: float, levels: Sequence[float]) -> None:
    number = isinstance(level, (int, float)) and not isinstance(level, bool)
    if not number or not levels[0] <= level <= levels[-1]:
        raise ResidualsError(
            f"level={level!r:.60}: expected a share of steps from {levels[0]:g} to {levels[-1]:g}"
        )


def _between(level: float, levels: Sequence[float], ends: Sequence[float]) -> float:
    """An end between those of two levels, by -log(1 - level), in which tails are about straight."""
    for (before, first), (after, second) in pairwise(zip(levels, ends, strict=True)):
        if before <= level <= after:
            span = math.log((1 - before) / (1 - after))
            return first + (second - first) * math.log((1 - before) / (1 - level)) / span
    return ends[0]  # there is one level only


# -- order statistics ------------------------------------------------------------------------------


def _ends(
    level: float, values: Sequence[float], weights: Sequence[float], groups: int, usual: float
) -> tuple[float, float]:
    """The ends of one level: a quantile at each side, where there are enough families.

    With fewer the quantile of absolute residuals, with yet fewer that of a wide distribution.
    """
    correction = (groups + 1) / groups if groups else math.inf
    side = (1 + level) / 2
    if side * correction <= 1:
        low = _quantile([-value for value in values], weights, side * correction)
        return min(0.0, -low), max(0.0, _quantile(values, weights, side * correction))
    if level * correction <= 1:
        size = _quantile([abs(value) for value in values], weights, level * correction)
        return -size, size
    size = _wide(side, values, weights, groups, usual)
    return -size, size


def _quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """The weighted quantile at `share`, interpolated between two of `values`."""
    total, before = 0.0, None
    for value, weight in sorted(zip(values, weights, strict=True)):
        if total + weight >= share - 1e-9:
            part = min(1.0, max(0.0, (share - total) / weight))
            return value if before is None else before + part * (value - before)
        total, before = total + weight, value
    return max(values)


def _wide(
    side: float, values: Sequence[float], weights: Sequence[float], groups: int, usual: float
) -> float:
    """Half of an interval from few residuals and the usual spread: a quantile of Student's t."""
    squares = sum(weight * value**2 for value, weight in zip(values, weights, strict=True))
    freedom = _PRIOR_WEIGHT + groups
    scale = math.sqrt((_PRIOR_WEIGHT * usual**2 + groups * squares) / freedom)
    # A prediction is off by its deviation, and by that of the mean of the measured ones.
    return student(side, freedom) * scale * math.sqrt(1 + 1 / freedom)


def student(share: float, freedom: float) -> float:
    """The quantile of Student's t by Hill's expansion (Communications of the ACM 13, 1970)."""
    z = NormalDist().inv_cdf(share)
    return z * (
        1
        + (z**2 + 1) / (4 * freedom)
        + (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)
        + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * freedom**3)
    )


def _rounded(value: float) -> float:
    """An end with four digits, rounded away from 0."""
    if not value:
        return 0.0
    digits = 3 - math.floor(math.log10(abs(value)))
    step = 10.0**-digits
    return math.copysign(
        min(_FARTHEST, round(math.ceil(abs(value) / step - 1e-9) * step, digits)), value
    )


# -- classes of kernels ----------------------------------------------------------------------------

LAST = ", channels last"
"""Suffix of the classes for images with channels last, where eager kernels differ.  A knob file
without a share for such a class uses that of the class without the suffix."""
CLASSES = (
    "conv",
    f"conv{LAST}",
    "conv 1x1",
    f"conv 1x1{LAST}",
    "conv 3d",
    "conv, odd channels",
    "grouped conv",
    f"grouped conv{LAST}",
    "depthwise conv",
    "depthwise conv, large",
    "depthwise conv, general",
    "depthwise conv backward",
    "grouped conv backward",
    *KINDS[1:],
)
"""Every class, matrix work first.  A group is in the first class that one of its ops has."""
UNITS = tuple(
    f"{engine} {family}"
    for engine in ENGINES
    for family in dict.fromkeys(compute_family(name) for name in PRECISIONS)
)
"""Every engine in every precision that a chip may have a rate for, as in "vector fp32"."""


# -- knobs -----------------------------------------------------------------------------------------
# A kernel takes  (t_comp^p + t_hbm^p)^(1/p) + launch,  with
#   t_comp = FLOP of full tiles and waves / (compute * share of its class * datasheet peak),
#   t_hbm  = (bytes + hidden layout copies) / (memory * share of its class * datasheet bandwidth),
#            where bytes that the last cache still holds (see `works`) count 1 / cache each.
# compute and memory: sustained by the chip; the shares differ little between chips of a kind.
# Where pace is not 1, all of these times, and those of the host, are divided by it.
# Attention forward takes the seconds of `attention.py` instead, on chips with an SM count.

SCHEMA = "rooftrace.knobs/1"
_SHIPPED = Path(__file__).parent / "fitted"
_KIND = FileKind("knob file", KnobsError)
MOST_OVERLAP = 20.0
"""An exponent from which on a soft maximum is a maximum."""
_LEFT_OUT = (("cache", 1.0), ("pace", 1.0))
"""Values of numbers that a file leaves out."""
USUAL = "usual"
"""The usual numbers of the chip's generation."""


@dataclass(frozen=True)
class Knobs(Plain):
    """Calibrated constants of one chip, and the measurements that they come from."""

    title: str
    compute: float = knob(1.0, least=LEAST_SHARE, prior=0.2)  # sustained over datasheet
    memory: float = knob(1.0, least=LEAST_SHARE, prior=0.2, on_cpu=0.4)
    # p of the formula above; infinite: compute and memory overlap fully.
    overlap: float = knob(
        math.inf, least=1.0, endless=True, prior=0.4, start=MOST_OVERLAP, fitted=MOST_OVERLAP
    )
    # Of a kernel on the device; None: the chip's.
    launch: float | None = knob(None, unit="second", prior=0.7, of_chip="kernel_gap", start=3e-6)
    # Of a kernel on the host, eager; None: the chip's.
    dispatch: float | None = knob(
        None, unit="second", prior=0.7, of_chip="dispatch_eager", start=8e-6
    )
    # Relative standard deviation that all kernels of a step share.
    spread: float = knob(0.0, most=WIDEST)
    # Bandwidth of the last cache over the memory's; 1: it adds nothing.
    cache: float = knob(1.0, least=1.0, prior=0.7, start=3.0)
    tiling: Tiling = field(default_factory=Tiling)
    shares: Mapping[str, Share] = field(default_factory=dict, hash=False)  # by class of kernels
    # Free text by key (from, cases, date, error ...); shown, never computed with.
    source: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)
    attention: AttentionKnobs | str = field(default_factory=AttentionKnobs)  # or "usual"
    # Of engines where products do not reach the share of their class: "vector fp32" and its like.
    engines: Mapping[str, float] = field(default_factory=dict, hash=False)
    # Of a view on the host, eager; None: the chip's.
    view: float | None = knob(None, unit="second")
    # Of Python per call of a module, eager; None: the chip's.
    call: float | None = knob(None, unit="second")
    # Factors on the bytes that rules count; None: no factors.
    traffic: ByteFactors | None = None
    # Speed of all kernels, launches and the host over that by the other numbers.
    pace: float = knob(1.0, least=LEAST_SHARE, prior=0.2, on_cpu=0.4)
    use: str = NO_FIT  # one of `USES`
    # Ends of intervals by `use`; not in the hash: they change no time.
    residuals: Mapping[str, Residuals] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        return short(
            self,
            f"{self.title}: compute {self.compute:.3g}, memory {self.memory:.3g} of the peaks, "
            f"{len(self.shares)} classes of kernels with shares of their own",
        )

    def __post_init__(self) -> None:
        check_knobs(self)
        for name in (self.use, *self.residuals):
            if name not in USES:
                raise KnobsError(f"use {name!r:.60}: expected one of {', '.join(USES)}")
        for name in self.shares:
            if name not in CLASSES:
                raise KnobsError(f"share {name!r:.60}: expected one of {'; '.join(CLASSES)}")
        if isinstance(self.attention, str) and self.attention != USUAL:
            raise KnobsError(
                f"attention={self.attention!r:.60}: expected a table of numbers, or {USUAL!r}"
            )
        for name, share in self.engines.items():
            if name not in UNITS:
                raise KnobsError(f"engines {name!r:.60}: expected one of {'; '.join(UNITS)}")
            if not _is_share(share):
                raise KnobsError(
                    f"engines.{name}={share!r:.60}: expected a share of its rate, 2 at most"
                )

    def share(self, name: str) -> Share:
        """The share of a class of kernels, else that of the class without its layout suffix."""
        share = self.shares.get(name)
        return share or self.shares.get(name.removesuffix(LAST), PLAIN)

    def with_shares(self, **changes: Mapping[str, Any]) -> Knobs:
        """Knobs with some shares of classes changed: with_shares(compute={"mm": 0.9})."""
        shares = dict(self.shares)
        for number, by_class in changes.items():
            for name, value in by_class.items():
                shares[name] = replace(shares.get(name, PLAIN), **{number: value})
        return replace(self, shares=shares)

    @staticmethod
    def typical(chip: Chip, compiled: bool, sustained: bool = True) -> Knobs:
        """Typical knobs of a chip, eager or compiled, before anything is fitted.

        The shares of its kind of chip, or of its generation where its matrix engines are as wide
        as those of A100 or of H100; then its sustained rates (`Chip.sustained_compute` and
        `sustained_memory`).  sustained: False: without the latter, as a kernel alone runs.
        """
        facts = (chip.sustained_compute, chip.sustained_memory) if sustained else (None, None)
        rates = [1.0 if fact is None else fact.value for fact in facts]
        of = (chip.kind == "gpu" and Knobs.generation(chip)) or ""
        return _sustained(chip.kind, compiled, of, *rates)

    @staticmethod
    def generation(chip: Chip) -> str | None:
        """The generation of data-center GPUs whose kernels a chip runs; None for any other GPU."""
        if not chip.has_peak("matrix", "bf16"):
            return None
        if chip.architecture and chip.architecture != "sm_89":
            return _OF_ARCHITECTURE.get(chip.architecture)
        if chip.vendor != "NVIDIA" or chip.sm_count is None or chip.clock is None:
            return None
        width = chip.peak("matrix", "bf16") / (chip.sm_count.value * chip.clock.value)
        if chip.architecture:
            return "ada" if width >= _FULL_RATE else None
        return next((name for name, least in GENERATIONS if width >= least), None)

    @staticmethod
    def products(chip: Chip) -> Mapping[str, ProductKnobs]:
        """Kernels of libraries for products in narrow formats, by "FORMAT LIBRARY", on a chip.

        They go by the generation; of other GPUs nothing is measured.
        """
        of = chip.kind == "gpu" and Knobs.generation(chip)
        return _products(of) if of else {}

    @property
    def fitted_on(self) -> tuple[str, ...]:
        """The names of the chips that were measured for these constants; none where unknown."""
        names = self.source.get("chip", ())
        return (names,) if isinstance(names, str) else tuple(map(str, names))

    @property
    def is_fit(self) -> bool:
        """Whether these constants are a fit to one chip, not typical shares of several."""
        return isinstance(self.source.get("chip"), str)

    def borrowed(self, chip: Chip) -> str:
        """A sentence that other chips were measured for these constants; "" for this chip."""
        if not self.fitted_on or {chip.name, *chip.aliases} & set(self.fitted_on):
            return ""
        if self.is_fit:
            return f"{self.title} was fitted on {self.fitted_on[0]}, and is used for {chip.name}"
        measured = ", ".join(self.fitted_on)
        return f"what kernels reach of their peaks was measured on {measured}, not on {chip.name}"

    def reached(self, kind: str) -> tuple[float, float]:
        """The shares of the chip's FLOP rate and bandwidth that kernels of a class reach."""
        share = self.share(kind)
        return (
            self.pace * self.compute * share.compute,
            self.pace * self.memory * share.memory,
        )

    def launch_on(self, chip: Chip) -> float:
        """Seconds that a kernel takes on this chip on top of its work."""
        return (chip.kernel_gap.value if self.launch is None else self.launch) / self.pace

    def ends(self, level: float = LEVEL) -> tuple[float, float]:
        """Ends of the interval that holds this share of steps, in standard deviations of a step.

        By the residuals of this use; without any, those of a normal distribution.
        """
        residuals = self.residuals.get(self.use)
        return normal_ends(level) if residuals is None else residuals.ends(level)

    def to_dict(self) -> dict[str, Any]:
        """A plain dict with the keys of a knob file."""
        result: dict[str, Any] = {"schema": SCHEMA, "title": self.title}
        for item, _ in knobs_of(self):
            value = getattr(self, item.name)
            if value is not None and value != math.inf and (item.name, value) not in _LEFT_OUT:
                result[item.name] = value
        if self.use != NO_FIT:
            result["use"] = self.use
        tiling = _changed(self.tiling, Tiling())
        if tiling:
            result["tiling"] = tiling
        if self.engines:
            result["engines"] = dict(self.engines)
        if isinstance(self.attention, str):
            result["attention"] = self.attention
        elif attention := _changed(self.attention, AttentionKnobs()):
            result["attention"] = attention
        if self.source:
            result["source"] = dict(self.source)
        if self.traffic is not None:
            result["traffic"] = _changed(self.traffic, ByteFactors()) | {
                "fusion": self.traffic.fusion,
                "factors": {
                    kind: _changed(factor, ByteFactor())
                    for kind, factor in self.traffic.factors.items()
                },
            }
        if self.residuals:
            result["residuals"] = {
                name: {f.name: getattr(ends, f.name) for f in fields(ends)}
                for name, ends in self.residuals.items()
            }
        result["share"] = {name: _changed(share, PLAIN) for name, share in self.shares.items()}
        return result

    @staticmethod
    def from_dict(data: Mapping[str, Any], where: str = "knobs") -> Knobs:
        """The inverse of `to_dict`.  Raises KnobsError naming `where` and the key."""
        values = dict(data)
        schema = values.pop("schema", None)
        if schema != SCHEMA:
            raise KnobsError(f"{where}: schema {schema!r:.60}: expected {SCHEMA!r}")
        shares = record_of(dict[str, Share], values.pop("share", {}), where, _KIND, "share")
        knobs = record_of(Knobs, values, where, _KIND)
        try:
            return replace(knobs, shares=shares)
        except KnobsError as error:
            raise KnobsError(f"{where}: {error}") from None


def _is_share(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and LEAST_SHARE <= value <= 2


def _changed(record: Any, default: Any) -> dict[str, Any]:
    """The fields of a record that differ from those of `default`."""
    names = [f.name for f in fields(record)]
    return {n: getattr(record, n) for n in names if getattr(record, n) != getattr(default, n)}


# -- typical ones ----------------------------------------------------------------------------------

GENERATIONS = (("blackwell", 5000.0), ("hopper", 2200.0), ("ampere", 1500.0))
"""Files of generations, and the least FLOP of bf16 per SM and clock of each, for chips that do not
name their architecture: A100 has 2,048, H100 3,786 at its highest clock (less where a limit on
power was measured along), B200 7,737, GeForce cards 512."""
_OF_ARCHITECTURE = {
    "sm_80": "ampere", "sm_90": "hopper", "sm_100": "blackwell", "sm_103": "blackwell",
    "gfx942": "cdna3", "gfx950": "cdna4",
}  # fmt: skip
_FULL_RATE = 900.0
"""FLOP of bf16 per SM and clock from which on a chip of sm_89 adds in fp32 at the full rate, as L4,
L40S and RTX 6000 Ada do, and GeForce cards do not: these have the file "ada"."""


@functools.lru_cache(maxsize=1024)
def _sustained(kind: str, compiled: bool, of: str, compute: float, memory: float) -> Knobs:
    """Typical numbers of a chip that sustains these shares of its rates."""
    knobs = _typical(kind, compiled, of)
    return replace(knobs, compute=knobs.compute * compute, memory=knobs.memory * memory)


@functools.cache
def _typical(kind: str, compiled: bool, of: str) -> Knobs:
    """Typical shares of a kind of chip, with the numbers of a generation in place of some."""
    how = "compiled" if compiled else "eager"
    name = "typical-cpu" if kind == "cpu" else f"typical-{how}"
    if not of:
        return load_knobs(name)
    base, path = load_knobs(name).to_dict(), _SHIPPED / "generations" / f"{of}.toml"
    changes = toml_of(text_of(path, _KIND), str(path), _KIND)
    changes.pop("products", None)
    for table in ("source", "share"):
        changes[table] = {**base[table], **changes.get(table, {})}
    title = f"{changes['title']} ({how})"
    return Knobs.from_dict({**base, **changes, "title": title}, str(path))


@functools.cache
def _products(of: str) -> Mapping[str, ProductKnobs]:
    """The table [products] of a generation."""
    path = _SHIPPED / "generations" / f"{of}.toml"
    table = toml_of(text_of(path, _KIND), str(path), _KIND).get("products", {})
    return record_of(dict[str, ProductKnobs], table, str(path), _KIND, "products")


# -- files -----------------------------------------------------------------------------------------


def load_knobs(name: str | os.PathLike[str]) -> Knobs:
    """Knobs by path, or by the name of a file that comes with rooftrace.  Raises KnobsError."""
    path = Path(name)
    shipped = _SHIPPED / f"{os.fspath(name)}.toml"
    if not path.suffix and shipped.is_file():
        path = shipped
    try:
        data = toml_of(text_of(path, _KIND), str(path), _KIND)
    except FileNotFoundError:
        raise KnobsError(
            f"knobs {os.fspath(name)!r}: there is no such file; expected typical (of the chip's "
            "kind), none, a TOML file written by `rooftrace calibrate`, or one of "
            f"{', '.join(shipped_knobs())}"
            f"{hint(os.fspath(name), ('typical', 'none', *shipped_knobs()))}"
        ) from None
    return Knobs.from_dict(data, str(path))


def shipped_knobs() -> tuple[str, ...]:
    """Names of the knob files that come with rooftrace."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.toml")))


def dump_knobs(knobs: Knobs) -> str:
    """The TOML text of a knob file; `load_knobs` reads it back."""
    data = _six_digits(knobs.to_dict())
    shares, residuals = data.pop("share"), data.pop("residuals", {})
    ordered = ("source", "tiling", "attention", "engines")
    names = [name for name in ordered if isinstance(data.get(name), Mapping)]
    tables = {name: data.pop(name) for name in names}
    if "traffic" in data:
        tables["traffic"] = data.pop("traffic")
        tables["traffic.factors"] = tables["traffic"].pop("factors")
    sections = [("", data), *((f"[{name}]", table) for name, table in tables.items())]
    sections += [(f"[residuals.{toml_key(name)}]", ends) for name, ends in residuals.items()]
    return toml_sections([*sections, ("[share]", shares)] if shares else sections)


def _six_digits(value: Any) -> Any:
    """A value with six digits in each of its numbers."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {name: _six_digits(item) for name, item in value.items()}
    return [_six_digits(item) for item in value] if isinstance(value, (list, tuple)) else value
