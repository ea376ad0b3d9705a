"""Rows of a `KernelTable` that others measured: kernels of which sizes are known, and no graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rooftrace.costmodels.kernels.attention_rows import COLUMNS
from rooftrace.costmodels.kernels.experts import COLUMNS as EXPERTS
from rooftrace.costmodels.kernels.knobs import CLASSES
from rooftrace.costmodels.kernels.seconds import KernelTable
from rooftrace.costmodels.kernels.tiles import SIZES
from rooftrace.costmodels.ops.cost import AttentionSizes
from rooftrace.hardware.chip import Chip

AMOUNTS = ("count", "bytes", "warm", "vector", "matrix", "flop", "rate", *SIZES)
"""The numbers of a row, in this order, and after them `unit` and `odd`."""
_NONE = ("turned", "issue", "wait", "left", *EXPERTS)
"""Columns that are 0 in all rows."""
NO_ATTENTION = (0.0,) * len(COLUMNS)


def columns(
    sizes: AttentionSizes, kernels: int, size: float, rate: float, library: float
) -> tuple[float, ...]:
    """The attention columns of a row with this many kernels of these sizes."""
    numbers = (float(getattr(sizes, name)) for name in sizes.__struct_fields__)
    return (kernels, *numbers, size, rate, library)


def table(
    chip: Chip,
    kinds: Sequence[str],
    rows: Iterable[Sequence[float]],
    attention: Sequence[tuple[float, ...]] | None = None,
) -> KernelTable:
    """The table of kernels of these classes; numbers as in AMOUNTS, and those of `columns`."""
    names = (*AMOUNTS, "unit", "odd")
    data = dict(zip(names, np.array(list(rows), dtype=float).T, strict=True))
    blocks = attention or [NO_ATTENTION] * len(kinds)
    for name, column in zip(COLUMNS, np.array(blocks, dtype=float).T, strict=True):
        data[f"attention {name}"] = column
    data |= {name: np.zeros(len(kinds)) for name in _NONE}
    return KernelTable(chip, np.array([CLASSES.index(k) for k in kinds], dtype=np.int64), data)


def stage(
    chip: Chip, kind: str, moved: np.ndarray, warm: np.ndarray, **numbers: np.ndarray | float
) -> KernelTable:
    """Kernels of one class, a row each: bytes, the share of them that is warm, other columns."""
    names = (
        *AMOUNTS,
        "unit",
        "odd",
        *_NONE,
        *(f"attention {name}" for name in COLUMNS),
    )
    data = {name: np.zeros(len(moved)) for name in names}
    numbers = {"count": 1.0, "rate": 1.0, "padded": 1.0, **numbers}
    for name, number in {**numbers, "bytes": moved, "warm": warm * moved}.items():
        data[name] = np.broadcast_to(np.asarray(number, dtype=float), moved.shape)
    return KernelTable(chip, np.full(len(moved), CLASSES.index(kind), dtype=np.int64), data)
