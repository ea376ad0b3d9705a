"""Kernels as rows of amounts: a row for each kernel at each of its sizes.

A plan has a row for each of its different kernels; a form of a plan has one for each kernel at each
size.  What a kernel computes stands by key of `Cost.work`: works of one key are arrays over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.costs import COMPUTED, AttentionSizes, Cost, Work
from rooftrace.costmodels.kernels.opclass import group_class
from rooftrace.costmodels.kernels.reuse import warm_bytes
from rooftrace.costmodels.knobs.classes import CLASSES, LAST
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array, Places
    from rooftrace.costmodels.planning import Plan

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
        """M, N, K of one product; None where they are not all known."""
        if self.rows is None or self.columns is None or self.inner is None:
            return None
        return self.rows, self.columns, self.inner


@dataclass(frozen=True, slots=True, eq=False)
class KernelAmounts:
    """Kernels in R rows: arrays of length R.

    kind: the class of each, a place in CLASSES.  bytes: through HBM.  warm: those that the last
    cache still holds.  moved: those that are no weights, of kernels that may copy layouts.  link:
    bytes over links.  eager: see `Plan.eager`.  works: those that take time, in the order in which
    a row adds them up.  attention: the attention kernels of rows, with the FLOP of all of a size.
    """

    kind: Places
    bytes: Array
    warm: Array
    moved: Array
    link: Array
    eager: np.ndarray[Any, np.dtype[np.bool_]]
    works: tuple[Works, ...]
    attention: tuple[Works, ...]

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class SizedKernel:
    """One kernel at one size: what it costs, and what the plan says of it."""

    cost: Cost
    kind: str
    warm: float = 0.0
    moved: int = 0
    eager: bool = False


def kernels_of(kernels: Iterable[SizedKernel]) -> tuple[KernelAmounts, list[int]]:
    """Kernels in rows, and the row of each: equal ones share a row."""
    places: dict[Any, int] = {}
    apart: list[tuple[SizedKernel, int, int]] = []
    place = []
    for kernel in kernels:
        size, link = kernel.cost.bytes(), kernel.cost.bytes("link")
        numbers = (kernel.kind, kernel.warm, kernel.moved, kernel.eager, size, link)
        row = places.setdefault((*numbers, *kernel.cost.work.items()), len(apart))
        if row == len(apart):
            apart.append((kernel, size, link))
        place.append(row)
    return _rows(apart), place


def _rows(kernels: Sequence[tuple[SizedKernel, int, int]]) -> KernelAmounts:
    def amounts(numbers: Iterable[float]) -> Array:
        return np.array(list(numbers), dtype=float)

    return KernelAmounts(
        kind=np.array([CLASSES.index(kernel.kind) for kernel, _, _ in kernels], dtype=np.int64),
        bytes=amounts(size for _, size, _ in kernels),
        warm=amounts(kernel.warm for kernel, _, _ in kernels),
        moved=amounts(kernel.moved for kernel, _, _ in kernels),
        link=amounts(link for _, _, link in kernels),
        eager=np.array([kernel.eager for kernel, _, _ in kernels], dtype=bool),
        works=_by_key([list(kernel.cost.computed().items()) for kernel, _, _ in kernels]),
        attention=_by_key([_largest_attention(kernel.cost) for kernel, _, _ in kernels]),
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
