"""Kernels as rows of amounts, and the bytes that they read from the last-level cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace._amounts import larger, smaller
from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.kernels.engines import group_class
from rooftrace.costmodels.kernels.instructions import NOTHING, Issued, group_issued
from rooftrace.costmodels.kernels.intervals import WIDE, StepCell
from rooftrace.costmodels.kernels.knobs import CLASSES
from rooftrace.costmodels.memory import Visits
from rooftrace.costmodels.ops import COMPUTED, MATRIX, WIRES, Access, AttentionSizes, Cost, Work
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array, Places

# -- reuse -----------------------------------------------------------------------------------------
# An LRU cache still holds the bytes that were touched within the last `capacity` bytes of traffic
# (reuse distance; Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems
# Journal 9(2), 1970).  Each step follows an equal step, so the weights of a small model stay.  A
# result need not reach memory if it is dead, and its block is written again, within that distance.


def warm_bytes(planned: Plan, capacity: float, cold: bool = False) -> list[float]:
    """HBM bytes of each group that a cache of `capacity` bytes still holds.

    The mean over the iterations that a group stands for.  Distances are in bytes of traffic, and
    the bytes that a kernel touches take room too: a storage as large as the room that is left is
    evicted entirely, and a storage half as large stays entirely.  cold: the step begins with an
    empty cache.
    """
    return [sum(held.values()) for held in warm_accesses(planned, capacity, cold)]


def warm_accesses(
    planned: Plan, capacity: float, cold: bool = False
) -> list[Mapping[Access, float]]:
    """The bytes of `warm_bytes` by access of each group."""
    walk = _Walk(planned, lambda group, access: planned.costs[group].traffic[access])
    walk.both(cold)
    return [
        {
            access: sum(_held(capacity, *amounts) for amounts in parts) / walk.visits[group]
            for access, parts in walk.parts[group].items()
        }
        for group in range(len(planned.groups))
    ]


# -- at many sizes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class WarmPart:
    """Bytes of a kernel that may still be in a cache; vectors as `warm_parts` was passed them."""

    weight: float  # the share of the kernel's iterations that touch them so
    size: Array
    distances: tuple[Array, ...]  # bytes of other traffic since; the smallest holds


def warm_parts(
    planned: Plan, amounts: Callable[[int, Access], Array], cold: bool = False
) -> list[list[WarmPart]]:
    """For each group the bytes that a cache may still hold, for sizes that are still open.

    amounts: the bytes of an access of a group, as a vector: an array over points, or coefficients
    of terms of which the bytes are the sum; all of one length.  Sizes and distances are linear in
    them.  An access whose vector is zero touches nothing.  Where a repeat stands in the graph, its
    count is that of `planned`.  `warm_columns` says how much of them a cache holds; for one plan,
    that is `warm_bytes`.
    """
    walk = _Walk(planned, amounts)
    walk.both(cold)
    result: list[list[WarmPart]] = []
    for group in range(len(planned.groups)):
        equal: dict[tuple[bytes, ...], tuple[int, tuple[Array, ...]]] = {}
        for parts in walk.parts[group].values():
            for vectors in parts:
                key = tuple(vector.tobytes() for vector in vectors)
                count, _ = equal.get(key, (0, vectors))
                equal[key] = count + 1, vectors
        result.append(
            [
                WarmPart(count / walk.visits[group], size, tuple(distances))
                for count, (size, *distances) in equal.values()
            ]
        )
    return result


def warm_columns(
    parts: Iterable[WarmPart],
    capacity: float,
    over: Callable[[Array], Array] = lambda vector: vector,
) -> Array | float:
    """Bytes of a group [P] that a cache of `capacity` bytes still holds; 0.0 without parts.

    over: from a vector of `warm_parts` to an array over points.
    """
    held: Array | float = 0.0
    for part in parts:
        amounts = map(over, (part.size, *part.distances))
        held = held + part.weight * _held(capacity, *amounts)
    return held


def _held(capacity: float, size: Any, *distances: Any) -> Any:
    """Bytes of `size` that are still in the cache after the least of these bytes of other traffic.

    Numbers, or arrays over points.
    """
    room = larger(0.0, capacity - larger(0.0, reduce(smaller, distances)) - size)
    return smaller(size, room)


# -- two steps in a row ----------------------------------------------------------------------------


class _Walk:
    """Two steps in a row, kernel by kernel, with the time (in bytes) of every storage's last touch.

    An iteration that stands for many others moves the clock on for all of them.  It is not measured
    itself; its neighbours are.  Amounts are numbers, or vectors of one length.
    """

    def __init__(self, planned: Plan, amounts: Callable[[int, Access], Any]) -> None:
        self.planned, self.amounts = planned, amounts
        self.ops = Visits(planned.graph)
        self.group_of = {op: i for i, group in enumerate(planned.groups) for op in group.ops}
        self.closing = {group.ops[-1] for group in planned.groups}
        values = planned.graph.values
        self.kept = {values[i].storage for i in (*planned.graph.outputs, *planned.graph.external)}
        self.clock: Any = 0.0
        self.began: dict[int, Any] = {}  # when the kernel that touched it last began, and ended
        self.last: dict[int, Any] = {}
        # By group and access, what may be reused: the size, and distances of which the least holds.
        self.parts: dict[int, dict[Access, list[tuple[Any, ...]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self.visits: dict[int, int] = defaultdict(int)

    def both(self, cold: bool) -> None:
        """Run a step and measure the one after it; cold: measure the first."""
        if not cold:
            self.step(measured=False)
        self.step(measured=True)

    def step(self, measured: bool) -> None:
        """Run a step; add up its warm bytes if it is `measured`."""
        self.writes: list[tuple[int, Access, int, Any, tuple[Any, ...]]] = []
        touched: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for visit in self.ops.order:
            group = self.group_of.get(visit.op.id)
            if group is None:
                continue
            for storage, number in self.ops.bound(visit):
                touched[group][storage].add(number)
            if visit.op.id in self.closing:
                others = self.ops.standing(visit.at)
                self._run(group, touched.pop(group, {}), others, measured and others == 1)
        if measured:
            for group, access, number, wrote, before in self.writes:
                self.parts[group][access].append((*before, self.began[number] - wrote))

    def _run(self, group: int, touched: dict[int, set[int]], times: int, measured: bool) -> None:
        """Run one kernel, which stands for `times` of them."""
        parts: list[tuple[int, Any, Access]] = []
        stays = set()
        for access in self.planned.costs[group].traffic:
            amount = self.amounts(group, access) if access.wire == "hbm" else 0
            if amount if isinstance(amount, (int, float)) else amount.any():
                numbers = touched.get(access.storage) or {-1 - access.storage}
                parts += [(n, amount / len(numbers), access) for n in sorted(numbers)]
                if access.storage in self.kept:
                    stays |= numbers
        moved = sum(size for _, size, _ in parts)
        if measured:
            self.visits[group] += 1
            for number, size, access in parts:
                last = self.last.get(number)
                before = (size,) if last is None else (size, self.clock - last)
                if access.write and number not in stays:
                    wrote = self.clock + moved
                    self.writes.append((group, access, number, wrote, before))
                elif last is not None:
                    self.parts[group][access].append(before)
        begin = self.clock
        self.clock = self.clock + times * moved
        for number, _, _ in parts:
            self.began[number], self.last[number] = begin, self.clock


# -- works -----------------------------------------------------------------------------------------
# A plan has a row for each of its different kernels; a form of a plan has one for each kernel at
# each size.  Works of one key of `Cost.work` are arrays over rows.

_SIZES = ("rows", "columns", "inner")
_ATTENTION = AttentionSizes.__struct_fields__


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Works:
    """Work of one key in some rows, with its FLOP there.

    key: a key of `Cost.work`; its sizes do not count.  row: the rows that it is in, each once.
    flop, rows, columns, inner, attention: as in `Cost.work`, by row, or one number for all of them;
    flop is 0 where a row has no such work.
    """

    key: Work
    row: slice | Places
    flop: Amount
    rows: Amount | None = None
    columns: Amount | None = None
    inner: Amount | None = None
    attention: Mapping[str, Amount] | None = None

    @property
    def shape(self) -> tuple[Amount, Amount, Amount] | None:
        """M, N, K of one product; None where any is unknown."""
        if self.rows is None or self.columns is None or self.inner is None:
            return None
        return self.rows, self.columns, self.inner


@dataclass(frozen=True, slots=True, eq=False)
class KernelAmounts:
    """Kernels in R rows: arrays of length R.

    kind: the class of each, a place in CLASSES.  bytes: through HBM.  warm: those that the last
    cache still holds.  instructions, trips, after, turned: see `Issued`.  link, host: bytes over
    links, and between device and host.
    eager: see `Plan.eager`.  works: those that take time, in the order in which a row adds them
    up.  attention: the attention kernels of rows, with the FLOP of all of a size.
    """

    kind: Places
    bytes: Array
    warm: Array
    instructions: Array
    trips: Array
    after: Array
    turned: Array
    link: Array
    host: Array
    eager: np.ndarray[Any, np.dtype[np.bool_]]
    works: tuple[Works, ...]
    attention: tuple[Works, ...]

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def latent(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether a row is attention on latents: keys wider than values."""
        latent = np.zeros(len(self), dtype=bool)
        for work in self.attention:
            if work.attention is not None:
                latent[work.row] |= work.attention["width"] != work.attention["value_width"]
        return latent

    @property
    def products(self) -> tuple[Array, Array]:
        """FLOP of the products of each row: of those whose weights alone are narrow, and of all."""
        narrow, flops = np.zeros(len(self)), np.zeros(len(self))
        for work in self.works:
            if work.key.operation in MATRIX:
                flops[work.row] += work.flop
                widths, wide = work.key.widths, StepCell.precision_of(work.key.precision) in WIDE
                if wide and widths is not None and widths[1] <= 1 < widths[0]:
                    narrow[work.row] += work.flop
        return narrow, flops


@dataclass(frozen=True, slots=True)
class SizedKernel:
    """One kernel at one size: its cost, and the numbers that `kernel_bytes` has of the plan."""

    cost: Cost
    kind: str
    warm: float = 0.0
    issued: Issued = NOTHING
    eager: bool = False


def kernels_of(kernels: Iterable[SizedKernel]) -> tuple[KernelAmounts, list[int]]:
    """Kernels in rows, and the row of each: equal ones share a row."""
    row_by_key: dict[Any, int] = {}
    distinct: list[tuple[SizedKernel, tuple[int, ...]]] = []
    rows = []
    for kernel in kernels:
        sizes = tuple(map(kernel.cost.bytes, WIRES))
        ours = (kernel.kind, kernel.warm, kernel.issued, kernel.eager)
        row = row_by_key.setdefault((*ours, sizes, *kernel.cost.work.items()), len(distinct))
        if row == len(distinct):
            distinct.append((kernel, sizes))
        rows.append(row)
    return _rows(distinct), rows


def _rows(rows: Sequence[tuple[SizedKernel, tuple[int, ...]]]) -> KernelAmounts:
    kernels = [kernel for kernel, _ in rows]
    hbm, link, host = zip(*(sizes for _, sizes in rows), strict=True) if rows else ((), (), ())

    def amounts(numbers: Iterable[float]) -> Array:
        return np.array(list(numbers), dtype=float)

    return KernelAmounts(
        kind=np.array([CLASSES.index(kernel.kind) for kernel in kernels], dtype=np.int64),
        bytes=amounts(hbm),
        warm=amounts(kernel.warm for kernel in kernels),
        instructions=amounts(kernel.issued.instructions for kernel in kernels),
        trips=amounts(kernel.issued.trips for kernel in kernels),
        after=amounts(kernel.issued.after for kernel in kernels),
        turned=amounts(kernel.issued.turned for kernel in kernels),
        link=amounts(link),
        host=amounts(host),
        eager=np.array([kernel.eager for kernel in kernels], dtype=bool),
        works=_by_key([list(kernel.cost.computed().items()) for kernel in kernels]),
        attention=_by_key([_largest_attention(kernel.cost) for kernel in kernels]),
    )


def _largest_attention(cost: Cost) -> list[tuple[Work, int]]:
    """The largest attention kernel of a cost with its FLOP; nothing where there is none."""
    flop: dict[AttentionSizes, int] = {}
    last: dict[AttentionSizes, Work] = {}
    for work, amount in cost.work.items():
        if work.attention is not None and work.count in COMPUTED:
            flop[work.attention] = flop.get(work.attention, 0) + amount
            last[work.attention] = work
    if not flop:
        return []
    sizes = max(flop, key=lambda sizes: (flop[sizes], sizes.keys))
    return [(last[sizes], flop[sizes])]


def _by_key(rows: Sequence[Sequence[tuple[Work, int]]]) -> tuple[Works, ...]:
    """The works of rows by key; those of a row stay in their order."""
    alike: dict[Any, list[tuple[int, Work, int]]] = {}
    for row, works in enumerate(rows):
        for place, (work, flop) in enumerate(works):
            shape = (work.rows is None, work.columns is None, work.inner is None)
            kind = (work.operation, work.precision, work.widths, work.lined, *shape)
            key = (place, kind, work.attention is None)
            alike.setdefault(key, []).append((row, work, flop))
    return tuple(_works(alike[key]) for key in sorted(alike, key=lambda key: int(key[0])))


def _works(entries: Sequence[tuple[int, Work, int]]) -> Works:
    works = [work for _, work, _ in entries]
    first = works[0]
    sizes = {
        name: np.array([getattr(work, name) for work in works], dtype=float)
        for name in _SIZES
        if getattr(first, name) is not None
    }
    attention = None
    if first.attention is not None:
        attention = {
            name: np.array([getattr(work.attention, name) for work in works], dtype=float)
            for name in _ATTENTION
        }
    return Works(
        key=first,
        row=np.array([row for row, _, _ in entries]),
        flop=np.array([flop for _, _, flop in entries], dtype=float),
        **sizes,
        attention=attention,
    )


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
) -> Iterator[tuple[str, float, Issued]]:
    """By group: its class, bytes that the last cache holds, and what it issues.

    chip: whose cache; None: there is none.  For reuse and cold see `kernel_table`.
    """
    warm = [0.0] * len(planned.groups)
    if reuse and chip is not None and chip.l2_capacity is not None:
        warm = warm_bytes(planned, chip.l2_capacity.value, cold)
    for number, group in enumerate(planned.groups):
        layout = planned.lays_out(number)
        kind = group_class(planned.graph, group.ops, layout, planned.op_costs)
        yield kind, warm[number], group_issued(planned, number, kind)
