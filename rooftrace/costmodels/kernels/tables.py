"""Seconds of many kernels at once from calibrated constants; predictions and fits both use it.

The formulas work on arrays, since a fit evaluates thousands of kernels hundreds of times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import COMPUTED, MATRIX, Cost, Work
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.attention_rows import (
    NO_ATTENTION,
    attention_row,
    attention_seconds_of,
    column_data,
)
from rooftrace.costmodels.kernels.attention_time import attention_engine
from rooftrace.costmodels.kernels.engines import compute_seconds, product_engine, stored_widths
from rooftrace.costmodels.kernels.opclass import group_class
from rooftrace.costmodels.kernels.reuse import warm_bytes
from rooftrace.costmodels.kernels.utilization import (
    SIZES,
    MatrixEngine,
    TileChoice,
    TileTerms,
    matrix_engine,
    p_norm,
    tile_terms,
)
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
    """Seconds of one kernel of each row; `device` is the whole of it, without a launch.

    choice: the tile and split of each row's product (see `TileChoice.at`), -1 where it has none or
    is not timed by tiles.  untiled: `device` if every tile and every wave were full, and fed at
    once.  Both None where they were not worked out.
    """

    compute: Array
    memory: Array
    device: Array
    choice: np.ndarray[Any, np.dtype[np.int64]] | None = None
    untiled: Array | None = None

    def at_pace(self, pace: float) -> KernelSeconds:
        """The seconds of kernels that are all so many times as fast."""
        compute, memory, device = (each / pace for each in (self.compute, self.memory, self.device))
        untiled = None if self.untiled is None else self.untiled / pace
        return KernelSeconds(compute, memory, device, self.choice, untiled)


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
            if result.choice is not None and result.untiled is not None:
                result.choice[rows], result.untiled[rows] = -1, by_blocks.device
        return result if knobs.pace == 1 else result.at_pace(knobs.pace)


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
        row = (kind, kernel_row(cost, held, moved, chip, planned.execution), attention)
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


def kernel_row(
    cost: Cost, warm: float, moved: int, chip: Chip, execution: ExecutionModel
) -> tuple[float, ...]:
    """The numbers of a row of `table` that follow its count."""
    vector = matrix = 0.0
    for work, flop in cost.work.items():
        if work.count not in COMPUTED or (work.operation in MATRIX and _has_shape(work)):
            continue
        seconds = flop / chip.peak(*product_engine(work, chip, execution))
        if work.operation in MATRIX:
            matrix += seconds
        else:
            vector += seconds
    products = plain_products(cost, chip, execution)
    if not products:
        return (cost.bytes(), warm, moved, vector, matrix, 0, 1, 0, 0, 0, 0, 0, 0, 0)
    work, flop, rate, whole = products[-1]
    assert work.shape is not None
    rows, columns, inner = work.shape
    matrix += sum(flop / rate for _, flop, rate, _ in products[:-1])
    count = max(1, round(flop / (2 * rows * columns * inner)))
    sizes = (rows, columns, inner, count, *stored_widths(work), whole)
    return (cost.bytes(), warm, moved, vector, matrix, flop, rate, *sizes)


def plain_products(
    cost: Cost, chip: Chip, execution: ExecutionModel
) -> list[tuple[Work, int, float, bool]]:
    """The products of known sizes of a kernel, the longest last: only that one is timed by tiles.

    Each with its FLOP, the FLOP/s of its engine, and whether tiles are computed whole there.
    """
    products = []
    for work, flop in cost.work.items():
        if work.operation in MATRIX and work.count in COMPUTED and _has_shape(work):
            engine, precision = product_engine(work, chip, execution)
            products.append((work, flop, chip.peak(engine, precision), engine == "matrix"))
    return sorted(products, key=lambda product: product[1] / product[2])


def _has_shape(work: Work) -> bool:
    return work.shape is not None and 0 not in work.shape


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
    device = p_norm(knobs.overlap, t_compute, t_memory)
    choice = np.full(len(table), -1, dtype=np.int64)
    if engine is None or not len(tiled):
        return KernelSeconds(t_compute, t_memory, device, choice, device)
    terms = terms or table.tiles(knobs)
    assert terms is not None
    work = terms.flop / (d["rate"] * compute)[tiled, None] + rest[tiled, None]
    feed = terms.feed / (engine.cache * knobs.tiling.feed)
    spill = terms.spill / (bandwidth * knobs.memory) + terms.split * knobs.tiling.split
    moved = t_memory[tiled, None] / terms.busy
    whole = p_norm(knobs.overlap, work, feed, moved) + spill
    best = (np.arange(len(tiled)), whole.argmin(axis=1))
    by_tiles = p_norm(knobs.overlap, work[best], feed[best]) + spill[best]
    untiled, device = device, device.copy()
    on_matrix = ~aside[tiled]
    rows = tiled[on_matrix]
    choice[rows] = best[1][on_matrix]
    t_compute[rows], t_memory[rows] = by_tiles[on_matrix], moved[best][on_matrix]
    device[rows] = whole[best][on_matrix]
    return KernelSeconds(t_compute, t_memory, device, choice, untiled)


# -- single kernels, as they are or with other sizes, and how their products are tiled -------------


@dataclass(frozen=True, slots=True)
class TileUse:
    """How one product of a kernel is cut into tiles, and what of them it fills."""

    choice: TileChoice
    tile_efficiency: float  # the share of what its tiles compute that the product has
    wave_efficiency: float  # the share of the SMs that has a block, over all waves


@dataclass(frozen=True, slots=True)
class TiledKernel:
    """Seconds of one kernel without its launch, and the tiles of its products.

    A product that is not in `uses` is not modelled by tiles.
    """

    seconds: float
    untiled: float  # seconds if every tile and every wave were full
    uses: Mapping[Work, TileUse] = field(default_factory=dict)


def tiled_kernels(
    planned: Plan,
    chip: Chip,
    knobs: Knobs | None,
    headline: float,
    wanted: Iterable[tuple[int, Cost]],
) -> list[TiledKernel]:
    """Kernels in the place of those of a plan, priced as `time_plan` prices them, without links.

    knobs: None: at the datasheet's rates.  headline: FLOP/s.  wanted: numbers of groups of the
    plan, each with the cost of one kernel, which may differ from its own.
    """
    wanted = list(wanted)
    if knobs is None:
        return [_at_peaks(planned, cost, chip, headline) for _, cost in wanted]
    return _by_knobs(planned, chip, knobs, wanted)


def _at_peaks(planned: Plan, cost: Cost, chip: Chip, headline: float) -> TiledKernel:
    memory = cost.bytes() / chip.memory_bandwidth.value
    execution = planned.execution
    seconds, untiled = (
        max(memory, compute_seconds(cost, chip, execution, headline, tiled=tiled))
        for tiled in (True, False)
    )
    uses = {}
    for work, flop, rate, whole in plain_products(cost, chip, execution):
        engine = matrix_engine(chip, rate * execution.utilization.eta(work.rows))
        if engine is not None and execution.utilization.tiles:
            numbers = (*_shape(work), _count(work, flop), *stored_widths(work), whole)
            uses[work] = _use(
                TileChoice.fastest(_arrays(numbers), engine), work, flop, whole, engine
            )
    return TiledKernel(seconds, untiled, uses)


def _by_knobs(
    planned: Plan, chip: Chip, knobs: Knobs, wanted: Sequence[tuple[int, Cost]]
) -> list[TiledKernel]:
    if not wanted:
        return []
    execution = planned.execution
    known = list(kernel_bytes(planned, chip, reuse=knobs.cache != 1))
    places: dict[tuple[str, tuple[float, ...], tuple[float, ...]], int] = {}  # equal ones once
    place = []
    for group, cost in wanted:
        kind, held, moved = known[group]
        numbers = (1.0, *kernel_row(cost, held, moved, chip, execution))
        row = (kind, numbers, attention_row(cost, chip, execution))
        place.append(places.setdefault(row, len(places)))
    kinds, rows, attention = zip(*places, strict=True)
    seconds = table(chip, kinds, rows, attention).seconds(knobs, planned.copies_layouts)
    assert seconds.choice is not None and seconds.untiled is not None
    engine = matrix_engine(chip, 1.0)
    kernels = []
    for number, (_, cost) in zip(place, wanted, strict=True):
        choice, uses = int(seconds.choice[number]), {}
        if choice >= 0 and engine is not None:
            work, flop, _, whole = plain_products(cost, chip, execution)[-1]
            uses[work] = _use(TileChoice.at(choice), work, flop, whole, engine)
        device, untiled = float(seconds.device[number]), float(seconds.untiled[number])
        kernels.append(TiledKernel(device, untiled, uses))
    return kernels


def _use(choice: TileChoice, work: Work, flop: int, whole: bool, engine: MatrixEngine) -> TileUse:
    rows, columns, _ = _shape(work)
    waves = choice.waves(rows, columns, _count(work, flop), engine.units)
    return TileUse(choice, choice.filled(rows, columns, whole), waves / -(-waves // 1))


def _shape(work: Work) -> tuple[float, int, float]:
    assert work.shape is not None
    return work.shape


def _count(work: Work, flop: int) -> int:
    rows, columns, inner = _shape(work)
    return max(1, round(flop / (2 * rows * columns * inner)))


def _arrays(numbers: Sequence[float]) -> dict[str, Array]:
    import numpy as np

    return {name: np.array([float(n)]) for name, n in zip(SIZES, numbers, strict=True)}
