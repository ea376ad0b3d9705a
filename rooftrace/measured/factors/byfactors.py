"""From measured bytes of kernels to a factor for each kind of bytes, and what is behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rooftrace.costmodels.bytefactors import BYTE_KINDS, ByteFactor, ByteFactors
from rooftrace.hardware.units import format_traffic
from rooftrace.measured.factors.causes import factors_of
from rooftrace.measured.factors.kernelbytes import KernelBytes, StepBytes
from rooftrace.measured.factors.shares import Shares, shared

if TYPE_CHECKING:
    import numpy as np

_SURE = 0.25
"""A factor is identified if its standard error is at most this share of it, or of `_SMALL`."""
_SMALL = 0.4
_RESTS = 0.1
"""A kernel counts for a factor if at least this share of its bytes is of that kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFactors:
    """Factors of a run by kind of bytes, and what they rest on."""

    factors: ByteFactors
    kernels: int  # how many kernels' bytes were measured, and agree with each other
    apart: int  # how many were measured and left out, as they are far from what the others say
    of: int  # how many kernels the steps have
    noise: float  # relative standard deviation of a kernel's bytes around what is expected
    # Weights by kind and layer: "dense weights of layers.3"; empty unless asked for.
    by_layer: Mapping[str, ByteFactor] = field(default_factory=dict)


def byte_factors(
    steps: Sequence[StepBytes], measured: str = "", fusion: str = "detected", by_layer: bool = False
) -> MeasuredFactors:
    """The factors of measured steps by kind of bytes.

    A kind that the measurements do not tell says why.  It takes part in the fit, so that the errors
    of others hold whatever it is.  measured: the device and the day.
    fusion: of the executions that they are for.  by_layer: also a factor for the weights of each
    layer.
    """
    fit = _Fit(steps, lambda kernel, kind: kind)
    factors = {kind: _factor(steps, fit, kind, kind) for kind in BYTE_KINDS if kind in fit.ran}
    layers: dict[str, ByteFactor] = {}
    if by_layer:
        fine = _Fit(steps, _in_layer)
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


class _Fit:
    """A column for each kind of bytes (or for less than a kind), a row for each measured kernel."""

    def __init__(
        self, steps: Sequence[StepBytes], column_of: Callable[[KernelBytes, str], str]
    ) -> None:
        self.ran: dict[str, float] = defaultdict(float)
        self.expected: dict[str, float] = defaultdict(float)
        self.kind_of: dict[str, str] = {}
        self.rows: list[tuple[dict[str, float], float]] = []
        for step in steps:
            whole: dict[str, float] = defaultdict(float)
            for kernel in step.kernels:
                row: dict[str, float] = defaultdict(float)
                for kind, size in kernel.used.items():
                    column = column_of(kernel, kind)
                    self.kind_of[column] = kind
                    self.ran[column] += size
                    left = max(size - kernel.held.get(kind, 0.0), 0.0)
                    row[column] += left
                    self.expected[column] += left
                    whole[column] += left
                if kernel.moved is not None and any(row.values()):
                    self.rows.append((row, kernel.moved))
            if step.moved is not None:
                self.rows.append((whole, step.moved))
        self.columns = list(self.ran)
        self.shares: Shares = shared(*self._arrays())

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

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
        """How many of the kernels that took part have a good part of their bytes in a column."""
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


def _factor(steps: Sequence[StepBytes], fit: _Fit, column: str, kind: str) -> ByteFactor:
    """The factor of a kind, and what is known to be behind it.

    A column that is less than a kind is taken to be fused as its kind is.
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
