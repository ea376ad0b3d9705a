"""Explanations of a step: scaling tests, sweeps of one size, and the step as a worked example."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rooftrace.costmodels.estimates import Estimate, Row
from rooftrace.costmodels.kernels import engines
from rooftrace.costmodels.timing.steps import StepAmounts, time_step
from rooftrace.costmodels.timing.timings import REGIMES
from rooftrace.graph import OpGraph, pattern_of
from rooftrace.hardware import Chip
from rooftrace.studies.advice import Variant, VariantOutcome
from rooftrace.studies.explaining.quantities import Quantity, Rate, SizedPlace, rates_of
from rooftrace.studies.forms import Conditions, PlanForm, Points
from rooftrace.studies.forms.kernelforms import bytes_of, flops_of
from rooftrace.studies.sweeps import Form, evaluated, points_of

# -- scaling tests ---------------------------------------------------------------------------------
# Estimates of a step and its kernels with one thing halved.  Each has also the ratio of times if
# one term alone were the limit, so that a measured ratio identifies it.

HALF: Mapping[str, str] = {
    "fp64": "fp32", "fp32": "bf16", "tf32": "bf16", "bf16": "fp8", "fp16": "fp8",
    "fp8": "fp4", "fp8_e4m3": "fp4", "fp8_e5m2": "fp4", "int16": "int8", "int8": "int4",
}  # fmt: skip
"""A precision of half the bits."""
Key = tuple[str, str]
"""The module, with its indices starred, and the name of a kernel."""


@dataclass(frozen=True, slots=True)
class ScalingTest:
    """One change, and the time after it over the time before.

    ratio: of the time; None where the kernel is another one after the change.  by_limiter: the
    ratio if this term alone took time; terms that take none are left out.
    """

    name: str
    change: str
    ratio: float | None
    by_limiter: Mapping[str, float]
    note: str = ""


def variants(step: Estimate, sizes: Mapping[str, int]) -> Iterator[Variant]:
    """The step with weights of half the bytes, half of each size, and clocks at half."""
    stored = _weights_precision(step.graph)
    if stored in HALF:
        half = HALF[stored]
        yield Variant(
            name="weights halved",
            change=f"weights {stored} -> {half}",
            precisions={"weights_dtype": half},
        )
    for name, size in sizes.items():
        if size >= 2:
            yield Variant(
                name=f"{name} halved",
                change=f"{name} {size:,} -> {size // 2:,}",
                sizes={name: size // 2},
            )
    facts = step.chip.facts_by_name()
    clocked = [n for n in facts if n == "clock" or n.startswith(("matrix.", "vector."))]
    yield Variant(
        name="clock halved",
        change="engines at half their clock, memory as it is",
        numbers={f"chip.{name}": facts[name].value / 2 for name in clocked},
    )


def _weights_precision(graph: OpGraph) -> str:
    """The precision of most bytes of weights; "" without any."""
    sizes: Counter[str] = Counter()
    for index, tensor in enumerate(graph.values):
        if tensor.role == "weights" and tensor.storage == index:
            sizes[tensor.dtype] += tensor.nbytes * graph.times(tensor)
    return sizes.most_common(1)[0][0] if sizes else ""


def step_test(base: Estimate, outcome: VariantOutcome) -> ScalingTest:
    """The effect of a change on the step."""
    after = outcome.estimate
    if after is None:
        return _test(outcome, None, {}, outcome.note)
    old, new = (
        {
            "compute": times.t_comp,
            "hbm": times.t_hbm,
            "network": times.t_net,
            "launch": times.regime_seconds["launch"],
        }
        for times in (base.times, after.times)
    )
    return _test(outcome, after.t_est / base.t_est if base.t_est else None, _ratios(old, new))


def kernel_test(base: Estimate, rows: tuple[Row, ...], outcome: VariantOutcome) -> ScalingTest:
    """The effect of a change on kernels of one key, all of them together."""
    after = outcome.estimate
    if after is None:
        return _test(outcome, None, {}, outcome.note)
    keys = {key_of(row) for row in rows}
    before = [row for row in base.rows if key_of(row) in keys]
    others = [row for row in after.rows if key_of(row) in keys]
    if sum(r.count for r in others) != sum(r.count for r in before):
        return _test(outcome, None, {}, "other kernels do this work then")
    old, new = (_term_sums(part) for part in (before, others))
    device, seconds = old.pop("device"), new.pop("device")
    ratio = seconds / device if device else None
    return _test(outcome, ratio, _ratios(old, new))


def _test(
    outcome: VariantOutcome, ratio: float | None, by_limiter: Mapping[str, float], note: str = ""
) -> ScalingTest:
    return ScalingTest(outcome.variant.name, outcome.variant.change, ratio, by_limiter, note)


def _ratios(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, float]:
    """The ratio of each term that takes time."""
    return {name: new[name] / seconds for name, seconds in old.items() if seconds > 0}


def key_of(row: Row) -> Key:
    """The key of a kernel, the same at all sizes."""
    return pattern_of(row.module), row.name


def _term_sums(rows: list[Row]) -> dict[str, float]:
    sums = {"device": 0.0, "compute": 0.0, "hbm": 0.0, "network": 0.0, "launch": 0.0}
    for row in rows:
        for name, seconds in row.timing.terms.items():
            sums[name] += seconds
        sums["device"] += row.timing.t_device
    return sums


# -- sizesweeps ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One value on one chip: FLOP, byte, seconds; items are tokens or samples of the step."""

    chip: str
    value: int
    items: int
    flops: int
    bytes: int
    t_comp: float
    t_hbm: float
    t_net: float
    t_est: float
    regime: str
    regime_share: float

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        return self.flops / self.bytes if self.bytes else float("inf")

    @property
    def rate(self) -> float:
        """FLOP/s of the step."""
        return self.flops / self.t_est if self.t_est else 0.0

    @property
    def item_rate(self) -> float:
        """Tokens or samples per second."""
        return self.items / self.t_est if self.t_est else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeSweep:
    """Rows in rising order of the values, chip by chip.

    name: of the size.  others: the sizes that stay.  marked: a value with a meaning, such as the
    least batch that computing limits, or None.
    """

    title: str
    phase: str
    name: str
    others: Mapping[str, int]
    execution: str
    rows: tuple[SweepRow, ...]
    peaks: Mapping[str, float]  # FLOP/s of each chip, of the engine with most matrix FLOPs
    marked: int | None = None

    def is_marked(self, row: SweepRow) -> bool:
        """Whether a row is that of the marked value on the first chip, for which it holds."""
        return row.value == self.marked and row.chip == self.rows[0].chip


def size_sweep(
    form: Form,
    name: str,
    values: Sequence[int],
    others: Mapping[str, int],
    chips: Sequence[Chip],
    conditions: Conditions,
    marked: int | None = None,
) -> SizeSweep:
    """A sweep over some values of one size; `marked` is one of them, too.

    Raises as `evaluated` does.
    """
    chosen = sorted({*values, *([] if marked is None else [marked])})
    levels = {n: [others[n]] if n != name else chosen for n in form.names}
    table = evaluated(form, points_of(form.names, levels), chips, conditions, once=True)
    columns = ("chip", name, "items", "flops", "bytes_hbm", "t_comp", "t_hbm", "t_net", "t_est",
               "regime", "regime_share")  # fmt: skip
    lines = zip(*(table[column].tolist() for column in columns), strict=True)
    rows = tuple(
        SweepRow(*(chips[chip].name, *numbers, REGIMES[regime], share))
        for chip, *numbers, regime, share in lines
    )
    peaks: dict[str, float] = {}
    for row, peak in zip(rows, table["peak"].tolist(), strict=True):
        peaks[row.chip] = max(peaks.get(row.chip, 0.0), peak)
    return SizeSweep(
        title=form.title,
        phase=form.phase,
        name=name,
        others={n: size for n, size in others.items() if n != name},
        execution=conditions.execution.name,
        rows=rows,
        peaks=peaks,
        marked=marked,
    )


# -- stepexplained ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Critical:
    """The least value of a size at which a step is limited by computing, over all values tried.

    by_peaks: at the datasheet's rates, t_comp >= t_hbm of all kernels together.  expected: the
    largest part of the expected time is compute.  None: at none of them.  limiter: the largest part
    at `high`.  stays: whether computing limits at all larger values tried, too.
    more_flops, more_bytes: added to a step by the last one of all values.
    """

    name: str
    low: int
    high: int
    by_peaks: int | None
    expected: int | None
    limiter: str
    stays: bool
    more_flops: int
    more_bytes: int

    @property
    def more_intensity(self) -> float:
        """FLOP/byte added by the last value: where that is below the ridge, none will do."""
        return self.more_flops / self.more_bytes if self.more_bytes else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedStep:
    """The numbers of a step, each with its formula.

    flops: by operation and precision, then their sum; bytes: by role, then their sum through HBM,
    and over links where there are any.
    """

    flops: tuple[Quantity, ...]
    bytes: tuple[Quantity, ...]
    peak: float  # FLOP/s of the engine with most matrix FLOPs
    peak_precision: str
    bandwidth: float  # byte/s
    rates: tuple[Rate, ...]  # FLOP that are computed, by engine
    t_comp_peaks: float  # s, all FLOPs at the rates of their engines
    t_hbm_peaks: float
    t_comp: float
    t_hbm: float
    t_net: float
    t_launch: float  # gaps, and waiting for the host
    t_bound: float
    t_est: float
    regime_shares: Mapping[str, float]
    limiter: str
    margin: float
    critical: Critical | None
    scaling: tuple[ScalingTest, ...]

    @property
    def intensity(self) -> float:
        """FLOP/byte."""
        total = self.total_bytes.value
        return self.total_flops.value / total if total else float("inf")

    @property
    def ridge(self) -> float:
        """FLOP/byte from which on computing limits, at the peaks."""
        return self.peak / self.bandwidth

    @property
    def total_flops(self) -> Quantity:
        """FLOP of the step."""
        return next(item for item in self.flops if item.name == TOTAL)

    @property
    def total_bytes(self) -> Quantity:
        """Bytes of the step through HBM."""
        return next(item for item in self.bytes if item.name == TOTAL)


TOTAL = "all"


def step_of(
    plan: PlanForm,
    place: SizedPlace,
    estimate: Estimate,
    critical: Critical | None,
    scaling: tuple[ScalingTest, ...],
) -> ExplainedStep:
    """The worked example of a step at a place, from its plan and estimate."""
    times = estimate.times
    ideal = peak_times(plan, place, estimate.chip)
    return ExplainedStep(
        flops=tuple(_flops(plan, place, estimate.chip)),
        bytes=tuple(_bytes(plan, place)),
        peak=estimate.peak,
        peak_precision=estimate.peak_precision,
        bandwidth=estimate.chip.memory_bandwidth.value,
        rates=tuple(rates_of(estimate, estimate.plan.total.work.items(), streaming=False)),
        t_comp_peaks=ideal[0],
        t_hbm_peaks=ideal[1],
        t_comp=times.t_comp,
        t_hbm=times.t_hbm,
        t_net=times.t_net,
        t_launch=times.regime_seconds["launch"],
        t_bound=times.t_bound,
        t_est=times.t_est,
        regime_shares=times.regime_shares,
        limiter=times.regime,
        margin=times.margin,
        critical=critical,
        scaling=scaling,
    )


def _flops(plan: PlanForm, place: SizedPlace, chip: Chip) -> Iterator[Quantity]:
    kinds = dict.fromkeys(
        (work.key.operation, work.key.precision)
        for kernel in plan.kernels
        for work in kernel.works
        if work.key.is_dense
    )
    for operation, precision in kinds:
        parts = [
            (kernel.times, work.flop)
            for kernel in plan.kernels
            for work in kernel.works
            if work.key.is_dense
            and (work.key.operation, work.key.precision) == (operation, precision)
        ]
        yield place.total(f"{operation} {engines.precision_on(chip, precision)}", parts, "FLOP")
    yield place.total(TOTAL, flops_of(plan.kernels), "FLOP")


def _bytes(plan: PlanForm, place: SizedPlace) -> Iterator[Quantity]:
    accesses = [item.access for kernel in plan.kernels for item in kernel.traffic]
    for role in dict.fromkeys(access.role for access in accesses if access.wire == "hbm"):
        yield place.total(role, bytes_of(plan.kernels, role=role), "byte")
    yield place.total(TOTAL, bytes_of(plan.kernels), "byte")
    if any(access.wire == "link" for access in accesses):
        yield place.total("over links", bytes_of(plan.kernels, "link"), "byte")


def peak_times(plan: PlanForm, place: SizedPlace, chip: Chip) -> tuple[float, float]:
    """Seconds of all FLOPs, and of all bytes, at the datasheet's rates."""
    points = Points({n: [v] for n, v in zip(place.names, place.values, strict=True)})
    step = plan.step(points)
    timed = time_step(at_peaks(step), chip)
    return float(timed.t_comp[0]), float(timed.t_hbm[0])


def at_peaks(step: StepAmounts) -> StepAmounts:
    """The kernels of a plan with every engine at the rate of its datasheet."""
    execution = step.execution
    full = replace(execution.utilization, b_sat=None, eta_scalar=None, tiles=False)
    return replace(step, execution=replace(execution, knobs=None, utilization=full))


def critical_of(
    form: Form,
    name: str,
    values: range,
    sizes: Mapping[str, int],
    chip: Chip,
    conditions: Conditions,
) -> Critical:
    """The least of these values at which computing limits; the other sizes stay as they are."""
    levels = {n: np.full(len(values), size) for n, size in sizes.items()}
    levels[name] = np.arange(values.start, values.stop)
    points = Points({n: levels[n] for n in form.names})
    peaks = np.zeros(len(values), dtype=bool)
    expected = np.zeros(len(values), dtype=bool)
    largest = np.zeros(len(values), dtype=np.int64)
    names: list[str] = []
    totals = {"flops": np.zeros(len(values)), "bytes": np.zeros(len(values))}
    for plan, at in form.plans(points, conditions):
        here = points.where(at)
        step = plan.step(here, plan.cache_of(chip))
        totals["flops"][at], totals["bytes"][at] = plan.flops(here), plan.bytes(here)
        timed = time_step(step, chip)
        names = list(timed.regime_seconds)
        largest[at] = np.stack(list(timed.regime_seconds.values())).argmax(axis=0)
        expected[at] = largest[at] == names.index("compute")
        fast = time_step(at_peaks(step), chip)
        peaks[at] = fast.t_comp >= fast.t_hbm
    first = int(expected.argmax()) if expected.any() else None
    return Critical(
        name=name,
        low=values.start,
        high=values.stop - 1,
        by_peaks=values.start + int(peaks.argmax()) if peaks.any() else None,
        expected=None if first is None else values.start + first,
        limiter=names[int(largest[-1])],
        stays=first is not None and bool(expected[first:].all()),
        more_flops=_last_step(totals["flops"]),
        more_bytes=_last_step(totals["bytes"]),
    )


def _last_step(totals: np.ndarray[Any, np.dtype[np.float64]]) -> int:
    """The growth by the last value; all of it where there is one value."""
    return int(totals[-1] - totals[-2]) if len(totals) > 1 else int(totals[-1])
