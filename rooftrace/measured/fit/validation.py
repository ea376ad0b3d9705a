"""Records of a validation: steps, kernels and classes predicted and measured, with their errors.

Errors are (predicted - measured) / measured.  A value that was not measured is None, never 0.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rooftrace._plain import Plain, plain_record
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimates import Estimate
from rooftrace.costmodels.kernels import group_class
from rooftrace.graph import pattern_of
from rooftrace.hardware import Chip
from rooftrace.measured.alignment import Alignment, Stray
from rooftrace.measured.fit.cases import Errors, errors
from rooftrace.measured.fit.idleness import Idleness
from rooftrace.measured.fit.misses import Node, launches_by_op
from rooftrace.measured.profiles import Records

LINES: Mapping[str, str] = {
    "prefill": "prefill, forward",
    "forward": "prefill, forward",
    "training": "training",
    "decode": "decode",
}
"""The line of the summary that a phase belongs to; other phases have their own lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCheck(Plain):
    """One measured step with its estimate."""

    label: str
    group: str  # the model or target, whatever its sizes
    phase: str
    measured: float  # s
    predicted: float  # s, `t_est`
    interval: tuple[float, float] | None  # s that 90 % of steps are between; None without knobs
    shares: Mapping[str, float]  # of `t_est` by regime, as predicted
    device: float | None  # s of all kernels as measured; None: unknown
    device_predicted: float  # s, `t_serial`
    peak: int | None = None  # byte, measured; None: unknown
    peak_predicted: int | None = None  # byte; None without a measured one

    KEYS = (
        "label group phase measured_s=measured predicted_s=predicted interval_s=interval error "
        "inside regime_shares=shares device_measured_s=device "
        "device_predicted_s=device_predicted peak_measured_bytes=peak "
        "peak_predicted_bytes=peak_predicted peak_error"
    )

    @property
    def line(self) -> str:
        """The line of the summary that the step counts for."""
        return LINES.get(self.phase, self.phase)

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def peak_error(self) -> float | None:
        """Relative error of the predicted peak memory; None where it was not measured."""
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


@dataclass(frozen=True, slots=True)
class NodeCheck(Plain):
    """One kernel of a step with its measurement."""

    step: str  # label of its step
    kind: str  # its class (see `opclass`)
    node: Node
    dram: float | None = None  # byte, counted; None where a part was not counted

    KEYS = (
        "step kernel=node.row.index name=node.row.name class=kind module=node.row.module "
        "family=node.row.family part=node.row.part count=node.row.count ops "
        "ops_found=node.measured_ops predicted_s=node.predicted measured_s=node.measured miss_s "
        "regime=node.row.timing.regime flops=node.row.flops_causal hbm_bytes=node.row.bytes "
        "dram_bytes=dram kernels_launched=node.kernels reason=node.reason"
    )

    @property
    def ops(self) -> int:
        """The number of ops of its kernel."""
        return len(self.node.row.ops)

    @property
    def miss_s(self) -> float | None:
        """Measured seconds less the predicted ones; None where it was not measured."""
        return None if self.node.measured is None else self.node.miss


@dataclass(frozen=True, slots=True)
class ClassCheck(Plain):
    """All measured kernels of one class."""

    count: int  # launches
    predicted: float  # s
    measured: float  # s
    off: float  # s, the sum of |measured - predicted|

    KEYS = "launches=count predicted_s=predicted measured_s=measured bias mean"

    @property
    def bias(self) -> float:
        """Relative error of the sum: predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def mean(self) -> float:
        """Mean relative error of a kernel, weighted by its measured seconds."""
        return self.off / self.measured


def step_check(
    label: str,
    group: str,
    estimate: Estimate,
    measured: float,
    device: float | None = None,
    peak: int | None = None,
) -> StepCheck:
    """A measured step [s] with its estimate."""
    return StepCheck(
        label=label,
        group=group,
        phase=estimate.phase,
        measured=measured,
        predicted=estimate.t_est,
        interval=estimate.t_interval,
        shares=dict(estimate.times.regime_shares),
        device=device,
        device_predicted=estimate.times.t_serial,
        peak=peak,
        peak_predicted=estimate.memory.peak if peak else None,
    )


def node_checks(
    step: str, estimate: Estimate, kernels: Sequence[Node], dram: Mapping[int, float] | None = None
) -> tuple[NodeCheck, ...]:
    """Kernels with their classes.  dram: bytes by the index of their row."""
    return tuple(
        NodeCheck(
            step,
            group_class(estimate.graph, node.row.ops, costs=estimate.plan.op_costs),
            node,
            None if dram is None else dram.get(node.row.index),
        )
        for node in kernels
    )


def dram_by_row(estimate: Estimate, counted: Mapping[int, float]) -> dict[int, float]:
    """Bytes by the index of a row, from bytes by op id; rows with an uncounted op are left out."""
    launches = launches_by_op(estimate)
    return {
        row.index: sum(counted[op] * row.count / launches[op] for op in row.ops)
        for row in estimate.rows
        if all(op in counted for op in row.ops)
    }


def alike(checks: Sequence[NodeCheck]) -> list[NodeCheck]:
    """Merge kernels of a step with equal name and work in modules that differ only in numbers."""
    groups: dict[Any, list[NodeCheck]] = {}
    for check in checks:
        row, unknown = check.node.row, (check.node.measured is None, check.dram is None)
        work = (row.flops_causal or row.bytes) // row.count
        key = (check.step, row.name, pattern_of(row.module), row.part, work, unknown)
        groups.setdefault(key, []).append(check)
    return [_summed(group) if len(group) > 1 else group[0] for group in groups.values()]


def _summed(group: Sequence[NodeCheck]) -> NodeCheck:
    first = max(group, key=lambda check: abs(check.node.miss))
    all_nodes = [check.node for check in group]
    row = replace(
        first.node.row,
        count=sum(node.row.count for node in all_nodes),
        bytes=sum(node.row.bytes for node in all_nodes),
    )
    is_measured = first.node.measured is not None
    node = replace(
        first.node,
        row=row,
        predicted=sum(node.predicted for node in all_nodes),
        measured=sum(node.measured or 0.0 for node in all_nodes) if is_measured else None,
    )
    dram = None if first.dram is None else sum(check.dram or 0.0 for check in group)
    return replace(first, node=node, dram=dram)


def other_device(name: str, kind: str, chip: Chip) -> str:
    """A sentence if the measured device is not this chip; "" if it is, or may be.

    name: reported by the driver, "" where unknown; kind: gpu or cpu.
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


# -- validation ------------------------------------------------------------------------------------

SCHEMA = "rooftrace.validation/1"
_IN_JSON = 100
"""The number of worst nodes and calls in the JSON; nodes.csv has every node."""


@dataclass(frozen=True, kw_only=True)
class Validation(Plain, Shown):
    """Measurements against their predictions."""

    kind: Records  # run, trace or steps
    source: str  # path of the file, "" without one
    chip: Chip  # predicted for
    execution: str  # predicted for
    knobs: str  # title of the calibrated knobs, "" without knobs
    steps: tuple[StepCheck, ...]
    planned: int  # number of measured steps
    # {key or line of a step that was left out: reason}
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # remarks for readers
    nodes: tuple[NodeCheck, ...] = ()  # predicted kernels, where ops were measured
    strays: tuple[tuple[str, Stray], ...] = ()  # (step, measured calls that are no op of its graph)
    op_seconds: float = 0.0  # s, measured, of all ops and kernels
    op_matched: float = 0.0  # s of these that belong to `nodes`
    estimate: Estimate | None = field(default=None, repr=False)  # of a trace
    alignment: Alignment | None = field(default=None, repr=False)  # of a trace
    idle: Idleness | None = None  # of the device of a trace; None: unknown

    @property
    def idle_words(self) -> str:
        """A sentence on the idle time of the device beside both predictions; "" where unknown."""
        if self.idle is None or not self.steps:
            return ""
        return self.idle.words(self.steps[0].device_predicted, self.steps[0].predicted)

    @property
    def coverage(self) -> float | None:
        """Share of the measured op seconds that belongs to a kernel; None where none are known."""
        return self.op_matched / self.op_seconds if self.op_seconds else None

    @property
    def alike(self) -> list[NodeCheck]:
        """The kernels, with equal ones in similar modules as one."""
        return alike(self.nodes)

    @property
    def inside(self) -> tuple[int, int] | None:
        """(steps inside of their interval, steps with an interval); None without any."""
        inside = [step.inside for step in self.steps if step.inside is not None]
        return (sum(inside), len(inside)) if inside else None

    @property
    def lines(self) -> dict[str, tuple[StepCheck, ...]]:
        """The steps by line of the summary: lines of LINES in its order, then other phases."""
        groups: dict[str, list[StepCheck]] = {name: [] for name in dict.fromkeys(LINES.values())}
        for step in self.steps:
            groups.setdefault(step.line, []).append(step)
        return {name: tuple(group) for name, group in groups.items() if group}

    @property
    def by_phase(self) -> dict[str, Errors]:
        """Errors of step times by line of the summary; "all" where there are several."""
        by_line = {name: _errors(group) for name, group in self.lines.items()}
        return {**by_line, "all": _errors(self.steps)} if len(by_line) > 1 else by_line

    @property
    def peak_errors(self) -> Errors | None:
        """Errors of the memory at the peak; None where no step has it."""
        steps = [step for step in self.steps if step.peak_error is not None]
        if not steps:
            return None
        return errors(
            [step.label for step in steps],
            [float(step.peak_predicted or 0) for step in steps],
            [float(step.peak or 0) for step in steps],
        )

    @property
    def by_class(self) -> dict[str, ClassCheck]:
        """Kernels whose ops were all measured, by class; most measured seconds first."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
        for check in self.nodes:
            node = check.node
            if node.measured and node.measured_ops == len(node.row.ops):
                entry = sums[check.kind]
                entry[0] += node.row.count
                entry[1] += node.predicted
                entry[2] += node.measured
                entry[3] += abs(node.miss)
        classes = {
            kind: ClassCheck(count=int(count), predicted=predicted, measured=measured, off=off)
            for kind, (count, predicted, measured, off) in sums.items()
        }
        return dict(sorted(classes.items(), key=lambda entry: -entry[1].measured))

    def to_dict(self) -> dict[str, Any]:
        """The contents of validation.json: seconds, bytes, errors as (predicted - measured) /
        measured; null: not measured."""
        return {**plain_record(self, self.KEYS), "source": Path(self.source).name}

    KEYS = (
        "schema kind source chip=chip.name execution knobs=_knobs measured_steps=planned "
        "compared_steps=steps.__len__ left_out=failures notes device=idle errors=by_phase "
        "peak_memory_errors=peak_errors inside_interval=_inside steps ops=_ops"
    )
    schema = SCHEMA

    @property
    def _knobs(self) -> str | None:
        return self.knobs or None

    @property
    def _inside(self) -> dict[str, int] | None:
        return dict(zip(("steps", "of"), self.inside, strict=True)) if self.inside else None

    @property
    def _ops(self) -> dict[str, Any] | None:
        if not self.nodes:
            return None
        strays = sorted(self.strays, key=lambda entry: -entry[1].seconds)[:_IN_JSON]
        worst = sorted(self.nodes, key=lambda check: -abs(check.node.miss))
        return {
            "measured_s": self.op_seconds,
            "matched_s": self.op_matched,
            "matched_share": self.coverage,
            "classes": self.by_class,
            "nodes": len(self.nodes),
            "nodes_measured": sum(check.node.measured is not None for check in self.nodes),
            "worst_nodes": worst[:_IN_JSON],
            "not_in_graph": [
                {"step": step, **plain_record(stray, "name shapes count measured_s=seconds")}
                for step, stray in strays
            ],
        }

    def write(self, out: str | os.PathLike[str], figures: Sequence[str] = ("png",)) -> list[Path]:
        """Write validation.md, validation.json and parity.png into the folder `out`, nodes.csv
        where there are nodes, timeline.json.gz where there is a trace; their paths.

        figures: formats of the figure: "png", "svg", "pdf"; RequestError for another one.
        All files are made beside `out` first and then moved in, so nothing is left half-written.
        Raises ReportFolderError where the folder cannot be written.
        """
        from rooftrace.reporting.commands.reportfolder import write_validation

        return write_validation(self, Path(out), figures)

    def __repr__(self) -> str:
        compared = f"{len(self.steps)} of {self.planned} steps on {self.chip.name}"
        if not self.steps:
            return short(self, f"{compared}, {self.execution}")
        errors, inside = _errors(self.steps), self.inside
        within = "" if inside is None else f"; {inside[0]} of {inside[1]} in their interval"
        return short(
            self,
            f"{compared}, {self.execution}: mean error {errors.mean:.1%}, bias {errors.bias:+.1%}"
            f"{within}",
        )


def _errors(steps: Sequence[StepCheck]) -> Errors:
    return errors(
        [step.label for step in steps],
        [step.predicted for step in steps],
        [step.measured for step in steps],
    )
