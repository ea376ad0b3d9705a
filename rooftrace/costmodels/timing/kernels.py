"""The calibrated time of kernels, many at once: what a prediction and a fit both compute.

Equal formulas on arrays: a fit evaluates thousands of kernels hundreds of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import COMPUTED, MATRIX, Cost
from rooftrace.costmodels.estimating import ExecutionModel
from rooftrace.costmodels.timing.attention_rows import (
    NO_ATTENTION,
    attention_row,
    attention_seconds_of,
    column_data,
)
from rooftrace.costmodels.timing.knobs import Knobs
from rooftrace.costmodels.timing.opclass import CLASSES, LAST, group_class
from rooftrace.costmodels.timing.reuse import warm_bytes
from rooftrace.costmodels.timing.timing import product_engine, stored_widths
from rooftrace.costmodels.timing.utilization import TileTerms, matrix_engine, p_norm, tile_terms
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    import numpy as np

    from rooftrace.costmodels.estimating import Plan

    Array = np.ndarray[Any, np.dtype[np.float64]]

_COLUMNS = ("count", "bytes", "warm", "moved", "vector", "matrix", "flop", "rate", "rows",
            "columns", "inner", "products", "width_a", "width_b", "whole")  # fmt: skip


@dataclass(frozen=True)
class KernelTable:
    """Kernels on one chip, a row each; equal ones stand once.

    kind: position in CLASSES.  data: by column, arrays of one length:
    count: how many kernels a row stands for.  bytes: through HBM; warm: those of them that the last
    cache still holds; moved: those that are no weights, of kernels that may copy them into another
    layout.  vector: seconds of vector work at the peak; matrix: the same of matrix work that is no
    plain product, or not the largest.  flop, rate, rows, columns, inner, products, width_a,
    width_b, whole: the largest plain product (0 where there is none), FLOP/s of its engine, bytes
    of a stored element of its operands, whether tiles are done whole (see `tile_terms`).  The
    columns of attention are those of `attention_rows`.
    """

    chip: Chip
    kind: np.ndarray[Any, np.dtype[np.int64]]
    data: dict[str, Array]

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one kernel of each row; `device` is the whole of it, without a launch."""

    compute: Array
    memory: Array
    device: Array


def kernel_table(
    planned: Plan, chip: Chip, reuse: bool = True, cold: bool = False
) -> tuple[KernelTable, list[int]]:
    """The kernels of a plan on a chip, and the row of each group.

    reuse: whether to find out what the last cache still holds; else, or where its size is not
    known, nothing.  cold: it holds nothing when the step begins.
    """
    known: dict[Any, int] = {}
    rows: list[tuple[str, tuple[float, ...], tuple[float, ...]]] = []
    counts: list[int] = []
    place: list[int] = []
    warm = [0.0] * len(planned.groups)
    if reuse and chip.l2_capacity is not None:
        warm = warm_bytes(planned, chip.l2_capacity.value, cold)
    weights = {i for i, t in enumerate(planned.graph.values) if t.role == "weights"}
    for group, cost, held in zip(planned.groups, planned.costs, warm, strict=True):
        kind = group_class(planned.graph, group.ops, planned.channels_last, planned.op_costs)
        moved = (
            0
            if kind.endswith(LAST)
            else sum(
                size
                for access, size in cost.traffic.items()
                if access.wire == "hbm" and access.storage not in weights
            )
        )
        attention = attention_row(cost, chip, planned.execution)
        row = (kind, _row(cost, held, moved, chip, planned.execution), attention)
        index = known.setdefault(row, len(rows))
        if index == len(rows):
            rows.append(row)
            counts.append(0)
        counts[index] += group.times
        place.append(index)
    numbers = [(float(n), *row) for n, (_, row, _) in zip(counts, rows, strict=True)]
    return table(chip, [kind for kind, _, _ in rows], numbers, [a for _, _, a in rows]), place


def table(
    chip: Chip,
    kinds: Sequence[str],
    rows: Iterable[Sequence[float]],
    attention: Sequence[tuple[float, ...]] | None = None,
) -> KernelTable:
    """A table of rows whose numbers stand in the order count, bytes, warm, moved, vector, matrix,
    flop, rate, rows, columns, inner, products, width_a, width_b, whole; and those of
    `attention_rows`, if given."""
    import numpy as np

    columns = np.array(list(rows), dtype=float).reshape(len(kinds), len(_COLUMNS)).T
    data = dict(zip(_COLUMNS, columns, strict=True))
    data |= column_data([NO_ATTENTION] * len(kinds) if attention is None else attention)
    return KernelTable(chip, np.array([CLASSES.index(k) for k in kinds], dtype=np.int64), data)


def _row(
    cost: Cost, warm: float, moved: int, chip: Chip, execution: ExecutionModel
) -> tuple[float, ...]:
    """What a kernel's time depends on, after its count."""
    vector = matrix = 0.0
    products: list[tuple[int, float, tuple[int, int, int], tuple[float, float], bool]] = []
    for work, flop in cost.work.items():
        if work.count not in COMPUTED:
            continue
        engine, precision = product_engine(work, chip, execution)
        rate = chip.peak(engine, precision)
        if work.operation not in MATRIX:
            vector += flop / rate
        elif work.shape is None or 0 in work.shape:
            matrix += flop / rate
        else:
            whole = engine == "matrix"
            products.append((flop, rate, work.shape, stored_widths(work), whole))
    if not products:
        return (cost.bytes(), warm, moved, vector, matrix, 0, 1, 0, 0, 0, 0, 0, 0, 0)
    products.sort(key=lambda p: p[0] / p[1])
    flop, rate, shape, widths, whole = products[-1]
    matrix += sum(p[0] / p[1] for p in products[:-1])
    count = max(1, round(flop / (2 * shape[0] * shape[1] * shape[2])))
    return (cost.bytes(), warm, moved, vector, matrix, flop, rate, *shape, count, *widths, whole)


def copies_layouts(planned: Plan) -> bool:
    """Whether convolutions copy what they read and write into another layout: where channels come
    first, as in eager mode; a compiler chooses the layout once for all."""
    return not planned.channels_last and planned.execution.fusion != "factor"


def launch_seconds(knobs: Knobs, chip: Chip) -> float:
    """Seconds that a kernel takes on top of its work."""
    return chip.kernel_gap.value if knobs.launch is None else knobs.launch


def products_of(table: KernelTable, knobs: Knobs) -> TileTerms | None:
    """What tiles take for the rows of the table that have a product; None where its chip's SM count
    is not known.

    It does not depend on rates and shares, so a fit that keeps `knobs.tiling` needs it once.
    """
    engine = matrix_engine(table.chip, 1.0)
    if engine is None:
        return None
    tiled = table.data["flop"] > 0
    return tile_terms({k: v[tiled] for k, v in table.data.items()}, engine.units, knobs.tiling)


def kernel_seconds(
    table: KernelTable, knobs: Knobs, layouts: bool, terms: TileTerms | None = None
) -> KernelSeconds:
    """Seconds of one kernel of each row, by the formula of `rooftrace.costmodels.timing.knobs`; of
    attention by that of `rooftrace.costmodels.timing.attention_time`, where its blocks are known.

    layouts: whether convolutions copy their activations into another layout.  terms: those of
    `products_of`, where they are there already.
    """
    found = _shared_seconds(table, knobs, layouts, terms)
    sent = table.data["bytes"] - table.data["warm"] * (1 - 1 / knobs.cache)
    blocks = attention_seconds_of(table.data, sent, table.chip, knobs)
    if blocks is not None:
        rows, by_blocks = blocks
        found.compute[rows], found.memory[rows] = by_blocks.compute, by_blocks.memory
        found.device[rows] = by_blocks.device
    return found


def _shared_seconds(
    table: KernelTable, knobs: Knobs, layouts: bool, terms: TileTerms | None
) -> KernelSeconds:
    """The same by the shares of classes alone."""
    import numpy as np

    d, chip = table.data, table.chip
    shares = [knobs.share(name) for name in CLASSES]
    compute = knobs.compute * np.array([s.compute for s in shares])[table.kind]
    memory = knobs.memory * np.array([s.memory for s in shares])[table.kind]
    layout = np.array([s.layout for s in shares])[table.kind] if layouts else 0.0
    aside = np.array([s.engine == "vector" for s in shares])[table.kind]
    bandwidth = chip.memory_bandwidth.value

    touched = d["bytes"] + layout * d["moved"]
    t_memory = touched / (bandwidth * memory)
    if knobs.cache != 1:
        # What the memory sends, and what the kernel takes in: one of them is slower.
        sent = touched - d["warm"] * (1 - 1 / knobs.cache)
        t_memory = np.maximum(sent / (bandwidth * knobs.memory), t_memory)
    rest = (d["vector"] + d["matrix"]) / compute
    product = d["flop"] / (d["rate"] * compute)
    slow = chip.peak("vector", "fp32") if aside.any() else 1.0
    product = np.where(aside, d["flop"] / (slow * compute), product)
    engine = matrix_engine(chip, 1.0)
    t_compute = rest + product
    tiled = np.flatnonzero(d["flop"] > 0)
    if engine is None or not len(tiled):
        return KernelSeconds(t_compute, t_memory, p_norm(knobs.overlap, t_compute, t_memory))
    terms = terms or products_of(table, knobs)
    assert terms is not None
    work = terms.flop / (d["rate"] * compute)[tiled, None] + rest[tiled, None]
    feed = terms.feed / (engine.cache * knobs.tiling.feed)
    spill = terms.spill / (bandwidth * knobs.memory) + terms.split * knobs.tiling.split
    moved = t_memory[tiled, None] / terms.busy
    whole = p_norm(knobs.overlap, work, feed, moved) + spill
    best = (np.arange(len(tiled)), whole.argmin(axis=1))
    by_tiles = p_norm(knobs.overlap, work[best], feed[best]) + spill[best]
    device = p_norm(knobs.overlap, t_compute, t_memory)
    on_matrix = ~aside[tiled]
    rows = tiled[on_matrix]
    t_compute[rows], t_memory[rows] = by_tiles[on_matrix], moved[best][on_matrix]
    device[rows] = whole[best][on_matrix]
    return KernelSeconds(t_compute, t_memory, device)
