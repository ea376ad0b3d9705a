"""A plan over points: its kernels as columns over sizes, and what launches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels import columns
from rooftrace.costmodels.planning import Launch

if TYPE_CHECKING:
    from rooftrace.costmodels.kernels.columns import Amount, Array, KernelColumns, Places


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanColumns:
    """What `Plan` says of times, at P points of one structure.

    kernels: equal ones stand once, with their `times` added.  order: for each launch on the device,
    in the order of launches, the place of its kernel in `kernels`.  counts: iterations of each
    repeat that launches name, at least 1: numbers, or arrays of length P.  copies_layouts: see
    `Plan.copies_layouts`.
    Raises ValueError where these contradict each other.
    """

    points: int
    execution: ExecutionModel
    kernels: tuple[columns.KernelColumns, ...]
    launches: tuple[Launch, ...]
    order: tuple[int, ...]
    counts: tuple[columns.Amount, ...] = ()
    copies_layouts: bool = False

    def __post_init__(self) -> None:
        placed = sum(launch.on_device for launch in self.launches)
        if placed != len(self.order):
            raise ValueError(f"order has {len(self.order)} kernels, launches have {placed}")
        for number, kernel in enumerate(self.kernels):
            size, at = kernel.size, kernel.at
            if at is None and size not in (1, self.points):
                raise ValueError(
                    f"kernel {number} ({kernel.kind}) has {size} sizes for {self.points} points: "
                    "expected 1, one for each point, or `at`"
                )
            if at is not None and at.shape != (self.points,):
                raise ValueError(
                    f"kernel {number} ({kernel.kind}): at has shape {at.shape}, "
                    f"expected ({self.points},)"
                )


def at_points(amount: Array, at: Places | None, part: slice = slice(None)) -> Array:
    """Amounts of a kernel at its sizes, told at points (all, or a slice).

    One amount for all of them stays one.
    """
    if len(amount) == 1:
        return amount
    gathered: Array = amount[part] if at is None else amount[at[part]]
    return gathered


def total(kernels: Sequence[KernelColumns], amounts: Sequence[Amount], points: int) -> Array:
    """The sum [P] of an amount of each kernel; kernels of the same `at` are added up first."""
    sums: dict[int, tuple[Places | None, Amount]] = {}
    for kernel, amount in zip(kernels, amounts, strict=True):
        at, before = sums.get(id(kernel.at), (kernel.at, 0.0))
        sums[id(kernel.at)] = at, before + amount
    result = np.zeros(points)
    for at, amount in sums.values():
        result += at_points(np.atleast_1d(amount), at)
    return result
