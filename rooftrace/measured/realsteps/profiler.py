"""One step under torch's profiler: the time of each op, on the device or else on the host."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rooftrace.measured.bench import Bench
from rooftrace.measured.runs import OpTime

RANGE = "op "
"""A range of the host around one op of a graph is called "op 12"."""


def profiler(bench: Bench, shapes: bool = True) -> Any:
    """A torch profiler for the host and the device."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if bench.on_cuda:
        activities.append(ProfilerActivity.CUDA)
    # acc_events: torch 2.11 warns that others are cleared, as if there were several cycles.
    return profile(activities=activities, record_shapes=shapes, acc_events=True)


def profiled(bench: Bench, run: Callable[[], object], shapes: bool = True) -> tuple[Any, float]:
    """The events of the profiler during one `run`, and its wall seconds, which the profiler
    lengthens."""
    with profiler(bench, shapes) as recorded:
        wall = bench.wall(run)
    return recorded.events(), wall


@dataclass(frozen=True)
class StepProfile:
    """The time of one step by op."""

    ops: tuple[OpTime, ...]  # longest first; calls with equal shapes together
    seconds: float  # s, of the device in all
    unattributed: float  # s of these that belong to no op


def by_op(events: Any, on_cuda: bool) -> StepProfile:
    """Sums over equal ops, longest first.

    On CUDA kernels count for the innermost op that launched them; on a CPU an op counts without the
    ops inside of it.
    """
    groups: dict[tuple[str, str, tuple[str, ...]], list[Any]] = {}
    for event in events:
        seconds, total, kernels = _own(event, on_cuda)
        if total <= 0 or (seconds <= 0 and "::" not in event.name):  # a range of the host, no op
            continue
        shapes = json.dumps(list(event.input_shapes or ()))
        entry = groups.setdefault((event.name, shapes, kernels), [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += seconds
        entry[2] += total
    ops = [
        OpTime(
            target=name,
            seconds=seconds,
            count=count,
            shapes=_frozen(json.loads(shapes)),
            kernels=kernels,
            total=total if total > seconds else None,
        )
        for (name, shapes, kernels), (count, seconds, total) in groups.items()
    ]
    ops.sort(key=lambda op: (-op.seconds, -op.inclusive))
    attributed = sum(op.seconds for op in ops)
    total = on_device(events) if on_cuda else attributed
    return StepProfile(tuple(ops), max(total, attributed), max(0.0, total - attributed))


def _own(event: Any, on_cuda: bool) -> tuple[float, float, tuple[str, ...]]:
    """Seconds of an event without and with the events inside of it, and its kernels' names."""
    from torch._C._autograd import DeviceType

    if event.device_type != DeviceType.CPU:
        return 0.0, 0.0, ()
    if on_cuda:
        kernels = event.kernels
        names = tuple(sorted({str(kernel.name)[:120] for kernel in kernels}))
        own = sum(kernel.duration for kernel in kernels) * 1e-6
        return own, own + sum(_own(child, True)[1] for child in event.cpu_children), names
    if event.is_async or "::" not in event.name:  # a range of Python code, not an op
        return 0.0, 0.0, ()
    return event.self_cpu_time_total * 1e-6, event.cpu_time_total * 1e-6, ()


def on_device(events: Any) -> float:
    """Seconds of everything that ran on the device: kernels, copies, fills."""
    from torch._C._autograd import DeviceType

    return sum(
        float(event.time_range.elapsed_us()) * 1e-6
        for event in events
        if event.device_type != DeviceType.CPU and not _is_range(event)
    )


def _is_range(event: Any) -> bool:
    """Whether a device event only repeats a range of the host and its whole content."""
    named = event.name.startswith((RANGE, "Optimizer.", "ProfilerStep"))
    return named or bool(getattr(event, "is_user_annotation", False))


def _frozen(item: Any) -> Any:
    return tuple(_frozen(part) for part in item) if isinstance(item, list) else item
