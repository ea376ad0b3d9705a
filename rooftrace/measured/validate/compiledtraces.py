"""A trace of a compiled step beside its graph: kernel by kernel, as the compiler fused them."""

from __future__ import annotations

import os
from collections.abc import Callable

from rooftrace.costmodels.estimating import Estimate, estimate
from rooftrace.costmodels.execution import ExecutionModel
from rooftrace.hardware import Chip
from rooftrace.hardware.units import format_share, format_traffic, plural
from rooftrace.measured.alignment import Stray
from rooftrace.measured.fused import FusedStep
from rooftrace.measured.pairing import Graphs, matching
from rooftrace.measured.sources import counts_of
from rooftrace.measured.traces import Trace
from rooftrace.measured.validate.checks import dram_by_row, node_checks, step_check
from rooftrace.measured.validate.misses import nodes
from rooftrace.measured.validate.validation import Validation

Tell = Callable[[str], None]


def as_it_ran(
    step: FusedStep, model: ExecutionModel, chip: Chip
) -> tuple[Estimate, dict[int, float]]:
    """The prediction for the kernels of a compiled step, and their measured seconds by op.

    All seconds of a kernel count for its first op.
    """
    ran = step.measured.as_run(model)
    seconds: dict[int, float] = {}
    for group, known in zip(ran.groups, step.group_seconds, strict=True):
        if known is not None:
            seconds |= dict.fromkeys(group.ops, 0.0) | {group.ops[0]: known}
    return estimate(ran, chip), seconds


def strays_of(step: FusedStep) -> list[Stray]:
    """The calls of a compiled step that are of no op, longest first."""
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
    """A trace of a compiled step beside the prediction for the very kernels that ran.

    graphs_of: makes the graphs by phase; of several the one that matches best is taken.  counters:
    a CSV of Nsight Compute or rocprof of the same step.  Raises ProfileError where the trace or the
    counters match none of them.
    """
    step, phases = matching.best_fused(trace, graphs_of, tell)
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
        whole = {o: 0.0 for op in moved for o in ran.groups[first[op]].ops}
        dram = dram_by_row(priced, whole | moved)
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
        steps=(step_check(label, label, priced, trace.step_time),),
        planned=1,
        notes=tuple(notes),
        nodes=node_checks(label, priced, nodes(priced, seconds), dram),
        strays=tuple((label, stray) for stray in strays_of(step)),
        op_seconds=step.seconds,
        op_matched=step.coverage * step.seconds,
        estimate=priced,
    )


def _words(step: FusedStep, phases: tuple[str, ...]) -> str:
    """How kernels were told, and how far those that we detect agree."""
    best = step.detected.source.phase
    among = f"the trace matches {best} best of {', '.join(phases)}; " if len(phases) > 1 else ""
    return (
        f"{among}a compiled step: the ops of {plural(len(step.kernels), 'kernel')} are inferred by "
        f"their names, {format_share(step.coverage)} of the time; predicted are these kernels, and "
        f"those that we detect agree with them by F1 {step.agreement.f1:.2f}"
    )
