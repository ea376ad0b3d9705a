"""A validation: measurements beside their predictions, and the errors."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooftrace._plain import Plain, plain_record
from rooftrace._shown import Shown, short
from rooftrace.costmodels.estimating import Estimate
from rooftrace.hardware import Chip
from rooftrace.measured.alignment import Alignment, Stray
from rooftrace.measured.fit import Errors, errors
from rooftrace.measured.sources import Records
from rooftrace.measured.validate.checks import (
    LINES,
    ClassCheck,
    NodeCheck,
    StepCheck,
    alike,
)

SCHEMA = "rooftrace.validation/1"
_IN_JSON = 100
"""The number of worst nodes and calls in the JSON; nodes.csv has every node."""


@dataclass(frozen=True, kw_only=True)
class Validation(Plain, Shown):
    """Measurements beside what was predicted for them."""

    kind: Records  # run, trace or steps
    source: str  # path of the file, "" without one
    chip: Chip  # predicted for
    execution: str  # predicted for
    knobs: str  # title of the calibrated knobs, "" without knobs
    steps: tuple[StepCheck, ...]
    planned: int  # how many steps were measured
    failures: Mapping[str, str] = field(default_factory=dict)  # why some are left out, by place
    notes: tuple[str, ...] = ()  # what a reader should know of the comparison
    nodes: tuple[NodeCheck, ...] = ()  # predicted kernels, where ops were measured
    strays: tuple[tuple[str, Stray], ...] = ()  # (step, measured calls that are no op of its graph)
    op_seconds: float = 0.0  # s, measured, of all ops and kernels
    op_matched: float = 0.0  # s of these that belong to `nodes`
    estimate: Estimate | None = field(default=None, repr=False)  # of a trace
    alignment: Alignment | None = field(default=None, repr=False)  # of a trace

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
        """How many steps are in their interval, and how many have one; None without any."""
        known = [step.inside for step in self.steps if step.inside is not None]
        return (sum(known), len(known)) if known else None

    @property
    def lines(self) -> dict[str, tuple[StepCheck, ...]]:
        """The steps by line of the summary: those of LINES in its order, then other phases."""
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
        known = [step for step in self.steps if step.peak_error is not None]
        if not known:
            return None
        return errors(
            [step.label for step in known],
            [float(step.peak_predicted or 0) for step in known],
            [float(step.peak or 0) for step in known],
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
        measured; null is what was not measured."""
        return {**plain_record(self, self.KEYS), "source": Path(self.source).name}

    KEYS = (
        "schema kind source chip=chip.name execution knobs=_knobs measured_steps=planned "
        "compared_steps=steps.__len__ left_out=failures notes errors=by_phase "
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
        from rooftrace import _write

        return _write(self, Path(out), figures)

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
