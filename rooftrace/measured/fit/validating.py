"""Validates predictions against measured steps and traces, compiled steps kernel by kernel."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rooftrace.costmodels.estimates import Estimate, estimate
from rooftrace.costmodels.fusion import TYPICAL, ExecutionModel
from rooftrace.errors import RequestError
from rooftrace.graph import OpGraph
from rooftrace.hardware import Chip, units
from rooftrace.hardware.units import format_share, format_traffic, plural
from rooftrace.measured.alignment import (
    Alignment,
    FusedStep,
    Graphs,
    MeasuredStep,
    Stray,
    counted,
    fused,
    is_compiled,
    pairing,
    read_measured,
    steps_of,
)
from rooftrace.measured.bench import Run
from rooftrace.measured.fit.idleness import idleness_of
from rooftrace.measured.fit.misses import nodes, seconds_of_row
from rooftrace.measured.fit.planning import beaten_by, beaten_words
from rooftrace.measured.fit.validation import (
    NodeCheck,
    StepCheck,
    Validation,
    dram_by_row,
    node_checks,
    other_device,
    step_check,
)
from rooftrace.measured.profiles import StepTime, Trace, counts_of

Tell = Callable[[str], None]


def as_it_ran(
    step: FusedStep, model: ExecutionModel, chip: Chip
) -> tuple[Estimate, dict[int, float]]:
    """The prediction for the kernels of a compiled step, and their measured seconds by op.

    All seconds of a kernel count for its first op.
    """
    ran = step.measured.as_run(model)
    seconds: dict[int, float] = {}
    for group, measured in zip(ran.groups, step.group_seconds, strict=True):
        if measured is not None:
            seconds |= dict.fromkeys(group.ops, 0.0) | {group.ops[0]: measured}
    return estimate(ran, chip), seconds


def strays_of(step: FusedStep) -> list[Stray]:
    """The calls of a compiled step without an op, longest first."""
    calls = [k for k in step.kernels if not k.ops and not k.parts and k.seconds]
    return [Stray(k.name, (), 1, k.seconds) for k in sorted(calls, key=lambda k: -k.seconds)]


def validate_compiled(
    trace: Trace,
    graphs_of: Callable[[], Graphs] | None,
    chip: Chip,
    model: ExecutionModel,
    counters: str | os.PathLike[str] | None,
    tell: Tell,
) -> Validation:
    """A trace of a compiled step against the prediction for the kernels that ran.

    graphs_of: makes the graphs by phase, of which the best match is taken.  counters: a CSV of
    Nsight Compute or rocprof of the same step.  Raises ProfileError where the trace or the counters
    match none of them.
    """
    step, phases = pairing.best_fused(trace, graphs_of, tell)
    priced, seconds = as_it_ran(step, model, chip)
    ran = priced.plan
    label = f"{priced.graph.model.get('name') or 'model'} {priced.phase}"
    first = {group.ops[0]: number for number, group in enumerate(ran.groups)}
    notes = [_words(step, phases)]
    dram = None
    if counters is not None:
        source = os.fspath(counters)
        by_group = step.counted(counts_of(source, "counters"), source)
        moved = {op: size for op, number in first.items() if (size := by_group[number]) is not None}
        others = {o: 0.0 for op in moved for o in ran.groups[first[op]].ops}
        dram = dram_by_row(priced, others | moved)
        predicted = sum(row.bytes for row in priced.rows if row.index in dram)
        notes.append(
            f"counters of {plural(len(dram), 'kernel')}: {format_traffic(sum(dram.values()))} "
            f"through DRAM where {format_traffic(predicted)} are predicted"
        )
    return Validation(
        kind="trace",
        source=trace.source,
        chip=chip,
        execution=model.name,
        knobs="" if priced.knobs is None else priced.knobs.title,
        steps=(step_check(label, label, priced, trace.step_time, _busy(trace)),),
        planned=1,
        notes=tuple(notes),
        nodes=node_checks(label, priced, nodes(priced, seconds), dram),
        strays=tuple((label, stray) for stray in strays_of(step)),
        op_seconds=step.seconds,
        op_matched=step.coverage * step.seconds,
        estimate=priced,
        idle=idleness_of(trace),
    )


def _busy(trace: Trace) -> float | None:
    """Median seconds that the device works in a step; None without kernels."""
    busy = [step.busy for step in trace.steps if step.busy is not None]
    return statistics.median(busy) if busy else None


def _words(step: FusedStep, phases: tuple[str, ...]) -> str:
    """A note on how ops of kernels were inferred, and the agreement with detected kernels."""
    best = step.detected.source.phase
    among = f"the trace matches {best} best of {', '.join(phases)}; " if len(phases) > 1 else ""
    return (
        f"{among}a compiled step: the ops of {plural(len(step.kernels), 'kernel')} are inferred by "
        f"their names, {format_share(step.coverage)} of the time; predicted are these kernels, and "
        f"those that we detect agree with them by F1 {step.agreement.f1:.2f}"
    )


# -- validating ------------------------------------------------------------------------------------


def validated(
    measured: str | os.PathLike[str] | Run | Trace | Sequence[StepTime],
    chip: Chip,
    model: ExecutionModel,
    graphs_of: Callable[[], Graphs] | None = None,
    template: str | None = None,
    trust_targets: bool = False,
    phases: Sequence[str] | None = None,
    counters: str | os.PathLike[str] | None = None,
    progress: Tell | None = None,
) -> Validation:
    """Measurements of any kind against their predictions.

    measured: a file of any kind of `source_of`, or its reader's result.  graphs_of: makes the
    graphs by phase of the measured code; template: a target for the names in the measurements,
    without graphs.  trust_targets: without either, these names are targets.  phases: only these.
    counters: a CSV of Nsight Compute or of rocprof of the same step as a trace.  A step that does
    not trace is left out and reported.

    Raises RequestError where measurements and code do not match, and errors of the readers.
    """
    source = ""
    tell = progress or (lambda _: None)
    if isinstance(measured, (str, os.PathLike)):
        source = os.fspath(measured)
        measured = read_measured(source, "a comparison")
    if isinstance(measured, Trace):
        compiled = model.fusion != "none" and is_compiled(measured)
        validate_one = validate_compiled if compiled else validate_trace
        return validate_one(measured, graphs_of, chip, model, counters, tell)
    if counters is not None:
        raise RequestError(
            f"{os.fspath(counters)}: counters stand beside the kernels of a trace; "
            f"{source or 'what was measured'} has none"
        )
    target = template if graphs_of is None else graphs_of()
    steps = _of_phases(steps_of(measured, model, target, trust_targets), phases)
    result = _compared(steps, chip, model, tell)
    if isinstance(measured, Run):
        device = measured.device
        kind = "gpu" if device.get("type") == "cuda" else str(device.get("type") or chip.kind)
        notes = list(filter(None, [other_device(str(device.get("name") or ""), kind, chip)]))
        return replace(result, kind="run", source=source, notes=(*notes, *result.notes))
    notes = _notes_of_table(measured, chip, model)
    return replace(result, source=source, notes=(*notes, *result.notes))


# -- steps of a run, or of a table -----------------------------------------------------------------


def _notes_of_table(table: Sequence[StepTime], chip: Chip, model: ExecutionModel) -> list[str]:
    notes = []
    for field, predicted in (("chip", chip.name), ("execution", model.name)):
        others = {getattr(step, field) for step in table} - {None, predicted}
        if others:
            names = units.listed(sorted(map(repr, others)))
            notes.append(f"the table says {field} {names}; predicted for {predicted!r}")
    return notes


def _of_phases(
    measured: Sequence[MeasuredStep], phases: Sequence[str] | None
) -> Sequence[MeasuredStep]:
    """The steps of these phases, and steps of unknown phase."""
    if not phases:
        return measured
    chosen = [step for step in measured if step.phase is None or step.phase in phases]
    if not chosen:
        there = sorted({str(step.phase) for step in measured})
        raise RequestError(
            f"phase {', '.join(phases)}: no such steps were measured, only {units.listed(there)}"
        )
    return chosen


@dataclass(frozen=True)
class _StepKernels:
    """The kernels of one measured step with their predictions."""

    checks: tuple[NodeCheck, ...]
    strays: Sequence[Stray]
    total: float  # s, measured
    matched: float  # s of these that belong to `checks`
    by: str  # "kernel": that ran; "op": of a replay; "sum": of equal ops


def _kernels_of(
    step: MeasuredStep, graph: OpGraph, priced: Estimate, model: ExecutionModel
) -> _StepKernels | None:
    """The kernels of a step; None where they were not measured.

    Raises ProfileError for compiled kernels of another graph.
    """
    row = step.row
    if row is None:
        return None
    if row.kernels and model.fusion != "none":
        compiled = fused(row, graph)
        ran, seconds = as_it_ran(compiled, model, priced.chip)
        return _StepKernels(
            node_checks(step.label, ran, nodes(ran, seconds)),
            strays_of(compiled),
            compiled.seconds,
            compiled.coverage * compiled.seconds,
            "kernel",
        )
    if not row.ops or row.device_seconds is None:
        return None
    ops = seconds_of_row(row, priced)
    return _StepKernels(
        node_checks(step.label, priced, nodes(priced, ops.seconds)),
        ops.strays,
        ops.total,
        sum(ops.seconds.values()),
        "op" if row.source == "replay" else "sum",
    )


def _compared(
    measured: Sequence[MeasuredStep], chip: Chip, model: ExecutionModel, tell: Tell
) -> Validation:
    """The steps, and their ops where they were measured.  Raises RequestError where no step
    traces."""
    steps: list[StepCheck] = []
    kernels: list[tuple[str, _StepKernels]] = []
    failures: dict[str, str] = {}
    below: dict[str, str] = {}
    for number, step in enumerate(measured):
        tell(f"tracing {step.label} ({number + 1} of {len(measured)})")
        try:
            if step.seconds <= 0:
                raise RequestError(f"{step.seconds!r} seconds: expected a time above 0")
            graph = step.graph()
            priced = estimate(graph, chip, model if step.row is None else model.as_called)
            of_step = _kernels_of(step, graph, priced, model)
        except (ValueError, LookupError, RuntimeError, OSError) as error:
            failures[step.place] = step.why_not(error)
            continue
        device = step.row.device_seconds if step.row else None
        peak = step.row.peak_bytes if step.row else None
        steps.append(step_check(step.label, step.group, priced, step.seconds, device, peak))
        below |= beaten_by(steps[-1], priced)
        if of_step is not None:
            kernels.append((step.label, of_step))
    if not steps:
        first = next(iter(failures.values()), "there are none")
        raise RequestError(
            f"none of {len(measured)} measured steps could be compared; the first: {first}"
        )
    return Validation(
        kind="steps",
        source="",
        chip=chip,
        execution=model.name,
        knobs=_title(model, chip),
        steps=tuple(steps),
        planned=len(measured),
        failures=failures,
        notes=tuple(
            filter(
                None,
                (
                    beaten_words(below, chip) if below else "",
                    *_notes_of_steps({k.by for _, k in kernels}, chip, model),
                ),
            )
        ),
        nodes=tuple(check for _, of_step in kernels for check in of_step.checks),
        strays=tuple((label, stray) for label, of_step in kernels for stray in of_step.strays),
        op_seconds=sum(of_step.total for _, of_step in kernels),
        op_matched=sum(of_step.matched for _, of_step in kernels),
    )


def _notes_of_steps(sources: Collection[str], chip: Chip, model: ExecutionModel) -> Iterator[str]:
    """Notes on the kernels; sources: values of `_StepKernels.by`."""
    yield _knob_note(model, chip)
    if "kernel" in sources:
        yield "kernels of compiled steps are those that ran, and are predicted as such"
    elif sources:
        yield _fusion_note(model)
    if "sum" in sources:
        yield "the profiler sums identical ops; the sum is split in proportion to the predictions"


def _title(model: ExecutionModel, chip: Chip) -> str:
    knobs = model.knobs_on(chip)
    return knobs.title if knobs is not None else ""


def _knob_note(model: ExecutionModel, chip: Chip) -> str:
    if model.knobs_on(chip) is None:
        return "knobs none: predictions are bounds from the chip's peaks, and have no interval"
    if model.knobs == TYPICAL:
        return "typical knobs: nothing was fitted to this chip; `rooftrace calibrate` does that"
    return ""


def _fusion_note(model: ExecutionModel) -> str:
    if model.fusion == "none":
        return ""
    return (
        "predicted kernels are fused, and generated ones of the run are no op: a kernel of which "
        "only some ops are in the run counts for no class"
    )


# -- a trace ---------------------------------------------------------------------------------------


def validate_trace(
    trace: Trace,
    graphs_of: Callable[[], Graphs] | None,
    chip: Chip,
    model: ExecutionModel,
    counters: str | os.PathLike[str] | None,
    tell: Tell,
) -> Validation:
    """A trace against the graph of the measured code: op by op, and its steps.

    graphs_of: makes the graphs by phase, of which the best match is taken, with a note.  counters:
    a CSV of Nsight Compute or of rocprof of the same step.  Raises ProfileError where the trace or
    the counters match none of them.
    """
    counts = None if counters is None else counts_of(os.fspath(counters), "counters")
    match = pairing.best_match(trace, graphs_of, chip, model, tell)
    priced, alignment = match.estimate, match.alignment
    graph, trace = priced.graph, alignment.trace  # with the steps of the alignment
    label = f"{graph.model.get('name') or 'model'} {graph.phase}"
    step = step_check(label, label, priced, trace.step_time, _busy(trace))
    notes = [
        *_trace_notes(alignment, match.phases, chip),
        _knob_note(model, chip),
        _fusion_note(model),
    ]
    # Seconds without an op are means over the steps, and so is the total.
    rest = sum(stray.seconds for stray in alignment.only_in_trace)
    total = rest / (1 - alignment.coverage) if rest else sum(alignment.seconds.values())
    dram = None
    if counts is not None:
        seen = counted(alignment, counts, os.fspath(counters or ""))
        dram = dram_by_row(priced, seen.bytes)
        about = f"{seen.with_counters:,} of {units.plural(seen.kernels, 'kernel')}"
        notes.append(f"counters of {about}: {_traffic(priced, dram)}")
    return Validation(
        kind="trace",
        source=trace.source,
        chip=chip,
        execution=model.name,
        knobs=_title(model, chip),
        steps=(step,),
        planned=1,
        notes=tuple(filter(None, notes)),
        nodes=node_checks(label, priced, nodes(priced, alignment), dram),
        strays=tuple((label, stray) for stray in alignment.only_in_trace),
        op_seconds=total,
        op_matched=alignment.coverage * total,
        estimate=priced,
        alignment=alignment,
        idle=idleness_of(trace),
    )


def _traffic(priced: Estimate, dram: Mapping[int, float]) -> str:
    """Counted bytes against the predicted bytes of the same kernels, in words."""
    predicted = sum(row.bytes for row in priced.rows if row.index in dram)
    moved = sum(dram.values())
    more = f" ({predicted / moved - 1:+.1%})" if moved else ""
    return (
        f"{format_traffic(moved)} through DRAM where {format_traffic(predicted)} are "
        f"predicted{more}, of {format_traffic(priced.bytes_hbm)} in the whole step"
    )


def _trace_notes(alignment: Alignment, phases: Sequence[str], chip: Chip) -> list[str]:
    trace, graph = alignment.trace, alignment.graph
    count = len(trace.steps)
    names = sorted(set(trace.devices.values()))
    notes = [other_device(names[0] if names and trace.on_device else "", trace.kind, chip)]
    if len(phases) > 1:
        notes.append(f"the trace matches {graph.phase} best of {units.listed(phases)}")
    if not trace.on_device:
        notes.append("no kernels in the trace: seconds of ops are the host's own")
    notes += alignment.notes()
    notes.append(
        f"median of {units.plural(count, 'step')}, matched by {alignment.how}: "
        f"{format_share(alignment.ops_matched_share)} of the graph's kernels are in the trace"
    )
    if alignment.first_difference and (alignment.only_in_trace or alignment.only_in_graph):
        notes.append(f"the two part {alignment.first_difference}")
    if alignment.reshaped:
        notes.append(
            f"{units.plural(alignment.reshaped, 'call')} of the trace matched with shapes written "
            "otherwise (dimensions of 1, leading ones as one, a weight transposed)"
        )
    kept = "; seconds of kernels stay what they are" if trace.on_device else ", and its ops"
    notes.append(f"the profiler lengthens a step on the host{kept}")
    return notes
