"""Attention in a table of kernels: its columns there, and the seconds of its rows.

What a rule says of an attention op (`AttentionSizes` of its work) is a group of columns, all zero
in the rows of other kernels.  Rows whose products run on the matrix engine of a chip with a known
SM count take the seconds of `attention_time`; backward and all else keep the shares of their class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import COMPUTED, AttentionSizes, Cost
from rooftrace.costmodels.estimating import ExecutionModel
from rooftrace.costmodels.timing.attention_time import (
    AttentionSeconds,
    attention_engine,
    attention_knobs,
    attention_seconds,
)
from rooftrace.costmodels.timing.knobs import Knobs
from rooftrace.costmodels.timing.timing import engine_of
from rooftrace.hardware import Chip, precision

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

_SIZES = tuple(AttentionSizes.__dataclass_fields__)
COLUMNS = ("kernels", *_SIZES, "size", "rate")
"""kernels: attention kernels in one of the row's (0: none).  size: bytes of an element that is
multiplied.  rate: FLOP/s of the products, 0 where they do not run on the matrix engine in half
precision or less."""
_WIDEST = 2
"""Bytes of an element that kernels multiply whose tiles are known."""
NO_ATTENTION = (0.0,) * len(COLUMNS)


def attention_row(cost: Cost, chip: Chip, execution: ExecutionModel) -> tuple[float, ...]:
    """The columns of a kernel: of its largest attention."""
    flop: dict[AttentionSizes, float] = {}
    engines: dict[AttentionSizes, tuple[str, str]] = {}
    for work, amount in cost.work.items():
        if work.attention is not None and work.count in COMPUTED:
            flop[work.attention] = flop.get(work.attention, 0) + amount
            engines[work.attention] = engine_of(work, chip, execution)
    if not flop:
        return NO_ATTENTION
    sizes = max(flop, key=lambda one: (flop[one], one.keys))
    engine, name = engines[sizes]
    size = float(precision(name).bits / 8)
    rate = chip.peak(engine, name) if engine == "matrix" and size <= _WIDEST else 0.0
    return columns(sizes, max(1, round(flop[sizes] / sizes.flop)), size, rate)


def columns(sizes: AttentionSizes, kernels: int, size: float, rate: float) -> tuple[float, ...]:
    """The columns of a row."""
    return (kernels, *(float(getattr(sizes, name)) for name in _SIZES), size, rate)


def column_data(rows: Sequence[tuple[float, ...]]) -> dict[str, Array]:
    """Rows as arrays by the name of their column in a table."""
    import numpy as np

    arrays = np.array(rows, dtype=float).reshape(len(rows), len(COLUMNS)).T
    return {f"attention {name}": array for name, array in zip(COLUMNS, arrays, strict=True)}


def attention_seconds_of(
    data: Mapping[str, Array], bytes_: Array, chip: Chip, knobs: Knobs
) -> tuple[Array, AttentionSeconds] | None:
    """Which rows of a table are priced by blocks, and their seconds; None where there are none.

    bytes_: through HBM, by row.
    """
    import numpy as np

    on = attention_engine(chip)
    rows: Any = np.flatnonzero((data["attention rate"] > 0) & (data["attention backward"] == 0))
    if on is None or not len(rows):
        return None
    sizes = {name: data[f"attention {name}"][rows] for name in COLUMNS}
    kernels = sizes["kernels"]
    sizes["bytes"] = bytes_[rows] / kernels
    numbers = attention_knobs(knobs.attention, chip)
    found = attention_seconds(sizes, on, numbers, knobs.compute, knobs.memory, knobs.overlap)
    return rows, AttentionSeconds(
        kernels * found.compute, kernels * found.memory, kernels * found.device
    )
