"""Tables of kernels: those of a plan, of measurements, or single ones with other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.costs import MATRIX, Cost, Work
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.engines import product_engine, stored_widths
from rooftrace.costmodels.kernels.kerneltables import (
    KernelSeconds,
    KernelTable as KernelTable,
)
from rooftrace.costmodels.kernels.opclass import group_class
from rooftrace.costmodels.kernels.reuse import warm_bytes
from rooftrace.costmodels.kernels.seconds import (
    peak_seconds as peak_seconds,
    table_of,
)
from rooftrace.costmodels.kernels.utilization import (
    SIZES,
    MatrixEngine,
    TileChoice,
    matrix_engine,
)
from rooftrace.costmodels.kernels.works import KernelAmounts, SizedKernel, kernels_of
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import LAST
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Array
    from rooftrace.costmodels.planning import Plan


def kernel_table(
    planned: Plan, chip: Chip, reuse: bool = True, cold: bool = False
) -> tuple[KernelTable, list[int]]:
    """The kernels of a plan on a chip, and the row of each group.

    reuse: whether to work out what the last cache still holds, where its size is known.  cold:
    whether the cache is empty when the step begins.
    """
    kernels, place = plan_kernels(planned, chip, reuse, cold)
    rows = table_of(kernels, chip, planned.execution)
    counts = [0.0] * len(rows)
    for group, row in zip(planned.groups, place, strict=True):
        counts[row] += group.times
    return KernelTable(chip, rows.kind, {**rows.data, "count": np.array(counts)}), place


def plan_kernels(
    planned: Plan, chip: Chip | None, reuse: bool = True, cold: bool = False
) -> tuple[KernelAmounts, list[int]]:
    """The amounts of a plan's kernels, equal ones in one row, and the row of each group.

    chip: whose last cache holds bytes; None: there is none.  For reuse and cold see `kernel_table`.
    """
    bytes_of = kernel_bytes(planned, chip, reuse, cold)
    return kernels_of(
        SizedKernel(cost, *held, eager=number in planned.eager)
        for number, (cost, held) in enumerate(zip(planned.costs, bytes_of, strict=True))
    )


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
    for number, (group, cost) in enumerate(zip(planned.groups, planned.costs, strict=True)):
        layout = planned.lays_out(number)
        kind = group_class(planned.graph, group.ops, layout, planned.op_costs)
        moved = (
            0
            if kind.endswith(LAST)
            else sum(
                size
                for access, size in cost.traffic.items()
                if access.wire == "hbm" and access.storage not in weights
            )
        )
        yield kind, warm[number], moved


def seconds_by_knobs(
    kernels: KernelAmounts, chip: Chip, knobs: Knobs, execution: ExecutionModel, layouts: bool
) -> KernelSeconds:
    """Seconds of kernels by knobs; of those outside of what is compiled by their own.

    layouts: whether convolutions copy their activations into another layout.
    """
    table = table_of(kernels, chip, execution)
    seconds = table.seconds(knobs, layouts)
    outside = execution.outside.knobs_on(chip)
    if outside is None or not kernels.eager.any():
        return seconds
    return seconds.where(kernels.eager, table.seconds(outside, layouts=True))


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
    if not wanted:
        return []
    execution, reuse = planned.execution, knobs is not None and knobs.cache != 1
    held = list(kernel_bytes(planned, chip, reuse))
    kernels, place = kernels_of(
        SizedKernel(cost, *held[group], eager=group in planned.eager) for group, cost in wanted
    )
    if knobs is not None:
        seconds = seconds_by_knobs(kernels, chip, knobs, execution, planned.copies_layouts)
        assert seconds.untiled is not None
        both, choice = (seconds.device, seconds.untiled), seconds.choice
    else:
        memory, choice = kernels.bytes / chip.memory_bandwidth.value, None
        work = [peak_seconds(kernels, chip, execution, headline, tiled=t) for t in (True, False)]
        both = np.maximum(memory, work[0]), np.maximum(memory, work[1])
    return [
        TiledKernel(
            float(both[0][row]),
            float(both[1][row]),
            _uses_at_peaks(cost, chip, execution)
            if choice is None
            else _uses_by_knobs(cost, chip, execution, int(choice[row])),
        )
        for row, (_, cost) in zip(place, wanted, strict=True)
    ]


def _uses_at_peaks(cost: Cost, chip: Chip, execution: ExecutionModel) -> Mapping[Work, TileUse]:
    uses = {}
    for work, flop, rate, whole in plain_products(cost, chip, execution):
        engine = matrix_engine(chip, rate * execution.utilization.eta(work.rows))
        if engine is not None and execution.utilization.tiles:
            numbers = (*_shape(work), _count(work, flop), *stored_widths(work), whole)
            fastest = TileChoice.fastest(_arrays(numbers), engine)
            uses[work] = _use(fastest, work, flop, whole, engine)
    return uses


def _uses_by_knobs(
    cost: Cost, chip: Chip, execution: ExecutionModel, choice: int
) -> Mapping[Work, TileUse]:
    engine = matrix_engine(chip, 1.0)
    if choice < 0 or engine is None:
        return {}
    work, flop, _, whole = plain_products(cost, chip, execution)[-1]
    return {work: _use(TileChoice.at(choice), work, flop, whole, engine)}


def plain_products(
    cost: Cost, chip: Chip, execution: ExecutionModel
) -> list[tuple[Work, int, float, bool]]:
    """The products of known sizes of a kernel, the longest last: only that one is timed by tiles.

    Each with its FLOP, the FLOP/s of its engine, and whether tiles are computed whole there.
    """
    products = []
    for work, flop in cost.computed().items():
        if work.operation in MATRIX and work.shape is not None and 0 not in work.shape:
            engine, precision = product_engine(work, chip, execution)
            products.append((work, flop, chip.peak(engine, precision), engine == "matrix"))
    return sorted(products, key=lambda product: product[1] / product[2])


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
    return {name: np.array([float(n)]) for name, n in zip(SIZES, numbers, strict=True)}
