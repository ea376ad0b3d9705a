"""Predicted beside measured: steps, what the errors are by phase, kernels, and errors by class.

Errors are (predicted - measured) / measured.  What was not measured is None, never 0.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftrace.costmodels.estimating import Estimate
from rooftrace.costmodels.kernels import group_class
from rooftrace.hardware import Chip
from rooftrace.measured.fit import Errors, errors
from rooftrace.measured.validate.misses import Node

PHASES: Mapping[str, str] = {
    "prefill": "prefill, forward",
    "forward": "prefill, forward",
    "training": "training",
    "decode": "decode",
}
"""Which line of the summary a phase counts for; others have one of their own."""


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One measured step beside its estimate.  Seconds and bytes.

    group: what ran, whatever its sizes.  predicted: t_est.  interval: what 90 % of measured steps
    are between, None without fitted knobs.  shares: of t_est by regime, as predicted.  device:
    seconds of all kernels as measured, None where that was not seen; device_predicted: t_serial.
    peak, peak_predicted: bytes at the peak; both None where the run does not say.
    """

    label: str
    group: str
    phase: str
    measured: float
    predicted: float
    interval: tuple[float, float] | None
    shares: Mapping[str, float]
    device: float | None
    device_predicted: float
    peak: int | None = None
    peak_predicted: int | None = None

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def peak_error(self) -> float | None:
        """The same of the memory."""
        if not self.peak or self.peak_predicted is None:
            return None
        return self.peak_predicted / self.peak - 1

    @property
    def inside(self) -> bool | None:
        """Whether the measurement is in the interval; None without one."""
        if self.interval is None:
            return None
        low, high = self.interval
        return low <= self.measured <= high

    @property
    def regime(self) -> str:
        """The regime with the largest share."""
        return max(self.shares, key=self.shares.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for files."""
        return {
            "label": self.label,
            "group": self.group,
            "phase": self.phase,
            "measured_s": self.measured,
            "predicted_s": self.predicted,
            "interval_s": list(self.interval) if self.interval else None,
            "error": self.error,
            "inside": self.inside,
            "regime_shares": dict(self.shares),
            "device_measured_s": self.device,
            "device_predicted_s": self.device_predicted,
            "peak_measured_bytes": self.peak,
            "peak_predicted_bytes": self.peak_predicted,
            "peak_error": self.peak_error,
        }


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """One kernel beside its measurement.  step: whose it is.  kind: its class (`opclass`).

    dram: bytes that counters saw for what `node.row.bytes` predicts, None where they did not see
    all of it.
    """

    step: str
    kind: str
    node: Node
    dram: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for files."""
        node, row = self.node, self.node.row
        return {
            "step": self.step,
            "kernel": row.index,
            "name": row.name,
            "class": self.kind,
            "module": row.module,
            "family": row.family,
            "part": row.part,
            "count": row.count,
            "ops": len(row.ops),
            "ops_found": node.found,
            "predicted_s": node.predicted,
            "measured_s": node.measured,
            "miss_s": None if node.measured is None else node.miss,
            "regime": row.timing.regime,
            "flops": row.flops_causal,
            "hbm_bytes": row.bytes,
            "dram_bytes": self.dram,
            "kernels_launched": node.kernels,
            "reason": node.reason,
        }


@dataclass(frozen=True, slots=True)
class ClassCheck:
    """All measured kernels of one class: launches, seconds, and seconds that they are off by."""

    count: int
    predicted: float
    measured: float
    off: float

    @property
    def bias(self) -> float:
        """Of the sums: predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def mean(self) -> float:
        """Mean error of a kernel's seconds, by its measured seconds."""
        return self.off / self.measured

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for files."""
        return {
            "launches": self.count,
            "predicted_s": self.predicted,
            "measured_s": self.measured,
            "bias": self.bias,
            "mean": self.mean,
        }


def step_check(
    label: str,
    group: str,
    estimate: Estimate,
    measured: float,
    device: float | None = None,
    peak: int | None = None,
) -> StepCheck:
    """A measured step [s] beside its estimate."""
    return StepCheck(
        label,
        group,
        estimate.phase,
        measured,
        estimate.t_est,
        estimate.t_interval,
        dict(estimate.times.regime_shares),
        device,
        estimate.times.t_serial,
        peak,
        estimate.memory.peak if peak else None,
    )


def node_checks(
    step: str, estimate: Estimate, found: Sequence[Node], dram: Mapping[int, float] | None = None
) -> tuple[NodeCheck, ...]:
    """Kernels with their classes.  dram: bytes by the index of their row."""
    return tuple(
        NodeCheck(
            step,
            group_class(estimate.graph, node.row.ops, costs=estimate.plan.op_costs),
            node,
            None if dram is None else dram.get(node.row.index),
        )
        for node in found
    )


def dram_by_row(estimate: Estimate, counted: Mapping[int, float]) -> dict[int, float]:
    """Bytes by the index of a row, from bytes by op id; rows with an op that is not there are left
    out."""
    standing: Counter[int] = Counter()  # an op may stand in two rows: at the edge of iterations
    for row in estimate.rows:
        standing.update(dict.fromkeys(row.ops, row.count))
    return {
        row.index: sum(counted[op] * row.count / standing[op] for op in row.ops)
        for row in estimate.rows
        if all(op in counted for op in row.ops)
    }


# -- sums ------------------------------------------------------------------------------------------


def by_phase(steps: Sequence[StepCheck]) -> dict[str, Errors]:
    """Errors by the lines of PHASES, in its order, then others; "all" where there are several."""
    groups: dict[str, list[StepCheck]] = {name: [] for name in dict.fromkeys(PHASES.values())}
    for step in steps:
        groups.setdefault(PHASES.get(step.phase, step.phase), []).append(step)
    found = {name: _errors(group) for name, group in groups.items() if group}
    return {**found, "all": _errors(steps)} if len(found) > 1 else found


def _errors(steps: Sequence[StepCheck]) -> Errors:
    return errors(
        [step.label for step in steps],
        [step.predicted for step in steps],
        [step.measured for step in steps],
    )


def peak_errors(steps: Sequence[StepCheck]) -> Errors | None:
    """Errors of the memory at the peak; None where no step has it."""
    known = [step for step in steps if step.peak_error is not None]
    if not known:
        return None
    return errors(
        [step.label for step in known],
        [float(step.peak_predicted or 0) for step in known],
        [float(step.peak or 0) for step in known],
    )


def by_class(checks: Iterable[NodeCheck]) -> dict[str, ClassCheck]:
    """Kernels whose ops were all measured by class, most measured seconds first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for check in checks:
        node = check.node
        if node.measured and node.found == len(node.row.ops):
            entry = sums[check.kind]
            entry[0] += node.row.count
            entry[1] += node.predicted
            entry[2] += node.measured
            entry[3] += abs(node.miss)
    found = {
        kind: ClassCheck(int(count), predicted, measured, off)
        for kind, (count, predicted, measured, off) in sums.items()
    }
    return dict(sorted(found.items(), key=lambda entry: -entry[1].measured))


# -- the chip that was measured --------------------------------------------------------------------


def other_device(name: str, kind: str, chip: Chip) -> str:
    """A sentence where what was measured is not this chip; "" where it is, or may be.

    name: what the device calls itself, "" where unknown; kind: gpu or cpu.
    """
    if kind != chip.kind:
        called = f"{name}, a {kind.upper()}" if name else f"a {kind.upper()}"
        return (
            f"measured on {called}; predicted for {chip.title}, a {chip.kind.upper()}: the errors "
            "compare two devices"
        )
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    model = next((w for w in re.findall(r"[a-z0-9]+", chip.name) if re.search(r"\d", w)), "")
    if kind == "gpu" and name and model and model not in words:
        return f"measured on {name}; predicted for {chip.title}: the errors compare two devices"
    return ""
