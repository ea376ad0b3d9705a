"""Census of a step's matrix products: records by size, how they fill tiles, and odd sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from rooftrace._amounts import np
from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.estimates.nodes import Aligned, aligned, with_shape
from rooftrace.costmodels.estimates.rows import Row
from rooftrace.costmodels.fusion import ExecutionModel, Plan, runs
from rooftrace.costmodels.kernels import Knobs, engines, tiles
from rooftrace.costmodels.kernels.tiles import TileUse
from rooftrace.costmodels.ops import COMPUTED, MATRIX, Cost, Work, find_rule
from rooftrace.graph import Op, pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.precisions import precision
from rooftrace.hardware.units import format_flops

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True, kw_only=True)
class Product(Plain):
    """Equal products C[M, N] = A[M, K] B[K, N] of a step, cut into equal tiles."""

    operation: str  # "matmul", or "convolution": as the product that it implies
    kind: str  # of the kernel by its rule: mm, bmm, grouped mm, conv, rnn ...
    rows: float | None  # M; the mean where the groups of a call differ; None: unknown
    columns: int | None  # N
    inner: float | None  # K; the mean where the groups of a call differ
    # Products of this size in a call: of a batch, of the groups that got rows, of a convolution's
    # groups; real ones, of which a complex product is four.
    batch: float | None
    precision: str  # of computing
    calls: int
    flops: int  # FLOP, without those that backward computes again
    flops_recompute: int
    modules: tuple[str, ...]  # whose code calls it, indices starred
    parts: tuple[str, ...]  # forward, backward, recompute
    # Seconds of the kernels, fused ops included; several products of a kernel share them by their
    # seconds at the peak.
    seconds: float
    share: float  # of t_serial
    tile: tuple[int, int] | None  # M and N of one block
    split: int | None  # blocks that share one tile's K
    tile_efficiency: float | None  # FLOP of C over those of its full tiles
    wave_efficiency: float | None  # the share of the SMs that has a block, over full waves
    seconds_wasted: float | None  # that full tiles in full waves, fed at once, would save
    odd: tuple[str, ...]  # which of M, N, K are rows in memory that do not keep the alignment
    aligned: tuple[float, int, float] | None  # M, N, K with those up to the next size that does
    aligned_flops: int  # FLOP more at these sizes
    aligned_seconds: float | None  # seconds more at these sizes, by the kernel model; below 0: less

    @property
    def shape(self) -> tuple[float, int, float] | None:
        """M, N, K; None where any is unknown."""
        if self.rows is None or self.columns is None or self.inner is None:
            return None
        return self.rows, self.columns, self.inner

    @property
    def flops_wasted(self) -> int | None:
        """FLOP of full tiles beyond those of C; None where no tile is modelled."""
        if self.tile_efficiency is None:
            return None
        done = self.flops + self.flops_recompute
        return round(done / self.tile_efficiency) - done

    KEYS = "* flops_wasted"


_FIELDS = tuple(each.name for each in fields(Product))


@dataclass(frozen=True, slots=True, kw_only=True)
class Census(Plain, Shown):
    """Every matrix product of a step, most seconds first, and the FLOP of attention kernels.

    flops + flops_attention are the matrix FLOP of the step.
    """

    title: str
    products: tuple[Product, ...]
    flops_attention: int  # of kernels that multiply inside and never write the scores
    calls_attention: int
    seconds_attention: float
    align: int  # bytes that rows in memory should be a multiple of
    expected: bool  # whether seconds are expected ones, by knobs; False where they are bounds
    chip: str
    execution: str
    phase: str

    KEYS = (
        "title phase chip execution align expected flops flops_attention calls_attention "
        "seconds_attention flops_matrix products"
    )

    @property
    def flops(self) -> int:
        """FLOP of all products, without recomputation."""
        return sum(product.flops for product in self.products)

    @property
    def flops_matrix(self) -> int:
        """FLOP in matrix products and convolutions, attention dense: `Estimate.flops_matrix`."""
        return self.flops + self.flops_attention

    @property
    def odd(self) -> tuple[Product, ...]:
        """The products with sizes that do not keep the alignment, most seconds first."""
        return tuple(product for product in self.products if product.odd)

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dict for each product; lists as text, for tables."""
        return [
            {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in row.items()}
            for row in (product.to_dict() for product in self.products)
        ]

    def to_frame(self) -> pandas.DataFrame:
        """One row for each product."""
        import pandas

        return pandas.DataFrame.from_records(
            [product.to_dict() for product in self.products],
            columns=[*_FIELDS, "flops_wasted"],
        )

    def __repr__(self) -> str:
        sizes = (" x ".join(map(str, p.shape or ("?",))) for p in self.products)
        return short(
            self, f"{len(self.products)} products, {format_flops(self.flops_matrix)}: {some(sizes)}"
        )


# -- counting --------------------------------------------------------------------------------------
# Rows are exact: their FLOP and those of the attention kernels are the matrix FLOP of the step.
# Efficiencies of tiles and waves are those of `tiled_kernels`, None where it models none.
# A convolution stands as an im2col product: M the positions of all images, N the output channels
# of a group, K the values that each of them sums.

ATTENTION = "attention"
"""The kind of ops whose products are inside of one kernel."""


@dataclass(slots=True)
class _Call:
    """The products of one size that an op of a kernel has."""

    row: Row  # of the kernel
    op: Op
    kind: str
    works: dict[Work, int]  # FLOP of one call; the keys differ in `count` alone
    part: float = 1.0  # of the seconds of the kernel
    aligned: Aligned | None = None

    @property
    def work(self) -> Work:
        """The key with the most FLOP that take time."""
        return max(self.works, key=lambda work: (work.count in COMPUTED, self.works[work]))

    def flops(self, *, recompute: bool) -> int:
        """FLOP of one call that backward does a second time, or all others."""
        return sum(f for w, f in self.works.items() if (w.count == "recompute") is recompute)

    @property
    def batch(self) -> float | None:
        """Products of its size; None if unknown."""
        shape = self.work.shape
        if shape is None or 0 in shape:
            return None
        each, flop = 2 * shape[0] * shape[1] * shape[2], sum(self.works.values())
        count = round(flop / each)
        return count if abs(count * each - flop) <= 0.5 else flop / each  # FLOP are rounded


def census(
    planned: Plan,
    chip: Chip,
    rows: Sequence[Row],
    *,
    knobs: Knobs | None,
    headline: float,
    t_serial: float,
    clock: float,
    align: int = engines.ACCESS,
) -> Census:
    """Every matrix product of an estimate, whose fields these are.

    headline: FLOP/s of its peak.  t_serial: seconds that shares are of.  clock: see
    `StepTimes.clock`.  align: bytes; sizes are
    odd whose rows in memory are no multiple of them.  Raises ValueError for less than 1 byte.
    """
    if align < 1:
        raise ValueError(f"align={align}: expected bytes, 1 or more; usual are 16 and 128")
    calls = [call for row in rows for call in _calls_of(planned, chip, row)]
    products = [call for call in calls if call.kind != ATTENTION]
    lengthened: list[tuple[_Call, Cost, int]] = []
    for call in products:
        call.aligned = aligned(planned.graph, call.op, call.work, align)
        if call.aligned is not None:
            lengthened.append((call, *_lengthened(planned, call, call.aligned)))
    groups = list(dict.fromkeys(call.row.index for call in products))
    wanted = [(group, planned.costs[group]) for group in groups]
    wanted += [(call.row.index, cost) for call, cost, _ in lengthened]
    kernels = tiled_kernels(planned, chip, knobs, headline, wanted, clock)
    now = dict(zip(groups, kernels, strict=False))
    more = {
        id(call): (flop, kernel.seconds - now[call.row.index].seconds)
        for (call, _, flop), kernel in zip(lengthened, kernels[len(groups) :], strict=True)
    }
    pieces = [
        _product(planned, chip, call, now[call.row.index], more.get(id(call)), t_serial)
        for call in products
    ]
    attention = [call for call in calls if call.kind == ATTENTION]
    return Census(
        title=planned.graph.title,
        phase=planned.graph.phase,
        chip=chip.name,
        execution=planned.execution.name,
        align=align,
        expected=knobs is not None,
        products=_added_up(pieces),
        flops_attention=sum(c.row.count * c.flops(recompute=False) for c in attention),
        calls_attention=sum(
            count for _, count in {(c.row.index, c.op.id): c.row.count for c in attention}.items()
        ),
        seconds_attention=sum(c.part * c.row.timing.t_device for c in attention),
    )


def _calls_of(planned: Plan, chip: Chip, row: Row) -> Iterator[_Call]:
    """The products of a kernel by op and size, each with its part of the kernel's seconds."""
    calls: dict[Any, _Call] = {}
    seconds: dict[Any, float] = {}
    for number in row.ops:
        op, cost = planned.graph.ops[number], planned.op_costs[number]
        works = {work: flop for work, flop in cost.work.items() if work.operation in MATRIX}
        rule = find_rule(op.target)
        kind = rule.kind_of(cost) if rule is not None else "no rule"
        for work, flop in works.items():
            key = (number, kind == ATTENTION or (work.operation, work.precision, work.shape))
            call = calls.setdefault(key, _Call(row, op, kind, {}))
            call.works[work] = flop
            taken = 0.0
            if work.count in COMPUTED:
                taken = flop / chip.peak(*engines.product_engine(work, chip, planned.execution))
            seconds[key] = seconds.get(key, 0.0) + taken
    total = sum(seconds.values())
    for key, call in calls.items():
        call.part = seconds[key] / total if total else 1 / len(calls)
        yield call


def _lengthened(planned: Plan, call: _Call, made: Aligned) -> tuple[Cost, int]:
    """The cost of a call's kernel at aligned sizes, and how many FLOP more."""
    result = planned.graph.values[call.op.outputs[0]]
    output = result.storage, float(precision(result.dtype).bits / 8)
    cost, more = planned.costs[call.row.index], 0
    for number, (work, flop) in enumerate(call.works.items()):
        batch = 0.0 if number else call.batch or 1  # operands grow once
        cost, added = with_shape(cost, work, flop, made, batch, output)
        more += added
    return cost, more


def _product(
    planned: Plan,
    chip: Chip,
    call: _Call,
    kernel: TiledKernel,
    more: tuple[int, float] | None,
    t_serial: float,
) -> Product:
    """The record of a call, for as many times as its kernel runs."""
    row, work, times = call.row, call.work, call.row.count
    use = next((kernel.uses[w] for w in call.works if w in kernel.uses), None)
    modules = runs.kernel_modules(planned.graph, row.ops, call.op)
    seconds = call.part * row.timing.t_device
    shape = call.aligned.shape if call.aligned is not None else None
    return Product(
        operation=work.operation,
        kind=call.kind,
        rows=work.rows if work.shape is not None else None,
        columns=work.columns,
        inner=work.inner,
        batch=call.batch,
        precision=engines.precision_on(chip, work.precision),
        calls=times,
        flops=times * call.flops(recompute=False),
        flops_recompute=times * call.flops(recompute=True),
        modules=tuple(dict.fromkeys(map(pattern_of, modules))),
        parts=(call.op.part,),
        seconds=seconds,
        share=seconds / t_serial if t_serial else 0.0,
        tile=None if use is None else (use.rows, use.columns),
        split=None if use is None else use.split,
        tile_efficiency=None if use is None else use.tile_efficiency,
        wave_efficiency=None if use is None else use.wave_efficiency,
        seconds_wasted=None if use is None else times * (kernel.seconds - kernel.untiled),
        odd=() if call.aligned is None else call.aligned.odd,
        aligned=shape,
        aligned_flops=0 if more is None else times * more[0],
        aligned_seconds=None if more is None else times * more[1],
    )


_SUMS = ("calls", "flops", "flops_recompute", "seconds", "share", "seconds_wasted",
         "aligned_flops", "aligned_seconds")  # fmt: skip
_LISTS = ("modules", "parts")


def _added_up(pieces: Sequence[Product]) -> tuple[Product, ...]:
    """Equal products, cut into equal tiles, as one; most seconds first."""
    groups: dict[Product, list[Product]] = {}
    summed: dict[str, Any] = dict.fromkeys((*_SUMS, *_LISTS))
    for piece in pieces:
        groups.setdefault(replace(piece, **summed), []).append(piece)
    products = [_sum(group) for group in groups.values()]
    return tuple(sorted(products, key=lambda product: (-product.seconds, str(product.shape))))


def _sum(group: Sequence[Product]) -> Product:
    """The sum of equal products of several modules, kernels or parts of the step."""
    first = group[0]
    sums: dict[str, Any] = {
        name: None if getattr(first, name) is None else sum(getattr(p, name) for p in group)
        for name in _SUMS
    }
    for name in _LISTS:
        sums[name] = tuple(dict.fromkeys(item for p in group for item in getattr(p, name)))
    return replace(first, **sums)


# -- tiles -----------------------------------------------------------------------------------------
# Single kernels of a plan, also with other sizes: their seconds, the tiles of their products.


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
    clock: float,
) -> list[TiledKernel]:
    """Kernels in the place of those of a plan, priced as `time_plan` prices them, without links.

    knobs: None: at the datasheet's rates.  headline: FLOP/s.  wanted: numbers of groups of the
    plan, each with the cost of one kernel in its place.  clock: see `StepTimes.clock`.
    """
    from rooftrace.costmodels.kernels import seconds, works

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
        taken = taken.held(clock)
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
    engine, use = tiles.matrix_engine(chip), execution.utilization
    if engine is None or choice == -1 or (choice is None and not use.tiles):
        return uses
    longest = 0.0
    for work, flop in cost.computed().items():
        if work.operation not in MATRIX or work.shape is None or 0 in work.shape:
            continue
        name, precision = engines.product_engine(work, chip, execution)
        rate = chip.peak(name, precision)
        numbers = tiles.product_sizes(work, work.shape, flop, float(name == "matrix"), chip)
        sizes = {size: np.array([float(number)]) for size, number in numbers.items()}
        if choice is None:
            rates = np.array([rate * use.eta(work.rows)])
            place = int(tiles.tile_seconds(sizes, rates, engine).argmin())
            uses[work] = TileUse.of(place, sizes, engine.units)
        elif flop / rate >= longest:  # of equal ones the last
            longest, uses = flop / rate, {work: TileUse.of(choice, sizes, engine.units)}
    return uses
