"""Bytes that kernels of a measured step move, and factors by kind of bytes fitted to them.

`Causes` says why fewer bytes of weights are read than used.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.fusion import Plan
from rooftrace.costmodels.kernels import Knobs
from rooftrace.costmodels.kernels.knobs import CLASSES
from rooftrace.costmodels.kernels.seconds import kernel_table
from rooftrace.costmodels.kernels.works import warm_accesses
from rooftrace.costmodels.ops import (
    BYTE_KINDS,
    MATRIX,
    Access,
    ByteFactor,
    ByteFactors,
    Cost,
    bytes_by_kind,
    kinds_of,
)
from rooftrace.graph import Op, OpGraph, pattern_of
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_traffic

if TYPE_CHECKING:
    from rooftrace._amounts import Array

# -- causes ----------------------------------------------------------------------------------------
# Causes of reading fewer bytes of weights than used.  Used bytes are complete matrices and tables,
# all experts, as wide as the other operand, once for each op that uses them.

CAUSES = ("rows", "experts", "precision")
_WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Causes:
    """Bytes of weights by kind, by rule, and the bytes that each cause saves."""

    used: Mapping[str, float] = field(default_factory=dict)  # byte by kind, by rule
    # By cause, byte by kind that it saves.
    saved: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def causes_of(unfused: Plan) -> Causes:
    """Savings of weights by row look-ups, by routing to few experts, and by narrow storage.

    unfused: the step with a kernel for each op.
    """
    used: dict[str, float] = defaultdict(float)
    saved: dict[str, dict[str, float]] = {cause: defaultdict(float) for cause in CAUSES}
    graph = unfused.graph
    for group, cost in zip(unfused.groups, unfused.costs, strict=True):
        op = graph.ops[group.ops[0]]
        kind = kinds_of(graph, group.ops, unfused.op_costs)
        for access, size in cost.traffic.items():
            name = kind(access)
            if access.wire != "hbm" or access.write or not name.endswith(_WEIGHTS):
                continue
            full = max(_largest(graph, op, access.storage), size)
            times = group.times
            used[name] += times * size
            cause = "experts" if op.family == "moe" else "rows"
            saved[cause][name] += times * (full - size)
            wider = _wider(graph, op, cost, access.storage)
            saved["precision"][name] += times * full * (wider - 1)
    return Causes(dict(used), {cause: dict(by_kind) for cause, by_kind in saved.items()})


def factors_of(causes: Sequence[Causes], kind: str) -> dict[str, float]:
    """By cause: bytes without it over bytes with it, of one kind in several steps.

    Their product is used bytes over bytes by rule.
    """
    after = sum(cause.used.get(kind, 0.0) for cause in causes)
    factors: dict[str, float] = {}
    for name in CAUSES:
        saved = sum(cause.saved.get(name, {}).get(kind, 0.0) for cause in causes)
        factors[name] = (after + saved) / after if after else 1.0
        after += saved
    return factors


def _largest(graph: OpGraph, op: Op, storage: int) -> float:
    """Bytes of the largest view through which an op reads a storage."""
    views = (graph.values[i] for i in op.inputs)
    return max((view.nbytes for view in views if view.storage == storage), default=0)


def _wider(graph: OpGraph, op: Op, cost: Cost, storage: int) -> float:
    """The width at which an op uses a weight, over its stored width: in a product, or by a cast."""
    for work in cost.work:
        if work.operation in MATRIX and work.widths is not None and work.widths[1]:
            return work.widths[0] / work.widths[1]
    weight = next((graph.values[i] for i in op.inputs if graph.values[i].storage == storage), None)
    result = graph.values[op.outputs[0]] if len(op.outputs) == 1 else None
    if weight is None or result is None or weight.shape != result.shape or not weight.nbytes:
        return 1.0
    return max(result.nbytes / weight.nbytes, 1.0)


# -- bytes of kernels ------------------------------------------------------------------------------

MEMORY_BOUND = 1.5
"""Least ratio of memory to compute seconds of a kernel whose seconds tell its bytes."""
_MOSTLY = 0.5
SHORTEST = 20e-6
"""Seconds: on a CPU a shorter kernel is mostly its call, and time of the profiler."""
_LEAST_LAUNCHES, _BRIEF = 4.0, 2e-6
"""Least launch times, and seconds, of a kernel on a GPU whose seconds tell its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBytes:
    """One kernel of a measured step; bytes are of all its launches."""

    layer: str  # "layers.3"; "" outside of layers
    used: Mapping[str, float]  # byte by kind, by its rules
    held: Mapping[str, float]  # byte by kind of these that a cache answered
    moved: float | None  # byte, measured; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The kernels of one measured step, and the bytes of the same step in other kernels."""

    kernels: tuple[KernelBytes, ...]
    by: str  # "counters" or "seconds": the source of `moved`
    detected: Mapping[str, float]  # byte by kind, in the kernels that we detect
    unfused: Mapping[str, float]  # byte by kind, with a kernel for each op
    causes: Causes  # of reading fewer bytes of weights than used
    # Byte by kind that a cache of the chip's size holds, whether or not `held` has them.
    cached: Mapping[str, float] = field(default_factory=dict)
    flushed: bool = False  # whether the counters were read on empty caches
    moved: float | None = None  # byte of the step, where a counter has only this


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of the kernels of a plan; a list has an entry for each group."""

    seconds: Sequence[float | None] = ()  # s, all its launches
    counted: Sequence[float | None] = ()  # byte, all its launches
    flushed: bool = False  # whether the caches were emptied before each counted kernel
    total: float | None = None  # byte of the step


def step_bytes(
    ran: Plan,
    detected: Plan,
    measured: Measured,
    chip: Chip,
    knobs: Knobs,
    bandwidth: float,
) -> StepBytes:
    """The bytes of each kernel of `ran`, the plan in the kernels that ran.

    detected: the same step in the kernels that we detect.  bandwidth: byte/s that the device
    sustains.  Without counters the bytes of a memory-bound kernel are its seconds times that
    bandwidth, times the share of it that kernels of its class reach by `knobs`.  With a total alone
    no kernel's bytes are known.
    """
    counters = any(size is not None for size in measured.counted)
    held_by = _held(ran, chip)
    # DRAM counters do not see cache hits; these save seconds by the bandwidth of the cache.
    part = 1 - 1 / knobs.cache
    if counters or measured.total is not None:
        part = 0.0 if measured.flushed else 1.0
        moved = list(measured.counted)
    else:
        moved = _derived(ran, measured, chip, knobs, bandwidth)
        if knobs.cache == 1:  # the bandwidth of the cache is unknown
            moved = [
                None if _is_mostly(held, cost.bytes()) else size
                for size, held, cost in zip(moved, held_by, ran.costs, strict=False)
            ]
    used = _by_kind(ran, [cost.traffic for cost in ran.costs])
    held = _by_kind(ran, held_by)
    leads = (ran.graph.ops[group.ops[0]] for group in ran.groups)
    return StepBytes(
        kernels=tuple(
            KernelBytes(
                layer=_layer(lead.module),
                used=used[index],
                held=_times(held[index], part),
                moved=moved[index] if moved else None,
            )
            for index, lead in enumerate(leads)
        ),
        by="counters" if counters or measured.total is not None else "seconds",
        detected=_summed(_by_kind(detected, [cost.traffic for cost in detected.costs])),
        unfused=_summed(_by_kind(detected.unfused, [c.traffic for c in detected.unfused.costs])),
        causes=causes_of(detected.unfused),
        cached=_summed(held),
        flushed=counters and measured.flushed,
        moved=measured.total,
    )


def _by_kind(planned: Plan, amounts: Sequence[Mapping[Access, float]]) -> list[dict[str, float]]:
    """Amounts by kind of bytes, of each kernel all its launches."""
    return [
        _times(
            bytes_by_kind(each, kinds_of(planned.graph, group.ops, planned.op_costs)), group.times
        )
        for group, each in zip(planned.groups, amounts, strict=True)
    ]


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for kind, size in part.items():
            total[kind] += size
    return dict(total)


def _held(planned: Plan, chip: Chip) -> Sequence[Mapping[Access, float]]:
    """Bytes of each access of each kernel that the last cache still holds; none if unknown."""
    if chip.l2_capacity is None:
        return [{} for _ in planned.groups]
    return warm_accesses(planned, chip.l2_capacity.value)


def _is_mostly(held: Mapping[Access, float], size: float) -> bool:
    """Whether a cache holds most bytes of a kernel, so that its seconds do not tell its bytes."""
    return sum(held.values()) > _MOSTLY * size


def _derived(
    planned: Plan, measured: Measured, chip: Chip, knobs: Knobs, bandwidth: float
) -> list[float | None]:
    """The bytes of each kernel by its seconds; None of one that is not memory-bound."""
    if not measured.seconds:
        return []
    table, rows = kernel_table(planned, chip, reuse=False)
    compute = table.seconds(knobs, planned.copies_layouts).compute
    launch = knobs.launch_on(chip)
    least = SHORTEST if chip.host_waits else max(_LEAST_LAUNCHES * launch, _BRIEF)
    moved: list[float | None] = []
    for group, cost, row, seconds in zip(
        planned.groups, planned.costs, rows, measured.seconds, strict=True
    ):
        share = knobs.share(CLASSES[table.kind[row]]).memory
        work = float(compute[row])
        memory = cost.bytes() / (bandwidth * share)
        each = 0.0 if seconds is None else seconds / group.times
        bound = memory >= MEMORY_BOUND * work
        if not bound or each < least:
            moved.append(None)
            continue
        alone = _without(each - launch, work, knobs.overlap)
        moved.append(alone * bandwidth * share * group.times)
    return moved


def _without(seconds: float, work: float, p: float) -> float:
    """Seconds without the part of the work that memory does not hide."""
    if math.isinf(p) or seconds <= work:
        return seconds
    rest: float = (seconds**p - work**p) ** (1 / p)
    return rest


def _times(sizes: Mapping[str, float], factor: float) -> dict[str, float]:
    return {kind: size * factor for kind, size in sizes.items() if size * factor}


def _layer(module: str) -> str:
    """The first part of a path up to its first index: "layers.3" of "layers.3.mlp.up"."""
    steps = module.split(".")
    for number, step in enumerate(steps):
        if pattern_of(step) == "*":
            return ".".join(steps[: number + 1])
    return ""


# -- Factors by kind of bytes, fitted to the measured bytes of kernels by maximum likelihood -------

_PRIOR = 1.5
"""Standard deviation of a factor around 1, before anything is measured: wide."""
_TURNS = 60
_LEAST_NOISE = 1e-3
"""Relative: no counter and no clock is better."""
_USUAL_NOISE = 0.1
"""Relative, where there are no more kernels than factors."""
_SMALLEST = 1e-12
_UNEVEN = 1.2
"""Noise of a single kernel over the common noise, at most."""
_CAREFUL = 1.1
"""HC3 is a little too small where two factors rest on the same kernels."""
_SEVERAL = 4
"""Kernels whose residuals suffice for a separate noise."""


_OUTSIDE = 4.0
"""Robust standard deviations beyond which a kernel is left out."""
_FAR = (2.0, 4.0)
"""Factors off below which a kernel is never left out, and beyond which it always is."""
_AT_FIRST = 10.0
"""Before any fit: factor off from the median of kernels that move mostly the same kind, beyond
which a kernel is left out."""
_ROUNDS = 8


@dataclass(frozen=True)
class Shares:
    """Factors by column, with their errors."""

    factors: Array
    errors: Array  # standard errors: two of them hold 95 %, also where few kernels were measured
    noise: float  # relative standard deviation of measured bytes around expected ones
    kept: Array  # by row: whether it took part; kernels that were interrupted did not


def shared(used: Array, moved: Array) -> Shares:
    """The factors of each column of `used`, from the kernels that agree with each other.

    used: bytes[kernel, kind], by rules.  moved: bytes[kernel], measured.  Outliers are left out:
    another process ran in between, or their rules do not hold.  Without any kernel all factors are
    1, with the error of the prior.
    """
    off = np.log(np.maximum(moved, _SMALLEST) / np.maximum(used.sum(axis=1), _SMALLEST))
    kept = np.zeros(len(off), dtype=bool)
    most = used.argmax(axis=1) if used.size else np.zeros(0, dtype=int)
    for column in set(most.tolist()):
        same = most == column
        kept[same] = np.abs(off[same] - np.median(off[same])) <= np.log(_AT_FIRST)
    for _ in range(_ROUNDS):
        result = _fitted(used[kept], moved[kept])
        expected = np.maximum(used @ result.factors, _SMALLEST)
        off = np.log(np.maximum(moved, _SMALLEST) / expected)
        inside = np.abs(off[kept]) if kept.any() else np.ones(1)
        limit = np.clip(_OUTSIDE * 1.4826 * float(np.median(inside)), *np.log(_FAR))
        before, kept = kept, np.abs(off) <= limit
        if (kept == before).all():
            break
    return Shares(result.factors, result.errors, result.noise, before)


def _fitted(used: Array, moved: Array) -> Shares:
    """The factors of all these kernels.

    Errors are by the residuals of the kernels that a factor rests on (MacKinnon and White 1985,
    HC3); where these are few, by one relative noise of all kernels.
    """
    rows, columns = used.shape
    unit = max(float(used.sum()), 1.0) / max(rows, 1)  # numbers near 1
    x, y = used / unit, moved / unit
    prior = np.eye(columns) / _PRIOR**2
    factors = np.ones(columns)
    spread = 1.0
    for _ in range(_TURNS):
        expected = _expected(x, factors)
        info = x.T @ (x / expected[:, None])
        free = max(rows - float(np.trace(np.linalg.pinv(info) @ info)), 1.0)
        spread = max(
            float(((y - expected) ** 2 / expected).sum()) / free,
            _LEAST_NOISE**2 * float(expected.max(initial=1.0)),
        )
        target = x.T @ (y / expected) / spread + prior @ np.ones(columns)
        after = np.maximum(np.linalg.solve(info / spread + prior, target), 0.0)
        still = np.allclose(after, factors, rtol=1e-9, atol=1e-12)
        factors = after
        if still:
            break
    expected = _expected(x, factors)
    pull = np.linalg.inv(x.T @ (x / expected[:, None]) / spread + prior)
    lever = (x / expected[:, None] / spread) @ pull  # d factor / d bytes of a kernel
    held = np.minimum((lever * x).sum(axis=1), 0.99)
    off = y - expected
    noise, telling = _noise(off, expected, held)
    if rows <= columns:  # the residuals do not tell the noise
        noise = max(noise, _USUAL_NOISE)
    before = pull @ prior @ pull
    by_residual = lever.T @ (lever * ((off / (1 - held)) ** 2)[:, None]) + before
    by_noise = lever.T @ (lever * ((_UNEVEN * noise * expected) ** 2)[:, None]) + before
    bearing = _bearing(lever * expected[:, None])
    left = max(1 - float(held.sum()) / max(rows, 1), 0)
    separate = (_CAREFUL * _widened(bearing * left)) ** 2 * np.diag(by_residual)
    common = _widened(np.full(columns, telling)) ** 2 * np.diag(by_noise)
    errors = np.sqrt(np.where(bearing >= _SEVERAL, separate, common))
    kept = np.ones(rows, dtype=bool)
    return Shares(factors, errors, noise, kept)


def _expected(used: Array, factors: Array) -> Array:
    floor = _SMALLEST + 1e-9 * used.sum(axis=1)
    result: Array = np.maximum(used @ factors, floor)
    return result


def _noise(off: Array, expected: Array, held: Array) -> tuple[float, float]:
    """The relative noise of a kernel, and the effective number of kernels that tell it.

    Large kernels weigh most, and a kernel that a factor follows weighs nothing.
    """
    weight = expected * (1 - held)
    free = float(weight.sum())
    square = float((off**2 / expected).sum()) / free if free else 1.0
    telling = free**2 / float((weight**2).sum()) if free else 1.0
    return max(float(square**0.5), _LEAST_NOISE), telling


def _bearing(parts: Array) -> Array:
    """By column: the effective number of kernels that a factor rests on, by parts of variance."""
    square = parts**2
    result: Array = square.sum(axis=0) ** 2 / np.maximum((square**2).sum(axis=0), _SMALLEST**4)
    return result


def _widened(free: Array) -> Array:
    """The width of Student's distribution over that of a normal one, at 95 %."""
    from scipy.stats import t

    result: Array = t.ppf(0.97725, np.maximum(free, 1.0)) / 2
    return result


# -- factors of measured steps ---------------------------------------------------------------------

_SURE = 0.25
"""A factor is identified if its standard error is at most this share of it, or of `_SMALL`."""
_SMALL = 0.4
_RESTS = 0.1
"""A kernel counts for a factor if at least this share of its bytes is of that kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFactors:
    """Factors of a run by kind of bytes, and the kernels they rest on."""

    factors: ByteFactors
    kernels: int  # number of kernels with measured bytes that agree
    apart: int  # number of measured kernels that were left out as outliers
    of: int  # number of kernels of the steps
    noise: float  # relative standard deviation of a kernel's bytes around the expected ones
    # Weights by kind and layer: "dense weights of layers.3"; empty without `by_layer`.
    by_layer: Mapping[str, ByteFactor] = field(default_factory=dict)


def byte_factors(
    steps: Sequence[StepBytes], measured: str = "", fusion: str = "detected", by_layer: bool = False
) -> MeasuredFactors:
    """The factors of measured steps by kind of bytes.

    The record of a kind that the measurements do not tell says why.  It takes part in the fit, so
    that the errors of others hold.  measured: the device and the day.  fusion: of the executions
    that they are for.  by_layer: also a factor for the weights of each layer.
    """
    fit = _FactorFit(steps, lambda kernel, kind: kind)
    factors = {kind: _factor(steps, fit, kind, kind) for kind in BYTE_KINDS if kind in fit.ran}
    layers: dict[str, ByteFactor] = {}
    if by_layer:
        fine = _FactorFit(steps, _in_layer)
        layers = {
            column: _factor(steps, fine, column, kind)
            for column, kind in fine.kind_of.items()
            if column != kind
        }
    kept = int(fit.shares.kept.sum())
    return MeasuredFactors(
        factors=ByteFactors(fusion=fusion, measured=measured, factors=factors),
        kernels=kept,
        apart=len(fit.rows) - kept,
        of=sum(len(step.kernels) for step in steps),
        noise=fit.shares.noise,
        by_layer=layers,
    )


def _in_layer(kernel: KernelBytes, kind: str) -> str:
    return f"{kind} of {kernel.layer}" if kernel.layer and kind.endswith("weights") else kind


class _FactorFit:
    """A column for each kind of bytes (or part of a kind), a row for each measured kernel."""

    def __init__(
        self, steps: Sequence[StepBytes], column_of: Callable[[KernelBytes, str], str]
    ) -> None:
        self.ran: dict[str, float] = defaultdict(float)
        self.expected: dict[str, float] = defaultdict(float)
        self.kind_of: dict[str, str] = {}
        self.rows: list[tuple[dict[str, float], float]] = []
        for step in steps:
            total: dict[str, float] = defaultdict(float)
            for kernel in step.kernels:
                row: dict[str, float] = defaultdict(float)
                for kind, size in kernel.used.items():
                    column = column_of(kernel, kind)
                    self.kind_of[column] = kind
                    self.ran[column] += size
                    left = max(size - kernel.held.get(kind, 0.0), 0.0)
                    row[column] += left
                    self.expected[column] += left
                    total[column] += left
                if kernel.moved is not None and any(row.values()):
                    self.rows.append((row, kernel.moved))
            if step.moved is not None:
                self.rows.append((total, step.moved))
        self.columns = list(self.ran)
        self.shares: Shares = shared(*self._arrays())

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        used = np.array([[row.get(c, 0.0) for c in self.columns] for row, _ in self.rows])
        moved = np.array([size for _, size in self.rows])
        return used.reshape(len(self.rows), len(self.columns)), moved

    def factor(self, column: str) -> float:
        """Measured bytes over expected ones."""
        return float(self.shares.factors[self.columns.index(column)])

    def error(self, column: str) -> float:
        """The standard error of `factor`."""
        return float(self.shares.errors[self.columns.index(column)])

    def rests_on(self, column: str) -> int:
        """The number of kernels in the fit with a good part of their bytes in a column."""
        return sum(
            bool(kept) and row.get(column, 0.0) >= _RESTS * sum(row.values()) > 0
            for (row, _), kept in zip(self.rows, self.shares.kept, strict=True)
        )

    def why_unknown(self, column: str) -> str:
        """Why the measurements do not tell a factor; empty where they do."""
        size = format_traffic(self.ran[column])
        if not self.rows:
            return f"{size}: no kernel's bytes were measured"
        number = self.rests_on(column)
        if not number:
            return f"{size}: in no kernel whose bytes were measured"
        factor, error = self.factor(column), self.error(column)
        if error > _SURE * max(factor, _SMALL):
            return f"{size}: {factor:.2g} +- {error:.2g} is too unsure, by {number} kernels"
        return ""


def _factor(steps: Sequence[StepBytes], fit: _FactorFit, column: str, kind: str) -> ByteFactor:
    """The factor of a kind, with the causes behind it.

    A column that is a part of a kind is assumed to be fused like its kind.
    """
    why = fit.why_unknown(column)
    factor, error = (1.0, 0.0) if why else (fit.factor(column), fit.error(column))
    ran = sum(size for name, size in fit.ran.items() if fit.kind_of[name] == kind)
    detected, unfused = (
        sum(sizes.get(kind, 0.0) for sizes in which)
        for which in ([step.detected for step in steps], [step.unfused for step in steps])
    )
    left = 1.0 if why else fit.expected[column] / fit.ran[column]
    flushed = any(step.flushed for step in steps)
    held = 0.0 if flushed else sum(step.cached.get(kind, 0.0) for step in steps) / ran
    causes: dict[str, float] = {}
    if kind.endswith("weights"):
        causes = factors_of([step.causes for step in steps], kind)
    return ByteFactor(
        factor=factor,
        error=error,
        why=why,
        kernels=0 if why else fit.rests_on(column),
        by="counters" if all(step.by == "counters" for step in steps) else "seconds",
        grouping=ran / detected if detected else 1.0,
        unfused=factor * left * ran / unfused if unfused else factor,
        cache=1 / max(1 - held, 1e-3),
        **causes,
    )
