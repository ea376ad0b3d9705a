"""Attention in a table of kernels: its columns there, and the seconds of its rows.

What a rule says of an attention op (`AttentionSizes` of its work) is a group of columns, all zero
in the rows of other kernels.  Rows whose products run on the matrix engine of a chip with a known
SM count take the seconds of `attention_time`; backward and all else keep the shares of their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.costs import AttentionSizes
from rooftrace.costmodels.kernels.attention_libraries import WIDE, attention_knobs, library_on
from rooftrace.costmodels.kernels.attention_time import (
    LIBRARIES,
    AttentionSeconds,
    attention_engine,
    attention_seconds,
)
from rooftrace.costmodels.kernels.utilization import TILED
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


def products_of(engine: str, name: str, chip: Chip, library: str) -> tuple[float, float, float]:
    """The columns size, rate and library of products of this precision on this engine."""
    library = library_on(library, chip)
    size = float(precision(name).bits / 8)
    if library in WIDE and size < _WIDEST and chip.has_peak(engine, "bf16"):
        name, size = "bf16", float(_WIDEST)
    rate = chip.peak(engine, name) if engine == "matrix" and size <= _WIDEST else 0.0
    return size, rate, LIBRARIES.index(library)


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
    seconds = AttentionSeconds(*(np.zeros(len(rows)) for _ in range(3)))
    for place, library in enumerate(LIBRARIES):
        numbers = attention_knobs(knobs.attention, chip, library)
        chosen = np.flatnonzero(sizes["library"] == place)
        for part in np.split(chosen, range(TILED, len(chosen), TILED)):
            cases = {name: column[part] for name, column in sizes.items()}
            if len(part):
                single = attention_seconds(
                    cases, on, numbers, knobs.compute, knobs.memory, knobs.overlap
                )
                for name in ("compute", "memory", "device"):
                    getattr(seconds, name)[part] = kernels[part] * getattr(single, name)
    return rows, seconds
