"""The kernels of a plan for any sizes: amounts, traffic and works as formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rooftrace.costmodels.batchtiming import KernelColumns, WorkColumns
from rooftrace.costmodels.costs import AttentionSizes
from rooftrace.costmodels.knobs.classes import LAST
from rooftrace.costmodels.planforms.planrecords import AccessNumbers, GroupNumbers
from rooftrace.costmodels.planforms.points import Array, Points
from rooftrace.tracer.formulas import Formula
from rooftrace.tracer.graphforms import slots


@dataclass(frozen=True)
class Amount:
    """A number of a plan: exact where it is a formula, else what a draw makes of one.

    formula: of a plain number; else of what the draw multiplies or divides.
    """

    kind: str
    formula: Formula
    draw: slots.Draw | None = None
    constant: float | None = None  # a number that is no whole one, in place of the formula

    @property
    def sizes(self) -> frozenset[int]:
        """The places of the sizes that it depends on."""
        draw = self.draw
        if draw is None:
            return self.formula.symbols
        parts = (self.formula, draw.rows, draw.chosen, draw.classes)
        return frozenset().union(*(part.symbols for part in parts))

    def over(self, columns: Sequence[Array]) -> Array:
        """The numbers at points."""
        if self.constant is not None:
            return np.array([self.constant])
        if self.draw is None:
            return self.formula.over(columns)
        reached = self.draw.over(columns)
        value = None if self.kind == slots.REACHED else self.formula.over(columns)
        number: Array = slots.Varying((), self.kind).number(value, reached)
        return number

    def written(self, names: Sequence[str]) -> str:
        """The amount in symbols."""
        if self.constant is not None:
            return f"{self.constant:g}"
        if self.draw is None:
            return self.formula.written(names)
        draw, formula = self.draw.written(names), self.formula.written(names)
        return {
            slots.REACHED: draw,
            slots.TOUCHED: f"({formula}) {draw}",
            slots.EACH: f"({formula}) / {draw}",
        }[self.kind]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one access, with the factor that the execution has on them."""

    access: AccessNumbers
    amount: Amount

    def over(self, columns: Sequence[Array]) -> Array:
        """Bytes at points, rounded as in a plan."""
        size = self.amount.over(columns)
        factor, copies = self.access.factor, self.access.copies
        if factor == 1:
            return size
        return copies * np.rint(size / copies * factor).astype(np.int64)


@dataclass(frozen=True)
class KernelForm:
    """A kernel of a plan, its numbers as amounts.  groups: its places in the plan; equal ones."""

    numbers: GroupNumbers
    times: Amount
    flops: tuple[Amount, ...]  # of each work
    sizes: tuple[Amount | None, ...]  # rows, columns, inner of each work in turn
    attention: tuple[tuple[Amount, ...] | None, ...]
    traffic: tuple[Traffic, ...]

    @property
    def key(self) -> Any:
        """Equal for kernels of equal columns."""
        numbers = self.numbers
        works = tuple(
            (w.operation, w.precision, w.count, w.widths, w.lined, w.attention is None)
            for w in numbers.work
        )
        return (numbers.kind, numbers.spread_kind, numbers.eager, works, self.flops, self.sizes,
                self.attention, self.traffic)  # fmt: skip

    @cached_property
    def depends(self) -> frozenset[int]:
        """The places of the sizes that its numbers depend on, `times` apart."""
        amounts = [*self.flops, *(t.amount for t in self.traffic)]
        amounts += [size for size in self.sizes if size is not None]
        amounts += [size for sizes in self.attention if sizes for size in sizes]
        return frozenset().union(*(amount.sizes for amount in amounts))


def columns_of(kernels: Sequence[KernelForm], points: Points) -> KernelColumns:
    """Equal kernels at points, as what they are timed by."""
    kernel = kernels[0]
    times = Amount(slots.PLAIN, Formula.total((1, each.times.formula) for each in kernels))
    columns, at = points.part(kernel.depends | times.sizes)

    def told(amount: Amount | Traffic) -> Any:
        numbers = amount.over(columns).astype(float)
        return float(numbers[0]) if len(numbers) == 1 else numbers

    works = []
    attention: dict[Any, Any] = {}
    for number, work in enumerate(kernel.numbers.work):
        rows, width, inner = (
            None if size is None else told(size)
            for size in kernel.sizes[3 * number : 3 * number + 3]
        )
        sizes = kernel.attention[number]
        if sizes is not None and sizes not in attention:
            names = AttentionSizes.__struct_fields__
            attention[sizes] = {n: told(size) for n, size in zip(names, sizes, strict=True)}
        works.append(
            WorkColumns(
                operation=work.operation,
                precision=work.precision,
                flop=told(kernel.flops[number]),
                count=work.count,
                widths=work.widths,
                lined=work.lined,
                rows=rows,
                columns=width,
                inner=inner,
                attention=None if sizes is None else attention[sizes],
            )
        )
    bytes_ = [(item.access, told(item)) for item in kernel.traffic]
    hbm = [(a, size) for a, size in bytes_ if a.wire == "hbm"]
    last = kernel.numbers.kind.endswith(LAST)
    return KernelColumns(
        tuple(works),
        kernel.numbers.kind,
        sum((size for _, size in hbm), 0.0),
        0.0 if last else sum((size for a, size in hbm if a.role != "weights"), 0.0),
        sum((size for a, size in bytes_ if a.wire == "link"), 0.0),
        times=told(times),
        at=at,
        spread_kind=kernel.numbers.spread_kind,
        eager=kernel.numbers.eager,
    )
