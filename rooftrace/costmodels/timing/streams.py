"""A step on several streams: host and streams run in order, and events join them.

A collective runs on the stream that issued it where that one waits for it; else asynchronously,
until its result is read.  The collectives of one group follow each other.  Communication that the
main stream waits for is exposed; all other is hidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from statistics import NormalDist
from typing import Any, TypeAlias

from rooftrace._amounts import larger, smaller
from rooftrace.costmodels.fusion import Launch, Plan, runs
from rooftrace.costmodels.timing.queue import HostSeconds
from rooftrace.graph import REVERSED, Neighbour, Op, OpGraph, marks

MAIN = ""
"""The stream that computes."""
GROUP = "group "
"""Prefix of the name of a group's queue."""


@dataclass(slots=True)
class Walk:
    """Times of kernels on the streams of a device; seconds are numbers, or arrays over points."""

    starts: list[float]  # of each kernel, the first time; [] over points
    exposed: list[Any]  # by kernel: seconds for which the main stream waits for it; over points all
    end: Any = 0.0  # of the step
    busy: Any = 0.0  # seconds of kernels that the main stream runs, collectives aside

    @property
    def waited(self) -> Any:
        """Seconds for which the main stream waits for exchanges."""
        return sum(self.exposed)


@dataclass(frozen=True, slots=True)
class _Due:
    """Seconds at which a dependency is done, and its last collective's run (-1: none)."""

    time: Any = 0.0
    cause: int = -1


NOTHING = _Due()


@dataclass(frozen=True, slots=True)
class Spot:
    """A storage, or an event, as an op sees it: in a repeat there is one for each iteration."""

    number: int
    repeats: tuple[int, ...] = ()  # it has one for each iteration of these
    then: Neighbour | None = None  # read this neighbour's copy where that iteration exists
    neighbour: tuple[int, tuple[int, ...]] = (-1, ())  # number and repeats of that copy


Moment: TypeAlias = "tuple[int, tuple[int, ...]]"
"""A storage, or an event, of one iteration."""


@dataclass(frozen=True, slots=True)
class Item:
    """The next action of the host: a launch, a kernel with it, or a mark of a stream."""

    host: float = 0.0
    read_back: float | None = None  # of the host, after the device; None: it goes on at once
    kernel: int = -1
    mark: Op | None = None
    repeats: tuple[int, ...] = ()
    launch: Launch | None = None
    back: bool = False  # whether it goes through iterations in reverse
    spots: tuple[Spot, ...] = ()  # of a mark: the events that it is about


@dataclass(slots=True)
class KernelRun:
    """One run of a kernel.  track: its stream, or its group's queue where it is asynchronous."""

    kernel: int
    track: str
    start: Any
    end: Any
    exposed: float = 0.0  # seconds for which the main stream waits for it


@dataclass(frozen=True, slots=True)
class StreamKernel:
    """A kernel on a stream."""

    stream: str
    lane: str  # the queue of its group, whose exchanges follow each other; "" for one alone
    is_async: bool  # whether the stream that issues it goes on
    touched: tuple[Spot, ...]  # storages that another stream writes, too
    written: tuple[Spot, ...]  # storages that others wait for


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """The order in which the host and the streams of a plan act, whatever its sizes.

    items: without the seconds of the host.  processes: that the step talks to, and its own.
    """

    kernels: tuple[StreamKernel, ...]
    items: tuple[Item, ...]
    processes: int

    @staticmethod
    def of(planned: Plan) -> StreamOrder:
        """The order of a plan."""
        ranks = (rank for group in planned.graph.groups.values() for rank in group.ranks)
        kernels = tuple(_kernels(planned))
        return StreamOrder(kernels, tuple(_items(planned)), 1 + max(ranks, default=0))


def walk(
    order: StreamOrder,
    durations: Sequence[Any],
    host: HostSeconds,
    counts: Sequence[int],
    slows: float,
    waits: bool = False,
) -> Walk:
    """The step of a plan whose kernels take these seconds; see `queue.schedule` for the others."""
    single = all(isinstance(seconds, float) for seconds in durations)
    kind = Streams if single else StreamsOverPoints
    streams = kind.of(order, durations, host, counts, slows, waits)
    streams.walk(range(len(streams.items)), 0)
    return streams.ended()


def _kernels(planned: Plan) -> list[StreamKernel]:
    """The kernels of a plan, each with the storages by which others depend on it."""
    graph = planned.graph
    storage = [value.storage for value in graph.values]
    ops = [[graph.ops[number] for number in group.ops] for group in planned.groups]
    launched = [group.repeats for group in planned.groups]
    awaited = {
        storage[value]
        for members in ops
        for op in members
        if op.stream or (op.collective is not None and not op.collective.waits)
        for value in op.outputs
    }
    kernels = []
    for members, repeats in zip(ops, launched, strict=True):
        collective = next((op.collective for op in members if op.collective is not None), None)
        lane = "" if collective is None else f"{GROUP}{collective.group}"
        is_async = collective is not None and not collective.waits
        made = [_spot(graph, value) for op in members for value in op.outputs]
        read = [spot for op in members for spot in _read_in(graph, op, repeats)]
        stream = members[0].stream
        kernels.append(
            StreamKernel(
                stream=stream,
                lane=lane,
                is_async=is_async,
                touched=_spots_on(awaited, (*read, *made)),
                written=_spots_on(awaited, made) if stream or is_async else (),
            )
        )
    return kernels


def _spots_on(storages: set[int], spots: Iterable[Spot]) -> tuple[Spot, ...]:
    """The spots on these storages, each once."""
    return tuple(dict.fromkeys(s for s in spots if {s.number, s.neighbour[0]} & storages))


def _spot(graph: OpGraph, value: int, then: Neighbour | None = None) -> Spot:
    """The storage of a value."""
    storage = graph.values[value].storage
    repeats = graph.values[storage].repeats
    if then is None:
        return Spot(storage, repeats)
    copy = graph.values[then.value].storage
    return Spot(storage, repeats, then, (copy, graph.values[copy].repeats))


def _read_in(graph: OpGraph, op: Op, launched: Sequence[int]) -> Iterator[Spot]:
    """The reads of an op in a kernel that is launched in iterations of these repeats.

    Where the op stands before a repeat, its equal in the previous iteration takes its place in all
    iterations but the first.
    """
    for repeat in launched:
        if repeat not in op.repeats:
            inside = next((o for o in graph.ops[op.id :] if repeat in o.repeats), op)
            like = runs.twin(graph, op, inside, repeat)
            if like is not None:
                shift = 1 if inside.part in REVERSED else -1
                for ref, other in zip(op.reads, like.reads, strict=True):
                    yield _spot(graph, ref.id, Neighbour(repeat, other.id, shift))
                return
    yield from _read_by(graph, op)


def _read_by(graph: OpGraph, op: Op) -> Iterator[Spot]:
    return (_spot(graph, ref.id, ref.then) for ref in op.reads)


def _items(planned: Plan) -> Iterator[Item]:
    """Launches and marks in the order of the host; a mark precedes the first kernel after it."""
    graph = planned.graph
    marked = [op for op in graph.ops if op.name in marks.STREAM_MARKS]
    placed, groups = 0, iter(enumerate(planned.groups))
    back = False
    for launch in planned.launches:
        kernel = -1
        if launch.on_device:
            kernel, group = next(groups)
            while placed < len(marked) and marked[placed].id < group.ops[-1]:
                yield _mark(graph, marked[placed])
                placed += 1
            back = graph.ops[group.ops[0]].part in REVERSED
        yield Item(kernel=kernel, repeats=launch.repeats, launch=launch, back=back)
    for op in marked[placed:]:
        yield _mark(graph, op)


def _timed(item: Item, host: HostSeconds, waits: bool) -> Item:
    """An action with the seconds that the host takes for it."""
    if item.launch is None:
        return item
    back = host.read_back if item.launch.sync else 0.0 if waits else None
    return replace(item, host=host.of(item.launch), read_back=back)


def _mark(graph: OpGraph, op: Op) -> Item:
    if op.name == marks.RECORD_EVENT:
        spots = [_spot(graph, value) for value in op.outputs[:1]]
    else:
        spots = list(_read_by(graph, op))
    back = op.part in REVERSED
    return Item(mark=op, repeats=op.repeats, back=back, spots=tuple(spots))


@dataclass(slots=True)
class Streams:
    """The clocks of the host and of every stream while the items are walked."""

    items: Sequence[Item]
    kernels: Sequence[StreamKernel]
    seconds: Sequence[Any]  # of each kernel
    slows: float = 0.0  # share by which computing slows during an exchange
    host: Any = 0.0
    clocks: dict[str, Any] = field(default_factory=lambda: defaultdict(float))
    runs: list[KernelRun] = field(default_factory=list)
    launched: int = 0  # kernels so far
    held: dict[str, _Due] = field(default_factory=dict)  # awaited by the next kernel
    last: dict[str, int] = field(default_factory=dict)  # the last collective of each stream
    ready: dict[Moment, _Due] = field(default_factory=dict)  # by storage
    events: dict[Moment, _Due] = field(default_factory=dict)
    counts: Sequence[int] = ()  # iterations of each repeat
    at: dict[int, int] = field(default_factory=dict)  # by repeat, the iteration that runs

    @classmethod
    def of(
        cls,
        order: StreamOrder,
        seconds: Sequence[Any],
        host: HostSeconds,
        counts: Sequence[int],
        slows: float,
        waits: bool = False,
    ) -> Streams:
        """The streams before a step, with the actions of the host.  slows: see `Disturbances`."""
        items = [_timed(item, host, waits) for item in order.items]
        return cls(items, order.kernels, seconds, slows, counts=counts)

    @classmethod
    def of_plan(
        cls, planned: Plan, seconds: Sequence[float], host: HostSeconds, waits: bool
    ) -> Streams:
        """The streams of a plan before its step."""
        counts = [repeat.count for repeat in planned.graph.repeats]
        slows = planned.execution.disturbances.interference
        return cls.of(StreamOrder.of(planned), seconds, host, counts, slows, waits)

    def walk(self, part: range, depth: int) -> None:
        """Walk these items, iteration after iteration."""
        repeats = [item.repeats for item in self.items]
        for repeat, inside in runs.segments(repeats, part, depth):
            if repeat is None:
                for item in self.items[inside.start : inside.stop]:
                    self.next(item)
            else:
                for turn in range(self.counts[repeat]):
                    self.turn(repeat, turn, inside)
                    self.walk(inside, depth + 1)

    def turn(self, repeat: int, turn: int, part: range) -> None:
        """Begin an iteration of a repeat with these items; backward runs iterations in reverse."""
        items = map(self.items.__getitem__, part)
        back = next((i.back for i in items if i.kernel >= 0 or i.mark is not None), False)
        self.at[repeat] = self.counts[repeat] - 1 - turn if back else turn

    def _moment(self, spot: Spot) -> Moment:
        """A spot in the iterations that run; outside of a repeat, in the last one that ran."""
        number, repeats = spot.number, spot.repeats
        at = self.at
        if spot.then is not None:
            repeat = spot.then.repeat
            index = at.get(repeat, -1) + spot.then.shift
            if repeat in at and 0 <= index < self.counts[repeat]:
                number, repeats = spot.neighbour
                return number, tuple(index if r == repeat else at.get(r, -1) for r in repeats)
        return number, tuple([at.get(r, -1) for r in repeats]) if repeats else ()

    def next(self, item: Item) -> KernelRun | None:
        """Do the host's next action; return the run of the kernel that it launches, if any."""
        self.host += item.host
        if item.mark is not None:
            self._mark(item.mark, item.spots)
        run = self._launch(item.kernel) if item.kernel >= 0 else None
        if item.read_back is not None:
            self.host = larger(self.host, self.clocks[MAIN]) + item.read_back
        return run

    def _mark(self, op: Op, spots: Sequence[Spot]) -> None:
        stream = op.stream
        held = self.held.get(stream, NOTHING)
        if op.name == marks.RECORD_EVENT:
            time, cause = self.clocks[stream], self.last.get(stream, -1)
            here = _Due(time, cause if stream else -1)
            self.events[self._moment(spots[0])] = self._later(here, held)
        else:
            events = (self.events.get(self._moment(spot), NOTHING) for spot in spots)
            self.held[stream] = reduce(self._later, events, held)

    def _launch(self, number: int) -> KernelRun:
        kernel, seconds = self.kernels[number], self.seconds[number]
        stream, this = kernel.stream, self.launched
        self.launched += 1
        due = self.held.pop(stream, NOTHING)
        for spot in kernel.touched:
            due = self._later(due, self.ready.get(self._moment(spot), NOTHING))
        free = larger(self.host, self.clocks[stream])
        start = larger(free, due.time)
        if kernel.lane:
            before = _Due(self.clocks[kernel.lane], self.last.get(kernel.lane, -1))
            due = self._later(due, before)
            start = larger(start, before.time)
            self.clocks[kernel.lane] = start + seconds
            self.last[kernel.lane] = this
        end = start + seconds
        if self.slows and not kernel.lane and stream == MAIN:
            end = end + self._slowed(start, seconds)
        run = KernelRun(number, kernel.lane if kernel.is_async else stream, start, end)
        self._ran(run)
        if not kernel.is_async:
            self.clocks[stream] = end
            if stream == MAIN:
                if kernel.lane:
                    self._expose(this, seconds)
                self._expose(due.cause if due.cause >= 0 else this, start - free)
        if kernel.lane and not kernel.is_async:
            self.last[stream] = this
        for spot in kernel.written:
            self.ready[self._moment(spot)] = _Due(end, this if kernel.lane else due.cause)
        return run

    def _slowed(self, start: Any, seconds: Any) -> Any:
        """Seconds that concurrent exchanges add to a kernel; the longest of them is the cause."""
        lanes = [name for name in self.last if name.startswith(GROUP)]
        if not lanes:
            return 0.0
        clock = reduce(larger, (self.clocks[lane] for lane in lanes))
        more = self.slows * larger(0.0, smaller(seconds, clock - start))
        self._expose(self.last[self._latest(lanes)], more)
        return more

    # -- records of a walk ---------------------------------------------------------------------

    def _later(self, a: _Due, b: _Due) -> _Due:
        """The later of two; the first of equal ones."""
        return b if b.time > a.time else a

    def _latest(self, tracks: Collection[str]) -> str:
        """The track that is done last."""
        return max(tracks, key=self.clocks.__getitem__)

    def _ran(self, run: KernelRun) -> None:
        self.runs.append(run)

    def _expose(self, cause: int, seconds: Any) -> None:
        """The main stream waits for this run."""
        self.runs[cause].exposed += seconds

    def ended(self) -> Walk:
        """The finished walk; exchanges that end after the main stream are exposed, too."""
        main = max(self.host, self.clocks[MAIN])
        tail = self._latest(self.clocks)
        walked = Walk([-1.0] * len(self.kernels), [0.0] * len(self.kernels))
        walked.end = max(main, self.clocks[tail])
        if walked.end > main and self.last.get(tail, -1) >= 0:
            self._expose(self.last[tail], walked.end - main)
        for run in self.runs:
            kernel = self.kernels[run.kernel]
            walked.exposed[run.kernel] += run.exposed
            if walked.starts[run.kernel] < 0:
                walked.starts[run.kernel] = run.start
            if run.track == MAIN and not kernel.lane:
                walked.busy += self.seconds[run.kernel]
        return walked


@dataclass(slots=True)
class StreamsOverPoints(Streams):
    """The clocks at many points: arrays.  Of runs only sums are kept, without their causes."""

    exposed: Any = 0.0
    busy: Any = 0.0

    def _later(self, a: _Due, b: _Due) -> _Due:
        return _Due(larger(a.time, b.time))

    def _latest(self, tracks: Collection[str]) -> str:
        return next(iter(tracks))

    def _ran(self, run: KernelRun) -> None:
        kernel = self.kernels[run.kernel]
        if run.track == MAIN and not kernel.lane:
            self.busy = self.busy + self.seconds[run.kernel]

    def _expose(self, cause: int, seconds: Any) -> None:
        self.exposed = self.exposed + seconds

    def ended(self) -> Walk:
        """The sums when all is done."""
        main = larger(self.host, self.clocks[MAIN])
        end = reduce(larger, self.clocks.values(), main)
        for talking in (clock for track, clock in self.clocks.items() if track in self.last):
            self._expose(-1, (talking == end) * (end - main))
            main = larger(main, talking)
        return Walk([], [self.exposed], end, self.busy)


def has_streams(planned: Plan) -> bool:
    """Whether a plan talks to other processes, or works on several streams."""
    return any(op.collective is not None or op.stream for op in planned.graph.ops)


# -- what-ifs -------------------------------------------------------------------------------------


def wait_for_stragglers(
    walked: Walk, processes: int, spread: float, calls: Mapping[int, float]
) -> None:
    """Add the wait of all processes for the slowest of them, evenly over the exchanges.

    spread: see `Disturbances.stragglers`.  calls: of kernels that exchange with others.

    The slowest of n is expected as many standard deviations above the mean as the largest of n
    normal numbers (Blom, Statistical Estimates and Transformed Beta-Variables, 1958).
    """
    if not spread or not calls:
        return
    more = walked.busy * spread * slowest_of(processes)
    walked.end = walked.end + more
    if not walked.starts:  # over points
        walked.exposed.append(more)
        return
    total = sum(calls.values())
    for number, times in calls.items():
        walked.exposed[number] += float(more * times / total)


def slowest_of(processes: int) -> float:
    """Expected largest of so many normal numbers, in standard deviations above the mean."""
    if processes < 2:
        return 0.0
    return NormalDist().inv_cdf((processes - 0.375) / (processes + 0.25))
