"""Predicted beside measured: steps, what the errors are by phase, kernels, and errors by class.

Errors are (predicted - measured) / measured.  What was not measured is None, never 0.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftrace.costmodels.calibrate import Errors, errors
from rooftrace.costmodels.estimate import Estimate
from rooftrace.costmodels.misses import Node
from rooftrace.costmodels.opclass import group_class
from rooftrace.costmodels.profiles.align import Key, Stray, key_of_call, key_of_op
from rooftrace.hardware.chip import Chip
from rooftrace.tracer.runfile import ModelRow

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
            group_class(estimate.graph, node.row.ops),
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


# -- the ops of a run's row ------------------------------------------------------------------------

# The profiler counts a kernel for the innermost op, which the graph may have under another name:
# pattern, common name, and how many shapes tell two apart.
_INNERMOST: tuple[tuple[re.Pattern[str], str, int], ...] = tuple(
    (re.compile(pattern), name, shapes)
    for pattern, name, shapes in (
        (r"aten::(_to_copy|clone|copy|contiguous)", "copy", 1),
        (r"aten::(cudnn_|miopen_|mkldnn_|_slow_|slow_|thnn_)?_?conv(olution|_depthwise|2d|3d)\w*"
         r"(?<!backward)", "convolution", 2),
        (r"aten::_(flash|efficient|cudnn)_attention_forward", "attention", 0),
        (r"aten::mkldnn_rnn_layer|rnn", "rnn", 0),
        (r"aten::mkldnn_rnn_layer_backward|rnn_backward", "rnn_backward", 0),
        (r"attention", "attention", 0),
        (r"aten::(cat|stack)", "cat", 0),
        (r"aten::_foreach_(\w+)", r"foreach \1", 0),
        (r"aten::(embedding|index_select)", "embedding", 1),
        (r"aten::(relu|clamp_min)", "relu", 1),
        (r"aten::(_index_put_impl|_?index_put|_unsafe_index_put)", "index put", 1),
        (r"aten::(bernoulli|native_dropout)", "dropout", 1),
        (r"aten::(convolution|_slow_conv2d|mkldnn_convolution)_backward", "convolution back", 3),
    )
)  # fmt: skip


@dataclass(frozen=True)
class RowSeconds:
    """What a row says of the ops of its graph: seconds by op id, all iterations together.

    total: seconds of all ops of the row, unattributed ones included.  strays: those that the graph
    has not, most seconds first.
    """

    seconds: Mapping[int, float]
    total: float
    strays: tuple[Stray, ...]

    @property
    def coverage(self) -> float:
        """Share of the measured seconds that belongs to an op of the graph."""
        return sum(self.seconds.values()) / self.total if self.total else 0.0


def seconds_of_row(row: ModelRow, estimate: Estimate) -> RowSeconds:
    """The measured seconds of a row's ops, by op of `estimate.graph`.

    A replay names ops by id.  The profiler has alike ops together, by name and shapes: their own
    seconds are shared among the ops of the graph that are so, as their predicted seconds are.  An
    op that is run by others inside of it has the seconds of those that are known for it.
    """
    total = row.attributed + (row.unattributed or 0.0)
    if row.source == "replay":
        return _by_id(row, estimate, total)
    graph = estimate.graph
    weights: dict[int, float] = defaultdict(float)
    for kernel in estimate.rows:
        for index in kernel.ops:
            weights[index] += kernel.timing.t_device / len(kernel.ops)
    exact: dict[Key, list[int]] = defaultdict(list)
    loose: dict[Key, list[int]] = defaultdict(list)
    for op in graph.ops:
        if op.kind == "kernel":
            key = key_of_op(graph, op)
            exact[key].append(op.id)
            loose[_innermost(key)].append(op.id)
    seconds: dict[int, float] = defaultdict(float)
    strays: list[Stray] = []
    for one in row.ops:
        if one.seconds <= 0:  # what it took is in the ops inside of it
            continue
        key = key_of_call(one.target, one.shapes)
        owners = exact.get(key) or loose.get(_innermost(key)) or loose.get(_foreach(key)) or []
        if not owners:
            strays.append(Stray(one.target, key[1], one.count, one.seconds))
            continue
        shares = [weights[index] for index in owners]
        whole = sum(shares)
        for index, share in zip(owners, shares, strict=True):
            seconds[index] += one.seconds * (share / whole if whole else 1 / len(owners))
    strays.sort(key=lambda stray: -stray.seconds)
    return RowSeconds(dict(seconds), total, tuple(strays))


def _innermost(key: Key) -> Key:
    name, shapes = key
    for pattern, common, count in _INNERMOST:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(common), shapes[:count]
    return key


def _foreach(key: Key) -> Key:
    """What an optimizer's op on one parameter is in the graph: a part of one on all of them."""
    return f"foreach {key[0].removeprefix('aten::')}", ()


def _by_id(row: ModelRow, estimate: Estimate, total: float) -> RowSeconds:
    ops = estimate.graph.ops
    seconds: dict[int, float] = {}
    strays: list[Stray] = []
    for one in row.ops:
        if one.id is not None and one.id < len(ops) and ops[one.id].target == one.target:
            seconds[one.id] = seconds.get(one.id, 0.0) + one.seconds
        else:
            strays.append(Stray(one.target, (), one.count, one.seconds))
    return RowSeconds(seconds, total, tuple(strays))


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
