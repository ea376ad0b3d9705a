"""Where the amounts of kernels become seconds: at a datasheet's peaks, and as rows for knobs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.costs import MATRIX, AttentionSizes
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels import attention_rows, engines
from rooftrace.costmodels.kernels.kerneltables import KernelTable
from rooftrace.costmodels.kernels.loads import misaligned, unit_of
from rooftrace.costmodels.kernels.utilization import SIZES, matrix_engine, tile_shares
from rooftrace.costmodels.kernels.works import KernelAmounts, Works
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array


def peak_seconds(
    kernels: KernelAmounts,
    chip: Chip,
    execution: ExecutionModel,
    headline: float,
    *,
    tiled: bool = True,
) -> Array:
    """Seconds [R] of the work of each kernel at the datasheet's rates.

    headline: FLOP/s of the engine that runs most of the matrix FLOPs.  tiled: False: as if every
    tile and every wave of products were full.

    Matrix and vector work of one kernel are added: engines are not assumed to overlap inside it.
    Raises MissingPeakError where the chip lacks a rate.
    """
    seconds = np.zeros(len(kernels))
    use = execution.utilization
    for work in kernels.works:
        rate: Amount
        if work.key.operation == "vector":
            scalar = use.eta_scalar
            rate = chip.peak("vector", work.key.precision) if scalar is None else scalar * headline
        elif use.tiles:
            rate, whole = _rates(work, chip, execution)
            rate = rate * _reached(execution, work)
            if tiled:
                rate = rate * _tile_shares(work, chip, rate, whole)
        else:
            rate = chip.peak(*engines.engine_of(work.key, chip, execution))
            rate = rate * _reached(execution, work)
        seconds[work.row] += work.flop / rate
    return seconds


def _reached(execution: ExecutionModel, work: Works) -> Amount:
    """`Utilization.eta` of products; equal rows are asked for once."""
    use = execution.utilization
    if use.b_sat is None or work.rows is None:
        return 1.0
    rows, places = np.unique(np.ravel(work.rows), return_inverse=True)
    eta: Array = np.array([use.eta(float(number)) for number in rows])[places]
    return eta


def _rates(work: Works, chip: Chip, execution: ExecutionModel) -> tuple[Amount, Amount]:
    """FLOP/s of `engines.product_engine`, and whether products are computed whole there."""
    engine = engines.engine_of(work.key, chip, execution)
    peak, whole = chip.peak(*engine), float(engine[0] == "matrix")
    if engine[0] == "vector" or work.key.operation != "matmul" or work.shape is None:
        return peak, whole
    few = np.minimum(*work.shape[:2])
    streams = (few > 0) & (few < engines.streamed_below(engine, chip))
    if not streams.any():
        return peak, whole
    return np.where(streams, chip.peak(*engines.STREAMING), peak), np.where(streams, 0.0, whole)


def _tile_shares(work: Works, chip: Chip, rate: Amount, whole: Amount) -> Amount:
    """Share of the rate that whole tiles in whole waves leave; 1 if not known."""
    engine, shape = matrix_engine(chip, 1.0), work.shape
    if engine is None or shape is None:
        return 1.0
    numbers = (*shape, _products(work), *engines.stored_widths(work.key), whole, rate)
    columns = np.broadcast_arrays(*(np.atleast_1d(number) for number in numbers))
    has_size = (columns[0] > 0) & (columns[1] > 0) & (columns[2] > 0)
    shares = np.ones(len(has_size))
    *sizes, rates = (column[has_size] for column in columns)
    if len(rates):
        shares[has_size] = tile_shares(dict(zip(SIZES, sizes, strict=True)), rates, engine)
    return shares


def _products(work: Works) -> Amount:
    """How many products of its shape the work is, at least 1."""
    assert work.shape is not None
    each = np.maximum(2 * math.prod(work.shape), 1.0)
    products: Amount = np.maximum(1.0, np.rint(work.flop / each))
    return products


# -- rows of a table -------------------------------------------------------------------------------

_PRODUCT = ("flop", "rate", *SIZES, "unit", "odd")


def table_of(kernels: KernelAmounts, chip: Chip, execution: ExecutionModel) -> KernelTable:
    """The kernels as a table on a chip, row by row.  Raises MissingPeakError."""
    data: dict[str, Array] = {
        "count": np.ones(len(kernels)),
        "bytes": kernels.bytes,
        "warm": kernels.warm,
        "moved": kernels.moved,
    }
    data |= _work_columns(kernels, chip, execution) | _attention(kernels, chip, execution)
    return KernelTable(chip, kernels.kind, data)


def _work_columns(
    kernels: KernelAmounts, chip: Chip, execution: ExecutionModel
) -> dict[str, Array]:
    """The columns of `KernelTable` for computing: those of the largest product, and the rest."""
    columns = {name: np.zeros(len(kernels)) for name in ("vector", "matrix", *_PRODUCT)}
    columns["rate"][:] = 1.0
    most = np.zeros(len(kernels))  # seconds of the largest product so far
    rows_odd = np.zeros(len(kernels))  # whether rows of vector work are misaligned
    for work in kernels.works:
        at, key = work.row, work.key
        rate, whole = _rates(work, chip, execution)
        if key.operation not in MATRIX:
            limit = engines.reached(work.rows, work.inner, chip)
            columns["vector"][at] += work.flop / np.minimum(rate, limit)
            if key.lined and work.columns is not None:
                odd = misaligned(key, {"N": work.columns})
                rows_odd[at] = np.maximum(rows_odd[at], odd)
            continue
        seconds = work.flop / rate
        if work.shape is None:
            columns["matrix"][at] += seconds
            continue
        m, n, k = work.shape
        has_size = np.minimum(np.minimum(m, n), k) > 0
        larger = has_size & (work.flop > 0) & (seconds >= most[at])  # of equal ones the last
        columns["matrix"][at] += np.where(larger, most[at], seconds)
        most[at] = np.where(larger, seconds, most[at])
        widths = engines.stored_widths(key)
        unit, odd = _unit_and_odd(work, whole, chip, execution)
        numbers = (work.flop, rate, m, n, k, _products(work), *widths, whole, unit, odd)
        for name, number in zip(_PRODUCT, numbers, strict=True):
            columns[name][at] = np.where(larger, number, columns[name][at])
    columns["odd"] = np.where(columns["flop"] > 0, columns["odd"], rows_odd)
    return columns


def _unit_and_odd(
    work: Works, whole: Amount, chip: Chip, execution: ExecutionModel
) -> tuple[Amount, Amount]:
    """The columns `unit` and `odd` of a product whose sizes are known; whole: that of `_rates`."""
    assert work.shape is not None
    tiled, streamed = engines.engine_of(work.key, chip, execution), engines.STREAMING
    on = tiled if tiled[0] == "vector" else streamed
    unit = np.where(np.asarray(whole) > 0, unit_of(*tiled), unit_of(*on))
    return unit, misaligned(work.key, dict(zip("MNK", work.shape, strict=True)))


def _attention(kernels: KernelAmounts, chip: Chip, execution: ExecutionModel) -> dict[str, Array]:
    """The attention columns, those of the largest attention of each row."""
    columns = {name: np.zeros(len(kernels)) for name in attention_rows.COLUMNS}
    most = np.zeros(len(kernels))
    for work in kernels.attention:
        assert work.attention is not None
        sizes, at = work.attention, work.row
        engine = engines.engine_of(work.key, chip, execution)
        size, rate, library = attention_rows.products_of(*engine, chip, execution.attention_library)
        each: Any = AttentionSizes(**sizes).flop  # type: ignore[arg-type]
        count = np.maximum(1.0, np.rint(work.flop / np.maximum(each, 1)))
        equal = (work.flop == most[at]) & (sizes["keys"] > columns["keys"][at]) & (work.flop > 0)
        larger = (work.flop > most[at]) | equal
        numbers = {**sizes, "kernels": count, "size": size, "rate": rate, "library": library}
        for name, column in columns.items():
            column[at] = np.where(larger, numbers.get(name, 0.0), column[at])
        most[at] = np.where(larger, work.flop, most[at])
    return {f"attention {name}": column for name, column in columns.items()}
