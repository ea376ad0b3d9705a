"""The launch queue of an estimate, kernel by kernel, with dependencies and times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rooftrace.costmodels.estimates.estimates import Estimate, estimate
from rooftrace.costmodels.estimates.rows import Row
from rooftrace.costmodels.fusion import Launch, plan, runs
from rooftrace.costmodels.timing import streams
from rooftrace.costmodels.timing.queue import Communication, Queue, host_seconds
from rooftrace.graph import REVERSED, Collective, Op, OpGraph, marks, pattern_of

# -- waiting ---------------------------------------------------------------------------------------
# A kernel waits for the makers of its inputs and outputs, for the one before it on its stream, for
# the exchange before it of its group, and for the events before it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """One kernel of a step.  Kernels are numbered in the order in which the host launches them."""

    row: Row
    start: float  # seconds since the step began
    seconds: float
    stream: str
    data: tuple[int, ...]  # kernels that made its inputs and outputs
    order: tuple[int, ...]  # the kernels that its stream, its group and events put before it
    collective: Collective | None = None
    exchange: Communication | None = None


@dataclass(slots=True)
class _KernelOrder:
    """Kernels that the streams of a step have put before the next one."""

    last: dict[str, int] = field(default_factory=dict)  # by stream, and by queue of a group
    held: dict[str, set[int]] = field(default_factory=dict)
    events: dict[int, set[int]] = field(default_factory=dict)
    synced: int = -1  # the last kernel that the host has waited for

    def mark(self, op: Op) -> None:
        """An event made, or waited for."""
        held = self.held.setdefault(op.stream, set())
        if op.name == marks.RECORD_EVENT:
            self.events[op.outputs[0]] = {self.last.get(op.stream, -1)} | held
        else:
            held |= self.events.get(op.inputs[0], set())

    def before(self, kernel: streams.StreamKernel) -> set[int]:
        """Kernels that come before one that is launched now."""
        ahead = self.held.pop(kernel.stream, set()) | {self.synced}
        queues = (kernel.stream, kernel.lane) if kernel.lane else (kernel.stream,)
        return (ahead | {self.last.get(queue, -1) for queue in queues}) - {-1}

    def launched(self, kernel: streams.StreamKernel, number: int) -> None:
        """A kernel is the last one of its stream, and an exchange of its group."""
        if kernel.lane:
            self.last[kernel.lane] = number
        if not kernel.is_async:
            self.last[kernel.stream] = number


def written_out(step: Estimate) -> Estimate:
    """A step without repeats: its estimate has a row for every kernel."""
    if not step.graph.repeats:
        return step
    return estimate(plan(step.plan.source.expand(), step.execution), step.chip)


def kernels_in_order(step: Estimate) -> list[Following]:
    """The kernels of a step in order, those of repeats written out."""
    flat = written_out(step)
    graph = flat.graph
    walked = streams.Streams.of_plan(
        flat.plan,
        [row.timing.t_device for row in flat.rows],
        host_seconds(flat.execution, flat.chip),
        flat.chip.host_waits,
    )
    exchanges = {exchange.kernel: exchange for exchange in flat.exchanges}
    order, writers = _KernelOrder(), dict[int, int]()
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
                    seconds=walked.seconds[run.kernel],
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
        if item.read_back is not None:
            order.synced = order.last.get(streams.MAIN, -1)
    return kernels


# -- playing ---------------------------------------------------------------------------------------
# The launches of all iterations, one by one; `timing` has the first run of each kernel only.  Where
# there are more than a limit, the repeats with the highest counts are folded: their first
# iteration, and one span for the others.


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One launch.  Times are seconds since the step began.

    Of a kernel at the edge of iterations, which stands in two rows, one row may be launched more
    often than it counts and the other less often; together they are right.
    """

    row: int | None  # index of the kernel in `Estimate.rows`, None for host work alone
    turn: int  # which iteration of its repeats this is, as they run
    module: str  # where it runs
    dispatches: int
    sync: bool
    host_start: float
    host_end: float
    start: float | None = None  # on the device, None for host work alone
    end: float | None = None
    track: str = ""  # its stream, or its group's queue where it is asynchronous
    exposed: float = 0.0  # seconds for which computing waits for this exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Iterations of a repeat that are not written out.  Times are seconds since the step began.

    Of a step on several streams there is one for each track, and one for the host alone.
    """

    repeat: int
    count: int  # iterations
    start: float  # on the device
    end: float
    host_start: float
    host_end: float
    track: str = ""


@dataclass(frozen=True, slots=True)
class Playback:
    """The launches in the order of the host; `end` is t_est."""

    launches: tuple[Played, ...]
    folded: tuple[Folded, ...]
    end: float


def play(step: Estimate, limit: int = 50_000) -> Playback:
    """The launches of a step, at most `limit` of them as far as repeats allow."""
    launches = step.plan.launches
    counts = {repeat.id: repeat.count for repeat in step.graph.repeats}
    fold = _to_fold(launches, counts, limit)
    return _Player(step, fold).playback()


def _to_fold(launches: Sequence[Launch], counts: dict[int, int], limit: int) -> frozenset[int]:
    """The repeats that must stand once to keep to the limit: those with the highest counts."""
    left = dict(counts)
    folded: set[int] = set()
    counted = Counter(launch.repeats for launch in launches)
    while left and limit < sum(
        times * math.prod(1 if r in folded else counts[r] for r in repeats)
        for repeats, times in counted.items()
    ):
        largest = max(left, key=lambda r: (left[r], -r))
        folded.add(largest)
        del left[largest]
    return frozenset(folded)


class _Player:
    """Walks the streams of a step, and collects the launches."""

    def __init__(self, step: Estimate, fold: frozenset[int]) -> None:
        self.estimate, self.fold = step, fold
        seconds = [row.timing.t_device / row.count for row in step.rows]
        host, waits = host_seconds(step.execution, step.chip), step.chip.host_waits
        self.streams = streams.Streams.of_plan(step.plan, seconds, host, waits)
        counts = [repeat.count for repeat in step.graph.repeats]
        self.queue = Queue(seconds, step.plan.launches, host, counts, waits)
        self.is_single = not streams.has_streams(step.plan)
        self.repeats = [item.repeats for item in self.streams.items]
        self.bases = [_shown_module(step.graph, row) for row in step.rows]
        self.inside: list[tuple[int, int]] = []  # (repeat, iteration), outermost first
        self.hidden: list[streams.KernelRun] | None = None  # runs of folded iterations
        self.played: list[tuple[Played, streams.KernelRun | None]] = []
        self.folded: list[Folded] = []

    def playback(self) -> Playback:
        """The launches of host and streams in order."""
        self._run(range(len(self.repeats)), 0, 0)
        end = self.streams.ended().end
        launches = (
            played if run is None else replace(played, exposed=run.exposed)
            for played, run in self.played
        )
        return Playback(tuple(launches), tuple(self.folded), end)

    def _run(self, part: range, depth: int, turn: int) -> None:
        for repeat, inside in runs.segments(self.repeats, part, depth):
            if repeat is None:
                for index in inside:
                    self._next(self.streams.items[index], turn)
                continue
            count = self.estimate.graph.repeats[repeat].count
            folds = repeat in self.fold and self.hidden is None
            for iteration in range(1 if folds else count):
                self.inside.append((repeat, iteration))
                self.streams.turn(repeat, iteration, inside)
                self._run(inside, depth + 1, turn * count + iteration)
                self.inside.pop()
            if folds and count > 1:
                self._fold(repeat, inside, depth + 1, count - 1)

    def _fold(self, repeat: int, part: range, depth: int, count: int) -> None:
        """Run the iterations that follow a first one; each track has one span for them all."""
        begin = self.streams.host
        spans = (
            self._jump(part, depth, count) if self.is_single else self._walk(repeat, part, depth)
        )
        end = self.streams.host
        for track, span in spans.items():
            host = (begin, end) if track == next(iter(spans)) else (end, end)
            self.folded.append(
                Folded(
                    repeat=repeat,
                    count=count,
                    start=span[0],
                    end=span[1],
                    host_start=host[0],
                    host_end=host[1],
                    track=track,
                )
            )

    def _jump(self, part: range, depth: int, count: int) -> dict[str, tuple[float, float]]:
        """The span of iterations on one stream, in as many steps as their count has digits."""
        clocks = self.streams.clocks
        before = self.streams.host, clocks[""]
        self.streams.host, clocks[""] = self.queue.turned(part, depth, count, before)
        return {"": (before[1], clocks[""])}

    def _walk(self, repeat: int, part: range, depth: int) -> dict[str, tuple[float, float]]:
        """The span of each track over the iterations after the first, which are walked."""
        self.hidden = []
        for iteration in range(1, self.estimate.graph.repeats[repeat].count):
            self.streams.turn(repeat, iteration, part)
            self._run(part, depth, 0)
        tracks: dict[str, list[streams.KernelRun]] = {}
        for run in self.hidden:
            tracks.setdefault(run.track, []).append(run)
        self.hidden = None
        return {track: (tracked[0].start, tracked[-1].end) for track, tracked in tracks.items()}

    def _next(self, item: streams.Item, turn: int) -> None:
        begin = self.streams.host
        run = self.streams.next(item)
        launch = item.launch
        if self.hidden is not None:
            self.hidden += [] if run is None else [run]
        elif launch is not None:
            played = Played(
                row=None if run is None else run.kernel,
                turn=turn,
                module="" if run is None else self._module(run.kernel),
                dispatches=launch.dispatches,
                sync=launch.sync,
                host_start=begin,
                host_end=self.streams.host if launch.sync else begin + item.host,
                start=None if run is None else run.start,
                end=None if run is None else run.end,
                track="" if run is None else run.track,
            )
            self.played.append((played, run))

    def _module(self, row: int) -> str:
        """The module of the kernel in this iteration."""
        return _module_of(self.estimate, row, self.bases[row], self.inside)


def _module_of(step: Estimate, row: int, path: str, inside: Sequence[tuple[int, int]]) -> str:
    """The module of a kernel in these iterations; backward goes through them in reverse.

    One that begins before its module's repeat is one iteration further in each.
    """
    graph, of = step.graph, step.rows[row]
    back = of.part in REVERSED
    within = {r for op in of.ops if graph.ops[op].module == path for r in graph.ops[op].repeats}
    for index, iteration in inside:
        repeat = graph.repeats[index]
        if index in within:
            path = repeat.path(path, repeat.count - 1 - iteration if back else iteration)
        else:
            path = repeat.path(path, -iteration if back else iteration)
    return path


def _shown_module(graph: OpGraph, row: Row) -> str:
    """The module of a kernel as the graph shows it: in the first iteration."""
    pattern = pattern_of(row.module)
    paths = (graph.ops[op].module for op in row.ops)
    return next((path for path in paths if pattern_of(path) == pattern), row.module)
