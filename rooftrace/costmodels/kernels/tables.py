"""Tables of kernels: those of a plan, of measurements, or single ones with other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import MATRIX, Cost, Work
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.attention_rows import (
    NO_ATTENTION,
    attention_row,
    column_data,
)
from rooftrace.costmodels.kernels.engines import (
    compute_seconds,
    product_engine,
    reached,
    stored_widths,
)
from rooftrace.costmodels.kernels.kerneltables import (
    KernelSeconds,
    KernelTable as KernelTable,
)
from rooftrace.costmodels.kernels.loads import odd_rows, unit_of
from rooftrace.costmodels.kernels.opclass import group_class
from rooftrace.costmodels.kernels.reuse import warm_bytes
from rooftrace.costmodels.kernels.utilization import (
    SIZES,
    MatrixEngine,
    TileChoice,
    matrix_engine,
)
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES, LAST
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    import numpy as np

    from rooftrace.costmodels.planning import Plan

    Array = np.ndarray[Any, np.dtype[np.float64]]

_COLUMNS = ("count", "bytes", "warm", "moved", "vector", "matrix", "flop", "rate", "rows",
            "columns", "inner", "products", "width_a", "width_b", "whole", "unit",
            "odd")  # fmt: skip


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


def seconds_by_part(
    planned: Plan, chip: Chip, knobs: Knobs, rows: KernelTable
) -> tuple[KernelSeconds, KernelSeconds]:
    """Seconds of rows of a plan as those of compiled kernels, or of all, and as those of eager
    ones, where it has both."""
    seconds = rows.seconds(knobs, planned.copies_layouts)
    outside = planned.execution.outside.knobs_on(chip)
    if not planned.eager or outside is None:
        return seconds, seconds
    return seconds, rows.seconds(outside, layouts=True)


def table(
    chip: Chip,
    kinds: Sequence[str],
    rows: Iterable[Sequence[float]],
    attention: Sequence[tuple[float, ...]] | None = None,
) -> KernelTable:
    """A table of rows whose numbers stand in the order count, bytes, warm, moved, vector, matrix,
    flop, rate, rows, columns, inner, products, width_a, width_b, whole, unit, odd; and those of
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
    for work, flop in cost.computed().items():
        if work.operation in MATRIX and _has_shape(work):
            continue
        rate = chip.peak(*product_engine(work, chip, execution))
        if work.operation in MATRIX:
            matrix += flop / rate
        else:
            vector += flop / min(rate, reached(work.rows, work.inner, chip))
    products = plain_products(cost, chip, execution)
    if not products:
        odd = any(odd_rows(work) for work in cost.work if work.operation == "vector")
        return (cost.bytes(), warm, moved, vector, matrix, 0, 1, *[0] * 8, odd)
    work, flop, rate, whole = products[-1]
    assert work.shape is not None
    rows, columns, inner = work.shape
    matrix += sum(flop / rate for _, flop, rate, _ in products[:-1])
    count = max(1, round(flop / (2 * rows * columns * inner)))
    unit = unit_of(*product_engine(work, chip, execution))
    sizes = (rows, columns, inner, count, *stored_widths(work), whole, unit, odd_rows(work))
    return (cost.bytes(), warm, moved, vector, matrix, flop, rate, *sizes)


def plain_products(
    cost: Cost, chip: Chip, execution: ExecutionModel
) -> list[tuple[Work, int, float, bool]]:
    """The products of known sizes of a kernel, the longest last: only that one is timed by tiles.

    Each with its FLOP, the FLOP/s of its engine, and whether tiles are computed whole there.
    """
    products = []
    for work, flop in cost.computed().items():
        if work.operation in MATRIX and _has_shape(work):
            engine, precision = product_engine(work, chip, execution)
            products.append((work, flop, chip.peak(engine, precision), engine == "matrix"))
    return sorted(products, key=lambda product: product[1] / product[2])


def _has_shape(work: Work) -> bool:
    return work.shape is not None and 0 not in work.shape


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
    parts = seconds_by_part(planned, chip, knobs, table(chip, kinds, rows, attention))
    engine = matrix_engine(chip, 1.0)
    kernels = []
    for number, (group, cost) in zip(place, wanted, strict=True):
        seconds = parts[group in planned.eager]
        assert seconds.choice is not None and seconds.untiled is not None
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
