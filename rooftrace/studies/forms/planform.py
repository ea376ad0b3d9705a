"""A plan for any sizes within one regime: its totals and its kernels, as formulas and as arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import numpy as np
from msgspec import structs

from rooftrace.costmodels.fusion import ExecutionModel, Plan
from rooftrace.costmodels.kernels.works import WarmPart, warm_columns, warm_parts
from rooftrace.costmodels.ops import MATRIX, Access, Work
from rooftrace.costmodels.timing.steps import StepAmounts
from rooftrace.errors import RequestError
from rooftrace.graph.formulas import Formula, FormulaError, RecordForm, leaves
from rooftrace.hardware import Chip
from rooftrace.studies.forms.kernelforms import (
    AccessNumbers,
    Amount,
    Array,
    GroupNumbers,
    KernelForm,
    KernelRows,
    PlanNumbers,
    Points,
    Traffic,
    WorkForm,
)

_Path = tuple[Any, ...]


class PlanForm:
    """A plan for the sizes where its form holds.

    Totals are exact integers: FLOP, bytes.  planner: gives a plan at some of the sizes.
    """

    def __init__(
        self, form: RecordForm, execution: ExecutionModel, planner: Callable[[], Plan]
    ) -> None:
        self.form, self.execution, self._planner = form, execution, planner
        self.template: PlanNumbers = form.template
        self._slots = {slot.path: slot for slot in self.form.slots}

    def under(self, execution: ExecutionModel) -> PlanForm:
        """This plan, timed under an execution with other constants of kernels."""
        if execution == self.execution:
            return self
        _ = self.kernels  # made once, for both
        other = copy(self)
        other.execution = execution
        return other

    # -- numbers -----------------------------------------------------------------------------------

    def amount(self, path: _Path, constant: Any) -> Amount:
        """The number at a path of the record; constant: its value where no size changes it."""
        slot = self._slots.get(path)
        if slot is None:
            if constant != int(constant):
                return Amount(leaves.PLAIN, Formula(), constant=float(constant))
            return Amount(leaves.PLAIN, Formula.constant(int(constant)))
        formula = self.form.formulas[slot.formulas[0]] if slot.formulas else Formula()
        return Amount(slot.kind, formula, self.form.draws[slot.draw] if slot.draw >= 0 else None)

    @cached_property
    def kernels(self) -> tuple[KernelForm, ...]:
        """The kernels in launch order."""
        return tuple(map(self._kernel, range(len(self.template.groups))))

    def _kernel(self, place: int) -> KernelForm:
        group = self.template.groups[place]
        at: _Path = ("groups", place)
        traffic = tuple(
            Traffic(access, self.amount((*at, "traffic", number, "size"), access.size))
            for number, access in enumerate(group.traffic)
        )
        exchange, exchanged = group.exchange, []
        if exchange is not None:
            here = (*at, "exchange")
            exchanged.append(self.amount((*here, "nbytes"), exchange.nbytes))
            if exchange.experts is not None:
                for name in ("nbytes", "rows"):
                    number = getattr(exchange.experts, name)
                    exchanged.append(self.amount((*here, "experts", name), number))
        times = self.amount((*at, "times"), group.times)
        if times.draw is not None:
            raise FormulaError(f"kernel {place}: how often it runs is drawn, and no whole formula")
        return KernelForm(
            numbers=group,
            times=times,
            works=tuple(
                self._work((*at, "work", number), *entry) for number, entry in enumerate(group.work)
            ),
            traffic=traffic,
            issued=tuple(
                self.amount((*at, "issued", place), number)
                for place, number in enumerate(group.issued)
            ),
            exchanged=tuple(exchanged),
        )

    def _work(self, at: _Path, work: Work, flop: int) -> WorkForm:
        here: _Path = (*at, 0)
        sizes = ((name, getattr(work, name)) for name in ("rows", "columns", "inner"))
        attention = {} if work.attention is None else structs.asdict(work.attention)
        return WorkForm(
            Work(
                work.operation,
                work.precision,
                count=work.count,
                widths=work.widths,
                lined=work.lined,
            ),
            self.amount((*at, 1), flop),
            tuple(None if n is None else self.amount((*here, name), n) for name, n in sizes),
            tuple(self.amount((*here, "attention", name), n) for name, n in attention.items()),
        )

    # -- totals ------------------------------------------------------------------------------------

    def flops(
        self, points: Points, keep: Callable[[GroupNumbers, Work], bool] | None = None
    ) -> Array:
        """FLOP at points, of the works that `keep` wants: by default the dense count; exact."""
        return self._sum(
            points,
            (
                (kernel.times, work.flop)
                for kernel in self.kernels
                for work in kernel.works
                if (work.key.is_dense if keep is None else keep(kernel.numbers, work.key))
            ),
        )

    def bytes(
        self,
        points: Points,
        keep: Callable[[GroupNumbers, AccessNumbers], bool] = lambda _, access: (
            access.wire == "hbm"
        ),
    ) -> Array:
        """Bytes at points, of the accesses that `keep` wants: by default all through HBM."""
        return self._sum(
            points,
            (
                (kernel.times, item)
                for kernel in self.kernels
                for item in kernel.traffic
                if keep(kernel.numbers, item.access)
            ),
        )

    def _sum(self, points: Points, parts: Iterator[tuple[Amount, Amount | Traffic]]) -> Array:
        """The sum of amounts, each so many times; formulas are added up before evaluation."""
        exact: list[tuple[int, Formula]] = []
        others: dict[Any, list[Amount]] = {}
        for times, item in parts:
            amount = item.amount if isinstance(item, Traffic) else item
            plain = amount.draw is None and not (
                isinstance(item, Traffic) and item.access.factor != 1
            )
            if plain:
                if times.formula.is_constant:  # as it is unless a size repeats layers
                    exact.append((times.formula.at(()), amount.formula))
                else:
                    exact.append((1, times.formula * amount.formula))
            else:
                others.setdefault(item, []).append(times)
        total = self._values(Amount(leaves.PLAIN, Formula.total(exact)), points)
        for item, many in others.items():
            times = Amount(leaves.PLAIN, Formula.total((1, each.formula) for each in many))
            amounts = self._values(item, points)
            if amounts.dtype.kind == "f":
                amounts = np.rint(amounts).astype(np.int64)
            total = total + self._values(times, points) * amounts
        return total

    def _values(self, item: Amount | Traffic, points: Points) -> Array:
        sizes = item.amount.sizes if isinstance(item, Traffic) else item.sizes
        columns, at = points.part(sizes)
        numbers = item.over(columns)
        if at is not None:
            numbers = numbers[at]
        return np.broadcast_to(numbers, (len(points),))

    def number(self, name: str, points: Points) -> Array:
        """An integer of the record at points: weights, kv, items."""
        return self._values(self.amount((name,), getattr(self.template, name)), points)

    def peak(self, points: Points) -> Array:
        """Bytes in memory at the fullest moment, at points."""
        alive = enumerate(self.template.alive)
        amounts = {self.amount(("alive", place), number) for place, number in alive}
        plain = _undominated({amount.formula for amount in amounts if amount.draw is None})
        amounts = {amount for amount in amounts if amount.draw is not None}
        most = np.zeros(len(points), dtype=np.int64)
        for amount in (*amounts, *(Amount(leaves.PLAIN, formula) for formula in plain)):
            most = np.maximum(most, self._values(amount, points))
        return most

    # -- times ------------------------------------------------------------------------------------

    @cached_property
    def warm(self) -> WarmForm:
        """Bytes of each kernel that a last-level cache may still hold.

        Raises RequestError where a size changes how often layers repeat: distances are unknown.
        """
        counts = (self.amount(("counts", i), n) for i, n in enumerate(self.template.counts))
        if any(count.sizes for count in counts):
            raise RequestError(
                "knobs with a cache, over a size that changes the number of layers: what the cache "
                "holds is not known; fix that size, or price it by other knobs"
            )
        return WarmForm(self.kernels, self._planner(), self._values)

    def cache_of(self, chip: Chip) -> float | None:
        """Bytes of the last cache of a chip, where its knobs say how fast that one is."""
        knobs = self.execution.knobs_on(chip)
        if knobs is None or knobs.cache == 1 or chip.l2_capacity is None:
            return None
        return chip.l2_capacity.value

    def step(self, points: Points, cache: float | None = None) -> StepAmounts:
        """The plan at points, as it is timed; equal kernels are one part.

        cache: bytes of a last cache: then kernels differ in their warm bytes.
        """
        if cache is not None:
            rows, order = KernelRows(points.apart()), list(range(len(self.kernels)))
            for kernel, held in zip(self.kernels, self.warm.over(points, cache), strict=True):
                rows.add([kernel], held)
            return self._step(rows, order)
        alike: dict[Any, list[KernelForm]] = {}
        for kernel in self.kernels:
            alike.setdefault(kernel.key, []).append(kernel)
        rows, index = KernelRows(points), {key: number for number, key in enumerate(alike)}
        for kernels in alike.values():
            rows.add(kernels)
        return self._step(rows, [index[kernel.key] for kernel in self.kernels])

    def _step(self, rows: KernelRows, order: Sequence[int]) -> StepAmounts:
        kernels, times = rows.kernels()
        template, points = self.template, rows.points
        works = [work.key for kernel in self.kernels for work in kernel.works]
        products = {
            kind: self.flops(points, partial(_is_of, kind)).astype(float)
            for kind in dict.fromkeys((work.operation, work.precision) for work in works)
            if kind[0] in MATRIX
        }
        return StepAmounts(
            points=len(points),
            execution=self.execution,
            kernels=kernels,
            row=np.arange(len(kernels)),
            times=times,
            parts=rows.parts,
            order=order,
            launches=template.launches,
            counts=[
                self._number(self.amount(("counts", i), count), points)
                for i, count in enumerate(template.counts)
            ],
            copies_layouts=template.copies_layouts,
            products=products,
            stream_order=template.stream_order,
            phase=template.phase,
        )

    def _number(self, amount: Amount, points: Points) -> Any:
        values = self._values(amount, points)
        return float(values[0]) if not amount.sizes else values.astype(float)


def _is_of(kind: tuple[str, str], group: GroupNumbers, work: Work) -> bool:
    return (work.operation, work.precision) == kind


def _undominated(formulas: set[Formula]) -> list[Formula]:
    """The formulas that may be the largest of all for some sizes of at least 1."""
    factored = [(formula, formula.coefficients()) for formula in formulas]
    kept: list[tuple[Formula, dict[Any, Fraction]]] = []
    for formula, factors in sorted(factored, key=lambda pair: -sum(pair[1].values())):
        if not any(_covers(other, factors) for _, other in kept):
            kept.append((formula, factors))
    return [formula for formula, _ in kept]


def _covers(larger: dict[Any, Fraction], smaller: dict[Any, Fraction]) -> bool:
    """Whether a formula is at least another for all sizes of at least 1, term by term.

    Only equal terms are compared; a smaller constant may be made up for by any term.
    """
    terms = larger.keys() | smaller.keys()
    more = {t: larger.get(t, Fraction(0)) - smaller.get(t, Fraction(0)) for t in terms}
    short = more.pop((), Fraction(0))
    return all(value >= 0 for value in more.values()) and short + sum(more.values()) >= 0


# -- warmbytes -------------------------------------------------------------------------------------
# The order of touches of a storage is the same within one structure; only their distances in bytes
# change with the sizes.  So a plan is walked once, with vectors of coefficients in place of bytes,
# and the vectors are evaluated at points.


class WarmForm:
    """The bytes of each kernel group that a cache may hold, as sums of terms of the sizes.

    kernels: in the order of the groups of `planned`, a plan of the same structure.  over: numbers
    of an access at points.
    """

    def __init__(
        self,
        kernels: Sequence[KernelForm],
        planned: Plan,
        over: Callable[[Traffic, Points], Array],
    ) -> None:
        self._over = over
        self._terms: dict[Any, int] = {}  # index of each access, or of the powers of a monomial
        vectors: dict[tuple[int, Access], dict[int, float]] = {}
        for group, kernel in enumerate(kernels):
            accesses = planned.costs[group].traffic
            for access, traffic in zip(accesses, kernel.traffic, strict=True):
                vectors[group, access] = self._vector(traffic)
        dense = {key: np.zeros(len(self._terms)) for key in vectors}
        for key, entries in vectors.items():
            for place, value in entries.items():
                dense[key][place] = value
        self.parts: list[list[WarmPart]] = warm_parts(
            planned, lambda group, access: dense[group, access]
        )

    def _vector(self, traffic: Traffic) -> dict[int, float]:
        """The coefficients of an access, by the indices of their terms."""
        amount = traffic.amount
        linear = amount.draw is None and amount.constant is None and traffic.access.factor == 1
        if not linear:
            return {self._index(traffic): 1.0}
        factors = amount.formula.coefficients().items()
        return {self._index(powers): float(value) for powers, value in factors}

    def _index(self, term: Any) -> int:
        return self._terms.setdefault(term, len(self._terms))

    def over(self, points: Points, capacity: float) -> list[Array | float]:
        """Bytes of each group that a cache of `capacity` bytes holds: an array [P], or a number."""
        columns = np.stack([self._column(term, points) for term in self._terms])
        return [warm_columns(parts, capacity, lambda v: v @ columns) for parts in self.parts]

    def _column(self, term: Any, points: Points) -> Array:
        if isinstance(term, Traffic):
            return self._over(term, points).astype(float)
        column = np.ones(len(points))
        for place, power in enumerate(term):
            if power:
                column = column * points.columns[place].astype(float) ** power
        return column
