"""Numbers of records: the facts of each, and all of them by dotted names.

A record of constants declares a number as `split: float = knob(0.0, unit="second", prior=1.0)`:
its check, its unit, and how a fit frees it follow from that one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

LEAST_SHARE = 1e-6
"""The smallest share of a rate."""
MOST = 1e6
"""The largest number of any knob: rates and seconds stay far from where floats end."""
WIDEST = 100.0
"""The largest relative standard deviation: beyond, an interval says nothing, and overflows."""


class KnobsError(ValueError):
    """A knob file that cannot be read: names the file, the key, and the expected value."""


@dataclass(frozen=True, slots=True)
class KnobFacts:
    """Facts of a knob.

    default: has no effect.  least, most: bounds.  endless: whether it may be infinite.  unit:
    "second"; "" of factors and shares.  prior: standard deviation of its logarithm around the start
    of a fit; None where no fit frees it; on_cpu: that on CPUs.  start: where a fit begins without
    it; of_chip: the fact of the chip that is used before that.  fitted: the most that a fit gives.
    """

    default: float | None = None
    least: float = 0.0
    most: float = MOST
    endless: bool = False
    unit: str = ""
    prior: float | None = None
    on_cpu: float | None = None
    start: float | None = None
    of_chip: str = ""
    fitted: float = math.inf


def knob(default: float | None, **said: Any) -> Any:
    """A field of a record for a number with this default; said: fields of `KnobFacts`."""
    return field(default=default, metadata={"knob": KnobFacts(default, **said)})


def knobs_of(record: Any) -> Iterator[tuple[Field[Any], KnobFacts]]:
    """The numbers of a record, or of its class, in order."""
    for item in fields(record):
        if "knob" in item.metadata:
            yield item, item.metadata["knob"]


def check_knobs(record: Any) -> None:
    """Raise KnobsError for a number outside of its bounds; None is where it is the default."""
    for item, facts in knobs_of(record):
        value = getattr(record, item.name)
        if value is None and item.default is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        endless = facts.endless and value == math.inf
        if number and (facts.least <= value <= facts.most or endless):
            continue
        bounds = [f"at least {facts.least:g}", f"{facts.most:g} at most"]
        if number and value < facts.least:
            del bounds[1]
        raise KnobsError(f"{item.name}={value!r:.60}: expected a number of {', '.join(bounds)}")


# -- records of numbers ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """Fractions of the chip's sustained rates that kernels of one class reach."""

    compute: float = knob(1.0, least=LEAST_SHARE, prior=0.15)
    memory: float = knob(1.0, least=LEAST_SHARE, prior=0.15)
    engine: str = "matrix"  # "vector", as for depthwise convolutions
    layout: float = knob(0.0)  # hidden copies into another layout, in multiples of activation bytes
    # How often as long a kernel takes whose rows are not aligned to its loads.
    odd: float = knob(1.0, least=LEAST_SHARE)
    # Relative standard deviation of measured kernels around the prediction.
    spread: float = knob(0.0, most=WIDEST)
    # `layout` of activations in fp32, whose kernels of cuDNN read NCHW more often; None: the same.
    layout_fp32: float | None = knob(None)
    # `odd` of products whose rows begin inside a word of 4 bytes; None: the same.
    odd_word: float | None = knob(None)

    def __post_init__(self) -> None:
        check_knobs(self)
        if self.engine not in ("matrix", "vector"):
            raise KnobsError(f"engine={self.engine!r:.60}: expected matrix or vector")


PLAIN = Share()


@dataclass(frozen=True, slots=True)
class Tiling:
    """Fitted constants of the tiles of matrix products."""

    # Steps of K that filling and draining a tile's pipeline takes.
    prologue: float = knob(0.0, prior=1.0, start=200.0)
    # On top of a product whose K is split.
    split: float = knob(0.0, unit="second", prior=1.0, start=2e-6)
    feed: float = knob(1.0, least=LEAST_SHARE, prior=1.0)  # share of the L2 bandwidth of tiles
    # Share of the L2 bandwidth at which SMs with the smallest tile walk over K.
    busy: float = knob(math.inf, least=LEAST_SHARE, endless=True, prior=1.0, start=1.3)

    def __post_init__(self) -> None:
        check_knobs(self)


class TileRule(NamedTuple):
    """Which products C of a library have one of its tiles, and what that tile reaches."""

    most_rows: float  # of C
    rows: int  # of the tile
    columns: int  # 0: any
    most_columns: float = math.inf  # of C
    prologue: float | None = None  # steps of K for its start and its end; None: the library's
    share: float = 1.0  # of the matrix engine that its warps fill
    cluster: int = 1  # tiles along the rows of C that come together, wanted or not


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKnobs:
    """Constants of a library's products in one format, and of the kernels that round activations.

    Rounding M rows of K numbers takes `start`, and the longer of `reads` M K bytes through HBM (or
    the last cache, if it holds them before and after) and of the rows of a multiprocessor, each
    `row` and `chunk` for every 2,048 numbers of it.
    """

    compute: float = knob(1.0, least=LEAST_SHARE)  # in place of the share of the class
    prologue: float | None = knob(None)  # as in `Tiling`; None: that of the generation
    # Share of a prologue that tiles of all multiprocessors take one after another.
    common: float = knob(0.0, most=1.0)
    feed: float | None = knob(None, least=LEAST_SHARE)
    busy: float | None = knob(None, least=LEAST_SHARE)
    whole: bool = False  # whether K is never split
    # The first whose rows and columns of C suffice is taken, else the last.  Empty: the tile that
    # suits each product.
    tiles: tuple[TileRule, ...] = ()
    start: float = knob(0.0, unit="second")  # launches and latency
    reads: float = knob(0.0)  # bytes for a number
    row: float = knob(0.0, unit="second")
    chunk: float = knob(0.0, unit="second")
    # Where M is no multiple of 4, and a row has several scales: they are copied for the TMA.
    ragged: float = knob(0.0, unit="second")

    def __post_init__(self) -> None:
        check_knobs(self)


@dataclass(frozen=True, slots=True)
class AttentionKnobs:
    """Fitted constants of attention kernels.

    products may pass 1: it is high where a kernel hides exponentials, which are counted in full.
    convert holds at a head width of 128; steps of wider heads hold fewer keys, so it grows with it.
    """

    # Share of the sustained matrix rate inside a step.
    products: float = knob(1.0, least=LEAST_SHARE, prior=1.0)
    # Conversions of an fp8 step, over its products in bf16.
    convert: float = knob(0.0, prior=1.0, start=0.5)
    stream: float = knob(1.0, least=LEAST_SHARE, prior=1.0)  # share of the sustained bandwidth
    start: float = knob(0.0, unit="second", prior=1.0, start=1e-6)  # of a block
    combine: float = knob(0.0, unit="second", prior=1.0, start=3e-6)  # adding up splits
    merge: float = knob(0.0, unit="second", prior=1.0, start=1e-7)  # of an SM, per row of splits
    # The kernels that copy queries, with a paged cache.
    prepare: float = knob(0.0, unit="second", prior=1.0, start=3e-6)
    # One more request, with a paged cache.
    request: float = knob(0.0, unit="second", prior=1.0, start=1e-8)

    def __post_init__(self) -> None:
        check_knobs(self)


# -- by dotted names -------------------------------------------------------------------------------


def numbers_of(record: Any, before: str = "") -> dict[str, float]:
    """The numbers of a record, of records in it, and of mappings of records, by dotted names."""
    numbers: dict[str, float] = {}
    for column in fields(record):
        value, name = getattr(record, column.name), f"{before}{column.name}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            numbers[name] = value
        elif is_dataclass(value):
            numbers |= numbers_of(value, f"{name}.")
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if is_dataclass(item):
                    numbers |= numbers_of(item, f"{name}.{key}.")
    return numbers


def place_of(record: Any, path: str, missing: Any = None) -> tuple[Any, str]:
    """The record that a dotted name leads to, and the field in it.

    missing: the record in place of one that a mapping does not have.
    """
    first, dot, rest = path.partition(".")
    if not dot:
        return record, first
    inner = getattr(record, first)
    if isinstance(inner, Mapping):
        key, _, rest = rest.rpartition(".")
        inner = inner.get(key, missing)
    return place_of(inner, rest, missing)


def facts_of(record: Any, path: str, missing: Any = None) -> KnobFacts | None:
    """The facts of the knob at a dotted name; None for a number that is no knob."""
    inner, name = place_of(record, path, missing)
    return next((facts for item, facts in knobs_of(inner) if item.name == name), None)


def with_numbers(record: Any, values: Mapping[str, float], missing: Any = None) -> Any:
    """A record with other numbers, by the names of `numbers_of`.

    missing: the record in place of one that a mapping does not have.
    """
    alone: dict[str, Any] = {}
    inside: dict[str, dict[str, float]] = {}
    for path, value in values.items():
        first, _, rest = path.partition(".")
        if rest:
            inside.setdefault(first, {})[rest] = value
        else:
            alone[first] = value
    for first, numbers in inside.items():
        inner = getattr(record, first)
        if not isinstance(inner, Mapping):
            alone[first] = with_numbers(inner, numbers)
            continue
        by_key: dict[str, dict[str, float]] = {}
        for path, value in numbers.items():
            key, _, number = path.rpartition(".")
            by_key.setdefault(key, {})[number] = value
        changed = {key: replace(inner.get(key, missing), **new) for key, new in by_key.items()}
        alone[first] = {**inner, **changed}
    return replace(record, **alone)
