"""How a step of a trace divides: computing, communication, copies, and why the device waits.

The parts of a step exclude each other and add up to its time.  Communication under a kernel that
computes is hidden; the rest is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from rooftrace.measured.rundiffs.kernelnames import is_communication
from rooftrace.measured.traces import Trace, TraceStep, records

Interval: TypeAlias = tuple[float, float]
"""When something starts and ends [s]."""

_ROUNDING = 1e-12
"""Seconds: traces have nanoseconds."""


def step_figures(trace: Trace, step: TraceStep) -> dict[str, float]:
    """Every figure of a step but `work`, by name in METRICS."""
    kernels = trace.kernels
    names = kernels.names.items
    computing: list[Interval] = []
    communicating: list[Interval] = []
    copying: list[Interval] = []
    for index in step.kernels:
        start = kernels.start[index]
        span = (start, start + kernels.duration[index])
        if is_communication(names[kernels.name[index]]):
            communicating.append(span)
        elif kernels.kind[index]:
            copying.append(span)
        else:
            computing.append(span)
    under = _length(computing)
    with_communication = _length([*computing, *communicating])
    busy = _length([*computing, *communicating, *copying])
    communication, exposed = _length(communicating), _less(with_communication, under)
    idle = _less(step.seconds, busy)
    waiting, queued = _gaps(trace, step)
    waiting = min(waiting, idle)
    queued = min(queued, _less(idle, waiting))
    return {
        "time": busy + idle,
        "device": busy,
        "computing": under,
        "communication": communication,
        "hidden": _less(communication, exposed),
        "exposed": exposed,
        "copying": _less(busy, with_communication),
        "idle": idle,
        "waiting": waiting,
        "queued": queued,
        "outside": _less(idle, waiting + queued),
        "kernels": sum(not kernels.kind[index] for index in step.kernels),
        "copies": sum(bool(kernels.kind[index]) for index in step.kernels),
    }


def host_figures(step: TraceStep, calls: Iterable[Interval]) -> dict[str, float]:
    """The figures of a step of a trace without kernels; calls: when each call of an op ran."""
    clipped = [(max(a, step.start), min(b, step.start + step.duration)) for a, b in calls]
    inside = _length([(a, b) for a, b in clipped if a < b])
    idle = _less(step.seconds, inside)
    return {"time": inside + idle, "device": inside, "idle": idle}


def _gaps(trace: Trace, step: TraceStep) -> tuple[float, float]:
    """Seconds of the gaps between kernels in which the host had not yet launched the next one, and
    of those in which it had."""
    kernels = trace.kernels
    waiting = queued = 0.0
    end: float | None = None
    for index in sorted(step.kernels, key=kernels.start.__getitem__):
        start = kernels.start[index]
        if end is not None and start > end:
            launched = kernels.launched[index]
            late = max(0.0, min(launched, start) - end) if launched >= 0 else 0.0
            waiting += late
            queued += start - end - late
        end = max(end or start, start + kernels.duration[index])
    return waiting, queued


def _less(seconds: float, part: float) -> float:
    """Seconds less a part of them; 0 where rounding is all that is left."""
    left = seconds - part
    return left if left > _ROUNDING else 0.0


def _length(intervals: Sequence[Interval]) -> float:
    """Seconds that intervals cover together."""
    return records.busy_and_gaps(intervals)[0]
