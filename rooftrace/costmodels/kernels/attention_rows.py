"""Attention in a table of kernels: its columns there, and the seconds of its rows.

What a rule says of an attention op (`AttentionSizes` of its work) is a group of columns, all zero
in the rows of other kernels.  Rows whose products run on the matrix engine of a chip with a known
SM count take the seconds of `attention_time`; backward and all else keep the shares of their class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import COMPUTED, AttentionSizes, Cost
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.attention_libraries import WIDE, attention_knobs, library_on
from rooftrace.costmodels.kernels.attention_time import (
    LIBRARIES,
    AttentionSeconds,
    attention_engine,
    attention_seconds,
)
from rooftrace.costmodels.kernels.engines import engine_of
from rooftrace.costmodels.knobs import Knobs
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import precision

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

_SIZES = tuple(AttentionSizes.__struct_fields__)
COLUMNS = ("kernels", *_SIZES, "size", "rate", "library")
"""kernels: attention kernels in one of the row's (0: none).  size: bytes of an element that is
multiplied.  rate: FLOP/s of the products, 0 where they do not run on the matrix engine in half
precision or less.  library: the place in LIBRARIES of whose kernel it is."""
_WIDEST = 2
"""Bytes of an element that kernels multiply whose tiles are known."""
NO_ATTENTION = (0.0,) * len(COLUMNS)


def attention_row(cost: Cost, chip: Chip, execution: ExecutionModel) -> tuple[float, ...]:
    """The attention columns of a kernel, which are those of its largest attention."""
    flop: dict[AttentionSizes, float] = {}
    engines: dict[AttentionSizes, tuple[str, str]] = {}
    for work, amount in cost.work.items():
        if work.attention is not None and work.count in COMPUTED:
            flop[work.attention] = flop.get(work.attention, 0) + amount
            engines[work.attention] = engine_of(work, chip, execution)
    if not flop:
        return NO_ATTENTION
    sizes = max(flop, key=lambda sizes: (flop[sizes], sizes.keys))
    numbers = products_of(*engines[sizes], chip, execution.attention_library)
    return columns(sizes, max(1, round(flop[sizes] / sizes.flop)), *numbers)


def products_of(engine: str, name: str, chip: Chip, library: str) -> tuple[float, float, float]:
    """The columns size, rate and library of products of this precision on this engine."""
    library = library_on(library, chip)
    size = float(precision(name).bits / 8)
    if library in WIDE and size < _WIDEST and chip.has_peak(engine, "bf16"):
        name, size = "bf16", float(_WIDEST)
    rate = chip.peak(engine, name) if engine == "matrix" and size <= _WIDEST else 0.0
    return size, rate, LIBRARIES.index(library)


def columns(
    sizes: AttentionSizes, kernels: int, size: float, rate: float, library: float
) -> tuple[float, ...]:
    """The attention columns of a row with this many kernels of these sizes."""
    return (kernels, *(float(getattr(sizes, name)) for name in _SIZES), size, rate, library)


def column_data(rows: Sequence[tuple[float, ...]]) -> dict[str, Array]:
    """The attention columns of many rows, as arrays by their name in a table."""
    import numpy as np

    arrays = np.array(rows, dtype=float).reshape(len(rows), len(COLUMNS)).T
    return {f"attention {name}": array for name, array in zip(COLUMNS, arrays, strict=True)}


def attention_seconds_of(
    data: Mapping[str, Array], bytes_: Array, chip: Chip, knobs: Knobs
) -> tuple[Array, AttentionSeconds] | None:
    """The rows of a table that are priced by blocks, with their seconds; None without such rows.

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
    found = AttentionSeconds(*(np.zeros(len(rows)) for _ in range(3)))
    for place, library in enumerate(LIBRARIES):
        chosen = sizes["library"] == place
        if not chosen.any():
            continue
        numbers = attention_knobs(knobs.attention, chip, library)
        cases = {name: column[chosen] for name, column in sizes.items()}
        single = attention_seconds(cases, on, numbers, knobs.compute, knobs.memory, knobs.overlap)
        for name in ("compute", "memory", "device"):
            getattr(found, name)[chosen] = kernels[chosen] * getattr(single, name)
    return rows, found
