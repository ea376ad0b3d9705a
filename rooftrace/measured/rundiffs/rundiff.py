"""The records of a comparison of two measured runs: totals, rows, modules, families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rooftrace._plain import Plain
from rooftrace._shown import Shown, short, some
from rooftrace.costmodels.findings.diffs import Diff
from rooftrace.hardware.units import format_time
from rooftrace.measured.rundiffs.kernelnames import kernel_key
from rooftrace.measured.rundiffs.metrics import METRICS
from rooftrace.tracer.changes import Change
from rooftrace.tracer.changes.limits import Limited

_UNITS = {"second": "s", "byte": "byte", "count": "launches"}
"""Units of metrics, as JSON names them."""
NO_MODULE = "(no module)"
"""The name of the group of kernels whose module is not known."""
_NEXT_TO_NONE = 1e-3
"""Share of a prediction: ratios to a smaller difference say nothing."""


@dataclass(frozen=True, slots=True)
class MeasuredChange(Change):
    """One measured quantity of a step before and after (SI units)."""

    rounding: ClassVar[float] = 1e-9
    """Seconds of a trace are differences of large times, as floats."""

    noise: float | None = None  # half the 95 % interval of the difference; None: not known

    KEYS = "before after delta relative noise within_noise"

    @property
    def within_noise(self) -> bool | None:
        """Whether the steps' own spread explains the difference; None where it is not known."""
        return None if self.noise is None else abs(self.delta) <= self.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange(Plain):
    """A kernel of a call, or equal ones of several layers, before and after."""

    # slower, faster, same, new, gone; replaced: by another kernel; resized: in the same time;
    # unclear: within noise
    status: str
    call: tuple[str, str]  # what launched it, before and after; "" where it is not known
    module: str  # with the numbers of repeated blocks starred; "" where it is not known
    part: str  # "backward" or ""
    family: str
    kind: str  # kernel, memcpy, memset; op: a call on the host
    sizes: tuple[str, str]  # of the call's tensors
    kernels: tuple[tuple[str, ...], tuple[str, ...]]  # names before and after
    count: MeasuredChange  # launches in a step
    time: MeasuredChange  # s in a step
    places: int  # calls of the sequence that it stands for: one in each of so many layers

    @property
    def short_kernels(self) -> tuple[str, str]:
        """The first kernel before and after, without tiles, types and namespaces."""
        first, second = (kernel_key(names[0]) if names else "" for names in self.kernels)
        return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChange(Plain):
    """All kernels of a module, or of a family, before and after."""

    name: str
    time: MeasuredChange  # s in a step
    count: MeasuredChange  # launches in a step
    predicted: MeasuredChange | None = None  # s of its kernels; None: nothing was predicted

    KEYS = "* ratio"

    @property
    def ratio(self) -> float | None:
        """Measured difference over the predicted one; None without a prediction, or one of 0."""
        return ratio_of(self.time, self.predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Plain):
    """What was predicted for a step, before and after."""

    diff: Diff  # of its cost
    totals: Mapping[str, MeasuredChange]  # by name in METRICS, those that can be predicted
    notes: tuple[str, ...] = ()  # where prediction and measurement disagree

    KEYS = "chips=diff.chips executions=diff.executions time_is=diff.time_is totals notes"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDiff(Plain):
    """One measured step before and after."""

    label: str  # the key of its row; "step" of a trace
    steps: tuple[int, int]  # how many were measured
    devices: tuple[str, str]
    on_device: bool  # whether seconds are those of kernels; else of calls on the host
    timed_inside: bool  # whether rows were timed in the step itself, so that parts add up to it
    totals: Mapping[str, MeasuredChange]  # by name in METRICS
    rows: tuple[KernelChange, ...]  # the largest difference first; their times add up to `work`
    modules: tuple[GroupChange, ...]  # empty where no module is known
    families: tuple[GroupChange, ...]
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = None

    KEYS = (
        "label steps devices seconds_of timed_inside totals rows modules families prediction notes"
    )

    @property
    def seconds_of(self) -> str:
        """Whose seconds the rows have."""
        return "kernels" if self.on_device else "host calls"

    @property
    def changes(self) -> tuple[KernelChange, ...]:
        """The rows in which something differs."""
        return tuple(row for row in self.rows if row.status != "same")

    @property
    def unchanged(self) -> bool:
        """Whether no row and no total differs at all."""
        return not self.changes and not any(change.delta for change in self.totals.values())

    def ratio(self, metric: str) -> float | None:
        """Measured difference over the predicted one; None without a prediction, or one of 0."""
        predicted = None if self.prediction is None else self.prediction.totals.get(metric)
        return ratio_of(self.totals[metric], predicted)


@dataclass(frozen=True, kw_only=True)
class RunDiff(Plain, Shown, Limited):
    """The difference of two measured runs, step by step."""

    names: tuple[str, str]
    kinds: tuple[str, str]  # "trace" or "run"
    steps: tuple[StepDiff, ...]
    only_before: tuple[str, ...] = ()  # rows that only one side has
    only_after: tuple[str, ...] = ()
    operations: Mapping[str, MeasuredChange] | None = None  # s of operations alone, of two runs

    METRICS = METRICS
    COMPARED = "measured runs"
    EXAMPLE = "idle>1 ms"
    schema = "rooftrace.rundiff/1"
    KEYS = (
        "schema before=names.0 after=names.1 kinds metrics=_metrics only_before only_after steps "
        "operations"
    )

    @property
    def _metrics(self) -> dict[str, str]:
        return {name: _UNITS[metric.unit] for name, metric in METRICS.items()}

    @property
    def unchanged(self) -> bool:
        """Whether nothing differs at all."""
        return (
            not self.only_before
            and not self.only_after
            and all(step.unchanged for step in self.steps)
            and not any(change.delta for change in (self.operations or {}).values())
        )

    def places(self) -> list[tuple[str, Mapping[str, Change]]]:
        """The totals of each step."""
        return [(f"{step.label}: measured ", step.totals) for step in self.steps]

    def __repr__(self) -> str:
        changes = [
            f"{step.label} {format_time(step.totals['time'].before)} -> "
            f"{format_time(step.totals['time'].after)}"
            for step in self.steps
        ]
        return short(self, f"{self.names[0]} -> {self.names[1]}: {some(changes)}")


def ratio_of(measured: MeasuredChange, predicted: MeasuredChange | None) -> float | None:
    """Measured difference over the predicted one; None where none is predicted, or next to none."""
    if predicted is None:
        return None
    if abs(predicted.delta) <= _NEXT_TO_NONE * max(predicted.before, predicted.after):
        return None
    return measured.delta / predicted.delta
