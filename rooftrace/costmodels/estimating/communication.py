"""What a step exchanges with other processes, by the axis of the mesh and the kind of exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from rooftrace._plain import Positive
from rooftrace.costmodels.timing.exchanges import Communication
from rooftrace.costmodels.timing.timings import StepTimes
from rooftrace.tracer.collectives import replicas_of
from rooftrace.tracer.graph import OpGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Equal exchanges of one process over one axis of the mesh, added up."""

    axis: str  # of the mesh; the name of the group where no mesh is known
    kind: str  # all_gather, all_reduce ...
    ranks: Positive  # processes of a group
    level: str  # the outermost level of links that they use
    calls: Positive
    bytes: int  # of all buffers, as nccl-tests counts them
    bytes_sent: float  # by one process over its links
    seconds: float
    exposed: float  # seconds for which computing waits
    beyond: str  # what lies outside of measurements, "" where nothing does


def added_up(exchanges: Iterable[Communication]) -> tuple[Exchanged, ...]:
    """Exchanges by axis, kind, size of the group and level, longest first."""
    rows: dict[tuple[str, str, int, str], Exchanged] = {}
    for item in exchanges:
        if item.ranks <= 1:
            continue
        key = item.axis, item.kind, item.ranks, item.level
        row = rows.get(key) or Exchanged(
            axis=item.axis,
            kind=item.kind,
            ranks=item.ranks,
            level=item.level,
            calls=0,
            bytes=0,
            bytes_sent=0.0,
            seconds=0.0,
            exposed=0.0,
            beyond="",
        )
        rows[key] = replace(
            row,
            calls=row.calls + item.calls,
            bytes=row.bytes + item.calls * item.nbytes,
            bytes_sent=row.bytes_sent + item.calls * item.sent,
            seconds=row.seconds + item.calls * item.seconds,
            exposed=row.exposed + item.exposed,
            beyond=row.beyond or item.beyond,
        )
    return tuple(sorted(rows.values(), key=lambda row: -row.seconds))


class Together:
    """What an estimate says of all processes of its mesh; a part of `Estimate`."""

    exchanges: tuple[Communication, ...]
    times: StepTimes

    @property
    def graph(self) -> OpGraph:
        """The graph that was priced."""
        raise NotImplementedError

    @cached_property
    def communication(self) -> tuple[Exchanged, ...]:
        """What this process exchanges, by axis and kind, longest first."""
        return added_up(self.exchanges)

    @property
    def processes(self) -> int:
        """How many processes run the step together, a chip each."""
        return self.graph.processes

    @property
    def replicas(self) -> int | None:
        """How many batches they work on at a time; None where the mesh does not say."""
        if not self.graph.mesh:
            return 1 if self.processes == 1 else None
        return replicas_of(self.graph.mesh)

    @property
    def item(self) -> str:
        """What a step produces: token or sample."""
        return str(self.graph.workload.get("item", "sample"))

    @property
    def items(self) -> int:
        """How many items (tokens or samples) one step produces."""
        return int(self.graph.workload.get("items", 1))

    @property
    def items_per_s(self) -> float | None:
        """Items per second of t_est, of all replicas; of one where the mesh does not say."""
        seconds = self.times.t_est
        return self.items * (self.replicas or 1) / seconds if seconds else None

    @property
    def items_per_s_per_chip(self) -> float | None:
        """Items per second of t_est of all processes, divided by their number."""
        seconds = self.times.t_est
        if self.replicas is None or not seconds:
            return None
        return self.items * self.replicas / (seconds * self.processes)

    @property
    def exposed_axis(self) -> str:
        """The axis whose exchanges computing waits for longest; "" without any."""
        seconds: dict[str, float] = {}
        for row in self.communication:
            seconds[row.axis] = seconds.get(row.axis, 0.0) + row.exposed
        longest = max(seconds, key=seconds.__getitem__, default="")
        return longest if seconds.get(longest) else ""
