"""The time in which the device of a trace is idle, and the events of the host that fill it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rooftrace._plain import Plain
from rooftrace.hardware.units import format_share, format_time, listed
from rooftrace.measured.profiles import Trace, TraceStep
from rooftrace.measured.profiles.records import joined

LATE, WAITED, LOADED, QUEUED = (
    "waits for the host",
    "waits for the host after a call that waits for the device",
    "waits for the host, which loads data",
    "between queued kernels",
)
"""Reasons for a pause of the device, in the words of the parts of a diff of runs.

LATE: the next kernel was not yet launched.  WAITED: neither, as the host waited for the device
(`.item()`, a copy to the host, `synchronize`) when it became idle.  LOADED: a data loader ran.
QUEUED: the next kernel had been launched, and starts late or waits for another stream or process.
"""
_LOADER = "DataLoader"
_SLACK = 2e-6
"""Seconds between the end of a kernel and the return of a call that waits for it, and more."""
_RETURN = 50e-6
"""Seconds that such a call returns after the end of the last kernel, and that a kernel starts
after its launch, at most; one that starts later waits for more than the host."""
_LEAST = 0.05
"""The smallest share of the idle time that is told."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Idleness(Plain):
    """The idle time of the device in a mean step."""

    seconds: float  # s, of the step
    busy: float  # s, in which the device works
    reasons: dict[str, float] = field(default_factory=dict)  # idle s by reason, most first
    filled: dict[str, float] = field(default_factory=dict)  # idle s by op of the host, most first

    KEYS = "step_s=seconds busy_s=busy idle_share=share reasons filled_by=filled"

    @property
    def share(self) -> float:
        """The share of the step in which the device is idle."""
        return 1 - self.busy / self.seconds if self.seconds else 0.0

    def words(self, predicted: float, wall: float) -> str:
        """A sentence on the idle time, its reasons, and both predictions.

        predicted: s that the device works.  wall: s of the step.
        """
        idle = self.seconds - self.busy
        text = (
            f"device idle {format_share(self.share)} of the step ({format_time(idle)} of "
            f"{format_time(self.seconds)}); busy {format_time(self.busy)} where "
            f"{format_time(predicted)} are predicted ({predicted / self.busy - 1:+.1%}), the step "
            f"{format_time(self.seconds)} where {format_time(wall)} are "
            f"({wall / self.seconds - 1:+.1%})"
        )
        told = [
            f"{reason} ({format_share(seconds / idle)})"
            for reason, seconds in self.reasons.items()
            if idle and seconds > _LEAST * idle
        ]
        if not told:
            return text
        filled = f"; calls of the host in it: {self.calls}" if self.calls else ""
        return f"{text}; of the idle time {listed(told)}{filled}"

    @property
    def calls(self) -> str:
        """The calls of the host in the idle time, with their shares of it, in words."""
        idle = self.seconds - self.busy
        return listed(
            [
                f"{name} {format_share(seconds / idle)}"
                for name, seconds in list(self.filled.items())[:3]
                if idle and seconds > _LEAST * idle
            ]
        )


def idleness_of(trace: Trace) -> Idleness | None:
    """The idle time of the device in a trace; None without kernels."""
    steps = [step for step in trace.steps if step.busy]
    if not trace.on_device or not steps:
        return None
    waits = sorted(trace.cut.waits) if trace.cut is not None else []
    loads = _loads(trace)
    reasons: dict[str, float] = defaultdict(float)
    filled: dict[str, float] = defaultdict(float)
    order = sorted(range(len(trace.kernels)), key=trace.kernels.start.__getitem__)
    for step in steps:
        pauses = _pauses(trace, step, order)
        idle = step.seconds - (step.busy or 0.0)
        # Kernels from before the trace, which have no launch in it, are in no step and no pause.
        part = min(1.0, idle / (sum(end - start for start, end, _ in pauses) or 1.0))
        for start, end, launched in pauses:
            for reason, seconds in _reasons(start, end, launched, waits, loads).items():
                reasons[reason] += part * seconds
        for name, seconds in _filled(trace, step, [(a, b) for a, b, _ in pauses]).items():
            filled[name] += part * seconds
    count = len(steps)
    return Idleness(
        seconds=sum(step.seconds for step in steps) / count,
        busy=sum(step.busy or 0.0 for step in steps) / count,
        reasons=_per_step(reasons, count),
        filled=_per_step(filled, count),
    )


def _per_step(seconds: Mapping[str, float], steps: int) -> dict[str, float]:
    ranked = sorted(seconds.items(), key=lambda entry: -entry[1])
    return {name: each / steps for name, each in ranked if each > 0}


def _pauses(
    trace: Trace, step: TraceStep, order: Sequence[int]
) -> list[tuple[float, float, float]]:
    """(start, end, launch of the next kernel) of each pause of the device in a step [s].

    order: all kernels by their start; those of other steps are no pause.
    """
    kernels = trace.kernels
    end, last = step.start + step.waited, step.start + step.duration
    last = max([last, *(kernels.start[i] + kernels.duration[i] for i in step.kernels)])
    pauses = []
    for index in order:
        start, launched = kernels.start[index], kernels.launched[index]
        if start >= last:
            break
        if start > end:
            pauses.append((end, start, launched if launched >= 0 else end))
        end = max(end, start + kernels.duration[index])
    return [*pauses, (end, last, last)] if last > end else pauses


def _reasons(
    start: float,
    end: float,
    launched: float,
    waits: Sequence[Interval],
    loads: Sequence[Interval],
) -> dict[str, float]:
    """Seconds of a pause by reason."""
    late = min(end, launched + _RETURN) - start if launched > start else 0.0
    loaded = sum(max(0.0, min(b, start + late) - max(a, start)) for a, b in loads)
    loaded = min(loaded, late)
    last = bisect_right(waits, (start + _SLACK, float("inf"))) - 1
    waited = last >= 0 and waits[last][1] >= start - _SLACK and waits[last][1] <= start + _RETURN
    rest = late - loaded
    return {LOADED: loaded, QUEUED: end - start - late, WAITED if waited else LATE: rest}


def _loads(trace: Trace) -> list[Interval]:
    """When data loaders ran, each second once."""
    ops = trace.ops
    names = {number for number, name in enumerate(ops.names.items) if _LOADER in name}
    spans = [(a.start, a.end) for a in trace.annotations if _LOADER in a.name]
    spans += [(s, s + d) for n, s, d in zip(ops.name, ops.start, ops.duration, strict=True)
              if n in names]  # fmt: skip
    return joined(spans)


def _filled(trace: Trace, step: TraceStep, pauses: Sequence[Interval]) -> dict[str, float]:
    """Seconds of pauses in which the host ran an op, by its name, without the ops that it called.

    Self seconds of an op count for as much of them as the op overlaps pauses.
    """
    ops = trace.ops
    starts = [start for start, _ in pauses]
    sums = [0.0]
    for start, end in pauses:
        sums.append(sums[-1] + end - start)

    def until(moment: float) -> float:
        """Seconds of pauses before a moment."""
        number = bisect_right(starts, moment)
        if not number:
            return 0.0
        start, end = pauses[number - 1]
        return sums[number - 1] + min(moment, end) - start

    seconds: dict[str, float] = defaultdict(float)
    for op in step.ops:
        begin, duration = ops.start[op], ops.duration[op]
        if duration > 0:
            share = (until(begin + duration) - until(begin)) / duration
            seconds[ops.names.items[ops.name[op]]] += share * ops.self_duration[op]
    return seconds
