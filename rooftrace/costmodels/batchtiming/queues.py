"""The two-track queue over points: `timing.Queue` with clocks that are arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rooftrace.costmodels.batchtiming.plancolumns import PlanColumns, at_points
from rooftrace.costmodels.timing.queue import HostSeconds, Queue, Shift, host_seconds
from rooftrace.hardware import Chip

if TYPE_CHECKING:
    from rooftrace.costmodels.kernels.columns import Array, Places

_POINTS = 16_384
"""Points that are run at once; each launch keeps an array of so many starts."""


def queue_ends(step: PlanColumns, durations: Sequence[Array], t_serial: Array, chip: Chip) -> Array:
    """When the step ends at each point [P], as `timing.schedule` says it.

    durations: seconds of one kernel of each of `step.kernels`, at its sizes.  t_serial: of all.
    """
    host = host_seconds(step.execution, chip)
    before = _leading(step, host, chip)
    if before is not None:
        return before + t_serial
    ends = [
        _ends(step, durations, host, chip, slice(at, min(at + _POINTS, step.points)))
        for at in range(0, step.points, _POINTS)
    ]
    return np.concatenate(ends) if ends else np.zeros(0)


def _leading(step: PlanColumns, host: HostSeconds, chip: Chip) -> float | None:
    """Seconds of the host before the first kernel, if nothing keeps the device waiting later.

    None also where the queue's sum may be another than that of all kernels: a kernel that is fused
    over the boundary of a loop is enqueued with the iterations, and stands for those of its first
    op; a cache makes a difference between the two.
    """
    if chip.host_waits or any(launch.sync for launch in step.launches):
        return None
    knobs = step.execution.knobs_on(chip)
    if knobs is not None and knobs.cache != 1 and step.counts:
        return None
    first = next((i for i, launch in enumerate(step.launches) if launch.on_device), None)
    if first is None:
        return None
    leading, after = step.launches[: first + 1], step.launches[first + 1 :]
    seconds = sum(host.of(launch) for launch in leading)
    again = any(launch.repeats and host.of(launch) for launch in leading)
    return None if again or any(host.of(launch) for launch in after) else seconds


def _ends(
    step: PlanColumns, durations: Sequence[Array], host: HostSeconds, chip: Chip, part: slice
) -> Array:
    gathered: dict[int, Array] = {}
    for number in step.order:
        if number not in gathered:
            gathered[number] = at_points(durations[number], step.kernels[number].at, part)
    counts: list[Any] = [
        int(np.ravel(count)[0]) if np.size(count) == 1 else np.asarray(count)[part].astype(np.int64)
        for count in step.counts
    ]
    busy: list[Any] = [gathered[number] for number in step.order]
    queue = ArrayQueue(busy, step.launches, host, counts, chip.host_waits)
    ends = np.maximum(*queue.run(range(len(step.launches)), 0, (0.0, 0.0)))
    return np.broadcast_to(ends, (part.stop - part.start,))


class ArrayQueue(Queue):
    """The queue at many points: durations and counts are arrays of one length, or of length 1."""

    larger = staticmethod(np.maximum)

    @staticmethod
    def after(first: Shift, then: Shift) -> Shift:
        """One shift after the other, at every point."""
        a, b, c, e = first
        p, q, r, s = then
        return _joined(p, a, q, c), _joined(p, b, q, e), _joined(r, a, s, c), _joined(r, b, s, e)

    def power(self, shift: Shift, count: int | Places) -> Shift:
        """A shift that stands for `count` equal ones at each point."""
        if isinstance(count, int):
            return super().power(shift, count)
        a, b, c, e = super().power(shift, 0)
        while count.any():
            p, q, r, s = self.after((a, b, c, e), shift)
            odd = count & 1 > 0
            a, b = _chosen(odd, p, a), _chosen(odd, q, b)
            c, e = _chosen(odd, r, c), _chosen(odd, s, e)
            shift, count = self.after(shift, shift), count >> 1
        return a, b, c, e


def _never(term: Any) -> bool:
    """Whether a term of a shift is minus infinity at all points."""
    return isinstance(term, float) and term == -np.inf


def _joined(a: Any, b: Any, c: Any, d: Any) -> Any:
    """max(a + b, c + d); terms that never count cost nothing."""
    if _never(a) or _never(b):
        return -np.inf if _never(c) or _never(d) else c + d
    return a + b if _never(c) or _never(d) else np.maximum(a + b, c + d)


def _chosen(odd: Any, then: Any, otherwise: Any) -> Any:
    return then if _never(then) and _never(otherwise) else np.where(odd, then, otherwise)
