"""Single kernels of a plan, also with other sizes: their seconds, the tiles of their products."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rooftrace.costmodels.fusion import ExecutionModel, Plan
from rooftrace.costmodels.kernels import Knobs, engines, seconds, works
from rooftrace.costmodels.kernels.engines import TileUse
from rooftrace.costmodels.ops import MATRIX, Cost, Work
from rooftrace.hardware import Chip


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
    plan, each with the cost of one kernel in its place.
    """
    wanted = list(wanted)
    if not wanted:
        return []
    execution, reuse = planned.execution, knobs is not None and knobs.cache != 1
    held = list(works.kernel_bytes(planned, chip, reuse))
    kernels, place = works.kernels_of(
        works.SizedKernel(cost, *held[group], eager=group in planned.eager)
        for group, cost in wanted
    )
    if knobs is not None:
        taken = seconds.seconds_by_knobs(kernels, chip, knobs, execution, planned.copies_layouts)
        tiled, untiled, choices = taken.device, taken.untiled, taken.choice.tolist()
    else:
        memory = kernels.bytes / chip.memory_bandwidth.value
        tiled, untiled = (
            np.maximum(memory, seconds.peak_seconds(kernels, chip, execution, headline, tiled=each))
            for each in (True, False)
        )
        choices = [None] * len(kernels)
    return [
        TiledKernel(
            float(tiled[row]), float(untiled[row]), _uses(cost, chip, execution, choices[row])
        )
        for row, (_, cost) in zip(place, wanted, strict=True)
    ]


def _uses(
    cost: Cost, chip: Chip, execution: ExecutionModel, choice: int | None
) -> Mapping[Work, TileUse]:
    """The tiles of the products of a kernel that have sizes.

    choice: those of its longest product, -1 for none, by knobs; None: each has its fastest ones, at
    the datasheet's rates.
    """
    uses: dict[Work, TileUse] = {}
    engine, use = engines.matrix_engine(chip), execution.utilization
    if engine is None or choice == -1 or (choice is None and not use.tiles):
        return uses
    longest = 0.0
    for work, flop in cost.computed().items():
        if work.operation not in MATRIX or work.shape is None or 0 in work.shape:
            continue
        name, precision = engines.product_engine(work, chip, execution)
        rate = chip.peak(name, precision)
        numbers = engines.product_sizes(work, work.shape, flop, float(name == "matrix"), chip)
        sizes = {size: np.array([float(number)]) for size, number in numbers.items()}
        if choice is None:
            rates = np.array([rate * use.eta(work.rows)])
            place = int(engines.tile_seconds(sizes, rates, engine).argmin())
            uses[work] = TileUse.of(place, sizes, engine.units)
        elif flop / rate >= longest:  # of equal ones the last
            longest, uses = flop / rate, {work: TileUse.of(choice, sizes, engine.units)}
    return uses
