"""Seconds of many kernels at once from calibrated constants; predictions and fits both use it.

The formulas work on arrays, since a fit evaluates thousands of kernels hundreds of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import COMPUTED, MATRIX, Cost
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.attention_rows import (
    NO_ATTENTION,
    attention_row,
    attention_seconds_of,
    column_data,
)
from rooftrace.costmodels.kernels.attention_time import attention_engine
from rooftrace.costmodels.kernels.engines import product_engine, stored_widths
from rooftrace.costmodels.kernels.opclass import group_class
from rooftrace.costmodels.kernels.reuse import warm_bytes
from rooftrace.costmodels.kernels.utilization import TileTerms, matrix_engine, p_norm, tile_terms
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES, LAST
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    import numpy as np

    from rooftrace.costmodels.planning import Plan

    Array = np.ndarray[Any, np.dtype[np.float64]]

_COLUMNS = ("count", "bytes", "warm", "moved", "vector", "matrix", "flop", "rate", "rows",
            "columns", "inner", "products", "width_a", "width_b", "whole")  # fmt: skip


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one kernel of each row; `device` is the whole of it, without a launch."""

    compute: Array
    memory: Array
    device: Array


@dataclass(frozen=True)
class KernelTable:
    """Kernels on one chip, a row each; equal ones stand once.

    data has a column for each of these names, and those of `attention_rows`:
      count               how many kernels the row stands for
      bytes, warm         through HBM; and how many of them the last cache still holds
      moved               bytes that are no weights, of kernels that may copy layouts
      vector, matrix      seconds at the peak: vector work; matrix work beside the largest product
      flop, rate          of the largest plain product, 0 where there is none; FLOP/s of its engine
      rows, columns,
      inner, products     sizes of that product, and how many of them one kernel has
      width_a, width_b    bytes of a stored element of its operands
      whole               whether its tiles are computed whole (see `tile_terms`)
    """

    chip: Chip
    kind: np.ndarray[Any, np.dtype[np.int64]]  # position in CLASSES
    data: dict[str, Array]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def has_tiles(self) -> bool:
        """Whether products are timed by tiles: the chip's SM count and clock are known."""
        return matrix_engine(self.chip, 1.0) is not None

    @property
    def has_attention_blocks(self) -> bool:
        """Whether attention is timed by its blocks: the chip's SMs and bf16 rate are known."""
        return attention_engine(self.chip) is not None

    def tiles(self, knobs: Knobs) -> TileTerms | None:
        """What each tile takes for the rows that have a product; None without `has_tiles`.

        It does not depend on rates and shares, so a fit that keeps `knobs.tiling` needs it once.
        """
        engine = matrix_engine(self.chip, 1.0)
        if engine is None:
            return None
        tiled = self.data["flop"] > 0
        columns = {name: column[tiled] for name, column in self.data.items()}
        return tile_terms(columns, engine.units, knobs.tiling)

    def seconds(self, knobs: Knobs, layouts: bool, terms: TileTerms | None = None) -> KernelSeconds:
        """Seconds of one kernel of each row, by the formula of `knobs`.

        Attention takes the formula of `attention_time`, where its blocks are known.  layouts:
        whether convolutions copy their activations into another layout.  terms: those of `tiles`,
        to compute them once for many knobs.
        """
        result = _shared_seconds(self, knobs, layouts, terms)
        sent = self.data["bytes"] - self.data["warm"] * (1 - 1 / knobs.cache)
        blocks = attention_seconds_of(self.data, sent, self.chip, knobs)
        if blocks is not None:
            rows, by_blocks = blocks
            result.compute[rows], result.memory[rows] = by_blocks.compute, by_blocks.memory
            result.device[rows] = by_blocks.device
        return result


def kernel_table(
    planned: Plan, chip: Chip, reuse: bool = True, cold: bool = False
) -> tuple[KernelTable, list[int]]:
    """The kernels of a plan on a chip, and the row of each group.

    reuse: whether to work out what the last cache still holds, where its size is known.  cold:
    whether the cache is empty when the step begins.
    """
    known: dict[Any, int] = {}
    rows: list[tuple[str, tuple[float, ...], tuple[float, ...]]] = []
    counts: list[int] = []
    place: list[int] = []
    bytes_of = kernel_bytes(planned, chip, reuse, cold)
    for group, cost, (kind, held, moved) in zip(
        planned.groups, planned.costs, bytes_of, strict=True
    ):
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


def kernel_bytes(
    planned: Plan, chip: Chip | None, reuse: bool = True, cold: bool = False
) -> Iterator[tuple[str, float, int]]:
    """By group: its class, the bytes that the last cache holds, those that layout copies move.

    chip: whose cache; None: there is none.  For reuse and cold see `kernel_table`.
    """
    warm = [0.0] * len(planned.groups)
    if reuse and chip is not None and chip.l2_capacity is not None:
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
        yield kind, held, moved


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
    """The numbers of a row that follow its count."""
    vector = matrix = 0.0
    products: list[tuple[int, float, tuple[float, int, float], tuple[float, float], bool]] = []
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


def _shared_seconds(
    table: KernelTable, knobs: Knobs, layouts: bool, terms: TileTerms | None
) -> KernelSeconds:
    """Seconds per row from class shares only, before attention takes those of its blocks."""
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
        # The memory's rate and the kernel's rate: the slower of the two holds.
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
    terms = terms or table.tiles(knobs)
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
