"""A step written out kernel by kernel, each with the kernels that it waits for.

A kernel waits for those that made what it reads or writes, for the one before it on its stream, for
the exchange before it of its group, and for what the events before it stand for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftrace.costmodels.estimating import Estimate, Row, estimate as estimate_of
from rooftrace.costmodels.planning import plan
from rooftrace.costmodels.timing import streams
from rooftrace.costmodels.timing.exchanges import Communication
from rooftrace.costmodels.timing.queue import host_seconds
from rooftrace.tracer.collectives import Collective, marks
from rooftrace.tracer.graph import Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """One kernel of a step.  Kernels are numbered in the order in which the host launches them."""

    row: Row
    start: float  # seconds since the step began
    seconds: float
    stream: str
    data: tuple[int, ...]  # the kernels that made what it reads or writes
    order: tuple[int, ...]  # the kernels that its stream, its group and events put before it
    collective: Collective | None = None
    exchange: Communication | None = None


@dataclass(slots=True)
class _Order:
    """Which kernels the streams of a step have put before the next one."""

    last: dict[str, int] = field(default_factory=dict)  # by stream, and by queue of a group
    held: dict[str, set[int]] = field(default_factory=dict)
    events: dict[int, set[int]] = field(default_factory=dict)
    synced: int = -1  # what the host has waited for

    def mark(self, op: Op) -> None:
        """An event made, or waited for."""
        held = self.held.setdefault(op.stream, set())
        if op.name == marks.RECORD_EVENT:
            self.events[op.outputs[0]] = {self.last.get(op.stream, -1)} | held
        else:
            held |= self.events.get(op.inputs[0], set())

    def before(self, kernel: streams.StreamKernel) -> set[int]:
        """What comes before a kernel that is launched now."""
        ahead = self.held.pop(kernel.stream, set()) | {self.synced}
        queues = (kernel.stream, kernel.lane) if kernel.lane else (kernel.stream,)
        return (ahead | {self.last.get(queue, -1) for queue in queues}) - {-1}

    def launched(self, kernel: streams.StreamKernel, number: int) -> None:
        """A kernel is the last one of its stream, and an exchange of its group."""
        if kernel.lane:
            self.last[kernel.lane] = number
        if not kernel.beside:
            self.last[kernel.stream] = number


def written_out(estimate: Estimate) -> Estimate:
    """A step without repeats: its estimate has a row for every kernel."""
    if not estimate.graph.repeats:
        return estimate
    return estimate_of(plan(estimate.plan.source.expand(), estimate.execution), estimate.chip)


def kernels_in_order(estimate: Estimate) -> list[Following]:
    """The kernels of a step in order, those of repeats written out."""
    flat = written_out(estimate)
    graph = flat.graph
    walked = streams.Streams.of(
        flat.plan,
        [row.timing.t_device for row in flat.rows],
        host_seconds(flat.execution, flat.chip),
        flat.chip.host_waits,
    )
    exchanges = {exchange.kernel: exchange for exchange in flat.exchanges}
    order, writers = _Order(), dict[int, int]()
    kernels: list[Following] = []
    for item in walked.items:
        run = walked.next(item)
        if item.mark is not None:
            order.mark(item.mark)
        if run is not None:
            kernel, row = walked.kernels[run.kernel], flat.rows[run.kernel]
            ops = [graph.ops[number] for number in row.ops]
            touched = {graph.values[v].storage for op in ops for v in (*op.inputs, *op.outputs)}
            data = {writers[storage] for storage in touched if storage in writers}
            kernels.append(
                Following(
                    row=row,
                    start=run.start,
                    seconds=kernel.seconds,
                    stream=kernel.stream,
                    data=tuple(sorted(data)),
                    order=tuple(sorted(order.before(kernel) - data)),
                    collective=next((op.collective for op in ops if op.collective), None),
                    exchange=exchanges.get(run.kernel),
                )
            )
            order.launched(kernel, run.kernel)
            made = {graph.values[value].storage for op in ops for value in op.outputs}
            writers |= dict.fromkeys(made, run.kernel)
        if item.sync:
            order.synced = order.last.get(streams.MAIN, -1)
    return kernels
