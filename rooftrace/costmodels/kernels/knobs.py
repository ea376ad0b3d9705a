"""Knobs of kernels: constants of a chip by which kernels take longer than their peaks say."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rooftrace._escapes import toml_key
from rooftrace._plain import Plain
from rooftrace._reading import FileKind, record_of, text_of, toml_of
from rooftrace._shown import short
from rooftrace.costmodels.kernels.intervals import (
    LEVEL,
    LEVELS,
    NO_FIT,
    USES,
    Behind,
    IntervalTable,
    Residuals,
    StepCell,
    StepErrors,
    normal_ends,
)
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

# -- classes of kernels ----------------------------------------------------------------------------

LAST = ", channels last"
"""Suffix of the classes for images with channels last, where kernels differ.  A knob file
without a share for such a class uses that of the class without the suffix."""
BACK = " backward"
"""Suffix of the classes of gradients of convolutions, where kernels differ; the same holds."""
NATIVE = "depthwise conv, large"
"""The class of PyTorch's own kernels of depthwise convolutions: all that cuDNN does not take, among
them those with large windows."""
FEW = ", few channels"
"""Suffix, before the others, of the classes of images with fewer channels than 16 bytes hold; the
same holds."""
ODD = ", odd rows"
"""The same of 1x1 ones with channels first whose images begin at no multiple of 16 bytes."""
FILTERS = ", fp32 filters"
"""The same of gradients of fp32 filters."""
GROUPED = ("grouped conv", f"grouped conv{LAST}", "grouped conv backward")
CLASSES = (
    "conv",
    f"conv{LAST}",
    f"conv{FEW}",
    f"conv{FEW}{LAST}",
    "conv 1x1",
    f"conv 1x1{LAST}",
    f"conv 1x1{ODD}",
    f"conv{BACK}",
    f"conv{FEW}{BACK}",
    f"conv{FILTERS}{BACK}",
    f"conv 1x1{BACK}",
    f"conv 1x1{ODD}{BACK}",
    "conv 3d",
    "conv, odd channels",
    *GROUPED,
    "depthwise conv",
    f"depthwise conv{LAST}",
    NATIVE,
    "depthwise conv, general",
    "depthwise conv backward",
    f"depthwise conv{BACK}{LAST}",
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
#   t_comp = FLOP of full tiles and waves / (compute * share of its class * datasheet peak)
#            + what is counted by instructions (see `instructions`) / max(1, compute),
#   t_hbm  = bytes / (memory * share of its class * datasheet bandwidth),
#            where bytes that the last cache still holds (see `works`) count 1 / cache each;
# and, at the same time, its waits for memory; convolutions take copies of their operands besides.
# compute and memory: sustained by the chip; the shares differ little between chips of a kind.
# Where pace is not 1, all of these times, and those of the host, are divided by it.
# Attention forward takes the seconds of `attention.py` instead, on chips with an SM count.

SCHEMA = "rooftrace.knobs/1"
_SHIPPED = Path(__file__).parent / "fitted"
_KIND = FileKind("knob file", KnobsError)
MOST_OVERLAP = 20.0
"""An exponent from which on a soft maximum is a maximum."""
_LEFT_OUT = (("cache", 1.0), ("pace", 1.0), ("power", 1.0))
"""Values of numbers that a file leaves out."""
USUAL = "usual"
"""The usual numbers: of attention, those of the chip's generation; of intervals, the table's."""


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
    # Share of its clock that a chip holds with its matrix engines at full rate, by its limit on
    # power; see `seconds.held`.
    power: float = knob(1.0, least=LEAST_SHARE, most=1.0)
    use: str = NO_FIT  # one of `USES`
    # Ends of intervals by `use`, or "usual"; not in the hash: they change no time.
    residuals: Mapping[str, Residuals] | str = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        return short(
            self,
            f"{self.title}: compute {self.compute:.3g}, memory {self.memory:.3g} of the peaks, "
            f"{len(self.shares)} classes of kernels with shares of their own",
        )

    def __post_init__(self) -> None:
        check_knobs(self)
        if isinstance(self.residuals, str) and self.residuals != USUAL:
            raise KnobsError(f"residuals={self.residuals!r:.60}: expected tables, or {USUAL!r}")
        named = () if isinstance(self.residuals, str) else self.residuals
        for name in (self.use, *named):
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
        """The share of a class of kernels, else that of the class without its suffixes."""
        usual = re.sub("|".join((FEW, ODD, FILTERS)), "", name)
        names = (name, usual, usual.removesuffix(LAST).removesuffix(BACK))
        return next((self.shares[each] for each in names if each in self.shares), PLAIN)

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
        `sustained_memory`).  A share of compute below 1 is a limit on power: it becomes `power`.
        sustained: False: without sustained rates, as a kernel alone runs.
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

    @property
    def of_use(self) -> Residuals | None:
        """The residuals of this use: of these knobs, or the usual ones; None without any."""
        return self.residuals_of(self.use)

    def residuals_of(self, use: str) -> Residuals | None:
        """The residuals of a use."""
        if isinstance(self.residuals, str):
            return IntervalTable.shipped().uses.get(use)
        return self.residuals.get(use)

    def ends(self, level: float = LEVEL) -> tuple[float, float]:
        """Ends of the interval that holds this share of steps, in standard deviations of a step.

        By the residuals of this use, wherever a step is; without any, those of a normal
        distribution.
        """
        residuals = self.of_use
        return normal_ends(level) if residuals is None else residuals.ends(level)

    def errors_of(self, cell: StepCell, alone: Any, variance: Any, behind: Behind) -> StepErrors:
        """Where log(measured / predicted) of a step lies.

        cell: where it is.  alone: how much it is one kernel (see `StepTimes.alone`).  variance: of
        the step, by the spreads of its kernels.  Numbers, or arrays over points of one cell.
        behind: where its host is.

        With "usual" residuals the table says it.  Those of a fit are of its left-out steps, in
        standard deviations; a step in another cell than theirs varies by how far cells are apart.
        """
        table = IntervalTable.shipped()
        if self.residuals == USUAL:
            return table.errors(cell, alone, behind)
        residuals = self.of_use
        if residuals is not None:
            variance = variance + table.apart(residuals.cells, cell)
        levels = LEVELS if residuals is None else residuals.levels
        ends = [self.ends(level) for level in levels]
        deviation = variance**0.5
        return StepErrors(
            levels,
            tuple(low * deviation for low, _ in ends),
            tuple(high * deviation for _, high in ends),
        )

    def grounds_of(self, cell: StepCell, alone: float, behind: Behind) -> str:
        """A sentence on the steps that an interval at a cell rests on; "" where there are none."""
        table, residuals = IntervalTable.shipped(), self.of_use
        if self.residuals == USUAL:
            return table.grounds(cell, alone, behind)
        if residuals is None:
            return ""
        other = table.apart(residuals.cells, cell) > 0
        where = f"; widened, as none of them was {cell}" if other else ""
        return f"interval by {residuals.basis}{where}" if residuals.few or other else ""

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
        if isinstance(self.residuals, str):
            result["residuals"] = self.residuals
        elif self.residuals:
            result["residuals"] = {name: ends.to_dict() for name, ends in self.residuals.items()}
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
    return replace(
        knobs,
        compute=knobs.compute * max(1.0, compute),
        memory=knobs.memory * memory,
        power=min(1.0, compute),
    )


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
    shares = base["share"]
    for name, numbers in changes.get("share", {}).items():
        shares[name] = {**shares.get(name, {}), **numbers}
    changes |= {"share": shares, "source": {**base["source"], **changes["source"]}}
    title = f"{changes['title']} ({how})"
    return Knobs.from_dict({**base, **changes, "title": title}, str(path))


def library_products(chip: Chip) -> Mapping[str, ProductKnobs]:
    """Kernels of libraries for products in narrow formats, by "FORMAT LIBRARY", on a chip.

    They go by the generation; of other GPUs nothing is measured.
    """
    of = chip.kind == "gpu" and Knobs.generation(chip)
    return _products(of) if of else {}


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
    return tuple(sorted(path.stem for path in _SHIPPED.glob("typical-*.toml")))


def dump_knobs(knobs: Knobs) -> str:
    """The TOML text of a knob file; `load_knobs` reads it back."""
    data = _six_digits(knobs.to_dict())
    shares, residuals = data.pop("share"), {}
    if isinstance(data.get("residuals"), Mapping):
        residuals = data.pop("residuals")
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
