"""Seconds of many kernels at once from calibrated constants; predictions and fits both use it.

The formulas work on arrays, since a fit evaluates thousands of kernels hundreds of times.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rooftrace.costmodels.kernels.attention_rows import attention_seconds_of
from rooftrace.costmodels.kernels.attention_time import attention_engine
from rooftrace.costmodels.kernels.utilization import (
    SIZES,
    TILED,
    TileTerms,
    matrix_engine,
    p_norm,
    tile_terms,
)
from rooftrace.costmodels.knobs import Knobs
from rooftrace.costmodels.knobs.classes import CLASSES, UNITS
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Places = np.ndarray[Any, np.dtype[np.int64]]
    Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class KernelSeconds:
    """Seconds of one kernel of each row; `device` is the whole of it, without a launch.

    choice: the tile and split of each row's product (see `TileChoice.at`), -1 where it has none or
    is not timed by tiles.  untiled: `device` if every tile and every wave were full, and fed at
    once.
    """

    compute: Array
    memory: Array
    device: Array
    choice: np.ndarray[Any, np.dtype[np.int64]]
    untiled: Array

    def where(self, chosen: Flags, others: KernelSeconds) -> KernelSeconds:
        """These seconds; of chosen rows those of others."""
        import numpy as np

        pairs = ((getattr(self, f.name), getattr(others, f.name)) for f in fields(self))
        return KernelSeconds(*(np.where(chosen, theirs, ours) for ours, theirs in pairs))

    def at_pace(self, pace: float) -> KernelSeconds:
        """The seconds of kernels that are all so many times as fast."""
        seconds = (self.compute, self.memory, self.device, self.untiled)
        compute, memory, device, untiled = (each / pace for each in seconds)
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
      unit                the place in `UNITS` of the engine and precision of that product
      odd                 whether rows of it, or else of vector work, are `misaligned`
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

    def tiles(self, knobs: Knobs, rows: Places | None = None) -> TileTerms | None:
        """What each tile takes for rows that have a product (all of these); None without tiles.

        It does not depend on rates and shares, so a fit that keeps `knobs.tiling` needs it once.
        """
        engine = matrix_engine(self.chip, 1.0)
        if engine is None:
            return None
        tiled = self.data["flop"] > 0 if rows is None else rows
        columns = {name: self.data[name][tiled] for name in SIZES}
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
            result.choice[rows], result.untiled[rows] = -1, by_blocks.device
        return result if knobs.pace == 1 else result.at_pace(knobs.pace)


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
    odd = np.where(d["odd"] > 0, np.array([s.odd for s in shares])[table.kind], 1.0)
    bandwidth = chip.memory_bandwidth.value

    sent = d["bytes"] + layout * d["moved"] - d["warm"] * (1 - 1 / knobs.cache)
    t_memory = sent / (bandwidth * memory)
    t_memory = np.where(d["flop"] > 0, t_memory, odd * t_memory)
    odd = np.where(d["whole"] > 0, odd, 1.0)  # of products: those of the matrix engine
    rest = (d["vector"] + d["matrix"]) / compute
    reached = _product_shares(table, knobs, compute, odd)
    product = d["flop"] / (d["rate"] * reached)
    slow = chip.peak("vector", "fp32") if aside.any() else 1.0
    product = np.where(aside, d["flop"] / (slow * compute), product)
    engine, tiling = matrix_engine(chip, 1.0), knobs.tiling
    t_compute = rest + product
    tiled = np.flatnonzero(d["flop"] > 0)
    device = p_norm(knobs.overlap, t_compute, t_memory)
    choice = np.full(len(table), -1, dtype=np.int64)
    if engine is None or not len(tiled):
        return KernelSeconds(t_compute, t_memory, device, choice, device)
    untiled, device = device, device.copy()
    parts = [tiled] if terms is not None else np.split(tiled, range(TILED, len(tiled), TILED))
    for rows in parts:
        here = terms or table.tiles(knobs, rows)
        assert here is not None
        work = here.flop / (d["rate"] * reached)[rows, None] + rest[rows, None]
        feed = here.feed * odd[rows, None] / (engine.cache * tiling.feed)
        spill = here.spill / (bandwidth * knobs.memory) + here.split * tiling.split
        moved = np.maximum(t_memory[rows, None], here.walk / bandwidth)
        whole = p_norm(knobs.overlap, work, feed, moved) + spill
        best = (np.arange(len(rows)), whole.argmin(axis=1))
        by_tiles = p_norm(knobs.overlap, work[best], feed[best]) + spill[best]
        on_matrix = ~aside[rows]
        rows = rows[on_matrix]
        choice[rows] = best[1][on_matrix]
        t_compute[rows], t_memory[rows] = by_tiles[on_matrix], moved[best][on_matrix]
        device[rows] = whole[best][on_matrix]
    return KernelSeconds(t_compute, t_memory, device, choice, untiled)


def _product_shares(table: KernelTable, knobs: Knobs, by_class: Array, odd: Array) -> Array:
    """The share of its engine's rate that the largest product of each row reaches.

    by_class: that of the row's class.  An engine with a share of its own (`Knobs.engines`) has that
    in its place.  odd: how often as long each product takes.
    """
    import numpy as np

    own = np.array([knobs.engines.get(unit, np.nan) for unit in UNITS])
    share = own[table.data["unit"].astype(np.int64)]
    reached: Array = np.where(np.isnan(share), by_class, knobs.compute * share)
    return reached / odd
