"""Kernels whose amounts are columns over sizes, and their seconds at all sizes at once.

`tables` and `engines` time kernels that were priced at one size; here an amount is an array, or one
number for all sizes.  Formulas are theirs: this file says which numbers go into them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rooftrace.costmodels.costs import COMPUTED, MATRIX, AttentionSizes, Work
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels import attention_rows, engines
from rooftrace.costmodels.kernels.kerneltables import KernelSeconds, KernelTable
from rooftrace.costmodels.kernels.loads import misaligned, unit_of
from rooftrace.costmodels.kernels.utilization import SIZES, matrix_engine, tile_shares
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES
from rooftrace.hardware import Chip

Array = np.ndarray[Any, np.dtype[np.float64]]
Places = np.ndarray[Any, np.dtype[np.integer[Any]]]
Amount = Array | float
"""An array over sizes, or one number for all of them."""
Part = slice | Places

_TILED, _OTHERS = 1024, 65_536
"""Sizes that are timed at once: of products and attention, in all tiles or splits; of others."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkColumns:
    """A key of `Cost.work` over sizes, with its FLOP.  Fields are those of `Work`.

    flop: 0 where a size has no such work.  rows, columns, inner: None where they are so in `Work`.
    attention: the fields of `AttentionSizes` by name; works of one attention kernel share the
    mapping, or have equal ones.
    """

    operation: str
    precision: str
    flop: Amount
    count: str = "useful"
    widths: tuple[float, float] | None = None
    lined: str = ""
    rows: Amount | None = None
    columns: Amount | None = None
    inner: Amount | None = None
    attention: Mapping[str, Amount] | None = None

    @property
    def key(self) -> Work:
        """What does not depend on sizes."""
        return Work(
            self.operation,
            self.precision,
            count=self.count,
            widths=self.widths,
            lined=self.lined,
        )

    @property
    def shape(self) -> tuple[Amount, Amount, Amount] | None:
        """M, N, K of one product; None where they are not all known."""
        if self.rows is None or self.columns is None or self.inner is None:
            return None
        return self.rows, self.columns, self.inner

    def each(self, change: Callable[[Amount], Amount]) -> WorkColumns:
        """The work with every amount changed."""
        sizes = (None if x is None else change(x) for x in (self.rows, self.columns, self.inner))
        rows, columns, inner = sizes
        attention = self.attention
        if attention is not None:
            attention = {name: change(amount) for name, amount in attention.items()}
        return replace(
            self,
            flop=change(self.flop),
            rows=rows,
            columns=columns,
            inner=inner,
            attention=attention,
        )

    def amounts(self) -> Iterator[Amount]:
        """Every amount."""
        sizes = (self.rows, self.columns, self.inner)
        yield self.flop
        yield from (size for size in sizes if size is not None)
        yield from (self.attention or {}).values()


@dataclass(frozen=True, slots=True, eq=False)
class KernelColumns:
    """A kernel over U sizes: amounts are numbers, or arrays of length U or 1.

    works: in the order of `Cost.work`.  kind: its class, see `group_class`.  bytes: through HBM.
    moved: those of them that are no weights; 0 for classes that end with `LAST`.  link: bytes over
    links.  warm: bytes that the last cache still holds.  times: how many kernels it stands for.
    at: the place among the U of each of P points; None where U is P, or 1 for all points.
    spread_kind: the class whose spread holds, where it is another one than `kind`.  eager: see
    `Plan.eager`.
    Raises ValueError for arrays of different lengths, and for a class that does not exist.
    """

    works: tuple[WorkColumns, ...]
    kind: str
    bytes: Amount
    moved: Amount = 0.0
    link: Amount = 0.0
    warm: Amount = 0.0
    times: Amount = 1.0
    at: Places | None = None
    spread_kind: str = ""
    eager: bool = False
    size: int = field(init=False)  # U, the number of sizes

    def __post_init__(self) -> None:
        if self.kind not in CLASSES:
            raise ValueError(f"kind {self.kind!r}: expected one of {'; '.join(CLASSES)}")
        lengths = {np.size(amount) for amount in self._amounts()} - {1}
        if len(lengths) > 1:
            raise ValueError(
                f"a kernel ({self.kind}) with arrays of lengths {sorted(lengths)}: "
                "expected all of one length, or of length 1"
            )
        object.__setattr__(self, "size", max(lengths | {1}))

    def _amounts(self) -> Iterator[Amount]:
        yield from (self.bytes, self.moved, self.link, self.warm, self.times)
        for work in self.works:
            yield from work.amounts()

    def part(self, where: Part) -> KernelColumns:
        """The kernel at some of its sizes, without `at`."""

        def change(amount: Amount) -> Amount:
            return amount if np.size(amount) == 1 else np.asarray(amount)[where]

        return self._each(change)

    def written_out(self) -> KernelColumns:
        """The kernel with an entry for each point, if it has an `at`."""
        return self if self.at is None else self.part(self.at)

    def _each(self, change: Callable[[Amount], Amount]) -> KernelColumns:
        return replace(
            self,
            works=tuple(work.each(change) for work in self.works),
            bytes=change(self.bytes),
            moved=change(self.moved),
            link=change(self.link),
            warm=change(self.warm),
            times=change(self.times),
            at=None,
        )

    def chunks(self) -> Iterator[slice]:
        """Slices of the U sizes that are timed at once: memory stays bounded."""
        tiled = any(work.shape or work.attention for work in self.works)
        length = _TILED if tiled else _OTHERS
        yield from (slice(at, at + length) for at in range(0, self.size, length))


# -- by the peaks of a datasheet -------------------------------------------------------------------


def peak_seconds(
    kernel: KernelColumns, chip: Chip, execution: ExecutionModel, headline: Amount
) -> Array:
    """Seconds [U] of one kernel's work, by the formula of `engines.compute_seconds`.

    headline: FLOP/s; an array of length U where it differs between sizes.
    Raises MissingPeakError where the chip lacks a rate.
    """
    cuts = list(kernel.chunks())
    rates = [headline if np.size(headline) == 1 else np.asarray(headline)[cut] for cut in cuts]
    parts = [
        _peak_seconds(kernel.part(cut), chip, execution, rate)
        for cut, rate in zip(cuts, rates, strict=True)
    ]
    return np.concatenate(parts)


def _peak_seconds(
    kernel: KernelColumns, chip: Chip, execution: ExecutionModel, headline: Amount
) -> Array:
    seconds = np.zeros(kernel.size)
    use = execution.utilization
    for work in _computed(kernel):
        rate: Amount
        if work.operation == "vector":
            scalar = use.eta_scalar
            rate = chip.peak("vector", work.precision) if scalar is None else scalar * headline
        elif use.tiles:
            rate, whole = _rates(work, chip, execution)
            rate = rate * _reached(execution, work)
            rate = rate * _tile_shares(work, chip, rate, whole, kernel.size)
        else:
            rate = chip.peak(*engines.engine_of(work.key, chip, execution))
            rate = rate * _reached(execution, work)
        seconds = seconds + work.flop / rate
    return seconds


def _computed(kernel: KernelColumns) -> list[WorkColumns]:
    """The works of `Cost.computed`, over sizes: those that differ in their count only are one."""
    computed: list[WorkColumns] = []
    for work in kernel.works:
        if work.count not in COMPUTED or not np.any(work.flop):
            continue
        for place, other in enumerate(computed):
            if other.count != work.count and _same_product(other, work):
                computed[place] = replace(other, flop=other.flop + work.flop)
                break
        else:
            computed.append(work)
    return computed


def _same_product(a: WorkColumns, b: WorkColumns) -> bool:
    if (
        a.shape is None
        or b.shape is None
        or (a.operation, a.precision, a.widths) != (b.operation, b.precision, b.widths)
    ):
        return False
    return all(np.array_equal(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def _reached(execution: ExecutionModel, work: WorkColumns) -> Amount:
    """`Utilization.eta` of products; equal rows are asked for once."""
    use = execution.utilization
    if use.b_sat is None or work.rows is None:
        return 1.0
    rows, places = np.unique(np.ravel(work.rows), return_inverse=True)
    eta: Array = np.array([use.eta(float(number)) for number in rows])[places]
    return eta


def _rates(work: WorkColumns, chip: Chip, execution: ExecutionModel) -> tuple[Amount, Amount]:
    """FLOP/s of `engines.product_engine`, and whether products are computed whole there."""
    engine = engines.engine_of(work.key, chip, execution)
    peak, whole = chip.peak(*engine), float(engine[0] == "matrix")
    if engine[0] == "vector" or work.operation != "matmul" or work.shape is None:
        return peak, whole
    few = np.minimum(*work.shape[:2])
    streams = (few > 0) & (few < engines.streamed_below(engine, chip))
    if not streams.any():
        return peak, whole
    return np.where(streams, chip.peak(*engines.STREAMING), peak), np.where(streams, 0.0, whole)


def _tile_shares(work: WorkColumns, chip: Chip, rate: Amount, whole: Amount, size: int) -> Amount:
    """Share of the rate that whole tiles in whole waves leave; 1 if not known."""
    engine, shape = matrix_engine(chip, 1.0), work.shape
    if engine is None or shape is None:
        return 1.0
    numbers = (*shape, _products(work), *engines.stored_widths(work.key), whole, rate)
    columns = [_full(number, size) for number in numbers]
    known = (columns[0] > 0) & (columns[1] > 0) & (columns[2] > 0)
    shares = np.ones(size)
    *sizes, rates = (column[known] for column in columns)
    if len(rates):
        shares[known] = tile_shares(dict(zip(SIZES, sizes, strict=True)), rates, engine)
    return shares


def _products(work: WorkColumns) -> Amount:
    """How many products of its shape the work is, at least 1."""
    assert work.shape is not None
    each = np.maximum(2 * math.prod(work.shape), 1.0)
    return np.maximum(1.0, np.rint(work.flop / each))


def _full(amount: Amount, size: int) -> Array:
    return np.broadcast_to(np.asarray(amount, dtype=float), (size,))


# -- by knobs --------------------------------------------------------------------------------------


def knob_seconds(
    kernel: KernelColumns, knobs: Knobs, chip: Chip, execution: ExecutionModel, layouts: bool
) -> KernelSeconds:
    """Seconds [U] of one kernel by the formula of `knobs`, without a launch.

    layouts: whether convolutions copy their activations into another layout.
    Raises MissingPeakError where the chip lacks a rate.
    """
    parts = []
    for cut in kernel.chunks():
        table = _table(kernel.part(cut), chip, execution)
        parts.append(table.seconds(knobs, layouts))
    return KernelSeconds(
        np.concatenate([part.compute for part in parts]),
        np.concatenate([part.memory for part in parts]),
        np.concatenate([part.device for part in parts]),
    )


def _table(kernel: KernelColumns, chip: Chip, execution: ExecutionModel) -> KernelTable:
    """A table with a row for each size of one kernel."""
    amounts = {"count": 1.0, "bytes": kernel.bytes, "warm": kernel.warm, "moved": kernel.moved}
    amounts |= _work_columns(kernel, chip, execution) | _attention(kernel, chip, execution)
    data = {name: _full(amount, kernel.size) for name, amount in amounts.items()}
    return KernelTable(chip, np.full(kernel.size, CLASSES.index(kernel.kind)), data)


_PRODUCT = ("flop", "rate", *SIZES, "unit", "odd")


def _work_columns(
    kernel: KernelColumns, chip: Chip, execution: ExecutionModel
) -> dict[str, Amount]:
    """The columns of `KernelTable` for computing: those of the largest product, and the rest."""
    vector: Amount = 0.0
    matrix: Amount = 0.0
    most: Amount = 0.0  # seconds of the largest product so far
    rows_odd: Amount = 0.0  # whether rows of vector work are misaligned
    largest: dict[str, Amount] = {**dict.fromkeys(_PRODUCT, 0.0), "rate": 1.0}
    for work in _computed(kernel):
        rate, whole = _rates(work, chip, execution)
        if work.operation not in MATRIX:
            limit = engines.reached(work.rows, work.inner, chip)
            vector = vector + work.flop / np.minimum(rate, limit)
            if work.lined and work.columns is not None:
                rows_odd = np.maximum(rows_odd, misaligned(work.key, {"N": work.columns}))
            continue
        seconds = work.flop / rate
        if work.shape is None:
            matrix = matrix + seconds
            continue
        whole_shape = (np.minimum.reduce(np.broadcast_arrays(*work.shape)) > 0) & (work.flop > 0)
        larger = whole_shape & (seconds >= most)  # of equal ones the last
        matrix = matrix + np.where(larger, most, seconds)
        most = np.where(larger, seconds, most)
        widths = engines.stored_widths(work.key)
        unit, odd = _unit_and_odd(work, whole, chip, execution)
        numbers = (work.flop, rate, *work.shape, _products(work), *widths, whole, unit, odd)
        largest = {
            name: np.where(larger, number, largest[name])
            for name, number in zip(_PRODUCT, numbers, strict=True)
        }
    largest["odd"] = np.where(np.asarray(largest["flop"]) > 0, largest["odd"], rows_odd)
    return {"vector": vector, "matrix": matrix, **largest}


def _unit_and_odd(
    work: WorkColumns, whole: Amount, chip: Chip, execution: ExecutionModel
) -> tuple[Amount, Amount]:
    """The columns `unit` and `odd` of a product whose sizes are known; whole: that of `_rates`."""
    assert work.shape is not None
    tiled, streamed = engines.engine_of(work.key, chip, execution), engines.STREAMING
    on = tiled if tiled[0] == "vector" else streamed
    unit = np.where(np.asarray(whole) > 0, unit_of(*tiled), unit_of(*on))
    return unit, misaligned(work.key, dict(zip("MNK", work.shape, strict=True)))


def _attention(kernel: KernelColumns, chip: Chip, execution: ExecutionModel) -> dict[str, Amount]:
    """The attention columns, those of the kernel's largest attention at each size."""
    known: list[tuple[Mapping[str, Amount], Amount, tuple[str, str]]] = []
    for work in kernel.works:
        if work.attention is None or work.count not in COMPUTED or not np.any(work.flop):
            continue
        engine = engines.engine_of(work.key, chip, execution)
        flop = work.flop
        for place, (sizes, before, _) in enumerate(known):
            if _equal(sizes, work.attention):
                known[place] = sizes, before + flop, engine
                break
        else:
            known.append((work.attention, flop, engine))
    chosen: dict[str, Amount] = dict.fromkeys(attention_rows.COLUMNS, 0.0)
    most: Amount = 0.0
    for sizes, flop, engine in known:
        size, rate, library = attention_rows.products_of(*engine, chip, execution.attention_library)
        each: Any = AttentionSizes(**sizes).flop  # type: ignore[arg-type]
        kernels = np.maximum(1.0, np.rint(flop / np.maximum(each, 1)))
        larger = (flop > most) | ((flop == most) & (sizes["keys"] > chosen["keys"]) & (flop > 0))
        columns = {**sizes, "kernels": kernels, "size": size, "rate": rate, "library": library}
        chosen = {
            name: np.where(larger, columns.get(name, 0.0), before)
            for name, before in chosen.items()
        }
        most = np.where(larger, flop, most)
    return {f"attention {name}": column for name, column in chosen.items()}


def _equal(sizes: Mapping[str, Amount], others: Mapping[str, Amount]) -> bool:
    """Whether two attention kernels have equal sizes everywhere."""
    if sizes is others:
        return True
    names = {*sizes, *others}
    pairs = ((sizes.get(name, 0.0), others.get(name, 0.0)) for name in names)
    return all(a is b or bool(np.all(np.equal(a, b))) for a, b in pairs)
