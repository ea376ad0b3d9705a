"""Factors by kind of bytes, fitted to the measured bytes of kernels by maximum likelihood.

A kernel that uses x[k] bytes of kind k is expected to move  sum of factor[k] * x[k].  Factors are
such that each kernel's measured bytes, shared among kinds by their part of its expected bytes, add
up to  factor[k] * sum of x[k]  again: the maximum of the Poisson likelihood (Shepp and
Vardi 1982, "Maximum likelihood reconstruction for emission tomography").  So no measured byte is
lost, and none counts twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rooftrace.costmodels.ops import BYTE_KINDS, ByteFactor, ByteFactors
from rooftrace.hardware.units import format_traffic
from rooftrace.measured.fit.kernelbytes import KernelBytes, StepBytes, factors_of

if TYPE_CHECKING:
    from rooftrace._amounts import Array

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
