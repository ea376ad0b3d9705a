"""A step as it is timed: its kernels at one point, or at many, and what launches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.costs import MATRIX
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.costmodels.kernels.works import KernelAmounts, plan_kernels
from rooftrace.costmodels.planning import Launch, Plan
from rooftrace.costmodels.timing.exchanges import KernelExchange, exchanges_of
from rooftrace.costmodels.timing.streams import has_streams
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace._amounts import Amount, Array, Places


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """Kernels of a step that are equal at every point.

    where: their entries in the step, one for each of U sizes.  at: the place among the U of each
    point; None where U is 1, or there is one for each point.  spread_kind: the class whose spread
    holds; None: nobody asks for intervals.  of_experts: whether they compute what experts do.
    aside: whether they run on another stream than the main one.
    """

    where: slice
    at: Places | None = None
    spread_kind: str | None = None
    exchange: KernelExchange | None = None
    of_experts: bool = False
    aside: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepAmounts:
    """What `Plan` says of times, at P points of one structure.

    kernels: their amounts, in rows.  row, times: of each of N entries its row, and how many kernels
    it stands for.  parts: which entries are those of equal kernels; of a plan each of its groups.
    order: for each launch on the device, in the order of launches, its place in `parts`.  counts:
    iterations of each repeat that launches name, at least 1: numbers, or arrays of length P.
    copies_layouts: see `Plan.copies_layouts`.  products: matrix FLOP by operation and precision.
    structure: a plan of this structure, where it has streams; else None.
    Raises ValueError where these contradict each other.
    """

    points: int
    execution: ExecutionModel
    kernels: KernelAmounts
    row: Places
    times: Array
    parts: Sequence[Part]
    order: Sequence[int]
    launches: tuple[Launch, ...]
    counts: Sequence[Any] = ()
    copies_layouts: bool = False
    products: Mapping[tuple[str, str], Amount]
    structure: Callable[[], Plan] | None = None

    def __post_init__(self) -> None:
        placed = sum(launch.on_device for launch in self.launches)
        if placed != len(self.order):
            raise ValueError(f"order has {len(self.order)} kernels, launches have {placed}")
        for number, part in enumerate(self.parts):
            size, at = part.where.stop - part.where.start, part.at
            if at is None and size not in (1, self.points):
                raise ValueError(
                    f"kernel {number} has {size} sizes for {self.points} points: expected 1, one "
                    "for each point, or `at`"
                )
            if at is not None and at.shape != (self.points,):
                raise ValueError(
                    f"kernel {number}: at has shape {at.shape}, expected ({self.points},)"
                )

    @staticmethod
    def of(planned: Plan, chip: Chip | None) -> StepAmounts:
        """The one point of a plan.  chip: whose last cache holds bytes; None: none does."""
        kernels, row = plan_kernels(planned, chip)
        exchanges = exchanges_of(planned)
        products: Counter[tuple[str, str]] = Counter()
        for work, flop in planned.total.work.items():
            if work.operation in MATRIX:
                products[work.operation, work.precision] += flop
        return StepAmounts(
            points=1,
            execution=planned.execution,
            kernels=kernels,
            row=np.array(row, dtype=np.int64),
            times=np.array([group.times for group in planned.groups], dtype=float),
            parts=[
                Part(
                    where=slice(number, number + 1),
                    exchange=exchanges.get(number),
                    of_experts=computes_experts(planned, number),
                    aside=runs_aside(planned, number),
                )
                for number in range(len(planned.groups))
            ],
            order=range(len(planned.groups)),
            launches=planned.launches,
            counts=[repeat.count for repeat in planned.graph.repeats],
            copies_layouts=planned.copies_layouts,
            products=products,
            structure=(lambda: planned) if has_streams(planned) else None,
        )

    # -- amounts over points -----------------------------------------------------------------------

    def by_part(self, entries: Array) -> list[Amount]:
        """A number, or an array over its sizes, for each part."""
        if len(entries) == len(self.parts):
            numbers: list[Amount] = entries.tolist()
            return numbers
        return [
            entries[part.where] if part.where.stop - part.where.start > 1
            else float(entries[part.where.start])
            for part in self.parts
        ]  # fmt: skip

    def total(self, entries: Array, keep: Callable[[Part], bool] | None = None) -> Array:
        """The sum [P] of an amount of all entries, or of those of the parts that `keep` wants.

        Parts with the same `at` are added up first, in their order.
        """
        pairs = list(zip(self.parts, self.by_part(entries), strict=True))
        if self.points == 1:
            kept = (amount for part, amount in pairs if keep is None or keep(part))
            return np.array([sum(kept)], dtype=float)
        sums: dict[int, tuple[Places | None, Amount]] = {}
        for part, amount in pairs:
            if keep is None or keep(part):
                at, before = sums.get(id(part.at), (part.at, 0.0))
                sums[id(part.at)] = at, before + amount
        result = np.zeros(self.points)
        for at, amount in sums.values():
            result += at_points(amount, at)
        return result

    def launched(self, entries: Array, points: slice) -> list[Any]:
        """An amount of each launch on the device at some points: a number where all are equal."""
        amounts = self.by_part(entries)
        told: dict[int, Any] = {}
        for number in self.order:
            if number not in told:
                told[number] = at_points(amounts[number], self.parts[number].at, points)
        return [told[number] for number in self.order]

    def counted(self, points: slice) -> list[Any]:
        """How often each repeat runs at some points: a whole number, or an array of them."""
        return [
            int(np.ravel(n)[0]) if np.size(n) == 1 else np.asarray(n)[points].astype(np.int64)
            for n in self.counts
        ]

    def cuts(self, length: int) -> list[slice]:
        """The points in parts of at most this length."""
        starts = range(0, self.points, length)
        return [slice(start, min(start + length, self.points)) for start in starts]

    def where(self, chosen: Places) -> StepAmounts:
        """The step at some of its points."""

        def at(part: Part) -> Places | None:
            if part.where.stop - part.where.start == 1:
                return None
            return chosen if part.at is None else part.at[chosen]

        counts = [n if np.size(n) == 1 else np.asarray(n)[chosen] for n in self.counts]
        return replace(
            self,
            points=len(chosen),
            parts=[replace(part, at=at(part)) for part in self.parts],
            counts=counts,
            products={
                key: flop if np.size(flop) == 1 else np.asarray(flop)[chosen]
                for key, flop in self.products.items()
            },
        )


def at_points(amount: Amount, at: Places | None, points: slice = slice(None)) -> Any:
    """An amount over sizes at points, all or some of them; one number for all of them stays one."""
    if np.size(amount) == 1:
        return amount
    amounts = np.asarray(amount)
    return amounts[points] if at is None else amounts[at[points]]


def computes_experts(planned: Plan, kernel: int) -> bool:
    """Whether a kernel of a plan computes what experts do."""
    return any(planned.graph.ops[op].family == "moe" for op in planned.groups[kernel].ops)


def runs_aside(planned: Plan, kernel: int) -> bool:
    """Whether a kernel of a plan runs on another stream than the main one."""
    return bool(planned.graph.ops[planned.groups[kernel].ops[0]].stream)
