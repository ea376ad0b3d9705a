"""Predicted against measured: traces what ran, prices it, and sets the two side by side."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_share, format_time, format_traffic
from rooftrace.measured.bench import Run
from rooftrace.measured.profiles import (
    LAUNCH,
    OP,
    PROFILER_STEP,
    WHOLE,
    Alignment,
    Counted,
    Kind,
    Profile,
    StepTime,
    Stray,
    counted,
    read_counters,
)
from rooftrace.measured.validate.checks import (
    NodeCheck,
    StepCheck,
    by_class,
    by_phase,
    dram_by_row,
    node_checks,
    other_device,
    peak_errors,
    step_check,
)
from rooftrace.measured.validate.misses import nodes
from rooftrace.measured.validate.row_seconds import seconds_of_row
from rooftrace.measured.validate.steps import (
    Graphs,
    MeasuredRequestError,
    MeasuredStep,
    best_match,
    read_measured,
    steps_of_run,
    steps_of_table,
    what_ran,
    why_not,
)
from rooftrace.reporting.text import listed, plural

SCHEMA = "rooftrace.validation/1"
_IN_JSON = 100
"""So many nodes and calls, the worst, are in the JSON; nodes.csv has every node."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Validation:
    """Measurements beside what was predicted for them.

    kind: run, trace or steps.  source: the file, "" where there is none.  chip, execution, knobs:
    what was predicted for; knobs is the title of what a calibration found, "" without.  planned:
    how many measured steps there are; failures: why some are not in `steps`, by where they stand.
    notes: what a reader should know of the comparison.  nodes: kernels beside their measurement,
    where there is any.  strays: (step, call) of measured calls that are no op of their graph.
    op_seconds: measured seconds of all ops and kernels, of which `op_matched` are those of `nodes`.
    estimate, alignment: of a trace.
    """

    kind: Kind
    source: str
    chip: Chip
    execution: str
    knobs: str
    steps: tuple[StepCheck, ...]
    planned: int
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    nodes: tuple[NodeCheck, ...] = ()
    strays: tuple[tuple[str, Stray], ...] = ()
    op_seconds: float = 0.0
    op_matched: float = 0.0
    estimate: Estimate | None = field(default=None, repr=False)
    alignment: Alignment | None = field(default=None, repr=False)

    @property
    def coverage(self) -> float | None:
        """Share of the measured op seconds that belongs to a kernel; None where none are known."""
        return self.op_matched / self.op_seconds if self.op_seconds else None

    @property
    def inside(self) -> tuple[int, int] | None:
        """How many steps are in their interval, and how many have one; None without any."""
        known = [step.inside for step in self.steps if step.inside is not None]
        return (sum(known), len(known)) if known else None

    def to_dict(self) -> dict[str, Any]:
        """The contents of validation.json: seconds, bytes, errors as (predicted - measured) /
        measured; null is what was not measured."""
        peaks = peak_errors(self.steps)
        inside = self.inside
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "source": Path(self.source).name,
            "chip": self.chip.name,
            "execution": self.execution,
            "knobs": self.knobs or None,
            "measured_steps": self.planned,
            "compared_steps": len(self.steps),
            "left_out": dict(self.failures),
            "notes": list(self.notes),
            "errors": {name: one.to_dict() for name, one in by_phase(self.steps).items()},
            "peak_memory_errors": peaks.to_dict() if peaks else None,
            "inside_interval": {"steps": inside[0], "of": inside[1]} if inside else None,
            "steps": [step.to_dict() for step in self.steps],
            "ops": self._ops(),
        }

    def _ops(self) -> dict[str, Any] | None:
        if not self.nodes:
            return None
        strays = sorted(self.strays, key=lambda entry: -entry[1].seconds)
        worst = sorted(self.nodes, key=lambda check: -abs(check.node.miss))
        return {
            "measured_s": self.op_seconds,
            "matched_s": self.op_matched,
            "matched_share": self.coverage,
            "classes": {name: one.to_dict() for name, one in by_class(self.nodes).items()},
            "nodes": len(self.nodes),
            "nodes_measured": sum(check.node.measured is not None for check in self.nodes),
            "worst_nodes": [check.to_dict() for check in worst[:_IN_JSON]],
            "not_in_graph": [
                {
                    "step": step,
                    "name": stray.name,
                    "shapes": [list(shape) for shape in stray.shapes],
                    "count": stray.count,
                    "measured_s": stray.seconds,
                }
                for step, stray in strays[:_IN_JSON]
            ],
        }

    def write(self, out: str | os.PathLike[str]) -> list[Path]:
        """Write validation.md, validation.json and parity.png into the folder `out`, nodes.csv
        where there are nodes, timeline.json.gz where there is a trace; their paths.

        All files are made beside `out` first and then moved in, so nothing is left half-written.
        Raises ReportFolderError where the folder cannot be written.
        """
        from rooftrace.reporting.pages import write_validation

        return write_validation(self, Path(out))

    def __rich__(self) -> Any:
        from rooftrace.reporting.text import render_validation

        return render_validation(self)

    def __str__(self) -> str:
        from rooftrace.reporting.pages import as_text

        return as_text(self.__rich__())


def validated(
    measured: str | os.PathLike[str] | Run | Profile | Sequence[StepTime],
    chip: Chip,
    model: ExecutionModel,
    graphs_of: Callable[[], Graphs] | None = None,
    template: str | None = None,
    phases: Sequence[str] | None = None,
    counters: str | os.PathLike[str] | None = None,
    progress: Tell | None = None,
) -> Validation:
    """Whatever was measured, beside its predictions.

    measured: a file of any kind that `kind_of` knows, or what its reader made of it.  graphs_of:
    what ran, by phase; template: a target for the names in the measurements, where graphs are not
    given.  counters: a CSV of Nsight Compute of the same step as a trace.

    Raises MeasuredRequestError where the two do not go together, and what the readers raise.
    """
    source = ""
    if isinstance(measured, (str, os.PathLike)):
        source = os.fspath(measured)
        measured = read_measured(source, "a comparison")
    if isinstance(measured, Profile):
        return validate_trace(
            measured, what_ran(measured, graphs_of), chip, model, counters, progress
        )
    if counters is not None:
        raise MeasuredRequestError(
            f"{os.fspath(counters)}: counters stand beside the kernels of a trace; "
            f"{source or 'what was measured'} has none"
        )
    target = template if graphs_of is None else graphs_of()
    if isinstance(measured, Run):
        return validate_run(measured, chip, model, target, phases, source, progress)
    target = "{target}" if target is None else target
    return validate_steps(measured, chip, model, target, phases, source, progress)


# -- steps of a run, or of a table -----------------------------------------------------------------


def validate_run(
    run: Run,
    chip: Chip,
    model: ExecutionModel,
    target: str | Graphs | None = None,
    phases: Sequence[str] | None = None,
    source: str = "",
    progress: Tell | None = None,
) -> Validation:
    """The models of a run that ran as `model` dispatches, and their ops where they were measured.

    target: see `steps_of_run`.  phases: only these.  A row that does not trace is left out and
    reported.  Raises MeasuredRequestError where there is no row, or none is left.
    """
    device = run.device
    kind = "gpu" if device.get("type") == "cuda" else str(device.get("type") or chip.kind)
    notes = [other_device(str(device.get("name") or ""), kind, chip)]
    measured = _of_phases(steps_of_run(run, model, target), phases)
    return _compared("run", source, measured, chip, model, notes, progress)


def validate_steps(
    steps: Sequence[StepTime],
    chip: Chip,
    model: ExecutionModel,
    target: str | Graphs = "{target}",
    phases: Sequence[str] | None = None,
    source: str = "",
    progress: Tell | None = None,
) -> Validation:
    """A table of step times.  target: see `steps_of_table`.  Raises MeasuredRequestError where none
    of its steps traces."""
    notes = []
    for what, given in (("chip", chip.name), ("execution", model.name)):
        said = {getattr(step, what) for step in steps} - {None, given}
        if said:
            names = listed(sorted(map(repr, said)))
            notes.append(f"the table says {what} {names}; predicted for {given!r}")
    measured = _of_phases(steps_of_table(steps, target), phases)
    return _compared("steps", source, measured, chip, model, notes, progress)


def _of_phases(
    measured: Sequence[MeasuredStep], phases: Sequence[str] | None
) -> Sequence[MeasuredStep]:
    """The steps of these phases; those whose phase is not known are kept."""
    if not phases:
        return measured
    found = [one for one in measured if one.phase is None or one.phase in phases]
    if not found:
        there = sorted({str(one.phase) for one in measured})
        raise MeasuredRequestError(
            f"phase {', '.join(phases)}: no such steps were measured, only {listed(there)}"
        )
    return found


def _compared(
    kind: Kind,
    source: str,
    measured: Sequence[MeasuredStep],
    chip: Chip,
    model: ExecutionModel,
    notes: Sequence[str],
    progress: Tell | None,
) -> Validation:
    tell = progress or (lambda _: None)
    steps: list[StepCheck] = []
    found: list[NodeCheck] = []
    strays: list[tuple[str, Stray]] = []
    failures: dict[str, str] = {}
    total = matched = 0.0
    shared = False
    for number, one in enumerate(measured):
        tell(f"tracing {one.label} ({number + 1} of {len(measured)})")
        try:
            if one.seconds <= 0:
                raise MeasuredRequestError(f"{one.seconds!r} seconds: expected a time above 0")
            priced = estimate(one.graph(), chip, model)
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            failures[one.place] = why_not(error, one)
            continue
        row = one.row
        device = row.device_seconds if row else None
        peak = row.peak_bytes if row else None
        steps.append(step_check(one.label, one.group, priced, one.seconds, device, peak))
        if row is None or not row.ops or device is None:
            continue
        ops = seconds_of_row(row, priced)
        found += node_checks(one.label, priced, nodes(priced, ops.seconds))
        strays += [(one.label, stray) for stray in ops.strays]
        total += ops.total
        matched += sum(ops.seconds.values())
        shared = shared or row.source != "replay"
    if not steps:
        first = next(iter(failures.values()), "there are none")
        raise MeasuredRequestError(
            f"none of {len(measured)} measured steps could be compared; the first: {first}"
        )
    said = [*notes, _knob_note(model)]
    if found:
        said.append(_fusion_note(model))
    if shared:
        said.append(
            "the profiler has alike ops of a step together: their seconds are shared among them "
            "as predicted"
        )
    return Validation(
        kind, source, chip, model.name, _title(model), tuple(steps), len(measured), failures,
        tuple(filter(None, said)), tuple(found), tuple(strays), total, matched,
    )  # fmt: skip


def _title(model: ExecutionModel) -> str:
    return model.knobs.title if model.knobs is not None else ""


def _knob_note(model: ExecutionModel) -> str:
    if model.knobs is not None:
        return ""
    return "no --knobs: predictions are ceilings from the chip's peaks, and have no interval"


def _fusion_note(model: ExecutionModel) -> str:
    if model.fusion == "none":
        return ""
    return (
        "predicted kernels are fused, and generated ones of the run are no op: a kernel of which "
        "only some ops are in the run counts for no class"
    )


# -- a trace ---------------------------------------------------------------------------------------


def validate_trace(
    profile: Profile,
    graphs: Graphs,
    chip: Chip,
    model: ExecutionModel,
    counters: str | os.PathLike[str] | None = None,
    progress: Tell | None = None,
) -> Validation:
    """A trace beside the graph of what ran: op by op, and its steps.

    graphs: by phase; of several the one that matches best is taken, and a note says so.  counters:
    a CSV of Nsight Compute of the same step.  Raises ProfileError where the trace, or what was
    counted, is of none of them.
    """
    counts = None if counters is None else read_counters(counters)
    priced, found = best_match(profile, graphs, chip, model, progress or (lambda _: None))
    graph, profile = priced.graph, found.profile  # with the steps that were told apart
    label = f"{graph.model.get('name') or 'model'} {graph.phase}"
    busy = [step.busy for step in profile.steps if step.busy is not None]
    device = statistics.median(busy) if busy else None
    step = step_check(label, label, priced, profile.step_time, device)
    notes = [*_trace_notes(found, graphs, chip), _knob_note(model), _fusion_note(model)]
    # Seconds without an op are means over the steps, and so is what they are a share of.
    rest = sum(stray.seconds for stray in found.only_in_trace)
    total = rest / (1 - found.coverage) if rest else sum(found.seconds.values())
    dram = None
    if counts is not None:
        seen = counted(found, counts, os.fspath(counters or ""))
        dram = dram_by_row(priced, seen.bytes)
        notes.append(_counter_note(priced, seen, dram))
    return Validation(
        "trace",
        profile.source,
        chip,
        model.name,
        _title(model),
        (step,),
        1,
        {},
        tuple(filter(None, notes)),
        node_checks(label, priced, nodes(priced, found), dram),
        tuple((label, stray) for stray in found.only_in_trace),
        total,
        found.coverage * total,
        priced,
        found,
    )


def _counter_note(priced: Estimate, seen: Counted, dram: Mapping[int, float]) -> str:
    """How much was counted, and whether it is what was predicted to move."""
    predicted = sum(row.bytes for row in priced.rows if row.index in dram)
    moved = sum(dram.values())
    more = f" ({predicted / moved - 1:+.1%})" if moved else ""
    return (
        f"counters of {seen.found:,} of {plural(seen.kernels, 'kernel')}: {format_traffic(moved)} "
        f"through DRAM where {format_traffic(predicted)} are predicted{more}, of "
        f"{format_traffic(priced.bytes_hbm)} in the whole step"
    )


def _step_notes(found: Alignment) -> list[str]:
    """How the steps of a trace are told apart, and kernels put into them where not by launch."""
    profile = found.profile
    count = plural(len(profile.steps), "step")
    notes: list[str] = []
    if found.outside is not None:
        notes.append(
            f"no ProfilerStep in the trace: the ops of the graph come again, which makes {count}; "
            f"{format_share(found.outside)} of the measured time is in none of them"
        )
    elif len(profile.steps) == 1 and profile.steps[0].name == WHOLE:
        notes.append("no ProfilerStep in the trace: all of it counts as one step")
    elif profile.marked_by and profile.marked_by != PROFILER_STEP:
        notes.append(
            f"no ProfilerStep in the trace: the ranges {profile.marked_by!r} are its steps"
        )
    for placed in profile.placements:
        if placed.how not in (LAUNCH, OP):
            others = f" and {plural(placed.copies, 'memory operation')}"
            notes.append(
                f"{plural(placed.kernels, 'kernel')}{others if placed.copies else ''} of the trace "
                f"({format_time(placed.seconds)}) {placed.how}"
            )
    waited = [step.waited for step in profile.steps if step.waited]
    if waited:
        notes.append(
            f"{format_time(sum(waited))} in which the host waited for work from before the "
            "trace begins are left out of the step"
        )
    return notes


def _trace_notes(found: Alignment, graphs: Mapping[str, Any], chip: Chip) -> list[str]:
    profile, graph = found.profile, found.graph
    count = len(profile.steps)
    names = sorted(set(profile.devices.values()))
    kind = "gpu" if profile.on_device else "cpu"
    notes = [other_device(names[0] if names and profile.on_device else "", kind, chip)]
    if len(graphs) > 1:
        notes.append(f"the trace matches {graph.phase} best of {listed(list(graphs))}")
    if not profile.on_device:
        notes.append("no kernels in the trace: seconds of ops are the host's own")
    notes += _step_notes(found)
    notes.append(
        f"median of {plural(count, 'step')}, matched by {found.how}: "
        f"{format_share(found.ops_matched_share)} of the graph's kernels are in the trace"
    )
    if found.first_difference and (found.only_in_trace or found.only_in_graph):
        notes.append(f"the two part {found.first_difference}")
    if found.reshaped:
        notes.append(
            f"{plural(found.reshaped, 'call')} of the trace matched with shapes written otherwise "
            "(dimensions of 1, leading ones as one, a weight transposed)"
        )
    kept = "; seconds of kernels stay what they are" if profile.on_device else ", and its ops"
    notes.append(f"the profiler lengthens a step on the host{kept}")
    return notes
