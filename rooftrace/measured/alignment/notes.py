"""Notes on the steps of a trace: how they were told apart, in sentences."""

from __future__ import annotations

from rooftrace.hardware import units
from rooftrace.hardware.units import format_share, format_time
from rooftrace.measured.alignment.alignment import Alignment
from rooftrace.measured.traces import records


def step_notes(alignment: Alignment) -> list[str]:
    """Sentences on how steps were told apart, and on kernels put into steps without a launch."""
    trace = alignment.trace
    count = units.plural(len(trace.steps), "step")
    notes: list[str] = []
    if alignment.outside is not None:
        notes.append(
            f"no ProfilerStep in the trace: the ops of the graph come again, which makes {count}; "
            f"{format_share(alignment.outside)} of the measured time is in none of them"
        )
    elif len(trace.steps) == 1 and trace.steps[0].name == records.WHOLE:
        notes.append("no ProfilerStep in the trace: all of it counts as one step")
    elif trace.marked_by and trace.marked_by != records.PROFILER_STEP:
        notes.append(f"no ProfilerStep in the trace: the ranges {trace.marked_by!r} are its steps")
    for placed in trace.placements:
        if placed.how not in (records.LAUNCH, records.OP):
            what = units.plural(placed.kernels, "kernel")
            if placed.copies:
                what += f" and {units.plural(placed.copies, 'memory operation')}"
            notes.append(f"{what} of the trace ({format_time(placed.seconds)}) {placed.how}")
    waited = [step.waited for step in trace.steps if step.waited]
    if waited:
        notes.append(
            f"{format_time(sum(waited))} in which the host waited for work from before the "
            "trace begins are left out of the step"
        )
    return notes
