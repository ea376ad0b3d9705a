"""Plans of one structure stacked: from plans at several sizes to columns over them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rooftrace.costmodels.batchtiming.plancolumns import PlanColumns
from rooftrace.costmodels.costs import AttentionSizes, Cost, Work
from rooftrace.costmodels.kernels import columns, group_class, tables
from rooftrace.costmodels.planning import Plan
from rooftrace.hardware import Chip


def stack(plans: Sequence[Plan], chip: Chip | None = None) -> PlanColumns:
    """Columns over plans of equal structure, a point for each; equal sizes stand once.

    chip: whose last cache holds bytes (`KernelColumns.warm`); None: none does.
    Raises ValueError for no plans, and where structures differ: in the execution, the launches, the
    classes of kernels, or the works of a kernel.
    """
    if not plans:
        raise ValueError("no plans: expected at least one")
    first = plans[0]
    _check(plans)
    bytes_of = [list(tables.kernel_bytes(planned, chip)) for planned in plans]
    known: dict[Hashable, int] = {}
    kernels: list[columns.KernelColumns] = []
    order = []
    ats: dict[bytes, columns.Places] = {}
    for number in range(len(first.groups)):
        entries = [
            _Entry(planned.costs[number], *held[number], planned.groups[number].times)
            for planned, held in zip(plans, bytes_of, strict=True)
        ]
        sizes: dict[tuple[Hashable, int], int] = {}
        keys = [(entry.identity, entry.times) for entry in entries]
        at = np.array([sizes.setdefault(key, len(sizes)) for key in keys])
        at = ats.setdefault(at.tobytes(), at)
        apart = [entries[int(place)] for place in np.unique(at, return_index=True)[1]]
        spread = group_class(first.graph, first.groups[number].ops, costs=first.op_costs)
        kernel = replace(
            _kernel(number, apart, spread),
            at=at if 1 < len(sizes) < len(plans) else None,
            eager=number in first.eager,
        )
        place = known.setdefault(
            (spread, kernel.eager, at.tobytes(), *(key for key, _ in sizes)), len(kernels)
        )
        if place == len(kernels):
            kernels.append(kernel)
        else:
            before = kernels[place]
            kernels[place] = replace(before, times=before.times + kernel.times)
        order.append(place)
    repeats = zip(*([r.count for r in planned.graph.repeats] for planned in plans), strict=True)
    return PlanColumns(
        points=len(plans),
        execution=first.execution,
        kernels=tuple(kernels),
        launches=first.launches,
        order=tuple(order),
        counts=tuple(_gathered(counts) for counts in repeats),
        copies_layouts=first.copies_layouts,
    )


def _check(plans: Sequence[Plan]) -> None:
    """Raise ValueError where plans differ in what columns have once."""
    first = plans[0]
    for number, planned in enumerate(plans):
        for name in ("execution", "launches", "copies_layouts"):
            if getattr(planned, name) != getattr(first, name):
                raise ValueError(
                    f"plan {number} has other {name} than plan 0: expected plans of one structure"
                )
        groups = [group.ops for group in planned.groups]
        expected = [group.ops for group in first.groups]
        if len(groups) != len(expected) or len(planned.graph.repeats) != len(first.graph.repeats):
            raise ValueError(
                f"plan {number} has {len(groups)} kernel groups and {len(planned.graph.repeats)} "
                f"repeats, plan 0 has {len(expected)} and {len(first.graph.repeats)}: "
                "expected plans of one structure"
            )
        other = next((i for i, ops in enumerate(groups) if ops != expected[i]), None)
        if other is not None:
            raise ValueError(
                f"kernel {other} has ops {groups[other]} in plan {number} and {expected[other]} in "
                "plan 0: expected plans of one structure"
            )


@dataclass(frozen=True, slots=True)
class _Entry:
    """One kernel group of one plan."""

    cost: Cost
    kind: str
    warm: float
    moved: int
    times: int

    @property
    def identity(self) -> Hashable:
        """Equal for groups whose kernels have equal columns."""
        link = self.cost.bytes("link")
        work = tuple(self.cost.work.items())
        return work, self.cost.bytes(), link, self.kind, self.warm, self.moved


def _gathered(amounts: Sequence[float]) -> columns.Amount:
    """An array; one number where all are equal."""
    equal = all(amount == amounts[0] for amount in amounts)
    return float(amounts[0]) if equal else np.array(amounts, dtype=float)


def _kernel(number: int, entries: Sequence[_Entry], spread_kind: str) -> columns.KernelColumns:
    """The columns of a kernel from its group at several sizes."""
    kinds = {entry.kind for entry in entries}
    if len(kinds) > 1:
        raise ValueError(f"kernel {number} is of the classes {sorted(kinds)}: expected one")
    return columns.KernelColumns(
        _works(number, [entry.cost for entry in entries]),
        entries[0].kind,
        bytes=_gathered([entry.cost.bytes() for entry in entries]),
        moved=_gathered([entry.moved for entry in entries]),
        link=_gathered([entry.cost.bytes("link") for entry in entries]),
        warm=_gathered([entry.warm for entry in entries]),
        times=_gathered([entry.times for entry in entries]),
        spread_kind=spread_kind,
    )


def _works(number: int, costs: Sequence[Cost]) -> tuple[columns.WorkColumns, ...]:
    """The works of a kernel from its costs at several sizes."""
    structures = [[_structure(work) for work in cost.work] for cost in costs]
    for structure in structures:
        if structure != structures[0]:
            raise ValueError(
                f"kernel {number} has works {structure} at one size and {structures[0]} at "
                "another: expected the same at all"
            )
    attention: dict[Hashable, Mapping[str, columns.Amount]] = {}
    works = []
    for entries in zip(*(cost.work.items() for cost in costs), strict=True):
        keys, flop = [work for work, _ in entries], _gathered([amount for _, amount in entries])
        rows, inner, width = (
            None if getattr(keys[0], name) is None else _gathered([getattr(k, name) for k in keys])
            for name in ("rows", "inner", "columns")
        )
        sizes = tuple(key.attention for key in keys)
        works.append(
            columns.WorkColumns(
                operation=keys[0].operation,
                precision=keys[0].precision,
                flop=flop,
                count=keys[0].count,
                widths=keys[0].widths,
                lined=keys[0].lined,
                rows=rows,
                columns=width,
                inner=inner,
                attention=None
                if keys[0].attention is None
                else attention.setdefault(sizes, _attention(sizes)),
            )
        )
    return tuple(works)


def _structure(work: Work) -> tuple[Any, ...]:
    """What has to be equal at all sizes."""
    unknown = (work.rows is None, work.columns is None, work.inner is None, work.attention is None)
    return (work.operation, work.precision, work.count, work.widths, work.lined, *unknown)


def _attention(sizes: Sequence[AttentionSizes | None]) -> Mapping[str, columns.Amount]:
    known = [size for size in sizes if size is not None]
    return {
        name: _gathered([float(getattr(size, name)) for size in known])
        for name in AttentionSizes.__struct_fields__
    }
