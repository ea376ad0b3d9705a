"""Seconds of kernels from their amounts: at a datasheet's peaks, and by calibrated constants.

The formulas work on arrays, a row for each kernel, since a sweep has thousands of kernels and a fit
evaluates them hundreds of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.fusion import ExecutionModel
from rooftrace.costmodels.kernels import attention_rows, engines, experts as expert_kernels, tiles
from rooftrace.costmodels.kernels.attention import attention_engine
from rooftrace.costmodels.kernels.engines import WORD, misaligned
from rooftrace.costmodels.kernels.knobs import (
    CLASSES,
    GROUPED,
    NATIVE,
    UNITS,
    Knobs,
    library_products,
)
from rooftrace.costmodels.kernels.numbers import ProductKnobs, Share
from rooftrace.costmodels.kernels.places import TURNED
from rooftrace.costmodels.kernels.tiles import (
    CHOICES,
    SIZES,
    SPLITS,
    KernelSeconds,
    TileTerms,
    fastest,
    matrix_engine,
    p_norm,
    tile_shares,
    tile_terms,
)
from rooftrace.costmodels.kernels.works import KernelAmounts, Works, plan_kernels
from rooftrace.costmodels.ops import MATRIX
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array, Places
    from rooftrace.costmodels.fusion import Plan

    Flags = np.ndarray[Any, np.dtype[np.bool_]]


# -- at a datasheet's peaks ------------------------------------------------------------------------


def peak_seconds(
    kernels: KernelAmounts,
    chip: Chip,
    execution: ExecutionModel,
    headline: float,
    *,
    tiled: bool = True,
) -> Array:
    """Seconds [R] of the work of each kernel at the datasheet's rates.

    headline: FLOP/s of the engine that runs most of the matrix FLOPs.  tiled: False: as if every
    tile and every wave of products were full.

    Matrix and vector work of one kernel are added: engines are not assumed to overlap inside it.
    Raises MissingPeakError where the chip lacks a rate.
    """
    seconds = np.zeros(len(kernels))
    use = execution.utilization
    for work in kernels.works:
        rate: Amount
        if work.key.operation == "vector":
            scalar = use.eta_scalar
            rate = chip.peak("vector", work.key.precision) if scalar is None else scalar * headline
        elif use.tiles:
            on = engines.running(work.key, work.shape, chip, execution)
            rate = on.rate * _reached(execution, work)
            if tiled:
                rate = rate * _tile_shares(work, chip, rate, on.padded)
        else:
            rate = chip.peak(*engines.engine_of(work.key, chip, execution))
            rate = rate * _reached(execution, work)
        seconds[work.row] += work.flop / rate
    return seconds


def _reached(execution: ExecutionModel, work: Works) -> Amount:
    """`Utilization.eta` of products."""
    use = execution.utilization
    if use.b_sat is None or work.rows is None:
        return 1.0
    rows, at = np.unique(np.ravel(work.rows), return_inverse=True)
    eta: Array = np.array([use.eta(float(number)) for number in rows])[at]
    return eta


def _tile_shares(work: Works, chip: Chip, rate: Amount, padded: Amount) -> Amount:
    """Share of the rate that tile and wave quantisation leave; 1 if unknown."""
    engine, shape = matrix_engine(chip), work.shape
    if engine is None or shape is None:
        return 1.0
    numbers = (*tiles.product_sizes(work.key, shape, work.flop, padded, chip).values(), rate)
    columns = np.broadcast_arrays(*(np.atleast_1d(number) for number in numbers))
    has_size = (columns[0] > 0) & (columns[1] > 0) & (columns[2] > 0)
    shares = np.ones(len(has_size))
    *sizes, rates = (column[has_size] for column in columns)
    if len(rates):
        shares[has_size] = tile_shares(dict(zip(SIZES, sizes, strict=True)), rates, engine)
    return shares


# -- by calibrated constants -----------------------------------------------------------------------


def seconds_by_knobs(
    kernels: KernelAmounts, chip: Chip, knobs: Knobs, execution: ExecutionModel, layouts: bool
) -> KernelSeconds:
    """Seconds of kernels by knobs; of kernels that are not compiled by those of eager mode.

    They are at the full clock where a step holds one clock, else each at its own; see `REST`.

    layouts: whether convolutions copy their activations into another layout.
    """
    table = table_of(kernels, chip, execution)
    price = table.at_full_clock if rest_of(chip) else table.seconds
    seconds = price(knobs, layouts)
    outside = execution.outside.knobs_on(chip)
    if outside is None or not kernels.eager.any():
        return seconds
    return seconds.where(kernels.eager, price(outside, layouts=True))


@dataclass(frozen=True)
class KernelTable:
    """Kernels on one chip, a row each; equal ones stand once.

    data has a column for each of these names, and those of `attention_rows.COLUMNS` and
    `experts.COLUMNS`:
      count               how many kernels the row stands for
      bytes, warm         through HBM; and how many of them the last cache still holds
      turned              values that convolutions may copy into another layout (see `Issued`)
      issue, wait         seconds in which SMs issue what is counted by instructions, and in which
                          threads wait for memory one trip after the other (see `Issued`)
      left                seconds in which the last blocks wait for the last cache
      vector, matrix      seconds at the peak: vector work; matrix work but for the largest product
      flop, rate          of the largest plain product, 0 where there is none; FLOP/s of its engine
      rows, columns,
      inner, products     sizes of that product, and how many of them one kernel has; columns of
                          grouped convolutions as their kernel pads them (`_group_sizes`)
      width_a, width_b    bytes of a stored element of its operands
      padded              whether its tiles are computed in full (see `tile_terms`)
      unit                the index in `UNITS` of the engine and precision of that product
      odd                 1 where rows of it, or else of vector work, are `misaligned`, 2 where they
                          are to a `WORD`, too
      kernel              the place in `engines.KERNELS` of the library's kernel that runs it
      rounded             numbers of its activations that a kernel rounds before
    """

    chip: Chip
    kind: Places  # position in CLASSES
    data: dict[str, Array]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def has_tiles(self) -> bool:
        """Whether products are timed by tiles: the chip has an SM count and a clock."""
        return matrix_engine(self.chip) is not None

    @property
    def has_attention_blocks(self) -> bool:
        """Whether attention is timed by its blocks: the chip has an SM count and a bf16 rate."""
        return attention_engine(self.chip) is not None

    def tiles(
        self, knobs: Knobs, rows: Places | None = None, splits: Sequence[int] = SPLITS
    ) -> TileTerms | None:
        """Amounts of each tile for rows that have a product (all of these); None without tiles.

        They do not depend on rates and shares: a fit that keeps `knobs.tiling` needs them once.
        splits: see `tile_terms`.
        """
        engine = matrix_engine(self.chip)
        if engine is None:
            return None
        tiled = self.data["flop"] > 0 if rows is None else rows
        columns = {name: self.data[name][tiled] for name in SIZES}
        kernels = self.libraries(tiled)
        return tile_terms(columns, engine.units, knobs.tiling, kernels, usual=True, splits=splits)

    def libraries(self, rows: Any = slice(None)) -> Iterator[tuple[ProductKnobs, Flags]]:
        """The kernels of libraries that run products, with flags of those among these rows."""
        if "kernel" not in self.data:
            return
        numbers, places = library_products(self.chip), self.data["kernel"][rows].astype(int)
        for place in np.flatnonzero(np.bincount(places)):
            if place:
                yield numbers[engines.KERNELS[place]], places == place

    def seconds(self, knobs: Knobs, layouts: bool, terms: TileTerms | None = None) -> KernelSeconds:
        """Seconds of one kernel of each row that runs again and again, at the clock that it holds.

        See `at_full_clock` for the arguments.
        """
        full = self.at_full_clock(knobs, layouts, terms)
        clock = clock_of(full.busy, full.paced, full.device, knobs.power, rest_of(self.chip))
        return full.held(clock)

    def at_full_clock(
        self, knobs: Knobs, layouts: bool, terms: TileTerms | None = None
    ) -> KernelSeconds:
        """Seconds of one kernel of each row, by the formula of `knobs`, where no limit slows it.

        Attention takes the formula of `attention.py`, where its blocks are modelled; products of
        experts by an engine's kernel that of `experts.py`.  layouts: whether convolutions copy
        their activations into another layout.  terms: those of `tiles`, to compute them once for
        many knobs.
        """
        result = _shared_seconds(self, knobs, layouts, terms)
        result = result.after(_rounding_seconds(self, knobs))
        sent = self.data["bytes"] - self.data["warm"] * (1 - 1 / knobs.cache)
        blocks = attention_rows.attention_seconds_of(self.data, sent, self.chip, knobs)
        experts = expert_kernels.expert_seconds_of(self.data, sent, self.chip, knobs)
        for part in (blocks, experts):
            if part is None:
                continue
            rows, own = part
            result.compute[rows], result.memory[rows] = own.compute, own.memory
            result.device[rows] = own.device
            result.choice[rows], result.untiled[rows] = -1, own.device
        if knobs.power < 1:
            result = _with_power(self, knobs, result)
        return result if knobs.pace == 1 else result.at_pace(knobs.pace)


def _shared_seconds(
    table: KernelTable, knobs: Knobs, layouts: bool, terms: TileTerms | None
) -> KernelSeconds:
    """Seconds per row from class shares only, before attention takes those of its blocks."""
    d, chip = table.data, table.chip
    shares = [knobs.share(name) for name in CLASSES]
    compute = knobs.compute * np.array([s.compute for s in shares])[table.kind]
    compute = compute * attention_rows.backward_shares(d, chip)
    memory = knobs.memory * np.array([s.memory for s in shares])[table.kind]
    layout = _layouts(table, shares) if layouts else 0.0
    aside = np.array([s.engine == "vector" for s in shares])[table.kind]
    odds = np.array([(1.0, s.odd, s.odd if s.odd_word is None else s.odd_word) for s in shares])
    odd = odds[table.kind, d["odd"].astype(np.int64)]
    bandwidth = chip.memory_bandwidth.value

    sent = d["bytes"] - d["warm"] * (1 - 1 / knobs.cache)
    t_memory = sent / (bandwidth * memory)
    copies = d["turned"] * d["width_a"] / (bandwidth * memory)  # before and after
    if chip.sm_count is not None and chip.clock is not None:
        turns = d["turned"] * TURNED / (ISSUED * chip.sm_count.value * chip.clock.value)
        copies = np.hypot(copies, turns)
    apart = layout * copies + d["left"]
    t_memory = np.where(d["flop"] > 0, t_memory, odd * t_memory)
    odd = np.where(d["padded"] > 0, odd, 1.0)  # of products: those of the matrix engine
    issue = d["issue"] / max(1, knobs.compute)
    rest = (d["vector"] + d["matrix"]) / compute + issue
    reached = _product_shares(table, knobs, compute, odd)
    rate = d["rate"] * reached
    product = d["flop"] / rate
    slow = chip.peak("vector", "fp32") if aside.any() else 1.0
    product = np.where(aside, d["flop"] / (slow * compute), product)
    counted = aside & (d["issue"] > 0)  # depthwise convolutions by their instructions
    rest, product = np.where(counted, issue, rest), np.where(counted, 0.0, product)
    t_compute = rest + product
    device = p_norm(knobs.overlap, t_compute, t_memory, d["wait"]) + apart
    choice = np.full(len(table), -1, dtype=np.int64)
    tiled = np.flatnonzero(d["flop"] > 0)
    if matrix_engine(chip) is None or not len(tiled):
        return KernelSeconds(t_compute, t_memory + apart, device, choice, device)
    untiled, device = device, device.copy()
    columns = (rate, rest, odd, t_memory, np.broadcast_to(apart, len(table)))
    products = _Products(table, knobs, tiled, *(column[tiled] for column in columns))
    on_matrix = ~aside[tiled]
    rows, best = tiled[on_matrix], products.by_tiles(terms)[:, on_matrix]
    device[rows], t_compute[rows], t_memory[rows], choice[rows] = best
    return KernelSeconds(t_compute, t_memory + apart, device, choice, untiled)


@dataclass(frozen=True)
class _Products:
    """Rows of a table that have a product: arrays of one length."""

    table: KernelTable
    knobs: Knobs
    rows: Places
    rate: Array  # FLOP/s that they reach
    rest: Array  # seconds of other work
    odd: Array  # factor on feeding
    sent: Array  # seconds of bytes, whatever the tile
    apart: Array  # seconds that nothing hides

    def by_tiles(self, terms: TileTerms | None = None) -> Array:
        """Seconds [3, products] by the fastest tile: of all, of computing, of bytes; its place.

        terms: those of `KernelTable.tiles`, of all of these products.
        """
        if terms is not None:
            return self._timed(np.arange(len(self.rows)), terms)
        return fastest(len(self.rows), self._terms, self._timed)

    def _terms(self, part: Places, splits: Sequence[int]) -> TileTerms:
        terms = self.table.tiles(self.knobs, self.rows[part], splits)
        assert terms is not None
        return terms

    def _timed(self, part: Places, terms: TileTerms) -> Array:
        engine, knobs, tiling = matrix_engine(self.table.chip), self.knobs, self.knobs.tiling
        assert engine is not None
        rate, rest, odd, sent, apart = (
            column[part, None] for column in (self.rate, self.rest, self.odd, self.sent, self.apart)
        )
        work = terms.flop / rate + rest
        feed = terms.feed * odd / (engine.cache * tiling.feed)
        spill = terms.spill / (engine.memory * knobs.memory) + terms.split * tiling.split + apart
        moved = np.maximum(sent, terms.walk / engine.cache)
        total = p_norm(knobs.overlap, work, feed, moved) + spill
        best = (np.arange(len(part)), total.argmin(axis=1))
        work, feed, spill, moved = (
            np.broadcast_to(term, total.shape)[best] for term in (work, feed, spill, moved)
        )
        by_tiles = p_norm(knobs.overlap, work, feed) + spill
        place = best[1] * (CHOICES // total.shape[1])
        return np.stack([total[best], by_tiles, moved, place])


def _layouts(table: KernelTable, shares: list[Share]) -> Array:
    """Hidden copies of each row, in multiples of its activations."""
    half = np.array([s.layout for s in shares])
    fp32 = np.array([s.layout if s.layout_fp32 is None else s.layout_fp32 for s in shares])
    copies: Array = np.where(table.data["width_a"] >= 4, fp32[table.kind], half[table.kind])
    return copies


def _product_shares(table: KernelTable, knobs: Knobs, by_class: Array, odd: Array) -> Array:
    """The share of its engine's rate that the largest product of each row reaches.

    by_class: that of the row's class, unless its engine has a share (`Knobs.engines`).  odd: factor
    on the time of each product.
    """
    shares = np.array([knobs.engines.get(unit, np.nan) for unit in UNITS])
    share = shares[table.data["unit"].astype(np.int64)]
    reached: Array = np.where(np.isnan(share), by_class, knobs.compute * share)
    for kernel, runs in table.libraries():
        reached[runs] = knobs.compute * kernel.compute
    return reached / odd


def _rounding_seconds(table: KernelTable, knobs: Knobs) -> Array:
    """Seconds of the kernels before a product that round its activations, by row."""
    seconds, engine = np.zeros(len(table)), matrix_engine(table.chip)
    if engine is None:
        return seconds
    capacity = 0.0 if table.chip.l2_capacity is None else table.chip.l2_capacity.value
    for kernel, runs in table.libraries():
        rows = np.flatnonzero(runs & (table.data["rounded"] > 0))
        numbers = table.data["rounded"][rows]
        high = numbers / table.data["inner"][rows]
        moved = numbers * kernel.reads / (engine.memory * knobs.memory)
        fits = numbers * (_WIDE + table.data["width_a"][rows]) <= capacity
        moved = np.where(fits, moved / knobs.cache, moved)
        ragged = (table.data["rows"][rows] % _SCALES != 0) & (table.data["inner"][rows] > _SCALED)
        each = kernel.row + kernel.chunk * np.ceil(table.data["inner"][rows] / _CHUNK)
        turns = np.maximum(high / engine.units, high > 0)
        seconds[rows] = kernel.start + np.maximum(moved, each * turns)
        seconds[rows] += ragged * kernel.ragged
    return seconds


_WIDE = 2
"""Bytes of a number before it is rounded."""
_CHUNK = 2048
"""Numbers that a block of 256 threads loads at once, 16 bytes each (vLLM rounds a row by such a
block: csrc/quantization/w8a8/fp8/common.cu)."""
_SCALES = 4
"""fp32 scales in the 16 bytes at whose multiples the TMA loads (CUDA C++ Programming Guide)."""
_SCALED = 128
"""Numbers of a row that share a scale.  A single column of scales lies as it has to."""


GROWTH = 2.3
"""Power of a busy engine grows with its clock f to this: f V^2, where V falls with f.  The largest
products of H100 run at 499.5 TFLOP/s on 114 SMs at 350 W (PCIe) and 792.1 on 132 at 700 W (SXM;
mamf-finder, https://github.com/mag-/gpu_benchmark), 100 W of each for memory and idle parts."""
REST = 0.415
"""Power of A100 and H100 whose matrix engines are idle, over that with them at full rate and full
clock: 466 W by additions of 2 GiB in turns with products, which take 1,124 W (H100 SXM, 700 W,
torch 2.11, 2026-11-27); steps of MPT with much attention and with little (llm-foundry, A100) agree.
Elsewhere a kernel holds the clock that it would hold alone, as if the rest took nothing: attention
on L40S and long steps on B200 say so."""
_MATRIX_UNITS = np.array([name.startswith("matrix") for name in UNITS])


def rest_of(chip: Chip) -> float:
    """`REST` of a chip; 0: each kernel holds a clock of its own."""
    return REST if Knobs.generation(chip) in ("ampere", "hopper") else 0.0


def _with_power(table: KernelTable, knobs: Knobs, at_full: KernelSeconds) -> KernelSeconds:
    """The seconds, with those of busy matrix engines and those that follow the clock."""
    d, full = table.data, knobs.compute * knobs.share("mm").compute
    vector = np.array([knobs.share(name).engine == "vector" for name in CLASSES])[table.kind]
    products = (d["flop"] > 0) & _MATRIX_UNITS[d["unit"].astype(np.int64)] & ~vector
    on_matrix = products | (d["attention rate"] > 0)
    at_peak = np.where(on_matrix, d["matrix"] + d["flop"] / d["rate"], 0.0)
    busy = np.minimum(at_peak / full, at_full.device)
    more = np.maximum(at_full.memory, 1e-30) / np.maximum(at_full.compute, 1e-30)
    with np.errstate(over="ignore"):
        paced = on_matrix * at_full.device / (1 + more**knobs.overlap)
    return replace(at_full, busy=busy, paced=paced)


def clock_of(busy: Amount, paced: Amount, seconds: Array, power: float, rest: float) -> Array:
    """The share of its clock that a chip holds by its limit on power, in [power, 1].

    Of work that takes `seconds` at the full clock, matrix engines are busy for `busy`, and `paced`
    grow as the clock falls: arrays of one length.  power: the share that the chip holds where they
    are busy all the time.  rest: see `REST`.

    The mean power is at its limit, power^GROWTH of that of busy engines at the full clock:
        busy f^(GROWTH - 1) + rest (T - busy / f) = power^GROWTH T,
    where T = seconds + paced (1 / f - 1).  It holds also where clocks change faster than steps.
    """
    held, limit, growth = np.ones(np.shape(seconds)), power**GROWTH, GROWTH - 1
    rest = min(rest, limit)
    left = limit - rest
    over = np.asarray(busy * (1 - rest) > left * seconds)  # the limit, at the full clock
    if power >= 1 or not over.any():
        return held
    busy, paced, seconds = (np.asarray(each)[over] for each in (busy, paced, seconds))
    clock, fixed = held[over], seconds - paced
    for _ in range(8):  # Newton's; the left side less the right grows with the clock
        more = busy * clock**growth - rest * busy / clock - left * (fixed + paced / clock)
        slope = busy * growth * clock ** (growth - 1) + (rest * busy + left * paced) / clock**2
        clock = np.clip(clock - more / slope, power, 1.0)
    held[over] = clock
    return held


# -- rows of a table -------------------------------------------------------------------------------


def kernel_table(
    planned: Plan, chip: Chip, reuse: bool = True, cold: bool = False
) -> tuple[KernelTable, list[int]]:
    """The kernels of a plan on a chip, and the row of each group.

    reuse: whether to count bytes that the last cache still holds, on chips with its size.  cold:
    whether the cache is empty when the step begins.
    """
    kernels, place = plan_kernels(planned, chip, reuse, cold)
    rows = table_of(kernels, chip, planned.execution)
    counts = [0.0] * len(rows)
    for group, row in zip(planned.groups, place, strict=True):
        counts[row] += group.times
    return KernelTable(chip, rows.kind, {**rows.data, "count": np.array(counts)}), place


def table_of(kernels: KernelAmounts, chip: Chip, execution: ExecutionModel) -> KernelTable:
    """The kernels as a table on a chip, row by row.  Raises MissingPeakError."""
    data: dict[str, Array] = {
        "count": np.ones(len(kernels)),
        "bytes": kernels.bytes,
        "warm": kernels.warm,
        "turned": kernels.turned,
        "issue": _issue_seconds(kernels, chip),
        "wait": _wait_seconds(kernels, chip),
        "left": kernels.after * (LEFT if chip.kind == "gpu" else 0.0),
    }
    data |= _work_columns(kernels, chip, execution)
    data |= attention_rows.columns_of(kernels, chip, execution)
    data |= expert_kernels.columns_of(kernels, chip, execution)
    return KernelTable(chip, kernels.kind, data)


ISSUED = 128
"""Threads for which an SM issues an instruction in a clock: four schedulers, 32 threads each (CUDA
C++ Programming Guide, compute capabilities).  A CU of CDNA has 128 lanes too."""


def _issue_seconds(kernels: KernelAmounts, chip: Chip) -> Array:
    """Seconds in which the SMs of a GPU issue `Issued.instructions`; 0 where their number is
    unknown, and of depthwise convolutions on GPUs that are not NVIDIA's, whose kernels are others.
    """
    if chip.kind != "gpu" or chip.sm_count is None or chip.clock is None:
        return np.zeros(len(kernels))
    others = (kernels.kind == CLASSES.index(NATIVE)) & (chip.vendor != "NVIDIA")
    return np.where(others, 0.0, kernels.instructions) / (
        ISSUED * chip.sm_count.value * chip.clock.value
    )


TRIP, TRIP_CACHED, GDDR = 410e-9, 235e-9, 0.62
"""Seconds in which a thread loads a number, from memory or the last cache, adds it to a mean and a
variance, and goes on: group norms of 2 to 64 groups on H200, torch 2.11, 2026-11-27.  The same of
GPUs without HBM over that: bilinear kernels on RTX 3090 and 4090 (timm's steps)."""


LEFT = 280e-9
"""Seconds in which a thread of the last block adds up what another left in the last cache: sums
over 256 to 16,384 columns on H100, torch 2.11, 2026-11-27."""


def _wait_seconds(kernels: KernelAmounts, chip: Chip) -> Array:
    """Seconds in which threads wait for memory, one trip after the other, on GPUs.

    The last cache holds what the kernel before wrote, which read as much: all where that is a third
    of its room, nothing from a half on (see `warm_bytes`).
    """
    if chip.kind != "gpu":
        return np.zeros(len(kernels))
    room = 0.0 if chip.l2_capacity is None else chip.l2_capacity.value
    cached = np.clip(3 - 6 * kernels.bytes / room, 0, 1) if room else 0.0
    near = GDDR if Knobs.generation(chip) in (None, "ada") else 1.0
    seconds: Array = kernels.trips * near * (TRIP + (TRIP_CACHED - TRIP) * cached)
    return seconds


def _work_columns(
    kernels: KernelAmounts, chip: Chip, execution: ExecutionModel
) -> dict[str, Array]:
    """The columns of `KernelTable` for computing: those of the largest product, and the rest."""
    names = ("vector", "matrix", "flop", "rate", *SIZES, "unit", "odd", "kernel", "rounded")
    columns = {name: np.zeros(len(kernels)) for name in names}
    columns["rate"][:] = 1.0
    most = np.zeros(len(kernels))  # seconds of the largest product so far
    rows_odd = np.zeros(len(kernels))  # whether rows of vector work are misaligned
    for work in kernels.works:
        at, key = work.row, work.key
        on = engines.running(key, work.shape, chip, execution)
        if key.operation not in MATRIX:
            limit = engines.reached(work.rows, work.inner, chip)
            columns["vector"][at] += work.flop / np.minimum(on.rate, limit)
            if key.lined and work.columns is not None:
                odd = misaligned(key, {"N": work.columns})
                rows_odd[at] = np.maximum(rows_odd[at], odd)
            continue
        seconds = work.flop / on.rate
        if work.shape is None:
            columns["matrix"][at] += seconds
            continue
        m, n, k = work.shape
        has_size = np.minimum(np.minimum(m, n), k) > 0
        larger = has_size & (work.flop > 0) & (seconds >= most[at])  # of equal ones the last
        columns["matrix"][at] += np.where(larger, most[at], seconds)
        most[at] = np.where(larger, seconds, most[at])
        numbers = {"flop": work.flop, "rate": on.rate, "unit": on.unit}
        numbers |= tiles.product_sizes(key, work.shape, work.flop, on.padded, chip)
        lengths = {"M": m, "N": n, "K": k}
        numbers["odd"] = misaligned(key, lengths) + misaligned(key, lengths, WORD)
        numbers["kernel"], rounds = engines.library_kernel(key, chip, execution.library)
        numbers["rounded"] = rounds * m * k * numbers["products"]
        every = larger.all()
        for name, number in numbers.items():
            columns[name][at] = number if every else np.where(larger, number, columns[name][at])
    grouped = np.isin(kernels.kind, [CLASSES.index(name) for name in GROUPED])
    for name, padded in _group_sizes(columns, chip).items() if grouped.any() else ():
        columns[name] = np.where(grouped, padded, columns[name])
    columns["odd"] = np.where(columns["flop"] > 0, columns["odd"], rows_odd)
    alone = kernels.kind != CLASSES.index("grouped mm")  # those of experts are other kernels
    for name in ("kernel", "rounded"):
        columns[name] *= alone
    return columns


GROUP_WIDTHS = (4, 8, 16, 32)
"""Channels of a group for which cuDNN has kernels of their own: no document says it, steps do."""
GROUP_TILE = (64, 128)
"""Groups as wide as some of the first fill tiles; all others are padded to the second.  On Hopper
all are padded to the first."""


def _group_sizes(columns: dict[str, Array], chip: Chip) -> dict[str, Array]:
    """Sizes of the products that a grouped convolution computes, by `GROUP_WIDTHS`.

    Steps with channels last on RTX 4090 (timm): groups of 24 to 120 channels take one time for each
    value that is read and written, as if all were 128 wide; those of 4 to 32 are limited by memory.
    On Hopper narrow groups share products of 64 columns and as many channels, mostly zeros: groups
    of 4 to 64 channels take 50 to 77 us (64 x 384 x 28 x 28 in bf16 on H200, 2026-11-27).
    """
    width, (fill, tile) = columns["columns"], GROUP_TILE
    if Knobs.generation(chip) != "hopper":
        fits = np.isin(width, GROUP_WIDTHS) | (width % fill == 0)
        return {"columns": np.where(fits, width, np.ceil(width / tile) * tile)}
    joined = np.minimum(np.maximum(1.0, fill // np.maximum(width, 1.0)), columns["products"])
    return {
        "columns": np.ceil(width / fill) * fill,
        "inner": columns["inner"] * joined,
        "products": columns["products"] / np.maximum(joined, 1.0),
    }
