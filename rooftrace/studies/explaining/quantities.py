"""Quantities with their formulas, and kernel seconds that follow from FLOPs, bytes, and rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from rooftrace.costmodels.estimates import Estimate, Row
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.ops import COMPUTED, Work
from rooftrace.graph.formulas import Formula, leaves
from rooftrace.studies.forms.kernelforms import Amount, KernelForm, Traffic, WorkForm


@dataclass(frozen=True, slots=True)
class Rate:
    """Work of one engine: FLOP of one launch, the engine's rate in FLOP/s, seconds at that rate."""

    engine: str
    precision: str
    flop: float
    rate: float

    @property
    def seconds(self) -> float:
        """At the full rate."""
        return self.flop / self.rate


@dataclass(frozen=True, slots=True)
class RateShares:
    """The share of a rate that a kernel reaches: that of its class by knobs, times the rest.

    rest: tile and wave quantisation, feeding tiles, the blocks of attention, or layout copies.
    """

    whole: float
    knobs: float

    @property
    def rest(self) -> float:
        """The factor that the share of the class does not explain."""
        return self.whole / self.knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """The seconds of one launch in an estimate, and their parts.

    compute: the sum over rates of FLOP/rate, over the share.  hbm: bytes / (bandwidth x share).
    more: added to the largest term by imperfect overlap.  device: largest term + more + gap.
    """

    rates: tuple[Rate, ...]
    compute_share: RateShares | None  # None: nothing is computed
    hbm_share: RateShares | None
    bandwidth: float  # byte/s
    link: float  # byte/s; infinite where nothing moves over one
    compute: float
    hbm: float
    network: float
    gap: float
    more: float
    device: float
    kind: str  # class of kernels whose knobs hold
    knobs: str  # their title; "" for the peaks of the datasheet


def seconds_of(estimate: Estimate, row: Row, kind: str) -> Seconds:
    """Seconds of one launch of a row; kind: the class of kernels that it is of."""
    chip, timing, count = estimate.chip, row.timing, row.count
    eager = row.index in estimate.plan.eager
    knobs = estimate.execution.outside.knobs_on(chip) if eager else estimate.knobs
    cost = estimate.plan.costs[row.index]
    rates = tuple(rates_of(estimate, cost.work.items()))
    ideal = sum(rate.seconds for rate in rates)
    compute, hbm = timing.t_comp / count, timing.t_hbm / count
    bandwidth = chip.memory_bandwidth.value
    by_class = knobs.reached(kind) if knobs else (1.0, 1.0)
    return Seconds(
        rates=rates,
        compute_share=RateShares(ideal / compute, by_class[0]) if compute else None,
        hbm_share=RateShares(row.bytes / count / bandwidth / hbm, by_class[1]) if hbm else None,
        bandwidth=bandwidth,
        link=engines.link_bandwidth(row.bytes_net, chip),
        compute=compute,
        hbm=hbm,
        network=timing.t_net / count,
        gap=timing.gap / count,
        more=timing.more / count,
        device=timing.t_device / count,
        kind=kind,
        knobs=knobs.title if knobs else "",
    )


def rates_of(
    estimate: Estimate, works: Iterable[tuple[Work, int]], streaming: bool = True
) -> Iterator[Rate]:
    """The works that are computed, by engine.

    streaming: whether products with few rows run on the vector engine where that is faster.
    """
    flops: dict[tuple[str, str], float] = {}
    chip, execution = estimate.chip, estimate.execution
    for work, flop in works:
        if work.count in COMPUTED and flop:
            engine = (engines.product_engine if streaming else engines.engine_of)(
                work, chip, execution
            )
            flops[engine] = flops.get(engine, 0) + flop
    for (name, precision), total in flops.items():
        yield Rate(name, precision, total, chip.peak(name, precision))


# -- quantities ------------------------------------------------------------------------------------

Numbers = tuple[int, ...]
_WIDTHS = (Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4), Fraction(8))
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number and where it comes from.

    symbols: the formula by names of sizes, factors side by side are multiplied.  numbers: the same
    with the sizes put in.  shapes: as a product of sizes of the op, "" where it is none.
    """

    name: str
    symbols: str
    numbers: str
    value: float
    unit: str
    shapes: str = ""


@dataclass(frozen=True, slots=True)
class SizedPlace:
    """Sizes by name, and their values."""

    names: tuple[str, ...]
    values: Numbers

    def at(self, item: Amount | Traffic) -> float:
        """The value of an amount here, rounded as in a plan."""
        columns = [np.array([value], dtype=np.int64) for value in self.values]
        value = item.over(columns).ravel()[0]
        return int(np.rint(value)) if isinstance(item, Traffic) else _whole(value)

    def quantity(self, name: str, item: Amount | Traffic, unit: str, shapes: str = "") -> Quantity:
        """A single amount."""
        return Quantity(name, self.symbols(item), self.numbers(item), self.at(item), unit, shapes)

    def symbols(self, item: Amount | Traffic) -> str:
        """The formula of an amount by names."""
        if isinstance(item, Amount):
            return item.written(self.names)
        return _factored(item.amount.written(self.names), item.access.factor)

    def numbers(self, item: Amount | Traffic) -> str:
        """The formula of an amount with the sizes put in."""
        if isinstance(item, Traffic):
            return _factored(self.numbers(item.amount), item.access.factor)
        draw, formula = item.draw, put_in(item.formula, self.values)
        if draw is None:
            return formula
        drawn = f"{draw.at(self.values):,.6g}"
        return {
            leaves.REACHED: drawn,
            leaves.TOUCHED: f"({formula}) {drawn}",
            leaves.EACH: f"({formula}) / {drawn}",
        }[item.kind]

    def total(
        self, name: str, parts: Iterable[tuple[Amount, Amount | Traffic]], unit: str
    ) -> Quantity:
        """The sum of amounts, each so many times; formulas are added up."""
        exact, others = _sorted(parts)
        symbols = [exact.written(self.names)] if exact.terms or not others else []
        numbers = [put_in(exact, self.values)] if symbols else []
        value: float = exact.at(self.values)
        for item, times in others.items():
            symbols.append(_times(times.written(self.names), self.symbols(item)))
            numbers.append(_times(put_in(times, self.values), self.numbers(item)))
            value += times.at(self.values) * self.at(item)
        return Quantity(name, " + ".join(symbols), " + ".join(numbers), value, unit)


def _sorted(
    parts: Iterable[tuple[Amount, Amount | Traffic]],
) -> tuple[Formula, dict[Amount | Traffic, Formula]]:
    """The sum of exact amounts, and how often each other amount occurs."""
    exact: list[tuple[int, Formula]] = []
    others: dict[Amount | Traffic, list[tuple[int, Formula]]] = {}
    for times, item in parts:
        amount = item.amount if isinstance(item, Traffic) else item
        factor = item.access.factor if isinstance(item, Traffic) else 1
        if amount.draw is None and factor == 1:
            exact.append((1, times.formula * amount.formula))
        else:
            alike = next((other for other in others if _alike(other, item)), item)
            others.setdefault(alike, []).append((1, times.formula))
    return Formula.total(exact), {item: Formula.total(many) for item, many in others.items()}


def _alike(item: Amount | Traffic, other: Amount | Traffic) -> bool:
    """Whether two amounts have the same value at all sizes."""
    if isinstance(item, Traffic) and isinstance(other, Traffic):
        mine, theirs = item.access, other.access
        return item.amount == other.amount and (mine.factor, mine.copies) == (
            theirs.factor,
            theirs.copies,
        )
    return item == other


def _times(times: str, text: str) -> str:
    if times == "1":
        return text
    return f"{times} {text}" if times.replace(",", "").isdigit() else f"({times}) {text}"


def _factored(text: str, factor: float) -> str:
    return text if factor == 1 else f"{factor:g} ({text})"


def _whole(value: Any) -> float:
    number = float(value)
    return int(value) if number.is_integer() else number


def put_in(formula: Formula, values: Sequence[int]) -> str:
    """A formula with numbers for its symbols: "131,072 x 4,096 + 131,072"."""
    return formula.written([f"{value:,}" for value in values], times=" x ")


# -- products of shapes ----------------------------------------------------------------------------


def shapes_of_work(work: WorkForm, names: Sequence[str]) -> str:
    """FLOP of a work as a product of its sizes, "2 x batch x 4,096 x 14,336"; "" for others.

    Source: C[M, N] = A[M, K] B[K, N] takes 2 M N K, and attention 2 (D + D_v) for each pair of a
    query and a key that a head looks at.
    """
    if work.attention:
        by_name = dict(zip(_ATTENTION, work.attention, strict=False))
        widths = by_name["width"].formula, by_name["value_width"].formula
        each = Formula.total([(2, width) for width in widths])
        factors = [by_name[name].formula for name in ("batch", "heads", "visible")] + [each]
        return _product(factors, work.flop.formula, names)
    if not work.product:
        return ""
    return _product([Formula.constant(2), *work.product], work.flop.formula, names)


_ATTENTION = ("batch", "queries", "keys", "visible", "heads", "kv_heads", "width", "value_width")


def shapes_of_access(kernel: KernelForm, item: Traffic, names: Sequence[str]) -> str:
    """Bytes of an access as a product of two sizes of the kernel's only product; "" for others."""
    if item.amount.draw is not None:
        return ""
    products = [work.product for work in kernel.works if work.sizes[0] is not None]
    if len(products) != 1 or not products[0] or not item.amount.formula.terms:
        return ""
    rows, columns, inner = products[0]
    for first, second in ((inner, columns), (rows, inner), (rows, columns)):
        area = first * second
        for width in _WIDTHS:
            if Formula.total([(width, area)]) == item.amount.formula:
                factors = " x ".join(_factor(part, names) for part in (first, second))
                return f"{float(width):g} byte x {factors}"
    return ""


def _product(factors: Sequence[Formula], total: Formula, names: Sequence[str]) -> str:
    product = Formula.constant(1)
    for factor in factors:
        product = product * factor
    mine, theirs = product.coefficients(), total.coefficients()
    ratios = {theirs[key] / mine[key] for key in mine} if mine.keys() == theirs.keys() else set()
    if len(ratios) != 1 or not (ratio := ratios.pop()) or ratio.denominator != 1:
        return ""
    text = [] if ratio == 1 else [f"{int(ratio):,}"]
    return " x ".join([*text, *(_factor(factor, names) for factor in factors)])


def _factor(formula: Formula, names: Sequence[str]) -> str:
    text = formula.written(names)
    return f"({text})" if len(formula.terms) > 1 else text


# -- kernels ---------------------------------------------------------------------------------------


def once(
    parts: Iterable[tuple[Amount, Amount | Traffic]],
) -> Iterator[tuple[Amount, Amount | Traffic]]:
    """The amounts of one launch."""
    times = Amount(leaves.PLAIN, Formula.constant(1))
    return ((times, item) for _, item in parts)


def legend(kernel: KernelForm, place: SizedPlace) -> Mapping[str, str]:
    """The sizes of the largest product or attention of a kernel, by name, in symbols."""
    for work in kernel.works:
        if work.attention:
            named = zip(_ATTENTION, work.attention, strict=False)
            return {name: place.symbols(size) for name, size in named}
        sizes = {n: size for n, size in zip("MNK", work.sizes, strict=True) if size is not None}
        if len(sizes) == len(work.sizes):
            return {name: place.symbols(size) for name, size in sizes.items()}
    return {}
